"""The sampled rows that would be resident at each of several embedding shares, by the rules of `EmbeddingCache`.

Each share has an exact LRU order of sampled rows; its size and the second-touch filter are scaled by the sampling rate.
All rows of a request are looked up before the missed ones are admitted, as in a step: a row that a request misses twice
is read once and counts once. This module knows no users and no tokens.

Shares are independent, so many requests are read at once, share by share: the arrays of one share fit the cache of a
core, those of all shares do not.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves.lru import OUT, Lines, close_gaps_of, coldest, join, make_lines, with_ids, with_places
from helmrec.memory.row_admission import count_touch, halve, num_counters
from helmrec.memory.sampling import row_hash

Rows = NDArray[np.int64]
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]

_NONE = -1


class RowShadowState(NamedTuple):
    """Arrays of all shares, for compiled loops. A row held by any share has a small id, found by a chained hash."""

    queue: NDArray[np.int32]
    place: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: Rows  # (ids,) the row of each id, _NONE if the id is free
    after: Ids  # (ids,) next id of the same bucket, or next free id
    bucket: Ids  # (power of two,)
    is_read: NDArray[np.bool_]  # (ids,) read by the current requests, so not to be released
    missed_in: Counts  # (ids,) the last step that missed it, numbered across all shares
    numbers: Counts  # (3,) the first free id, the number of free ids, and the number of steps
    slots: NDArray[np.int64]  # (2, columns) empty slots, and misses counted by the filter since it last aged
    sketch: NDArray[np.uint8]  # (columns, 2, power of two) counters of `SecondTouch`; empty if every row is admitted
    age_after: NDArray[np.int64]  # (1,) misses


class RowSteps(NamedTuple):
    """Rows of consecutive requests, one step each. Share c reads those of step s from `first_read[s, c]` on."""

    rows: Rows
    ends: Counts  # (steps + 1,) of each step in `rows`, with a leading 0
    first_read: Counts  # (steps, columns)


class RowShadows:
    """Resident sampled rows for each of `capacities`, the number of sampled rows at each share."""

    def __init__(self, capacities: list[int], filter_slots: int | None, rate: float) -> None:
        """`filter_slots`: slots of the whole pool, which determine the size of the filter; None admits every row."""
        assert capacities
        self._capacity = np.array(capacities, np.int64)
        self._longest = max(capacities)
        columns = len(capacities)
        lines = make_lines(columns, 1_024, 2 * self._longest + 4_096)
        sketch, age_after = _make_filter(columns, filter_slots, rate)
        slots = np.array([self._capacity, np.zeros(columns, np.int64)])
        self.state = RowShadowState(
            **lines._asdict(), **_empty_table(1_024), slots=slots, sketch=sketch, age_after=age_after
        )

    def read(self, steps: RowSteps, missed: NDArray[np.float64], decay: float) -> None:
        """Serve these steps at every share; `missed` (columns,) decays by `decay` per step and grows by its misses."""
        self._reserve(steps.rows.size)
        _read(tuple(self.state), tuple(steps), missed, decay)

    def _reserve(self, num_rows: int) -> None:
        if self.state.numbers[1] < num_rows:
            self._add_ids(num_rows)
        if self.state.queue.shape[1] < self._longest + num_rows:
            lines = with_places(Lines(*self.state[:3]), 2 * (self._longest + num_rows))
            self.state = self.state._replace(**lines._asdict())

    def _add_ids(self, needed: int) -> None:
        old = self.state
        num_ids = 2 * old.rows.size
        while num_ids - old.rows.size + old.numbers[1] < needed:
            num_ids *= 2
        lines = with_ids(Lines(*old[:3]), num_ids)
        self.state = old._replace(**lines._asdict(), **_empty_table(num_ids))
        _rehash(tuple(old), tuple(self.state))

    def check(self) -> None:
        """Assert the invariants of slots and ids."""
        state = self.state
        resident = state.place != OUT
        assert np.array_equal(resident.sum(axis=0) + state.slots[0], self._capacity), "a slot is lost"
        assert np.array_equal(state.rows != _NONE, resident.any(axis=1)), (
            "an id without a row is in use, or one is lost"
        )
        assert not state.is_read.any(), "a row is still marked as read"
        assert np.count_nonzero(state.rows == _NONE) == state.numbers[1], "a free id is lost"


def _empty_table(num_ids: int) -> dict[str, Any]:
    """The fields of a table without rows."""
    return {
        "rows": np.full(num_ids, _NONE, np.int64),
        "after": np.arange(1, num_ids + 1, dtype=np.int32),
        "bucket": np.full(2 * num_ids, _NONE, np.int32),
        "is_read": np.zeros(num_ids, np.bool_),
        "missed_in": np.zeros(num_ids, np.int64),
        "numbers": np.array([0, num_ids, 0], np.int64),
    }


def _make_filter(columns: int, slots: int | None, rate: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Counters of the size that `SecondTouch` uses, scaled by the rate: they age after the same share of the stream."""
    if slots is None:
        return np.zeros((columns, 2, 0), np.uint8), np.zeros(1, np.int64)
    scaled = rate * num_counters(slots)
    size = 1 << max(3, round(np.log2(scaled)))  # the nearest power of two
    return np.zeros((columns, 2, size), np.uint8), np.array([max(1, round(scaled / 4))])


