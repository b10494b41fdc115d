"""The embedding cache of a simulated node: `EmbeddingCache` with an LRU order, compiled, over dense row numbers.

Which rows hit, which earn a slot, who leaves and who is read ahead are decided as `memory/embedding_cache.py` decides
them; `tests/sim/node/test_conformance.py` holds one to the other. Slots and pages of rows are left out: no decision
depends on them. Of sampled rows, capacities are scaled by the sampling rate.
"""

from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.sim.node.jit import inner
from helmrec.types import IntArray

ABSENT = -1


class Row(IntEnum):
    """Places in `RowState.counts`."""

    CAPACITY = 0
    RESIDENT = 1
    HITS = 2
    MISSES = 3
    EVICTIONS = 4
    REFILLS = 5
    SEEN = 6  # by the admission filter since it last aged
    GHOST_END = 7  # where the next ghost goes
    GHOSTS = 8
    MISSED = 9  # rows of the running step in `missed`
    STEP = 10


class RowState(NamedTuple):
    counts: IntArray
    links: NDArray[np.int32]  # (rows + 1, 2) previous and next, coldest first; the last line holds the ends
    stamp: NDArray[np.int32]  # (rows,) step that last missed the row
    touches: NDArray[np.uint8]  # (2, counters) of the admission filter; no counters: every row is admitted
    ghosts: NDArray[np.int32]  # ring
    missed: NDArray[np.int32]


def make_rows(num_rows: int, num_slots: int, max_missed: int, *, is_filtered: bool) -> RowState:
    """`num_slots`: rows the whole pool could hold."""
    links = np.full((num_rows + 1, 2), ABSENT, np.int32)
    links[num_rows] = num_rows
    num_counters = 1 << max(10, (8 * num_slots - 1).bit_length())  # as SecondTouch sizes itself
    return RowState(
        counts=np.zeros(len(Row), np.int64),
        links=links,
        stamp=np.zeros(num_rows, np.int32),
        touches=np.zeros((2, num_counters if is_filtered else 0), np.uint8),
        ghosts=np.empty(max(1, num_slots), np.int32),
        missed=np.empty(max_missed, np.int32),
    )


@inner
def begin_step(rows: RowState) -> None:
    rows.counts[Row.MISSED] = 0
    rows.counts[Row.STEP] += 1


@inner
def look_up(rows: RowState, read: IntArray, count: int) -> int:
    """Touch the first `count` of `read` in order; returns how many missed. Nothing is admitted before `admit`."""
    links, missed = rows.links, rows.missed
    ends = links.shape[0] - 1
    num_missed = rows.counts[Row.MISSED]
    misses = 0
    for i in range(count):
        row = read[i]
        after = links[row, 1]
        if after == ABSENT:
            misses += 1
            if num_missed < missed.size:
                missed[num_missed] = row
                num_missed += 1
            continue
        before = links[row, 0]
        links[before, 1] = after
        links[after, 0] = before
        last = links[ends, 0]
        links[row, 0] = last
        links[row, 1] = ends
        links[last, 1] = row
        links[ends, 0] = row
    rows.counts[Row.MISSED] = num_missed
    rows.counts[Row.HITS] += count - misses
    rows.counts[Row.MISSES] += misses
    return misses


@inner
def admit(rows: RowState) -> None:
    """Let in those rows the step missed that earn a slot, evicting the coldest where none is empty."""
    counts, missed = rows.counts, rows.missed
    num = _distinct(rows)
    num_free = counts[Row.CAPACITY] - counts[Row.RESIDENT]
    if rows.touches.shape[1]:
        _age(rows, num)
        num = _worthy(rows.touches, missed, num, num_free)
    begin = max(0, num - counts[Row.CAPACITY])
    evict(rows, num - begin - num_free)
    ends = rows.links.shape[0] - 1
    for i in range(begin, num):
        _link(rows.links, rows.links[ends, 0], missed[i], ends)
    counts[Row.RESIDENT] += num - begin


