"""Checks requests and converts them to arrays; all errors of a request's content are raised here.

Pure: it reads the model's shape and changes no state, so a refused request has no effect.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from helmrec.engine.id_checks import (
    MAX_ID,
    REFUSE,
    IdLines,
    check_forward,
    context_rows,
    context_table,
    flat_ids,
    has_infinite,
    take_rows,
    whole_number,
)
from helmrec.engine.layout import place_of
from helmrec.errors import DeadlineExceeded, RequestError
from helmrec.memory.prefix_hash import HashKey, History, chain
from helmrec.model.config import ModelConfig
from helmrec.model.query_frame import latest_window
from helmrec.model.window import gap_bucket, window_anchor
from helmrec.types import Ids, IntArray, PrefillRequest, RankRequest
from helmrec.user_ids import check_user_id, seed_words

# The least float32 that becomes infinite in the type of a row: half a step above that type's largest number.
_INFINITE_FROM = {"float32": np.inf, "bfloat16": (2 - 2**-8) * 2.0**127, "float16": (2 - 2**-11) * 2.0**15}


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
    unknown_ids: Mapping[str, int] = field(default_factory=dict)  # by table: ids read as the row for unknown ones
    # Counted here and not for each step, whose host time is scarce.
    num_candidates: int = field(init=False)
    num_events: int = field(init=False)
    num_unkept: int = field(init=False)  # last events of the window whose K/V are not kept
    num_attending: int = field(init=False)  # tokens that are not of its cacheable history
    most_tokens: int = field(init=False)  # to compute for it, if nothing is resident
    places: tuple[int, int, int, int] = field(init=False, repr=False)  # of `columns`, then of `candidate_rows`

    def __post_init__(self) -> None:
        num_events, num_candidates = self.columns.shape[1], self.candidate_rows.shape[1]
        num_unkept = num_events - self.history.event_rows.shape[1]
        num_others = num_unkept + self.request_rows.size
        put = object.__setattr__
        put(self, "num_candidates", num_candidates)
        put(self, "num_events", num_events)
        put(self, "num_unkept", num_unkept)
        put(self, "num_attending", num_others if self.is_retrieval else num_others + num_candidates)
        put(self, "most_tokens", self.history.num_tokens + num_others + num_candidates)
        put(self, "places", (*place_of(self.columns), *place_of(self.candidate_rows)))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prepared request is bound to the addresses of its arrays; another process needs packed ones")


@dataclass(frozen=True, slots=True)
class IntakeRecipe:
    """All that an `Intake` is made from, in plain values: intakes of one recipe prepare a request alike.

    Never shown to clients: it has the key of the chained hash.
    """

    model: str  # its `ModelConfig` as JSON
    version: int
    max_history: int
    secret: bytes = field(repr=False)

    @property
    def tag(self) -> bytes:
        """Sixteen bytes that identify the recipe and reveal nothing of its key."""
        public = f"{self.version} {self.max_history} {self.model}"
        return hashlib.blake2b(public.encode(), key=self.secret, digest_size=16).digest()


class Intake:
    """Checks and converts requests for one model."""

    def __init__(self, config: ModelConfig, version: int, max_history: int, key: HashKey | None = None) -> None:
        """`key` is the key of the chained hash; by default a random one, since states never leave the process."""
        self._key = key or HashKey.random()
        self.recipe = IntakeRecipe(config.model_dump_json(), version, max_history, self._key.secret)
        self.tag = self.recipe.tag
        self._config = config
        self._version = version
        self._max_history = max_history
        self._extra = [table.name for table in config.features[1:]]
        self._extra_tables = set(self._extra)
        self._context_tables = {table.name for table in (*config.user_context, *config.request_context)}
        self._user_context, self._request_context = (
            [context_table(t, config.offsets[t.name]) for t in tables]
            for tables in (config.user_context, config.request_context)
        )
        limits = [table.num_rows for table in config.features]
        offsets = [config.offsets[table.name] for table in config.features]
        names = tuple(table.name for table in config.features)
        unknown = [REFUSE if table.unknown_row is None else table.unknown_row for table in config.features]
        self._event_lines = IdLines(
            ("items", *(f"features[{name!r}]" for name in self._extra), "actions", "timestamps"),
            np.array([*limits, config.num_actions, MAX_ID]),
            np.array([*offsets, 0, 0]),
            (*names, "actions", "timestamps"),
            np.array([*unknown, REFUSE, REFUSE]),
        )
        self._candidate_lines = IdLines(
            ("candidates", *(f"candidate_features[{name!r}]" for name in self._extra)),
            np.array(limits),
            np.array(offsets),
            names,
            np.array(unknown),
        )

    @classmethod
    def of(cls, recipe: IntakeRecipe) -> "Intake":
        """Make an intake like the one that this recipe came from."""
        config = ModelConfig.model_validate_json(recipe.model)
        return cls(config, recipe.version, recipe.max_history, HashKey(recipe.secret))

    def prepare(self, request: RankRequest) -> Prepared:
        """Check and convert a request; raise RequestError that names field and value."""
        _check_names("context", request.context, self._context_tables)
        unknown = dict[str, int]()
        columns, anchor = self._window(request, unknown)
        if self._config.retrieval is not None and not columns.shape[1]:
            raise RequestError("items", 0, "at least one event is needed: candidates are scored against its state")
        candidate_rows = self._candidate_rows(request, unknown)
        candidate_gap = self._candidate_gap(request.request_time, columns[-1])
        query_time = _query_time(request.request_time, columns[-1])
        # Where K/V depend on the query, only a request with the same query may reuse them.
        query = () if self._config.is_append_stable else (query_time, columns.shape[1], candidate_rows.shape[1])
        times = self._times(columns, query_time)
        return Prepared(
            history=self._history(request, columns, (anchor, *query), times, unknown),
            columns=columns,
            candidate_rows=candidate_rows,
            candidate_gap=candidate_gap,
            request_rows=context_rows(self._request_context, request.context, unknown),
            window_start=anchor,
            truncated_events=anchor - request.first_event,
            deadline_ms=_deadline("deadline_ms", request.deadline_ms),
            query_time=query_time,
            times=times,
            num_full=self._config.full_attn_tail,
            is_retrieval=self._config.retrieval is not None,
            unknown_ids=unknown,
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
        whole_number("num_candidates", request.num_candidates, self._config.max_candidates)
        _deadline("budget_ms", request.budget_ms)
        _deadline("hold_ms", request.hold_ms)
        unknown = dict[str, int]()  # counted with the rank that follows
        columns, anchor = self._window(request, unknown)
        times = self._times(columns, 0)  # of the time of the request, nothing that is kept depends
        history = self._history(request, columns, (anchor,), times, unknown)
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

    def _window(self, request: RankRequest | PrefillRequest, unknown: dict[str, int]) -> tuple[IntArray, int]:
        """Return the columns of the events in the model's window, and the absolute index of the first of them."""
        first_event = whole_number("first_event", request.first_event, MAX_ID // 2)
        columns = self._columns(request, unknown)
        anchored = window_anchor if self._config.is_append_stable else latest_window
        anchor = anchored(first_event, columns.shape[1], self._config.window)
        return np.ascontiguousarray(columns[:, anchor - first_event :]), anchor

    def _history(
        self,
        request: RankRequest | PrefillRequest,
        columns: IntArray,
        frame: tuple[int, ...],
        times: IntArray | None,
        unknown: dict[str, int],
    ) -> History:
        """Hash the events whose K/V are kept. `frame` holds what K/V depend on besides user, model and events."""
        columns = columns[:, : max(0, columns.shape[1] - self._config.unkept_events)]
        # With a bias by time, K/V of an event depend on the time of the next one too.
        hashed = columns if times is None else np.vstack([columns, times[1 : columns.shape[1] + 1]])
        user_id = check_user_id(request.user_id)
        user_rows = context_rows(self._user_context, request.context, unknown)
        seed = (*seed_words(user_id), self._version, *frame, *user_rows.tolist())
        return History(user_id, user_rows, columns[:-2], chain(self._key, seed, user_rows.size, hashed))

    def _columns(self, request: RankRequest | PrefillRequest, unknown: dict[str, int]) -> IntArray:
        """Return all events as (features + 2, events): row ids, then actions, then timestamps."""
        items = flat_ids("items", request.items)
        if items.size > self._max_history:
            raise RequestError("items", items.size, f"at most {self._max_history} events may be sent")
        extra = self._extra_ids("features", request.features)
        columns = take_rows(self._event_lines, [items, *extra, request.actions, request.timestamps], unknown)
        check_forward(columns[-1])
        return columns

    def _candidate_rows(self, request: RankRequest, unknown: dict[str, int]) -> IntArray:
        candidates = flat_ids("candidates", request.candidates)
        if not 1 <= candidates.size <= self._config.max_candidates:
            problem = f"between 1 and {self._config.max_candidates} candidates are needed"
            raise RequestError("candidates", candidates.size, problem)
        extra = self._extra_ids("candidate_features", request.candidate_features)
        return take_rows(self._candidate_lines, [candidates, *extra], unknown)

    def _extra_ids(self, field: str, given: Mapping[str, Ids]) -> list[Ids]:
        """Return the ids of every feature table except the items', in the model's order."""
        _check_names(field, given, self._extra_tables)
        return [given[name] for name in self._extra]

    def _candidate_gap(self, request_time: int | None, timestamps: IntArray) -> int:
        """Return the time bucket since the last event; bucket 0 if the request has no `request_time`."""
        if request_time is None:
            return 0
        now = whole_number("request_time", request_time, MAX_ID)
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
    values: NDArray[np.float32] | NDArray[np.float16]  # (rows, row_dim)
    is_added: NDArray[np.bool_] | None = None  # rows whose values are added to the old ones; None: no row

    def part(self, start: int, end: int) -> "RowUpdate":
        """Return rows [start, end) of these, in the same memory."""
        added = None if self.is_added is None else self.is_added[start:end]
        return RowUpdate(self.rows[start:end], self.values[start:end], added)


def prepare_rows(
    config: ModelConfig, table: str, ids: Ids, values: ArrayLike, *, are_distinct: bool = False
) -> RowUpdate:
    """Check and convert a row update; raise RequestError that names field and value.

    are_distinct: the caller has checked that no id is given twice.
    """
    num_rows = {t.name: t.num_rows for t in config.tables}
    if table not in num_rows:
        raise RequestError("table", table, f"the model has no such table, only {', '.join(num_rows)}")
    offset = config.offsets[table]
    lines = IdLines(("ids",), np.array([num_rows[table]]), np.array([offset]), (table,), np.array([REFUSE]))
    (rows,) = take_rows(lines, [ids], {})
    if not are_distinct:
        ordered = np.sort(rows)
        if (twice := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
            raise RequestError("ids", int(ordered[twice[0]]) - offset, "each id may be given once")
    return RowUpdate(rows, _row_values(values, (rows.size, config.row_dim), config.row_dtype))


def _row_values(values: ArrayLike, shape: tuple[int, int], dtype: str) -> NDArray[np.float32] | NDArray[np.float16]:
    """Check new values. An array of float16 stays one: every row type holds its numbers, rounded at most."""
    array: NDArray[np.float32] | NDArray[np.float16]
    try:
        if isinstance(values, np.ndarray) and values.dtype == np.float16:
            array = values
        else:
            with np.errstate(over="ignore"):
                array = np.asarray(values, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError("values", type(values).__name__, f"an array of numbers is needed ({error})") from None
    if array.shape != shape:
        raise RequestError("values", array.shape, f"shape {shape} is needed")
    if has_infinite(array, _INFINITE_FROM[dtype]):
        at = np.argwhere(~(np.abs(array.astype(np.float32)) < _INFINITE_FROM[dtype]))[0]
        raise RequestError(f"values[{at[0]}, {at[1]}]", float(array[*at]), f"numbers finite in {dtype} are needed")
    return array


def _check_names(field: str, given: Mapping[str, object], wanted: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise RequestError(field, given, "values by table name are needed")
    if given.keys() == wanted:
        return
    if unknown := given.keys() - wanted:
        raise RequestError(field, min(unknown, key=str), f"the model has no such table here, only {sorted(wanted)}")
    if missing := wanted - given.keys():
        raise RequestError(field, sorted(given), f"a value for {min(missing)!r} is needed")


def _deadline(field: str, ms: float | None) -> float | None:
    if ms is not None and (isinstance(ms, bool) or not (isinstance(ms, int | float) and ms > 0)):
        raise RequestError(field, ms, "a positive number is needed")
    return ms
