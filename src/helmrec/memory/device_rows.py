"""The embedding cache with its index on the device: rows are found, admitted and evicted without the host.

All its work is enqueued in `stream`; the caller enqueues `find`, `assign` and `keep` there, and may capture them.
The host assigns pages and receives the counters some steps later (`observe`). A step evicts the coldest slots of a
window that a clock hand moves over the slots; `EmbeddingCache`, indexed on the host, evicts the globally coldest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.kernels import row_table
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_index import ABSENT, IndexForm
from helmrec.kernels.row_kernels import RowKernels
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Admission, Claims, Control, Missed, RowTable, RowTally, Victims
from helmrec.memory.row_cache import RowMover
from helmrec.memory.streams import InStream

_MOST_ADMITTED = 131_072  # rows a step may admit
_WINDOW = 2  # slots examined per row that a step may admit; few steps admit the maximum
_SHRINK_WINDOW = 16  # slots examined per slot that leaves with its page
_HALF_LIFE = 8  # lookups for every slot of the pool after which a touch counts half
_REBASE_AT = 2.0**16  # heat beyond this would lose precision
_BITS_PER_MISS = 8  # with fewer, too many rows that were never missed appear as missed


Capture = Callable[[Callable[[], None]], torch.cuda.CUDAGraph]


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """Which rows are coldest, and which missed rows are admitted."""

    is_lru: bool  # else touches are counted with exponential decay
    admission: Admission = Admission.SECOND_TOUCH
    half_life: int = 128  # with FREQUENCY: lookups for every owned slot after which a touch counts half

    def __post_init__(self) -> None:
        assert not (self.is_lru and self.admission == Admission.FREQUENCY), "times are not compared with frequencies"


def _in_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method with the cache's stream as the current stream."""

    @wraps(method)
    def run(self: "DeviceRows", *args: Any) -> Any:
        with InStream(self.stream):
            return method(self, *args)

    return run


