"""Which sampled rows would be resident at each of several embedding shares, by the rules of `EmbeddingCache`.

One exact LRU of sampled rows per share, its size scaled by the sampling rate, and the second-touch filter scaled
likewise. Rows of one request are looked up together, then those missed are admitted, as a step does it: a row that a
request misses twice counts twice. Does not know users, tokens or why a row was asked for.

Shares know nothing of each other, so many requests are read at once, share by share: one share's arrays fit a core's
cache, those of all do not.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves.lru import OUT, Lines, close_gaps_of, coldest, join, make_lines, with_ids, with_places
from helmrec.memory.sampling import row_hash

Rows = NDArray[np.int64]
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]

_NONE = -1


class RowState(NamedTuple):
    """Arrays of all shares, for compiled loops. Rows that any share holds have a small id, found by a chained hash."""

    queue: NDArray[np.int32]
    place: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: Rows  # (ids,) the row of each id, _NONE if the id is free
    after: Ids  # (ids,) next id of the same bucket, or next free id
    bucket: Ids  # (power of two,)
    is_asked: NDArray[np.bool_]  # (ids,) by a request that is being read: not to be released
    missed_in: Counts  # (ids,) the step that missed it last, numbered over all shares
    numbers: Counts  # (3,) the first free id, how many there are, and steps so far
    slots: NDArray[np.int64]  # (2, columns) empty ones, and misses seen by the filter since it aged
    sketch: NDArray[np.uint8]  # (columns, 2, power of two) counters of `SecondTouch`; no size: every row is admitted
    age_after: NDArray[np.int64]  # (1,) misses


class Asked(NamedTuple):
    """Rows of some requests, one after the other. Share c reads those of step s from `first_read[s, c]` on."""

    rows: Rows
    ends: Counts  # (steps + 1,) of each step in `rows`, with a leading 0
    first_read: Counts  # (steps, columns)


class RowShadows:
    """Resident sampled rows for each of `capacities`, in sampled rows."""

    def __init__(self, capacities: list[int], filter_slots: int | None, rate: float) -> None:
        """`filter_slots`: slots of the whole pool, which size the second-touch filter; None admits every row."""
        assert capacities
        self._capacity = np.array(capacities, np.int64)
        self._longest = max(capacities)
        columns = len(capacities)
        lines = make_lines(columns, 1_024, 2 * self._longest + 4_096, "F")
        sketch, age_after = _make_filter(columns, filter_slots, rate)
        slots = np.array([self._capacity, np.zeros(columns, np.int64)])
        self.state = RowState(**lines._asdict(), **_empty_table(1_024), slots=slots, sketch=sketch, age_after=age_after)

    def read(self, asked: Asked, missed: NDArray[np.float64], decay: float) -> None:
        """Serve these steps at every share; `missed` (columns,) fades by `decay` a step and grows by its misses."""
        self._reserve(asked.rows.size)
        _read(tuple(self.state), tuple(asked), missed, decay)

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
        state = self.state
        resident = state.place != OUT
        assert np.array_equal(resident.sum(axis=0) + state.slots[0], self._capacity), "a slot is lost"
        assert np.array_equal(state.rows != _NONE, resident.any(axis=1)), (
            "an id without a row is in use, or one is lost"
        )
        assert not state.is_asked.any(), "a mark outlived its step"
        assert np.count_nonzero(state.rows == _NONE) == state.numbers[1], "a free id is lost"


def _empty_table(num_ids: int) -> dict[str, Any]:
    """The fields of a table without rows."""
    return {
        "rows": np.full(num_ids, _NONE, np.int64),
        "after": np.arange(1, num_ids + 1, dtype=np.int32),
        "bucket": np.full(2 * num_ids, _NONE, np.int32),
        "is_asked": np.zeros(num_ids, np.bool_),
        "missed_in": np.zeros(num_ids, np.int64),
        "numbers": np.array([0, num_ids, 0], np.int64),
    }


def _make_filter(columns: int, slots: int | None, rate: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """As `SecondTouch` sizes its own, scaled: it ages after the same share of the stream."""
    if slots is None:
        return np.zeros((columns, 2, 0), np.uint8), np.zeros(1, np.int64)
    scaled = rate * (1 << max(10, (8 * slots - 1).bit_length()))
    size = 1 << max(3, round(np.log2(scaled)))  # a power of two as near as there is, so its load is about the same
    return np.zeros((columns, 2, size), np.uint8), np.array([max(1, round(scaled / 4))])


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
    new.numbers[0] = first_free
    new.numbers[1] = new.rows.size - old.rows.size + old.numbers[1]


@numba.njit(cache=True, nogil=True)
def _read(
    state_arrays: tuple[Any, ...], asked_arrays: tuple[Any, ...], missed: NDArray[np.float64], decay: float
) -> None:
    """Plain tuples come in: named ones take three times as long to hand over."""
    state, asked = RowState(*state_arrays), Asked(*asked_arrays)
    ids = _take_ids(state, asked.rows)
    for column in range(missed.size):
        missed[column] = _read_column(state, asked, ids, column, missed[column], decay)
    _settle(state, ids)


# In the loops below arrays are locals: taken from a tuple inside, each would be counted as a reference every time.


@numba.njit(cache=True)
def _take_ids(state: RowState, asked: Rows) -> Ids:
    """The id of each row, a new one if it had none; none of them is released before `_settle`."""
    rows, after, bucket, numbers, is_asked = state.rows, state.after, state.bucket, state.numbers, state.is_asked
    ids = np.empty(asked.size, np.int32)
    for i in range(asked.size):
        id_ = _id_of(rows, after, bucket, numbers, asked[i])
        is_asked[id_] = True
        ids[i] = id_
    return ids


@numba.njit(cache=True)
def _read_column(state: RowState, asked: Asked, ids: Ids, column: int, missed: float, decay: float) -> float:
    """All steps at one share: look all rows of a step up, then admit what it missed. Returns `missed` as it is then."""
    queue, place, ends, missed_in, numbers = state.queue, state.place, state.ends, state.missed_in, state.numbers
    step_ends, first_read, fresh = asked.ends, asked.first_read, np.empty(asked.rows.size, np.int64)
    for step in range(first_read.shape[0]):
        begin, end = step_ends[step] + first_read[step, column], step_ends[step + 1]
        if begin == end:
            missed *= decay
            continue
        close_gaps_of(queue, place, ends, column, end - begin)  # each is touched or admitted, at most once
        numbers[2] += 1
        number, num_fresh, misses = numbers[2], 0, 0
        for i in range(begin, end):
            id_ = ids[i]
            if place[id_, column] != OUT:
                join(queue, place, ends, column, id_)
                continue
            misses += 1
            if missed_in[id_] != number:
                missed_in[id_] = number
                fresh[num_fresh] = i
                num_fresh += 1
        if num_fresh:
            _age(state, num_fresh, column)
            _admit(state, asked.rows, ids, fresh[:num_fresh], column)
        missed = missed * decay + misses
    return missed


@numba.njit(cache=True)
def _age(state: RowState, num_missed: int, column: int) -> None:
    seen, sketch = state.slots[1], state.sketch[column]
    if not sketch.size:
        return
    seen[column] += num_missed
    if seen[column] >= state.age_after[0]:
        seen[column] //= 2
        for at in range(sketch.shape[1]):
            sketch[0, at] >>= 1
            sketch[1, at] >>= 1


@numba.njit(cache=True)
def _admit(state: RowState, asked: Rows, ids: Ids, fresh: Counts, column: int) -> None:
    """Give missed rows that earn it a slot, in order of first touch."""
    queue, place, ends, is_asked = state.queue, state.place, state.ends, state.is_asked
    rows, after, bucket, numbers = state.rows, state.after, state.bucket, state.numbers
    sketch, free = state.sketch[column], state.slots[0]
    room = free[column]  # empty slots cost nobody anything: the first missed rows take them
    for i in fresh:
        is_worthy = _is_second_touch(sketch, asked[i]) or room > 0
        room -= 1
        if not is_worthy:
            continue
        if free[column] == 0:
            cold = coldest(queue, place, ends, column)
            if cold == OUT:  # no slots at all
                continue
            place[cold, column] = OUT
            free[column] = 1
            # Who is not asked for can only leave the other shares, never come to one: the last to drop it releases it.
            if not is_asked[cold] and not _is_held(place, cold):
                _release(rows, after, bucket, numbers, cold)
        join(queue, place, ends, column, ids[i])
        free[column] -= 1


@numba.njit(cache=True, inline="always")
def _is_second_touch(sketch: NDArray[np.uint8], row: int) -> bool:
    """Count a miss; whether the row was missed before, lately. Counters are those `SecondTouch` has.

    Without a filter every row was.
    """
    if not sketch.size:
        return True
    mask = np.uint64(sketch.shape[1] - 1)
    mixed = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    one, other = mixed & mask, (mixed >> np.uint64(32)) & mask
    first = min(sketch[0, one] + 1, 255)
    second = min(sketch[1, other] + 1, 255)
    sketch[0, one] = first
    sketch[1, other] = second
    return min(first, second) >= 2


@numba.njit(cache=True, inline="always")
def _is_held(place: NDArray[np.int32], id_: np.int64) -> bool:
    is_held = False
    for column in range(place.shape[1]):
        is_held |= place[id_, column] != OUT
    return is_held


@numba.njit(cache=True)
def _settle(state: RowState, ids: Ids) -> None:
    """All was read: rows no share holds give their ids back."""
    rows, after, bucket, numbers = state.rows, state.after, state.bucket, state.numbers
    place, is_asked = state.place, state.is_asked
    for id_ in ids:
        is_asked[id_] = False
        if rows[id_] != _NONE and not _is_held(place, id_):
            _release(rows, after, bucket, numbers, id_)


@numba.njit(cache=True, inline="always")
def _id_of(rows: Rows, after: Ids, bucket: Ids, numbers: Counts, row: int) -> np.int64:
    """The row's id, a new one if it had none."""
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
