"""Which sampled rows would be resident at each of several embedding shares, by the rules of `EmbeddingCache`.

One exact LRU of sampled rows per share, its size scaled by the sampling rate, and the second-touch filter scaled
likewise. Rows of one request are looked up together, then those missed are admitted, as a step does it: a row that a
request misses twice counts twice. Does not know users, tokens or why a row was asked for.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves_lru import OUT, Lines, close_gaps, coldest, join, make_lines, with_ids, with_places
from helmrec.memory.sampling import row_hash

Rows = NDArray[np.int64]
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]  # (columns,)

MAX_COLUMNS = 62  # a bit each in a word, beside the one that says a row is in the running step
_IN_STEP = np.uint64(1 << 63)
_NONE = -1


class RowState(NamedTuple):
    """Arrays of all shares, for compiled loops. Rows that any share holds have a small id, found by a chained hash."""

    queue: NDArray[np.int32]
    place: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: Rows  # (ids,) the row of each id, _NONE if the id is free
    after: Ids  # (ids,) next id of the same bucket, or next free id
    bucket: Ids  # (power of two,)
    marks: NDArray[np.uint64]  # (ids,) in the running step: bits of the shares that missed it, and _IN_STEP
    free_ids: NDArray[np.int64]  # (2,) the first, and how many there are
    slots: NDArray[np.int64]  # (2, columns) empty ones, and misses seen by the filter since it aged
    sketch: NDArray[np.uint8]  # (2, power of two, columns) counters of `SecondTouch`; no size: every row is admitted
    age_after: NDArray[np.int64]  # (1,) misses


class _Step(NamedTuple):
    """The rows of one request, and what became of them."""

    rows: Rows
    first_read: Counts
    ids: Ids  # (rows,)
    fresh: NDArray[np.uint64]  # (rows,) bits of the shares for which this is the row's first miss of the step
    misses: Counts
    missed_rows: Counts  # without repeats


class RowShadows:
    """Resident sampled rows for each of `capacities`, in sampled rows."""

    def __init__(self, capacities: list[int], filter_slots: int | None, rate: float) -> None:
        """`filter_slots`: slots of the whole pool, which size the second-touch filter; None admits every row."""
        assert 0 < len(capacities) <= MAX_COLUMNS
        self._capacity = np.array(capacities, np.int64)
        self._longest = max(capacities)
        columns = len(capacities)
        lines = make_lines(columns, 1_024, 2 * self._longest + 4_096)
        sketch, age_after = _make_filter(columns, filter_slots, rate)
        slots = np.array([self._capacity, np.zeros(columns, np.int64)])
        self.state = RowState(**lines._asdict(), **_empty_table(1_024), slots=slots, sketch=sketch, age_after=age_after)

    def reserve(self, num_rows: int) -> None:
        """Make sure that `read_rows` can take that many at once."""
        if self.state.free_ids[1] < num_rows:
            self._add_ids(num_rows)
        if self.state.queue.shape[1] < self._longest + num_rows:
            lines = with_places(Lines(*self.state[:3]), 2 * (self._longest + num_rows))
            self.state = self.state._replace(**lines._asdict())

    def _add_ids(self, needed: int) -> None:
        old = self.state
        num_ids = 2 * old.rows.size
        while num_ids - old.rows.size + old.free_ids[1] < needed:
            num_ids *= 2
        lines = with_ids(Lines(*old[:3]), num_ids)
        self.state = old._replace(**lines._asdict(), **_empty_table(num_ids))
        _rehash(tuple(old), tuple(self.state))

    def check(self) -> None:
        state = self.state
        resident = state.place != OUT
        assert np.array_equal(resident.sum(axis=0) + state.slots[0], self._capacity), "a slot is lost"
        assert np.array_equal(state.rows != _NONE, resident.any(axis=1)), (
            "an id without a row is in use, or one is lost"
        )
        assert not state.marks.any(), "a mark outlived its step"
        assert np.count_nonzero(state.rows == _NONE) == state.free_ids[1], "a free id is lost"


def _empty_table(num_ids: int) -> dict[str, Any]:
    """The fields of a table without rows."""
    return {
        "rows": np.full(num_ids, _NONE, np.int64),
        "after": np.arange(1, num_ids + 1, dtype=np.int32),
        "bucket": np.full(2 * num_ids, _NONE, np.int32),
        "marks": np.zeros(num_ids, np.uint64),
        "free_ids": np.array([0, num_ids], np.int64),
    }


def _make_filter(columns: int, slots: int | None, rate: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """As `SecondTouch` sizes its own, scaled: it ages after the same share of the stream."""
    if slots is None:
        return np.zeros((2, 0, columns), np.uint8), np.zeros(1, np.int64)
    scaled = rate * (1 << max(10, (8 * slots - 1).bit_length()))
    size = 1 << max(3, round(np.log2(scaled)))  # a power of two as near as there is, so its load is about the same
    return np.zeros((2, size, columns), np.uint8), np.array([max(1, round(scaled / 4))])


@numba.njit(cache=True)
def _rehash(old_arrays: tuple[Any, ...], new_arrays: tuple[Any, ...]) -> None:
    """Ids stay what they are; those in use are no longer free in the new table."""
    old, new = RowState(*old_arrays), RowState(*new_arrays)
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
    new.free_ids[0] = first_free
    new.free_ids[1] = new.rows.size - old.rows.size + old.free_ids[1]


@numba.njit(cache=True)
def read_rows(state: RowState, rows: Rows, first_read: Counts) -> Counts:
    """One request's rows; share c reads `rows[first_read[c]:]`. Returns the misses of each share."""
    start = first_read.min()
    num_rows, num_columns = rows.size - start, first_read.size
    close_gaps(Lines(state.queue, state.place, state.ends), num_rows)  # each is touched or admitted, at most once
    step = _Step(
        rows[start:],
        first_read - start,
        np.empty(num_rows, np.int32),
        np.empty(num_rows, np.uint64),
        np.zeros(num_columns, np.int64),
        np.zeros(num_columns, np.int64),
    )
    _look_up(state, step)
    _age(state, step.missed_rows)
    _admit(state, step)
    _settle(state, step.ids)
    return step.misses


