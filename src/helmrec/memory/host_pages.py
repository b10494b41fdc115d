"""The memory of the host tier: whole pages in DRAM, copied to and from the arena."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.kernels.row_kernels import RowKernels
from helmrec.memory.device_rows import Capture
from helmrec.memory.kv_host_tier import KVHostTier, PageSave
from helmrec.memory.prefix import PageLoad
from helmrec.memory.row_master import LockedBuffer
from helmrec.memory.streams import InStream

_TIMED_PAGES = 32
_STEPS_IN_FLIGHT = 2


class _Saving(NamedTuple):
    """Copies of one save that may still run."""

    has_ended: Callable[[], bool]
    pages: frozenset[int]
    slots: frozenset[int]


class SavesInFlight:
    """Tracks which pages running saves read and which slots they write, so that only dependent work waits."""

    def __init__(self) -> None:
        self._saving: deque[_Saving] = deque()  # oldest first; they end in this order

    def add(self, saves: Sequence[PageSave], has_ended: Callable[[], bool]) -> None:
        pages, slots = zip(*saves, strict=True)
        self._saving.append(_Saving(has_ended, frozenset(pages), frozenset(slots)))

    def read_any(self, pages: Iterable[int]) -> bool:
        """Whether a running save still reads one of these pages."""
        return any(not saving.pages.isdisjoint(pages) for saving in self._unended())

    def write_any(self, slots: Iterable[int]) -> bool:
        """Whether a running save still writes one of these slots."""
        return any(not saving.slots.isdisjoint(slots) for saving in self._unended())

    @property
    def is_empty(self) -> bool:
        """Whether all saves are known to have ended."""
        return not self._saving

    def _unended(self) -> "deque[_Saving]":
        while self._saving and self._saving[0].has_ended():
            self._saving.popleft()
        return self._saving


class _LoadLaunch(NamedTuple):
    """The launch that loads the pages of one step."""

    loads: NDArray[np.int32]  # (1 + most, 2) their number, then the pairs; read when the launch runs
    start: Callable[[], None]


class HostPages:
    """the slots of the host tier as host memory beside an arena, locked where the arena is on a card.

    On a card, saves and loads run in their own streams and return at once: saves as copies, loads as one launch that
    reads all pages, since issuing one copy per page took longer than the transfer. Only work that overwrites a page
    waits for its save, on the card and not on the host. A page that is being loaded is read by no running step, so
    loads start without waiting for steps.
    """

    def __init__(
        self, host_tier: KVHostTier, arena_pages: Tensor, kernels: RowKernels, capture: Capture | None = None
    ) -> None:
        """arena_pages: (pages, page_bytes) uint8, the whole arena; capture: captures graphs, if steps are graphs."""
        self._arena = arena_pages
        is_card, device = arena_pages.is_cuda, arena_pages.device
        self._saving, self._loading = (torch.cuda.Stream(device) if is_card else None for _ in range(2))
        self._saves = SavesInFlight()
        self._buffer = LockedBuffer(host_tier.num_slots * arena_pages.shape[1])
        self._host = self._buffer.data.view(host_tier.num_slots, arena_pages.shape[1])
        if host_tier.num_slots:
            if is_card:
                self._buffer.lock()
            self._launches = [self._make_launch(kernels, capture) for _ in range(_STEPS_IN_FLIGHT)]
            host_tier.costs.set_bus_time(self.time_a_page())

    @property
    def loading_stream(self) -> torch.cuda.Stream | None:
        """Stream in which pages are loaded; None is the caller's."""
        return self._loading

    def close(self) -> None:
        self._buffer.close()

    @property
    def is_saving(self) -> bool:
        """Whether a save may still run."""
        return not self._saves.is_empty

    def save(self, saves: Sequence[PageSave]) -> None:
        """Copy pages to host slots; on a card, return before the copies end."""
        if not saves:
            return
        if self._saving is not None and self._loading is not None:
            self._saving.wait_stream(self._loading)  # a running load may read a slot that is written now
        with InStream(self._saving):
            for save in saves:
                self._host[save.slot].copy_(self._arena[save.page], non_blocking=True)
        if self._saving is not None:
            self._saves.add(saves, self._saving.record_event().query)

    def finish_saves_of(self, pages: Iterable[int], stream: torch.cuda.Stream | None) -> None:
        """Make a stream wait for the running saves of these pages; None is the current stream."""
        if self._saves.read_any(pages):
            self.finish_saves(stream)

    def finish_saves(self, stream: torch.cuda.Stream | None) -> None:
        """Make a stream wait for all running saves; None is the current stream."""
        if self._saving is not None:
            (stream or torch.cuda.current_stream()).wait_stream(self._saving)

    def start_loading(self, loads: Sequence[PageLoad]) -> None:
        """Start the loads of a step, at most once per step: launches alternate, and two steps may run at once."""
        slots, pages = zip(*loads, strict=True)
        if self._saves.write_any(slots) or self._saves.read_any(pages):
            self.finish_saves(self._loading)
        launch = self._launches[0]
        self._launches.reverse()
        launch.loads[0] = len(loads), 0
        launch.loads[1 : 1 + len(loads)] = loads
        with InStream(self._loading):
            launch.start()

    def finish_loading(self) -> None:
        """Make the current stream wait for all loads that have started."""
        if self._loading is not None:
            torch.cuda.current_stream().wait_stream(self._loading)

    def _make_launch(self, kernels: RowKernels, capture: Capture | None) -> "_LoadLaunch":
        loads = torch.zeros((1 + len(self._arena), len(PageLoad._fields)), dtype=torch.int32)
        loads = loads.pin_memory() if self._loading is not None else loads
        start = partial(kernels.load_pages, self._host, self._arena, loads)
        return _LoadLaunch(loads.numpy(), start if capture is None else capture(start).replay)

    def time_a_page(self) -> float:
        """Measure the seconds of one page from host to arena, before any page is owned; the second pass counts."""
        num = min(_TIMED_PAGES, len(self._host), len(self._arena))
        for _ in range(2):
            self._wait()
            start_s = time.perf_counter()
            self.start_loading([PageLoad(i, i) for i in range(num)])
            self._wait()
            took_s = time.perf_counter() - start_s
        return took_s / num

    def _wait(self) -> None:
        if self._loading is not None:
            torch.cuda.synchronize()
