"""The memory behind the host tier: whole pages in DRAM, copied to and from the arena."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from helmrec.memory.expander import Expander, PageSave
from helmrec.memory.host_tier import LockedBuffer
from helmrec.memory.prefix import PageLoad

_TIMED_PAGES = 8


class HostPages:
    """The expander's slots as host memory beside an arena, locked where the arena is on a card.

    On a card, saves run on a stream of their own and return at once; whoever may overwrite the pages waits for them
    on the card, not on the host (`finish_saves_before`).
    """

    def __init__(self, expander: Expander, arena_pages: Tensor) -> None:
        """arena_pages: (pages, page_bytes) uint8, the arena seen as plain pages."""
        self._arena = arena_pages
        self._stream = torch.cuda.Stream(arena_pages.device) if arena_pages.is_cuda else None
        self._has_saved = False
        self._buffer = LockedBuffer(expander.num_slots * arena_pages.shape[1])
        self._host = self._buffer.data.view(expander.num_slots, arena_pages.shape[1])
        if expander.num_slots:
            if self._stream is not None:
                self._buffer.lock()
            expander.costs.page_s = self._time_a_page()

    def close(self) -> None:
        self._buffer.close()

    def save(self, saves: Sequence[PageSave]) -> None:
        if not saves:
            return
        if self._stream is None:
            self._copy_out(saves)
        else:
            self._has_saved = True
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._copy_out(saves)

    def finish_saves_before(self, *streams: torch.cuda.Stream | None) -> None:
        """What these streams do from now on comes after all saves so far."""
        if self._stream is not None and self._has_saved:
            for stream in streams:
                (stream or torch.cuda.current_stream()).wait_stream(self._stream)

    def load(self, loads: Sequence[PageLoad]) -> None:
        """In the order of the caller's stream, so that what follows sees the pages."""
        for load in loads:
            self._arena[load.page].copy_(self._host[load.slot], non_blocking=True)

    def _copy_out(self, saves: Sequence[PageSave]) -> None:
        for save in saves:
            self._host[save.slot].copy_(self._arena[save.page], non_blocking=True)

    def _time_a_page(self) -> float:
        """Seconds of one page from host to arena, over pages nobody owns yet; the second pass counts."""
        num = min(_TIMED_PAGES, len(self._host), len(self._arena))
        for _ in range(2):
            self._wait()
            start_s = time.perf_counter()
            self.load([PageLoad(i, i) for i in range(num)])
            self._wait()
            took_s = time.perf_counter() - start_s
        return took_s / num

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize()