class DeviceRows:
    """Caches rows in the arena's EMB pages. Slot s lies in page s // rows_per_page."""

    def __init__(
        self,
        num_rows: int,
        arena_rows: Tensor,
        rows_per_page: int,
        policy: RowPolicy,
        kernels: RowKernels,
        form: IndexForm | None = None,
    ) -> None:
        """arena_rows: (slots, row_dim), the whole arena seen as rows. form: of the index; None: as the sizes demand."""
        num_slots, device = len(arena_rows), arena_rows.device
        limit = min(_MOST_ADMITTED, num_slots)
        self.stream = torch.cuda.Stream(device) if arena_rows.is_cuda else None  # all work on the table runs here
        self._arena_rows = arena_rows
        self._rows_per_page = rows_per_page
        self._policy = policy
        self._kernels = kernels
        self.table = RowTable.allocate(num_rows, num_slots, device, policy.admission, form)
        self._pages: list[int] = []
        self._page_list = torch.zeros(num_slots // rows_per_page, dtype=torch.int64, device=device)
        self._claims = Claims.allocate(limit, device)
        self._copies = torch.zeros(limit, dtype=torch.int32, device=device)
        self._assigned = torch.zeros(limit, dtype=torch.int64, device=device)  # slots that the copies go to
        self._num_slots, self._window_size = num_slots, min(_WINDOW * limit, num_slots)
        slots = torch.zeros(self._window_size, dtype=torch.int64, device=device)
        self._window = slots, torch.zeros(self._window_size, device=device)
        self._now = 0.0
        self._age_at = 1.0  # NOW at which touches of absent rows count half
        self._generation = 0
        self._missed_in_generation = 0
        self._misses_per_generation = self.table.seen.shape[1] * 32 // _BITS_PER_MISS
        self._hand = 0
        self._empty_from = 0  # slots from this ordinal on may be empty since their pages were added
        self._refill_hand = 0  # position among them
        self._unused = torch.full((1,), num_slots, device=device)  # the extra slot that holds no row
        self._bounds = torch.zeros(2, dtype=torch.int64, device=device)
        self._refill_control = torch.zeros_like(self.table.control)
        self._shrink_graph: torch.cuda.CUDAGraph | None = None
        self._refill_graph: torch.cuda.CUDAGraph | None = None
        self._pages_in_graph = self._rows_in_graph = 0
        self._admitted = self._ghosts = 0  # as last observed, like all but the first two of the next
        self.hits = self.misses = self.evictions = self.refills = self.moves = self.refused = 0
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # which has initialised the tensors above

    @property
    def capacity(self) -> int:
        return len(self._pages) * self._rows_per_page

    @property
    def num_resident(self) -> int:
        """Resident rows as last observed."""
        return min(self.capacity, self._admitted - self.evictions)

    @property
    def index_bytes(self) -> int:
        return self.table.num_bytes

    # During a step: the host sends the control values, the device does the rest.

    def next_control(self, num_rows: int) -> NDArray[np.float64]:
        """Return the value of `table.control` for the next step, which reads `num_rows` rows."""
        self._now += self._time_of(num_rows)
        if self._now >= self._age_at:
            self._age_at = self._now + 1.0
            if self._policy.admission == Admission.FREQUENCY:
                with InStream(self.stream):
                    self.table.age()
        if self._now >= _REBASE_AT:
            with InStream(self.stream):
                self.table.heat.sub_(self._now)
            self._age_at -= self._now
            self._now = 0.0
        self._hand += self._window_size
        return self._control(self._hand)

    def _time_of(self, num_rows: int) -> float:
        """Return by how much a step that reads `num_rows` rows advances `NOW`: a step, or a share of the half-life."""
        if self._policy.is_lru:
            return 1.0
        if self._policy.admission == Admission.FREQUENCY:
            return num_rows / (self._policy.half_life * max(1, self.capacity))
        return num_rows / (_HALF_LIFE * self._num_slots)

    def _control(self, hand: int) -> NDArray[np.float64]:
        capacity = self.capacity
        is_filling = self.num_resident < capacity
        # In the order of `Control`.
        return np.array((self._now, self._generation, is_filling, hand % max(1, capacity), capacity), np.float64)

    def find(self, rows: Tensor, lookup: Lookup) -> None:
        """Look rows up: `lookup` says from where to read each; resident rows get hotter."""
        self._kernels.find(self.table, rows, lookup, is_lru=self._policy.is_lru)

    def assign(self, missed: Missed) -> None:
        """Give slots to missed rows that are admitted; `keep` must put their values there before the next `find`."""
        claims, by_heat = self._claims.first(len(missed.sources)), self._policy.admission == Admission.FREQUENCY
        claims.clear()
        self._kernels.claim(self.table, missed, claims, admission=self._policy.admission)
        self._kernels.publish(self.table, claims, self._coldest(), self._copies, by_heat=by_heat)

    def keep(self, gathered: Tensor) -> None:
        """Copy the rows that were assigned slots from where the step has read them."""
        count = self._claims.count
        self._kernels.gather_rows(
            gathered, gathered, self._copies, self._arena_rows, places=self._assigned, count=count
        )

    def _coldest(self) -> Victims:
        """Return the coldest slots of the window, coldest first. They are valid until the next call."""
        slots, heat = self._window
        self._kernels.window(self.table, self._page_list, self._rows_per_page, slots, heat)
        heat, order = heat.sort(stable=True)
        limit = self._copies.numel()
        torch.index_select(slots, 0, order[:limit], out=self._assigned)
        return Victims(self._assigned, heat[:limit])

    def _slots_at(self, ordinals: Tensor) -> Tensor:
        """Return slots by their ordinal among the owned slots."""
        per_page = self._rows_per_page
        return self._page_list[ordinals // per_page] * per_page + ordinals % per_page

    def observe(self, hits: int, misses: int, tally: NDArray[np.int64]) -> None:
        """Count the hits and misses of a step; `tally` is that of the table from about that time."""
        self._take(tally)
        self.hits += hits
        self.misses += misses
        self._missed_in_generation += misses
        if self._missed_in_generation > self._misses_per_generation:
            self._missed_in_generation = 0
            self._generation = 1 - self._generation
            with InStream(self.stream):
                self.table.seen[self._generation].zero_()

    def _take(self, tally: NDArray[np.int64]) -> None:
        """Take over the counts of the device."""
        # In the order of `RowTally`.
        self._admitted, self.evictions, self.refills, self.moves, self._ghosts, self.refused = tally.tolist()

    # Between steps.

    @_in_stream
    def add_pages(self, pages: Sequence[int]) -> None:
        """Add pages. If no slot was empty, the hand moves to the first new slot."""
        if not pages:
            return
        start = len(self._pages)
        if self.num_resident >= self.capacity:
            self._empty_from = self.capacity
            self._hand = self.capacity - self._window_size  # the next step advances it first
        self._pages += pages
        self._send(self._pages[start:], self._page_list[start : len(self._pages)])

    @_in_stream
    def give_up_pages(self, num: int, mover: RowMover | None = None) -> list[int]:
        """Give up the last `num` pages; evict the coldest rows among them and sixteen times as many other slots."""
        gone, self._pages = self._pages[len(self._pages) - num :], self._pages[: len(self._pages) - num]
        self._empty_from = min(self._empty_from, self.capacity)
        num_gone, num_kept = num * self._rows_per_page, self.capacity
        num_others = min(num_kept, _SHRINK_WINDOW * num_gone)
        self._send([self._hand % max(1, num_kept), num_kept], self._bounds)
        if num_others == _SHRINK_WINDOW * num_gone and num == self._pages_in_graph and self._shrink_graph is not None:
            self._shrink_graph.replay()
        else:
            self._shrink(num_gone, num_others)
        self._hand += num_others
        return gone

    def capture_moves(self, num_pages: int, capture: Capture) -> None:
        """Capture giving up `num_pages` pages at once as a graph, which costs the host little.

        Call it before the first step: capturing runs the work, on an empty table.
        """
        num_gone = num_pages * self._rows_per_page
        if (1 + _SHRINK_WINDOW) * num_gone <= len(self._arena_rows):
            self._send([0, _SHRINK_WINDOW * num_gone], self._bounds)
            torch.cuda.synchronize()
            self._shrink_graph = capture(partial(self._shrink, num_gone, _SHRINK_WINDOW * num_gone))
            self._pages_in_graph = num_pages

    def capture_refill(self, num_rows: int, master: Tensor, capture: Capture) -> None:
        """Capture reading `num_rows` rows ahead as a graph."""
        num_rows = min(num_rows, self._copies.numel())
        if num_rows:
            self._refill_graph = capture(partial(self._refill, num_rows, master))
            self._rows_in_graph = num_rows

    def _shrink(self, num_gone: int, num_others: int) -> None:
        """Empty the slots after the kept ones. `_bounds`: where to search for cold slots, and the number kept."""
        hand, num_kept = self._bounds
        leaving = self._slots_at(self._count(num_gone) + num_kept)
        others = self._slots_at((self._count(num_others) + hand) % num_kept.clamp_min(1))
        slots = torch.cat([leaving, others])
        coldest = self.table.heat[slots].argsort(stable=True)[:num_gone]
        goes = torch.zeros(len(slots), dtype=torch.bool, device=slots.device).scatter_(0, coldest, True)
        self._evict(slots[coldest])
        # The pages that leave keep as many rows as slots were emptied elsewhere: move those rows there.
        self._move(_packed(leaving, ~goes[:num_gone]), _packed(others, goes[num_gone:], num_gone))

    def refill(self, num: int, master: Tensor) -> None:
        """Read up to `num` of the most recently evicted rows into empty slots.

        They get less heat than the rows already resident, since no request has read them yet.
        """
        num = min(num, self._room_to_refill())
        if num > 0:
            self._refill_now(num, master)

    @_in_stream
    def _refill_now(self, num: int, master: Tensor) -> None:
        hand = self._empty_from + self._refill_hand % max(1, self.capacity - self._empty_from)
        self._refill_hand += num
        self._send(self._control(hand).tolist(), self._refill_control)
        if self._refill_graph is not None and num == self._rows_in_graph:
            self._refill_graph.replay()
        else:
            self._refill(num, master)

    def _refill(self, num: int, master: Tensor) -> None:
        table = self.table
        table.control.copy_(self._refill_control)
        coldest, now = self._coldest(), table.control[Control.NOW]
        is_warm = (coldest.heat > row_table.EMPTY) & (coldest.heat < row_table.UNUSABLE)
        now.copy_(torch.where(is_warm, coldest.heat, now.float()).amin() - 0.5)
        sources = self._pop_ghosts(num)
        self._claims.clear()
        asked = Missed(sources, self._count(num), torch.full_like(self._claims.count, num))
        self._kernels.claim(table, asked, self._claims, admission=Admission.ALWAYS)
        empty = Victims(coldest.slots, torch.where(coldest.heat == row_table.EMPTY, coldest.heat, row_table.UNUSABLE))
        self._kernels.publish(table, self._claims, empty, self._copies)
        is_read = self._copies != SKIP
        table.tally[RowTally.REFILLED] += is_read.sum()
        sources = torch.where(is_read, sources[self._copies.clamp(0, num - 1).long()], SKIP)
        self._kernels.gather_few(self._arena_rows, master, sources, self._arena_rows, places=empty.slots)

    def _room_to_refill(self) -> int:
        """Return the rows that a refill may read, as last observed."""
        room = self.capacity - self.num_resident
        return min(room, self._ghosts, self._copies.numel())

    def _pop_ghosts(self, num: int) -> Tensor:  # (num,) int32, as `gather_rows` takes them
        table, top = self.table, self.table.tally[RowTally.GHOSTS]
        rows = table.ghosts[(top - 1 - self._count(num)) % len(table.ghosts)]
        sources = torch.where((self._count(num) < top) & (rows != ABSENT), ~rows, SKIP)
        table.tally[RowTally.GHOSTS] -= top.clamp_max(num)
        return sources.int()

    @_in_stream
    def by_heat(self) -> NDArray[np.int64]:
        """Return the resident rows, coldest first. Waits for the device."""
        is_row = self.table.row_of != ABSENT
        order = self.table.heat[is_row].argsort()
        return self.table.row_of[is_row][order].cpu().numpy().astype(np.int64)

    @_in_stream
    def expect(self, rows: NDArray[np.int64]) -> None:
        """Queue rows for the next refills. Waits for the device, so that the next refill knows their number."""
        self._push_ghosts(torch.from_numpy(rows[-len(self.table.ghosts) :].astype(np.int32)).to(self._page_list.device))
        self.table.tally[RowTally.EVICTED] -= len(rows[-len(self.table.ghosts) :])  # the push counted them as evicted
        self._take(self.table.tally.cpu().numpy())

    def _evict(self, slots: Tensor) -> None:
        """Empty these slots. slots: coldest first; some may be empty already."""
        table, rows = self.table, self.table.row_of[slots]
        self._push_ghosts(rows)
        table.index.clear(rows)
        table.row_of.index_fill_(0, slots, ABSENT)
        table.heat.index_fill_(0, slots, row_table.EMPTY)

    def _push_ghosts(self, rows: Tensor) -> None:
        table, is_row = self.table, rows != ABSENT
        num = is_row.sum()
        packed = _packed(rows, is_row)
        places = (table.tally[RowTally.GHOSTS] + self._count(len(packed))) % len(table.ghosts)
        table.ghosts[places] = torch.where(self._count(len(packed)) < num, packed, table.ghosts[places]).int()
        table.tally[RowTally.GHOSTS] += num
        table.tally[RowTally.EVICTED] += num

    def _move(self, source: Tensor, target: Tensor) -> None:
        """Move rows and their heat between slots. Entries of SKIP are padding; a source slot may be empty."""
        table = self.table
        self._kernels.gather_rows(
            self._arena_rows, self._arena_rows, source.int(), self._arena_rows, places=target.clamp_min(0)
        )
        source, target = (torch.where(slots == SKIP, self._unused, slots) for slots in (source, target))
        rows = table.row_of[source]
        table.index.move(rows, target)
        table.row_of[target], table.heat[target] = rows, table.heat[source]
        emptied = torch.cat([source, self._unused])
        table.row_of.index_fill_(0, emptied, ABSENT)
        table.heat.index_fill_(0, emptied, row_table.EMPTY)
        table.tally[RowTally.MOVED] += (rows != ABSENT).sum()

    def _send(self, values: Sequence[float], target: Tensor) -> None:
        """Copy values to the device from pinned memory, so that the host does not wait for the stream."""
        torch_values = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target.copy_(torch_values, non_blocking=True)

    def _count(self, num: int) -> Tensor:
        return torch.arange(num, device=self.table.heat.device)

    @_in_stream
    def check(self) -> None:
        """Assert the invariants of the table. Waits for the device."""
        row_of, heat, index = self.table.row_of.cpu(), self.table.heat.cpu(), self.table.index
        slots, entries = (row_of != ABSENT).nonzero().flatten(), index.entries()
        order = entries.slots.argsort()
        assert row_of[-1] == ABSENT, "the unused last entry was written"
        assert torch.equal(entries.slots[order], slots), "a slot has no entry of the index, or several"
        assert torch.equal(entries.rows[order], row_of[slots].long()), "the index does not match the slots"
        found = index.slots_of(self.table.row_of[:-1]).cpu()
        assert torch.equal(found[slots].long(), slots), "a row is not found"
        assert torch.equal((heat != row_table.EMPTY).nonzero().flatten(), slots), (
            "an empty slot is warm, or a full one is not"
        )
        assert np.isin(slots.numpy() // self._rows_per_page, self._pages).all(), "a row is in a page not owned"
        tally = self.table.tally.tolist()
        assert tally[RowTally.ADMITTED] - tally[RowTally.EVICTED] == len(slots), (
            "the tally does not match the resident rows"
        )
        assert len(set(self._pages)) == len(self._pages)


def _packed(values: Tensor, chosen: Tensor, size: int | None = None) -> Tensor:
    """Return the chosen values first and SKIP after them, `size` entries in all."""
    size = len(values) if size is None else size
    places = torch.where(chosen, (chosen.cumsum(0) - 1).clamp_max(size), size)
    return values.new_full((size + 1,), SKIP).scatter_(0, places, values)[:size]