@numba.njit(cache=True)
def _rehash(old_arrays: tuple[Any, ...], new_arrays: tuple[Any, ...]) -> None:
    """Copy the rows of the old table into the new one; ids stay the same."""
    old, new = RowShadowState(*old_arrays), RowShadowState(*new_arrays)
    mask = np.uint64(new.bucket.size - 1)
    first_free = np.int64(_NONE)
    for id_ in range(new.rows.size - 1, -1, -1):
        if id_ >= old.rows.size or old.rows[id_] == _NONE:
            new.after[id_] = first_free
            first_free = np.int64(id_)
            continue
        at = row_hash(old.rows[id_]) & mask
        new.rows[id_] = old.rows[id_]
        new.after[id_] = new.bucket[at]
        new.bucket[at] = id_
    new.numbers[0] = first_free
    new.numbers[1] = new.rows.size - old.rows.size + old.numbers[1]


@numba.njit(cache=True, nogil=True)
def _read(
    state_arrays: tuple[Any, ...], step_arrays: tuple[Any, ...], missed: NDArray[np.float64], decay: float
) -> None:
    """Read all steps at every share. Takes plain tuples: named ones take three times as long to pass from Python."""
    state, steps = RowShadowState(*state_arrays), RowSteps(*step_arrays)
    ids = _take_ids(state, steps.rows)
    for column in range(missed.size):
        missed[column] = _read_column(state, steps, ids, column, missed[column], decay)
    _settle(state, ids)


# The loops below use local arrays: an array read from a tuple inside a loop is reference-counted every time.


@numba.njit(cache=True)
def _take_ids(state: RowShadowState, read: Rows) -> Ids:
    """The id of each row, a new one if it has none; none of them is released before `_settle`."""
    rows, after, bucket, numbers, is_read = state.rows, state.after, state.bucket, state.numbers, state.is_read
    ids = np.empty(read.size, np.int32)
    for i in range(read.size):
        id_ = _id_of(rows, after, bucket, numbers, read[i])
        is_read[id_] = True
        ids[i] = id_
    return ids


