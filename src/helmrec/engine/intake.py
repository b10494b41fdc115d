"""Checks requests and converts them to arrays; all errors of a request's content are raised here.

Pure: it reads the model's shape and changes no state, so a refused request has no effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from helmrec.errors import DeadlineExceeded, RequestError
from helmrec.memory.prefix_hash import HashKey, History, chain
from helmrec.model.config import ModelConfig
from helmrec.model.query_frame import latest_window
from helmrec.model.window import gap_bucket, window_anchor
from helmrec.types import Ids, IntArray, PrefillRequest, RankRequest
from helmrec.user_ids import check_user_id, seed_words

_MAX_ID = np.iinfo(np.int64).max
_NO_ROWS = np.empty(0, np.int64)
# The least float32 that becomes infinite in the type of a row: half a step above that type's largest number.
_INFINITE_FROM = {"float32": np.inf, "bfloat16": (2 - 2**-8) * 2.0**127, "float16": (2 - 2**-11) * 2.0**15}


class _Lines(NamedTuple):
    """Describes the lines of a block of ids: their names in messages, their bounds and their first rows."""

    names: tuple[str, ...]
    limits: IntArray  # (lines,) ids are smaller than these
    offsets: IntArray  # (lines,) first row of each table


class _ContextTable(NamedTuple):
    field: str  # its name in messages
    name: str
    num_rows: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A checked request in arrays; rows are ids in the shared row space."""

    history: History
    columns: IntArray  # (features + 2, events) of the window: rows, then actions, then timestamps
    candidate_rows: IntArray  # (features, candidates)
    candidate_gap: int  # time bucket of all candidates
    request_rows: IntArray  # (request context,)
    window_start: int
    truncated_events: int
    deadline_ms: float | None
    query_time: int = 0  # ages are relative to it in a model with a query frame
    num_full: int = 0  # last tokens before the candidates that see all, if attention has a window and a tail
    times: IntArray | None = None  # (events + 1,) of the events and what follows, if attention has a bias by time
    is_retrieval: bool = False  # whether its candidates are scored by a dot product and are no tokens

    @property
    def num_candidates(self) -> int:
        return self.candidate_rows.shape[1]

    @property
    def num_events(self) -> int:
        return self.columns.shape[1]

    @property
    def num_unkept(self) -> int:
        """Last events of the window whose K/V are not kept."""
        return self.num_events - self.history.event_rows.shape[1]

    @property
    def num_attending(self) -> int:
        """Tokens of the request that are not of its cacheable history."""
        return self.num_unkept + self.request_rows.size + (0 if self.is_retrieval else self.num_candidates)