@inner
def _distinct(rows: RowState) -> int:
    """Pack the missed rows, each once, in order of first touch."""
    missed, stamp, step = rows.missed, rows.stamp, rows.counts[Row.STEP]
    num = 0
    for i in range(rows.counts[Row.MISSED]):
        row = missed[i]
        if stamp[row] != step:
            stamp[row] = step
            missed[num] = row
            num += 1
    return num


@inner
def _age(rows: RowState, num_seen: int) -> None:
    touches, counts = rows.touches, rows.counts
    counts[Row.SEEN] += num_seen
    if counts[Row.SEEN] >= touches.shape[1] // 4:
        for i in range(touches.shape[1]):
            touches[0, i] >>= 1
            touches[1, i] >>= 1
        counts[Row.SEEN] //= 2


@inner
def _worthy(touches: NDArray[np.uint8], missed: NDArray[np.int32], num: int, num_free: int) -> int:
    """Keep rows missed before, lately, and as many others as there are empty slots; returns how many."""
    mask = np.uint64(touches.shape[1] - 1)
    kept = 0
    for i in range(num):
        mixed = np.uint64(missed[i]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        a, b = mixed & mask, (mixed >> np.uint64(32)) & mask
        touches[0, a] = min(touches[0, a] + 1, 255)
        touches[1, b] = min(touches[1, b] + 1, 255)
        if i < num_free or min(touches[0, a], touches[1, b]) >= 2:
            missed[kept] = missed[i]
            kept += 1
    return kept


@inner
def _link(links: NDArray[np.int32], before: int, row: int, after: int) -> None:
    links[row, 0] = before
    links[row, 1] = after
    links[before, 1] = row
    links[after, 0] = row


@inner
def evict(rows: RowState, num: int) -> None:
    """The `num` coldest rows leave and become ghosts, the hottest of them on top."""
    if num <= 0:
        return
    links, ghosts, counts = rows.links, rows.ghosts, rows.counts
    ends = links.shape[0] - 1
    end = counts[Row.GHOST_END]
    row = links[ends, 1]
    for _ in range(num):
        after = links[row, 1]
        links[row, 1] = ABSENT
        ghosts[end] = row
        end = end + 1 if end + 1 < ghosts.size else 0
        row = after
    links[ends, 1] = row
    links[row, 0] = ends
    counts[Row.GHOST_END] = end
    counts[Row.GHOSTS] = min(ghosts.size, counts[Row.GHOSTS] + num)
    counts[Row.RESIDENT] -= num
    counts[Row.EVICTIONS] += num


@inner
def refill(rows: RowState, limit: int) -> int:
    """Read up to `limit` of the hottest absent rows into empty slots, as the coldest; returns how many."""
    links, ghosts, counts = rows.links, rows.ghosts, rows.counts
    ends = links.shape[0] - 1
    limit = min(limit, counts[Row.CAPACITY] - counts[Row.RESIDENT])
    done = 0
    while done < limit and counts[Row.GHOSTS] > 0:
        counts[Row.GHOSTS] -= 1
        counts[Row.GHOST_END] = (counts[Row.GHOST_END] if counts[Row.GHOST_END] > 0 else ghosts.size) - 1
        row = ghosts[counts[Row.GHOST_END]]
        if links[row, 1] == ABSENT:
            _link(links, ends, row, links[ends, 1])
            done += 1
    counts[Row.RESIDENT] += done
    counts[Row.REFILLS] += done
    return done


@numba.njit(cache=True)
def resize(rows: RowState, capacity: int) -> None:
    """The cache has `capacity` slots from now on; the coldest rows that no longer fit leave."""
    evict(rows, rows.counts[Row.RESIDENT] - capacity)
    rows.counts[Row.CAPACITY] = capacity


def check_rows(rows: RowState) -> None:
    links, ends = rows.links, rows.links.shape[0] - 1
    seen, row = 0, int(links[ends, 1])
    while row != ends:
        assert links[links[row, 1], 0] == row, "the order is broken"
        seen, row = seen + 1, int(links[row, 1])
    assert seen == rows.counts[Row.RESIDENT] == np.count_nonzero(links[:-1, 1] != ABSENT), "a row is lost"
    assert seen <= rows.counts[Row.CAPACITY], "more rows than slots"