@numba.njit(cache=True)
def _read_column(state: RowShadowState, steps: RowSteps, ids: Ids, column: int, missed: float, decay: float) -> float:
    """Read all steps at one share: look up the rows of a step, then admit those missed. Return the updated `missed`."""
    queue, place, ends, missed_in, numbers = state.queue, state.place, state.ends, state.missed_in, state.numbers
    step_ends, first_read, fresh = steps.ends, steps.first_read, np.empty(steps.rows.size, np.int64)
    for step in range(first_read.shape[0]):
        begin, end = step_ends[step] + first_read[step, column], step_ends[step + 1]
        if begin == end:
            missed *= decay
            continue
        close_gaps_of(queue, place, ends, column, end - begin)  # each is touched or admitted, at most once
        numbers[2] += 1
        number, num_fresh = numbers[2], 0
        for i in range(begin, end):
            id_ = ids[i]
            if place[id_, column] != OUT:
                join(queue, place, ends, column, id_)
                continue
            if missed_in[id_] != number:
                missed_in[id_] = number
                fresh[num_fresh] = i
                num_fresh += 1
        if num_fresh:
            _age(state, num_fresh, column)
            _admit(state, steps.rows, ids, fresh[:num_fresh], column)
        missed = missed * decay + num_fresh
    return missed


@numba.njit(cache=True)
def _age(state: RowShadowState, num_missed: int, column: int) -> None:
    seen, sketch = state.slots[1], state.sketch[column]
    if not sketch.size:
        return
    seen[column] += num_missed
    if seen[column] >= state.age_after[0]:
        seen[column] //= 2
        halve(sketch)


@numba.njit(cache=True)
def _admit(state: RowShadowState, read: Rows, ids: Ids, fresh: Counts, column: int) -> None:
    """Admit missed rows that pass the filter, in order of first touch."""
    queue, place, ends, is_read = state.queue, state.place, state.ends, state.is_read
    rows, after, bucket, numbers = state.rows, state.after, state.bucket, state.numbers
    sketch, free = state.sketch[column], state.slots[0]
    room = free[column]  # empty slots: the first missed rows take them without passing the filter
    for i in fresh:
        is_admitted = not sketch.size or count_touch(sketch, read[i]) >= 2 or room > 0
        room -= 1
        if not is_admitted:
            continue
        if free[column] == 0:
            cold = coldest(queue, place, ends, column)
            if cold == OUT:  # no slots at all
                continue
            place[cold, column] = OUT
            free[column] = 1
            # A row that no request reads now can only leave other shares: the last share to evict it releases its id.
            if not is_read[cold] and not _is_held(place, cold):
                _release(rows, after, bucket, numbers, cold)
        join(queue, place, ends, column, ids[i])
        free[column] -= 1


@numba.njit(cache=True, inline="always")
def _is_held(place: NDArray[np.int32], id_: np.int64) -> bool:
    is_held = False
    for column in range(place.shape[1]):
        is_held |= place[id_, column] != OUT
    return is_held


@numba.njit(cache=True)
def _settle(state: RowShadowState, ids: Ids) -> None:
    """Release the ids of rows that no share holds."""
    rows, after, bucket, numbers = state.rows, state.after, state.bucket, state.numbers
    place, is_read = state.place, state.is_read
    for id_ in ids:
        is_read[id_] = False
        if rows[id_] != _NONE and not _is_held(place, id_):
            _release(rows, after, bucket, numbers, id_)


@numba.njit(cache=True, inline="always")
def _id_of(rows: Rows, after: Ids, bucket: Ids, numbers: Counts, row: int) -> np.int64:
    """The id of a row, a new one if it has none."""
    at = row_hash(row) & np.uint64(bucket.size - 1)
    id_ = np.int64(bucket[at])
    while id_ != _NONE and rows[id_] != row:
        id_ = np.int64(after[id_])
    if id_ == _NONE:
        id_ = numbers[0]
        numbers[0] = after[id_]
        numbers[1] -= 1
        rows[id_] = row
        after[id_] = bucket[at]
        bucket[at] = id_
    return id_


@numba.njit(cache=True, inline="always")
def _release(rows: Rows, after: Ids, bucket: Ids, numbers: Counts, id_: np.int64) -> None:
    at = row_hash(rows[id_]) & np.uint64(bucket.size - 1)
    before = np.int64(bucket[at])
    if before == id_:
        bucket[at] = after[id_]
    else:
        while after[before] != id_:
            before = np.int64(after[before])
        after[before] = after[id_]
    rows[id_] = _NONE
    after[id_] = numbers[0]
    numbers[0] = id_
    numbers[1] += 1
