"""The embedding cache with its index on the host: which rows are resident, in which slot of which page.

Bookkeeping only: it returns the copies to make and never touches row data. The caller copies the data into the arena
before it publishes an admission.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.evicted_rows import GhostRows
from helmrec.memory.row_admission import RowAdmission
from helmrec.memory.row_cache import RowMover, Slots
from helmrec.memory.row_order import EvictionOrder

ABSENT = -1  # value of the residency index for a row that is not in the pool
_REPEAT = -2  # minus the place of the first lookup: a lookup of a row that the same step has missed already
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Lookups of rows that the same step reads from the host already: copy `sources` of the output to `places`."""

    places: NDArray[np.int64]
    sources: NDArray[np.int64]


def repeats_of(slots: Slots) -> Repeats:
    """Return the repeats among the slots that `EmbeddingCache.lookup` found."""
    places = np.flatnonzero(slots <= _REPEAT)
    return Repeats(places, _REPEAT - slots[places].astype(np.int64))


@dataclass(frozen=True, slots=True)
class Admission:
    """Rows that are given slots: copy `positions` of the gathered rows into `slots`, then publish."""

    rows: Rows
    slots: Slots
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shrink:
    """Pages that are given up, and the moves of the rows that stay."""

    pages: list[int]
    source: Slots
    target: Slots


