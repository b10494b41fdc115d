"""From what a client sent to what the engine works on; every way a request can be wrong is told here.

Pure: it reads the model's shape and touches no state, so a refused request leaves none behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from helmrec.errors import RequestError
from helmrec.memory.history import History, chain
from helmrec.model.config import ITEM, ModelConfig
from helmrec.model.window import gap_bucket, window_anchor
from helmrec.types import Ids, IntArray, RankRequest

_MAX_ID = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A valid request in arrays; rows are ids in the shared row space."""

    history: History
    columns: IntArray  # (features + 2, events) of the window: rows, then actions, then timestamps
    candidate_rows: IntArray  # (features, candidates)
    candidate_gap: int  # time bucket of all candidates
    request_rows: IntArray  # (request context,)
    window_start: int
    truncated_events: int
    deadline_ms: float | None

    @property
    def num_candidates(self) -> int:
        return self.candidate_rows.shape[1]

    @property
    def num_events(self) -> int:
        return self.columns.shape[1]


class Intake:
    """Checks and converts requests for one model."""

    def __init__(self, config: ModelConfig, version: int, max_history: int) -> None:
        self._config = config
        self._version = version
        self._max_history = max_history
        self._extra_features = {table.name for table in config.features[1:]}
        self._context_tables = {table.name for table in (*config.user_context, *config.request_context)}

    def prepare(self, request: RankRequest) -> Prepared:
        """Raise RequestError, naming field and value, or return the request ready to plan."""
        config = self._config
        user_id = _scalar("user_id", request.user_id, _MAX_ID)
        first_event = _scalar("first_event", request.first_event, _MAX_ID // 2)
        columns = self._columns(request)
        num_events = columns.shape[1]
        anchor = window_anchor(first_event, num_events, config.window)
        columns = np.ascontiguousarray(columns[:, anchor - first_event :])
        num_features = len(config.features)
        user_rows, request_rows = self._context_rows(request.context)
        seed = (user_id, self._version, anchor, *user_rows.tolist())
        return Prepared(
            history=History(user_id, user_rows, columns[:num_features], chain(seed, user_rows.size, columns)),
            columns=columns,
            candidate_rows=self._candidate_rows(request),
            candidate_gap=self._candidate_gap(request.request_time, columns[-1]),
            request_rows=request_rows,
            window_start=anchor,
            truncated_events=anchor - first_event,
            deadline_ms=_deadline(request.deadline_ms),
        )

    def _columns(self, request: RankRequest) -> IntArray:
        """(features + 2, events): row ids, then actions, then timestamps."""
        features = self._config.features
        items = _ids("items", request.items)
        if items.size > self._max_history:
            raise RequestError("items", items.size, f"at most {self._max_history} events may be sent")
        columns = np.empty((len(features) + 2, items.size), np.int64)
        self._put_features(columns, ("items", items), ("features", request.features))
        _put(columns[-2], "actions", _ids("actions", request.actions), self._config.num_actions)
        _put(columns[-1], "timestamps", _ids("timestamps", request.timestamps), _MAX_ID)
        _check_forward(columns[-1])
        return columns

    def _candidate_rows(self, request: RankRequest) -> IntArray:
        features = self._config.features
        candidates = _ids("candidates", request.candidates)
        if not 1 <= candidates.size <= self._config.max_candidates:
            problem = f"between 1 and {self._config.max_candidates} candidates are needed"
            raise RequestError("candidates", candidates.size, problem)
        rows = np.empty((len(features), candidates.size), np.int64)
        self._put_features(rows, ("candidates", candidates), ("candidate_features", request.candidate_features))
        return rows

    def _put_features(
        self, target: IntArray, items: tuple[str, IntArray], extra: tuple[str, Mapping[str, Ids]]
    ) -> None:
        """Rows of every feature table, one line of `target` each; both arguments come with their field's name."""
        config, (field, given) = self._config, extra
        _check_names(field, given, self._extra_features)
        for line, table in zip(target, config.features, strict=False):
            offset = config.offsets[table.name]
            if table.name == ITEM:
                _put(line, items[0], items[1], table.num_rows, offset)
            else:
                name = f"{field}[{table.name!r}]"
                _put(line, name, _ids(name, given[table.name]), table.num_rows, offset)

    def _context_rows(self, context: Mapping[str, int]) -> tuple[IntArray, IntArray]:
        config = self._config
        _check_names("context", context, self._context_tables)
        user, request = (
            np.array(
                [
                    _scalar(f"context[{t.name!r}]", context[t.name], t.num_rows - 1) + config.offsets[t.name]
                    for t in tables
                ],
                np.int64,
            )
            for tables in (config.user_context, config.request_context)
        )
        return user, request

    def _candidate_gap(self, request_time: int | None, timestamps: IntArray) -> int:
        """Time since the last event, if the client says what time it is; else the bucket for no gap."""
        if request_time is None:
            return 0
        now = _scalar("request_time", request_time, _MAX_ID)
        if not timestamps.size:
            return 0
        if now < timestamps[-1]:
            raise RequestError("request_time", now, f"it lies before the last event at {timestamps[-1]}")
        return int(gap_bucket(now - int(timestamps[-1]), self._config.time_buckets))


class RowUpdate(NamedTuple):
    """New values of some rows, known to be good."""

    rows: IntArray  # ids in the shared row space, distinct
    values: NDArray[np.float32]  # (rows, row_dim)


def prepare_rows(config: ModelConfig, table: str, ids: Ids, values: ArrayLike) -> RowUpdate:
    """Raise RequestError, naming field and value, or return the update ready to apply."""
    by_name = {t.name: t for t in config.tables}
    if table not in by_name:
        raise RequestError("table", table, f"the model has no such table, only {', '.join(by_name)}")
    given = _ids("ids", ids)
    rows = np.empty_like(given)
    _put(rows, "ids", given, by_name[table].num_rows, config.offsets[table])
    unique, counts = np.unique(given, return_counts=True)
    if unique.size != given.size:
        raise RequestError("ids", int(unique[counts > 1][0]), "each id may be given once")
    return RowUpdate(rows, _row_values(values, (rows.size, config.row_dim), config.row_dtype))


def _row_values(values: ArrayLike, shape: tuple[int, int], dtype: str) -> NDArray[np.float32]:
    try:
        array = np.asarray(values, np.float32)
    except (ValueError, TypeError) as error:
        raise RequestError("values", type(values).__name__, f"an array of numbers is needed ({error})") from None
    if array.shape != shape:
        raise RequestError("values", array.shape, f"shape {shape} is needed")
    with np.errstate(over="ignore"):  # bfloat16 reaches as far as float32; float16 does not
        stored = array.astype(np.float16) if dtype == "float16" else array
    if (wrong := np.argwhere(~np.isfinite(stored))).size:
        at = wrong[0]
        raise RequestError(f"values[{at[0]}, {at[1]}]", float(array[*at]), f"numbers finite in {dtype} are needed")
    return array


def _ids(field: str, values: Ids) -> IntArray:
    if not isinstance(values, np.ndarray):
        values = _listed(field, values)
    if values.ndim != 1:
        raise RequestError(field, values.shape, "a flat list of integers is needed")
    if values.size == 0:
        return np.empty(0, np.int64)
    if values.dtype.kind not in "iu":
        raise RequestError(field, values[0].item(), f"integers of 64 bits are needed, not {values.dtype}")
    if values.dtype == np.uint64 and values.max() > _MAX_ID:
        raise RequestError(field, int(values.max()), "integers of 64 bits are needed")
    return np.ascontiguousarray(values, np.int64)


def _listed(field: str, values: object) -> IntArray:
    """A list of plain integers as an array; NumPy alone would also take booleans and round floats."""
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


def _put(target: IntArray, field: str, ids: IntArray, limit: int, offset: int = 0) -> None:
    """target = ids + offset, once they are known to be as many as needed and within [0, limit)."""
    if ids.size != target.size:
        raise RequestError(field, ids.size, f"one value per item is needed, {target.size} in all")
    at = _copy_until_outside(ids, limit, offset, target)
    if at < ids.size:
        raise RequestError(f"{field}[{at}]", int(ids[at]), f"values run from 0 to {limit - 1}")


@numba.njit(cache=True)
def _copy_until_outside(ids: IntArray, limit: int, offset: int, target: IntArray) -> int:
    """One pass over the ids; returns the index of the first one out of range, or how many there are."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= limit:
            return i
        target[i] = ids[i] + offset
    return ids.size


@numba.njit(cache=True)
def _first_step_back(values: IntArray) -> int:
    """Index of the first value smaller than the one before it, or how many there are."""
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
    if unknown := given.keys() - wanted:
        raise RequestError(field, min(unknown, key=str), f"the model has no such table here, only {sorted(wanted)}")
    if missing := wanted - given.keys():
        raise RequestError(field, sorted(given), f"a value for {min(missing)!r} is needed")


def _scalar(field: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) <= limit:
        raise RequestError(field, value, f"an integer from 0 to {limit} is needed")
    return int(value)


def _deadline(deadline_ms: float | None) -> float | None:
    if deadline_ms is not None and not (isinstance(deadline_ms, int | float) and deadline_ms > 0):
        raise RequestError("deadline_ms", deadline_ms, "a positive number is needed")
    return deadline_ms
