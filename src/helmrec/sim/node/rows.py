"""The embedding cache of a simulated node: a compiled `EmbeddingCache` with LRU order, over dense row numbers.

Hits, admissions, evictions and refills equal those of `memory/embedding_cache.py`, which
`tests/sim/node/test_conformance.py` checks. The slots and pages of rows are left out: no decision depends on them.
Where rows are sampled, capacities are scaled by the sampling rate.
"""

from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.jit import inner
from helmrec.memory.links import Links, link_first, link_last, unlink
from helmrec.memory.row_admission import count_touch, halve, num_counters
from helmrec.types import IntArray

ABSENT = -1


class Row(IntEnum):
    """Indices into `RowState.counts`."""

    CAPACITY = 0
    RESIDENT = 1
    EVICTIONS = 2
    REFILLS = 3
    SEEN = 4  # misses counted by the admission filter since it last aged
    GHOST_END = 5  # index of the next ghost
    GHOSTS = 6
    MISSED = 7  # number of rows in `missed`
    STEP = 8


class RowState(NamedTuple):
    """Resident rows in LRU order, the admission filter, and rows evicted recently (ghosts)."""

    counts: IntArray
    links: Links  # coldest first; ABSENT for rows that are not resident
    stamp: NDArray[np.int32]  # (rows,) step that last missed the row
    touches: NDArray[np.uint8]  # (2, counters) of the admission filter; without counters every row is admitted
    ghosts: NDArray[np.int32]  # ring
    missed: NDArray[np.int32]  # rows of the running step, each once, in order of first touch


def make_rows(num_rows: int, num_slots: int, max_missed: int, *, is_filtered: bool) -> RowState:
    """An empty cache. `num_slots`: rows that the whole pool could hold."""
    links = np.full((num_rows + 1, 2), ABSENT, np.int32)
    links[num_rows] = num_rows
    return RowState(
        counts=np.zeros(len(Row), np.int64),
        links=links,
        stamp=np.zeros(num_rows, np.int32),
        touches=np.zeros((2, num_counters(num_slots) if is_filtered else 0), np.uint8),
        ghosts=np.empty(max(1, num_slots), np.int32),
        missed=np.empty(max_missed, np.int32),
    )


@inner
def begin_step(rows: RowState) -> None:
    """Start to collect the misses of a step."""
    rows.counts[Row.MISSED] = 0
    rows.counts[Row.STEP] += 1


@inner
def look_up(rows: RowState, read: IntArray, count: int) -> int:
    """Touch the first `count` of `read` in order; return how many missed, each row once in a step.

    Nothing is admitted before `admit`.
    """
    links, missed, stamp, step = rows.links, rows.missed, rows.stamp, rows.counts[Row.STEP]
    num_missed, misses = rows.counts[Row.MISSED], 0
    for i in range(count):
        row = read[i]
        if links[row, 1] != ABSENT:
            unlink(links, row)
            link_last(links, row)
        elif stamp[row] != step:
            stamp[row] = step
            misses += 1
            if num_missed < missed.size:
                missed[num_missed] = row
                num_missed += 1
    rows.counts[Row.MISSED] = num_missed
    return misses


@inner
def admit(rows: RowState) -> None:
    """Admit the rows that the step missed and the filter passes; evict the coldest rows if no slot is empty."""
    counts, missed = rows.counts, rows.missed
    num = counts[Row.MISSED]
    num_free = counts[Row.CAPACITY] - counts[Row.RESIDENT]
    if rows.touches.shape[1]:
        _age(rows, num)
        num = _worthy(rows.touches, missed, num, num_free)
    begin = max(0, num - counts[Row.CAPACITY])
    evict(rows, num - begin - num_free)
    for i in range(begin, num):
        link_last(rows.links, missed[i])
    counts[Row.RESIDENT] += num - begin


@inner
def _age(rows: RowState, num_seen: int) -> None:
    touches, counts = rows.touches, rows.counts
    counts[Row.SEEN] += num_seen
    if counts[Row.SEEN] >= touches.shape[1] // 4:
        halve(touches)
        counts[Row.SEEN] //= 2


@inner
def _worthy(touches: NDArray[np.uint8], missed: NDArray[np.int32], num: int, num_free: int) -> int:
    """Keep rows that were missed before, and as many others as there are empty slots; return how many."""
    kept = 0
    for i in range(num):
        if count_touch(touches, missed[i]) >= 2 or i < num_free:
            missed[kept] = missed[i]
            kept += 1
    return kept


@inner
def evict(rows: RowState, num: int) -> None:
    """Evict the `num` coldest rows; they become ghosts, the hottest of them last."""
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
    """Read up to `limit` of the hottest ghosts into empty slots, as the coldest rows; return how many."""
    links, ghosts, counts = rows.links, rows.ghosts, rows.counts
    limit = min(limit, counts[Row.CAPACITY] - counts[Row.RESIDENT])
    done = 0
    while done < limit and counts[Row.GHOSTS] > 0:
        counts[Row.GHOSTS] -= 1
        counts[Row.GHOST_END] = (counts[Row.GHOST_END] if counts[Row.GHOST_END] > 0 else ghosts.size) - 1
        row = ghosts[counts[Row.GHOST_END]]
        if links[row, 1] == ABSENT:
            link_first(links, row)
            done += 1
    counts[Row.RESIDENT] += done
    counts[Row.REFILLS] += done
    return done


@numba.njit(cache=True)
def resize(rows: RowState, capacity: int) -> None:
    """Set the number of slots; evict the coldest rows that no longer fit."""
    evict(rows, rows.counts[Row.RESIDENT] - capacity)
    rows.counts[Row.CAPACITY] = capacity


def check_rows(rows: RowState) -> None:
    """Assert the invariants of the LRU order and its size."""
    links, ends = rows.links, rows.links.shape[0] - 1
    seen, row = 0, int(links[ends, 1])
    while row != ends:
        assert links[links[row, 1], 0] == row, "the order is broken"
        seen, row = seen + 1, int(links[row, 1])
    assert seen == rows.counts[Row.RESIDENT] == np.count_nonzero(links[:-1, 1] != ABSENT), "a row is lost"
    assert seen <= rows.counts[Row.CAPACITY], "more rows than slots"