# In the loops below arrays are locals: taken from a tuple inside, each would be counted as a reference every time.


@numba.njit(cache=True)
def _look_up(state: RowState, step: _Step) -> None:
    """Count and touch; nothing becomes resident or stops to be."""
    queue, place, ends, marks = state.queue, state.place, state.ends, state.marks
    rows, after, bucket, free_ids = state.rows, state.after, state.bucket, state.free_ids
    asked, ids, fresh = step.rows, step.ids, step.fresh
    first_read, misses, missed_rows = step.first_read, step.misses, step.missed_rows
    for i in range(asked.size):
        id_ = _id_of(rows, after, bucket, free_ids, asked[i])
        marked = marks[id_]
        new = np.uint64(0)
        for column in range(first_read.size):
            if i < first_read[column]:
                continue
            if place[id_, column] != OUT:
                join(queue, place, ends, column, id_)
                continue
            misses[column] += 1
            bit = np.uint64(1) << np.uint64(column)
            if not marked & bit:
                new |= bit
                missed_rows[column] += 1
        marks[id_] = marked | new | _IN_STEP
        ids[i] = id_
        fresh[i] = new


@numba.njit(cache=True)
def _age(state: RowState, missed_rows: Counts) -> None:
    seen, sketch = state.slots[1], state.sketch
    if not sketch.size:
        return
    for column in range(seen.size):
        seen[column] += missed_rows[column]
        if seen[column] >= state.age_after[0]:
            seen[column] //= 2
            for at in range(sketch.shape[1]):
                sketch[0, at, column] >>= 1
                sketch[1, at, column] >>= 1