class EmbeddingCache:
    """Residency index over all rows of all tables, in pages of `rows_per_page` slots.

    Slot s lies in page s // rows_per_page, so slots address the arena's row view directly.
    """

    def __init__(
        self, num_rows: int, num_pages: int, rows_per_page: int, order: EvictionOrder, admission: RowAdmission
    ) -> None:
        self._rows_per_page = rows_per_page
        self._index = np.full(num_rows, ABSENT, np.int32)
        self._row_of = np.full(num_pages * rows_per_page, ABSENT, np.int64)
        self._used = np.zeros(num_pages, np.int32)  # rows resident per page
        self._owned = np.zeros(num_pages, np.bool_)
        self._num_owned = 0
        self._free = np.empty(num_pages * rows_per_page, np.int32)  # stack of empty slots in owned pages
        self._num_free = 0
        self._ghosts = GhostRows(num_pages * rows_per_page)
        self._order = order
        self._admission = admission
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.refills = 0
        self.moves = 0

    @property
    def capacity(self) -> int:
        return self._num_owned * self._rows_per_page

    @property
    def num_resident(self) -> int:
        return self.capacity - self._num_free

    @property
    def index_bytes(self) -> int:
        return self._index.nbytes

    def by_heat(self) -> Rows:
        """Return the resident rows, coldest first."""
        return self._row_of[self._order.coldest(self.num_resident)]

    def expect(self, rows: Rows) -> None:
        """Queue rows, coldest first, for the next refills."""
        self._ghosts.push(rows)

    def lookup(self, rows: Rows) -> Slots:
        """Return the slot of each row of a step; count the lookups and make the resident rows recent.

        A row that is not resident is ABSENT where it first occurs, which is where the step must read it from the host.
        `repeats_of` finds its other places. Only the first is a miss: the others read what the step has read already.
        """
        slots = _find(self._index, rows)
        is_resident = slots >= 0
        num_misses = int(np.count_nonzero(slots == ABSENT))
        self.hits += rows.size - num_misses
        self.misses += num_misses
        self._order.touch(slots if is_resident.all() else slots[is_resident])
        return slots

    def peek(self, rows: Rows) -> Slots:
        """Return the slot of each row, or ABSENT, and change nothing."""
        return self._index[rows]

    def admit(self, missed: Rows, positions: NDArray[np.int64]) -> Admission:
        """Choose slots for the missed rows that are admitted, evicting the coldest where none is empty.

        missed: distinct rows, in order of their first touch. `positions` says where each lies in the gathered output.
        Not visible until published.
        """
        absent = self._index[missed] == ABSENT  # a step that ended since may have admitted them
        rows, where = missed[absent], positions[absent]
        worthy = self._admission.worthy(rows)
        worthy[: self._num_free] = True  # filling an empty slot evicts nothing
        rows, where = rows[worthy], where[worthy]
        room = self.capacity
        rows, where = rows[max(0, rows.size - room) :], where[max(0, where.size - room) :]
        self._evict(rows.size - self._num_free)
        return Admission(rows, self._pop_free(rows.size), where)

    def refill(self, limit: int) -> Admission:
        """Choose empty slots for up to `limit` of the hottest evicted rows; publish them as cold."""
        limit = min(limit, self._num_free)
        chosen = np.empty(0, np.int64)
        while chosen.size < limit and len(self._ghosts):
            ghosts = self._ghosts.pop(limit - chosen.size)
            ghosts = ghosts[(self._index[ghosts] == ABSENT) & ~np.isin(ghosts, chosen)]
            chosen = np.concatenate([chosen, ghosts[np.sort(np.unique(ghosts, return_index=True)[1])]])
        self.refills += chosen.size
        return Admission(chosen, self._pop_free(chosen.size), np.arange(chosen.size))

    def publish(self, admission: Admission, *, is_cold: bool = False) -> None:
        """Make rows visible to lookups, once their data is in place."""
        self._index[admission.rows] = admission.slots
        self._row_of[admission.slots] = admission.rows
        np.add.at(self._used, admission.slots // self._rows_per_page, 1)
        if is_cold:
            self._order.insert_coldest(admission.slots)
        else:
            self._order.insert(admission.slots)

    def withdraw(self, admission: Admission) -> None:
        """Free the slots of an admission whose data was not copied."""
        self._push_free(admission.slots)

    def add_pages(self, pages: Sequence[int]) -> None:
        self._owned[list(pages)] = True
        self._num_owned += len(pages)
        self._push_free(self._slots_of(np.asarray(pages, np.int32)))

    def give_up_pages(self, num: int, mover: RowMover) -> list[int]:
        """Give up `num` pages after moving the rows that stay elsewhere."""
        shrink = self.remove_pages(num)
        mover.copy_rows(shrink.source, shrink.target)
        self.finish_shrink(shrink)
        return shrink.pages

    def remove_pages(self, num: int) -> Shrink:
        """Plan giving up `num` pages: evict the globally coldest rows, and move the other rows of those pages.

        The emptiest pages are chosen, so that few rows move. The caller copies `source` to `target` slots and then
        calls `finish_shrink`; until then lookups return the old slots.
        """
        assert num * self._rows_per_page <= self.capacity
        self._evict(self.num_resident - (self.capacity - num * self._rows_per_page))
        owned = np.flatnonzero(self._owned)
        victims = owned[np.argsort(self._used[owned], kind="stable")[:num]]
        self._owned[victims] = False
        self._num_owned -= num
        free = self._free[: self._num_free]
        kept = free[self._owned[free // self._rows_per_page]]
        self._free[: kept.size] = kept
        self._num_free = kept.size
        slots = self._slots_of(victims)
        source = slots[self._row_of[slots] != ABSENT]
        return Shrink(victims.tolist(), source, self._pop_free(source.size))

    def finish_shrink(self, shrink: Shrink) -> None:
        """Update the index after the rows have been copied to their new slots."""
        rows = self._row_of[shrink.source]
        self._index[rows] = shrink.target
        self._row_of[shrink.source] = ABSENT
        self._row_of[shrink.target] = rows
        np.add.at(self._used, shrink.target // self._rows_per_page, 1)
        self._used[shrink.pages] = 0
        self._order.relocate(shrink.source, shrink.target)
        self.moves += shrink.source.size

    def _evict(self, num: int) -> None:
        if num <= 0:
            return
        slots = self._order.coldest(num)
        self._order.remove(slots)
        self._ghosts.push(self._row_of[slots])
        self._index[self._row_of[slots]] = ABSENT
        self._row_of[slots] = ABSENT
        np.subtract.at(self._used, slots // self._rows_per_page, 1)
        self._push_free(slots)
        self.evictions += slots.size

    def _slots_of(self, pages: NDArray[np.integer]) -> Slots:
        slots = pages[:, None] * self._rows_per_page + np.arange(self._rows_per_page)
        return slots.ravel().astype(np.int32)

    def _pop_free(self, num: int) -> Slots:
        assert num <= self._num_free
        self._num_free -= num
        return self._free[self._num_free : self._num_free + num].copy()

    def _push_free(self, slots: Slots) -> None:
        self._free[self._num_free : self._num_free + slots.size] = slots
        self._num_free += slots.size

    def check(self) -> None:
        slots = np.flatnonzero(self._row_of != ABSENT)
        rows = self._row_of[slots]
        assert np.array_equal(self._index[rows], slots), "the index does not match the slots"
        assert np.count_nonzero(self._index != ABSENT) == slots.size, "a row points to a slot that is not its own"
        pages = slots // self._rows_per_page
        assert np.array_equal(np.bincount(pages, minlength=self._used.size), self._used)
        assert self._owned[pages].all(), "a row lives in a page the cache does not own"
        free = self._free[: self._num_free]
        assert np.unique(free).size == free.size, "a slot is free twice"
        assert (self._row_of[free] == ABSENT).all(), "a free slot holds a row"
        assert self._owned[free // self._rows_per_page].all(), "a free slot lies in a page the cache does not own"
        assert np.count_nonzero(self._owned) == self._num_owned
        assert slots.size + free.size == self.capacity, "a slot is lost"
        assert np.array_equal(np.sort(self._order.coldest(slots.size)), slots), "the order lost a slot"


@numba.njit(cache=True)
def _find(index: NDArray[np.int32], rows: Rows) -> Slots:
    """Look rows up. The index itself notes where a missed row occurred first, and is restored before this returns."""
    slots = np.empty(rows.size, np.int32)
    for i in range(rows.size):
        slots[i] = index[rows[i]]
        if slots[i] == ABSENT:
            index[rows[i]] = _REPEAT - i
    for i in range(rows.size):
        if slots[i] == ABSENT:
            index[rows[i]] = ABSENT
    return slots
