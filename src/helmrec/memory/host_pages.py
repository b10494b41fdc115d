"""The memory behind the host tier: whole pages in DRAM, copied to and from the arena."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from helmrec.kernels.row_kernels import RowKernels
from helmrec.memory.expander import Expander, PageSave
from helmrec.memory.host_tier import LockedBuffer
from helmrec.memory.prefix import PageLoad
from helmrec.memory.streams import InStream

_TIMED_PAGES = 32
_STEPS_IN_FLIGHT = 2


class HostPages:
    """The expander's slots as host memory beside an arena, locked where the arena is on a card.

    On a card, saves and loads run in streams of their own and return at once: saves as copies, loads as one launch
    that reads all pages, since to issue a copy for each took longer than the bus. Whoever may overwrite a page waits
    for its save on the card, not on the host; a page that is loaded belongs to nobody until then, so loads start
    beside whatever runs.
    """

    def __init__(self, expander: Expander, arena_pages: Tensor, kernels: RowKernels) -> None:
        """arena_pages: (pages, page_bytes) uint8, the arena seen as plain pages."""
        self._arena = arena_pages
        self._kernels = kernels
        is_card, device = arena_pages.is_cuda, arena_pages.device
        self._saving, self._loading = (torch.cuda.Stream(device) if is_card else None for _ in range(2))
        self._has_saved = False
        self._buffer = LockedBuffer(expander.num_slots * arena_pages.shape[1])
        self._host = self._buffer.data.view(expander.num_slots, arena_pages.shape[1])
        shape = (_STEPS_IN_FLIGHT, len(arena_pages), len(PageLoad._fields))
        self._loads = torch.zeros(shape, dtype=torch.int32, pin_memory=is_card)  # read when the card comes to them
        self._turn = 0
        if expander.num_slots:
            if is_card:
                self._buffer.lock()
            expander.costs.page_s = self._time_a_page()

    def close(self) -> None:
        self._buffer.close()

    def save(self, saves: Sequence[PageSave]) -> None:
        if not saves:
            return
        self._has_saved = True
        if self._saving is not None and self._loading is not None:
            self._saving.wait_stream(self._loading)  # a slot may be read there that is now written
        with InStream(self._saving):
            for save in saves:
                self._host[save.slot].copy_(self._arena[save.page], non_blocking=True)

    def finish_saves_before(self, *streams: torch.cuda.Stream | None) -> None:
        """What these streams do from now on comes after all saves so far; None is the current one."""
        if self._saving is not None and self._has_saved:
            for stream in streams:
                (stream or torch.cuda.current_stream()).wait_stream(self._saving)

    def start_loading(self, loads: Sequence[PageLoad]) -> None:
        """Once for a step: the step before may still be on its way, the one before that has ended."""
        self.finish_saves_before(self._loading)
        self._turn = (self._turn + 1) % _STEPS_IN_FLIGHT
        asked = self._loads[self._turn, : len(loads)]
        asked.numpy()[:] = loads
        with InStream(self._loading):
            self._kernels.load_pages(self._host, self._arena, asked)

    def finish_loading(self) -> None:
        """What follows in the current stream sees all pages whose loading has started."""
        if self._loading is not None:
            torch.cuda.current_stream().wait_stream(self._loading)

    def _time_a_page(self) -> float:
        """Seconds of one page from host to arena, over pages nobody owns yet; the second pass counts."""
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