@numba.njit(cache=True)
def _admit(state: RowState, step: _Step) -> None:
    """Give missed rows that earn it a slot, in order of first touch."""
    queue, place, ends, marks = state.queue, state.place, state.ends, state.marks
    rows, after, bucket, free_ids = state.rows, state.after, state.bucket, state.free_ids
    asked, ids, fresh, sketch, free = step.rows, step.ids, step.fresh, state.sketch, state.slots[0]
    room = free.copy()  # empty slots cost nobody anything: the first missed rows take them
    for i in range(asked.size):
        at = _counters_of(asked[i], sketch.shape[1])
        for column in range(room.size):
            if not fresh[i] >> np.uint64(column) & np.uint64(1):
                continue
            is_worthy = _is_second_touch(sketch, at, column) or room[column] > 0
            room[column] -= 1
            if not is_worthy:
                continue
            if free[column] == 0:
                cold = coldest(queue, place, ends, column)
                if cold == OUT:  # no slots at all
                    continue
                place[cold, column] = OUT
                free[column] = 1
                if not marks[cold] and not _is_held(place, cold):
                    _release(rows, after, bucket, free_ids, cold)
            join(queue, place, ends, column, ids[i])
            free[column] -= 1


@numba.njit(cache=True, inline="always")
def _counters_of(row: int, size: int) -> tuple[np.uint64, np.uint64]:
    """The row's two counters, as `SecondTouch` has them."""
    mask = np.uint64(max(1, size) - 1)
    mixed = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed & mask, (mixed >> np.uint64(32)) & mask


@numba.njit(cache=True, inline="always")
def _is_second_touch(sketch: NDArray[np.uint8], at: tuple[np.uint64, np.uint64], column: int) -> bool:
    """Count a miss; whether the row was missed before, lately. Without a filter every row was."""
    if not sketch.size:
        return True
    first = min(sketch[0, at[0], column] + 1, 255)
    second = min(sketch[1, at[1], column] + 1, 255)
    sketch[0, at[0], column] = first
    sketch[1, at[1], column] = second
    return min(first, second) >= 2


@numba.njit(cache=True, inline="always")
def _is_held(place: NDArray[np.int32], id_: np.int64) -> bool:
    is_held = False
    for column in range(place.shape[1]):
        is_held |= place[id_, column] != OUT
    return is_held


@numba.njit(cache=True)
def _settle(state: RowState, ids: Ids) -> None:
    """The step has ended: rows no share holds give their ids back."""
    rows, after, bucket, free_ids = state.rows, state.after, state.bucket, state.free_ids
    place, marks = state.place, state.marks
    for id_ in ids:
        marks[id_] = 0
        if rows[id_] != _NONE and not _is_held(place, id_):
            _release(rows, after, bucket, free_ids, id_)


@numba.njit(cache=True, inline="always")
def _id_of(rows: Rows, after: Ids, bucket: Ids, free_ids: Rows, row: int) -> np.int64:
    """The row's id, a new one if it had none."""
    at = row_hash(row) & np.uint64(bucket.size - 1)
    id_ = np.int64(bucket[at])
    while id_ != _NONE and rows[id_] != row:
        id_ = np.int64(after[id_])
    if id_ == _NONE:
        id_ = free_ids[0]
        free_ids[0] = after[id_]
        free_ids[1] -= 1
        rows[id_] = row
        after[id_] = bucket[at]
        bucket[at] = id_
    return id_


@numba.njit(cache=True, inline="always")
def _release(rows: Rows, after: Ids, bucket: Ids, free_ids: Rows, id_: np.int64) -> None:
    at = row_hash(rows[id_]) & np.uint64(bucket.size - 1)
    before = np.int64(bucket[at])
    if before == id_:
        bucket[at] = after[id_]
    else:
        while after[before] != id_:
            before = np.int64(after[before])
        after[before] = after[id_]
    rows[id_] = _NONE
    after[id_] = free_ids[0]
    free_ids[0] = id_
    free_ids[1] += 1