class Intake:
    """Checks and converts requests for one model."""

    def __init__(self, config: ModelConfig, version: int, max_history: int, key: HashKey | None = None) -> None:
        """`key` is the key of the chained hash; by default a random one, since states never leave the process."""
        self._key = key or HashKey.random()
        self._config = config
        self._version = version
        self._max_history = max_history
        self._extra = [table.name for table in config.features[1:]]
        self._extra_tables = set(self._extra)
        self._context_tables = {table.name for table in (*config.user_context, *config.request_context)}
        self._user_context, self._request_context = (
            [_ContextTable(f"context[{t.name!r}]", t.name, t.num_rows, config.offsets[t.name]) for t in tables]
            for tables in (config.user_context, config.request_context)
        )
        limits = [table.num_rows for table in config.features]
        offsets = [config.offsets[table.name] for table in config.features]
        self._event_lines = _Lines(
            ("items", *(f"features[{name!r}]" for name in self._extra), "actions", "timestamps"),
            np.array([*limits, config.num_actions, _MAX_ID]),
            np.array([*offsets, 0, 0]),
        )
        self._candidate_lines = _Lines(
            ("candidates", *(f"candidate_features[{name!r}]" for name in self._extra)),
            np.array(limits),
            np.array(offsets),
        )

    def prepare(self, request: RankRequest) -> Prepared:
        """Check and convert a request; raise RequestError that names field and value."""
        _check_names("context", request.context, self._context_tables)
        columns, anchor = self._window(request)
        if self._config.retrieval is not None and not columns.shape[1]:
            raise RequestError("items", 0, "at least one event is needed: candidates are scored against its state")
        candidate_rows = self._candidate_rows(request)
        candidate_gap = self._candidate_gap(request.request_time, columns[-1])
        query_time = _query_time(request.request_time, columns[-1])
        # Where K/V depend on the query, only a request with the same query may reuse them.
        query = () if self._config.is_append_stable else (query_time, columns.shape[1], candidate_rows.shape[1])
        times = self._times(columns, query_time)
        return Prepared(
            history=self._history(request, columns, (anchor, *query), times),
            columns=columns,
            candidate_rows=candidate_rows,
            candidate_gap=candidate_gap,
            request_rows=_context_rows(self._request_context, request.context),
            window_start=anchor,
            truncated_events=anchor - request.first_event,
            deadline_ms=_deadline("deadline_ms", request.deadline_ms),
            query_time=query_time,
            times=times,
            num_full=self._config.full_attn_tail,
            is_retrieval=self._config.retrieval is not None,
        )

    def prepare_all(self, requests: Sequence[RankRequest]) -> list[Prepared]:
        """Prepare the requests of a call. With several, RequestError names the one that is wrong."""
        prepared: list[Prepared] = []
        for i, request in enumerate(requests):
            try:
                prepared.append(self.prepare(request))
            except RequestError as error:
                if len(requests) == 1:
                    raise
                raise RequestError(f"requests[{i}].{error.field}", error.value, error.problem) from None
        return prepared

    def prepare_ahead(self, request: PrefillRequest) -> Prepared:
        """Check and convert a history that is computed ahead. Its request-context tokens are placeholders."""
        if not self._config.is_append_stable:
            problem = "nothing can be computed ahead: K/V of this model depend on the query"
            raise RequestError("user_id", request.user_id, problem)
        _check_names("context", request.context, {table.name for table in self._user_context})
        _scalar("num_candidates", request.num_candidates, self._config.max_candidates)
        _deadline("budget_ms", request.budget_ms)
        _deadline("hold_ms", request.hold_ms)
        columns, anchor = self._window(request)
        times = self._times(columns, 0)  # of the time of the request, nothing that is kept depends
        history = self._history(request, columns, (anchor,), times)
        num_kept = history.event_rows.shape[1]
        return Prepared(
            history=history,
            columns=columns[:, :num_kept],
            candidate_rows=np.empty((len(self._config.features), 0), np.int64),
            candidate_gap=0,
            request_rows=np.array([table.offset for table in self._request_context], np.int64),
            window_start=anchor,
            truncated_events=anchor - request.first_event,
            deadline_ms=None,
            times=None if times is None else times[: num_kept + 1],
        )

    def _times(self, columns: IntArray, query_time: int) -> IntArray | None:
        """Return the times that a bias of attention reads: of all events, and of the request after them."""
        return None if self._config.attention_bias is None else np.append(columns[-1], query_time)

    def _window(self, request: RankRequest | PrefillRequest) -> tuple[IntArray, int]:
        """Return the columns of the events in the model's window, and the absolute index of the first of them."""
        first_event = _scalar("first_event", request.first_event, _MAX_ID // 2)
        columns = self._columns(request)
        anchored = window_anchor if self._config.is_append_stable else latest_window
        anchor = anchored(first_event, columns.shape[1], self._config.window)
        return np.ascontiguousarray(columns[:, anchor - first_event :]), anchor

    def _history(
        self, request: RankRequest | PrefillRequest, columns: IntArray, frame: tuple[int, ...], times: IntArray | None
    ) -> History:
        """Hash the events whose K/V are kept. `frame` holds what K/V depend on besides user, model and events."""
        columns = columns[:, : max(0, columns.shape[1] - self._config.unkept_events)]
        # With a bias by time, K/V of an event depend on the time of the next one too.
        hashed = columns if times is None else np.vstack([columns, times[1 : columns.shape[1] + 1]])
        user_id = check_user_id(request.user_id)
        user_rows = _context_rows(self._user_context, request.context)
        seed = (*seed_words(user_id), self._version, *frame, *user_rows.tolist())
        return History(user_id, user_rows, columns[:-2], chain(self._key, seed, user_rows.size, hashed))

    def _columns(self, request: RankRequest | PrefillRequest) -> IntArray:
        """Return all events as (features + 2, events): row ids, then actions, then timestamps."""
        items = _ids("items", request.items)
        if items.size > self._max_history:
            raise RequestError("items", items.size, f"at most {self._max_history} events may be sent")
        extra = self._extra_ids("features", request.features)
        columns = _take(self._event_lines, [items, *extra, request.actions, request.timestamps])
        _check_forward(columns[-1])
        return columns

    def _candidate_rows(self, request: RankRequest) -> IntArray:
        candidates = _ids("candidates", request.candidates)
        if not 1 <= candidates.size <= self._config.max_candidates:
            problem = f"between 1 and {self._config.max_candidates} candidates are needed"
            raise RequestError("candidates", candidates.size, problem)
        extra = self._extra_ids("candidate_features", request.candidate_features)
        return _take(self._candidate_lines, [candidates, *extra])

    def _extra_ids(self, field: str, given: Mapping[str, Ids]) -> list[Ids]:
        """Return the ids of every feature table except the items', in the model's order."""
        _check_names(field, given, self._extra_tables)
        return [given[name] for name in self._extra]

    def _candidate_gap(self, request_time: int | None, timestamps: IntArray) -> int:
        """Return the time bucket since the last event; bucket 0 if the request has no `request_time`."""
        if request_time is None:
            return 0
        now = _scalar("request_time", request_time, _MAX_ID)
        if not timestamps.size:
            return 0
        if now < timestamps[-1]:
            raise RequestError("request_time", now, f"it lies before the last event at {timestamps[-1]}")
        return int(gap_bucket(now - int(timestamps[-1]), self._config.time_buckets))


def less_spent(request: Prepared, spent_ms: float) -> Prepared:
    """Subtract time already spent from the request's own deadline; DeadlineExceeded if none is left."""
    if request.deadline_ms is None:
        return request
    if spent_ms >= request.deadline_ms:
        raise DeadlineExceeded(f"the deadline passed {spent_ms:.1f} ms after the request came in, on its way")
    return replace(request, deadline_ms=request.deadline_ms - spent_ms)


def _query_time(request_time: int | None, timestamps: IntArray) -> int:
    """Return the request's time, by default the time of its last event."""
    if request_time is not None:
        return int(request_time)
    return int(timestamps[-1]) if timestamps.size else 0


class RowUpdate(NamedTuple):
    """Checked new values of rows."""

    rows: IntArray  # ids in the shared row space, distinct
    values: NDArray[np.float32]  # (rows, row_dim)


def prepare_rows(config: ModelConfig, table: str, ids: Ids, values: ArrayLike) -> RowUpdate:
    """Check and convert a row update; raise RequestError that names field and value."""
    num_rows = {t.name: t.num_rows for t in config.tables}
    if table not in num_rows:
        raise RequestError("table", table, f"the model has no such table, only {', '.join(num_rows)}")
    offset = config.offsets[table]
    (rows,) = _take(_Lines(("ids",), np.array([num_rows[table]]), np.array([offset])), [ids])
    unique, counts = np.unique(rows, return_counts=True)
    if unique.size != rows.size:
        raise RequestError("ids", int(unique[counts > 1][0]) - offset, "each id may be given once")
    return RowUpdate(rows, _row_values(values, (rows.size, config.row_dim), config.row_dtype))


def _row_values(values: ArrayLike, shape: tuple[int, int], dtype: str) -> NDArray[np.float32]:
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError("values", type(values).__name__, f"an array of numbers is needed ({error})") from None
    if array.shape != shape:
        raise RequestError("values", array.shape, f"shape {shape} is needed")
    if (wrong := np.argwhere(~(np.abs(array) < _INFINITE_FROM[dtype]))).size:
        at = wrong[0]
        raise RequestError(f"values[{at[0]}, {at[1]}]", float(array[*at]), f"numbers finite in {dtype} are needed")
    return array


def _context_rows(tables: Sequence[_ContextTable], context: Mapping[str, int]) -> IntArray:
    if not tables:
        return _NO_ROWS
    return np.array([_scalar(t.field, context[t.name], t.num_rows - 1) + t.offset for t in tables])


def _ids(field: str, values: Ids) -> NDArray[np.integer]:
    """Return the ids as a flat array of integers that fit signed 64 bits."""
    if not isinstance(values, np.ndarray):
        values = _listed(field, values)
    if values.ndim != 1:
        raise RequestError(field, values.shape, "a flat list of integers is needed")
    if values.dtype == np.int64 or values.size == 0:
        return values
    if values.dtype.kind not in "iu":
        first = values[0]
        shown = first.item() if isinstance(first, np.generic) else first  # an array of objects holds them as they are
        raise RequestError(field, shown, f"integers of 64 bits are needed, not {values.dtype}")
    if values.dtype == np.uint64 and values.max() > _MAX_ID:
        raise RequestError(field, int(values.max()), "integers of 64 bits are needed")
    return values


def _listed(field: str, values: object) -> IntArray:
    """Convert a list of plain integers; NumPy alone would also accept booleans and round floats."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError(field, values, "a flat list of integers is needed")
    for kind in set(map(type, values)):
        if kind is not int and not issubclass(kind, np.integer):
            at, wrong = next((i, value) for i, value in enumerate(values) if type(value) is kind)
            raise RequestError(f"{field}[{at}]", wrong, f"integers of 64 bits are needed, not {kind.__name__}")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise RequestError(field, max(values, key=abs), "integers of 64 bits are needed") from None


def _take(lines: _Lines, given: Sequence[Ids]) -> IntArray:  # (lines, ids)
    """Check that the lines have equal length and ids in range, and return their rows, one line each.

    The ids are copied before they are checked, since a client may reuse its arrays.
    """
    ids = [_ids(name, values) for name, values in zip(lines.names, given, strict=True)]
    num = ids[0].size
    for name, line in zip(lines.names, ids, strict=True):
        if line.size != num:
            raise RequestError(name, line.size, f"one value per item is needed, {num} in all")
    block: IntArray = np.concatenate(ids, dtype=np.int64, casting="unsafe").reshape(len(ids), num)
    outside = _shift_until_outside(block, lines.limits, lines.offsets)
    if outside < block.size:
        at_line, at = divmod(outside, num)
        problem = f"values run from 0 to {lines.limits[at_line] - 1}"
        raise RequestError(f"{lines.names[at_line]}[{at}]", int(block[at_line, at]), problem)
    return block


@numba.njit(cache=True, nogil=True)
def _shift_until_outside(block: IntArray, limits: IntArray, offsets: IntArray) -> int:
    """Add each line's offset to its ids, line by line up to the first line with an id outside [0, limit).

    Return the flat index of that id, or the number of ids. A line is checked as a whole without an early exit,
    because only such loops become vector instructions.
    """
    for line in range(block.shape[0]):
        ids, limit = block[line], np.uint64(limits[line])
        is_outside = False
        for i in range(ids.size):
            is_outside |= bool(np.uint64(ids[i]) >= limit)  # negative ids become large
        if is_outside:
            return line * ids.size + _first_outside(ids, limits[line])
        for i in range(ids.size):
            ids[i] += offsets[line]
    return block.size


@numba.njit(cache=True, nogil=True)
def _first_outside(ids: IntArray, limit: int) -> int:
    """Return the index of the first id outside [0, limit), or the number of ids."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= limit:
            return i
    return ids.size


@numba.njit(cache=True, nogil=True)
def _first_step_back(values: IntArray) -> int:
    """Return the index of the first value smaller than the one before it, or the number of values."""
    for i in range(1, values.size):
        if values[i] < values[i - 1]:
            return i
    return values.size


def _check_forward(timestamps: IntArray) -> None:
    at = _first_step_back(timestamps)
    if at < timestamps.size:
        raise RequestError(f"timestamps[{at}]", int(timestamps[at]), f"time runs backwards from {timestamps[at - 1]}")


def _check_names(field: str, given: Mapping[str, object], wanted: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise RequestError(field, given, "values by table name are needed")
    if given.keys() == wanted:
        return
    if unknown := given.keys() - wanted:
        raise RequestError(field, min(unknown, key=str), f"the model has no such table here, only {sorted(wanted)}")
    if missing := wanted - given.keys():
        raise RequestError(field, sorted(given), f"a value for {min(missing)!r} is needed")


def _scalar(field: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) <= limit:
        raise RequestError(field, value, f"an integer from 0 to {limit} is needed")
    return int(value)


def _deadline(field: str, ms: float | None) -> float | None:
    if ms is not None and (isinstance(ms, bool) or not (isinstance(ms, int | float) and ms > 0)):
        raise RequestError(field, ms, "a positive number is needed")
    return ms
