"""The memory behind the host tier: whole pages in DRAM, copied to and from the arena.

On a card, saves and loads run on streams of their own. Pages come back layer by layer, read over the bus by a few
programs, so that a step may start on the first layer while the others are on their way.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.kernels.row_kernels import RowKernels
from helmrec.memory.expander import Expander, PageSave
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.host_tier import LockedBuffer
from helmrec.memory.prefix import PageLoad
from helmrec.memory.streams import InStream

_TIMED_PAGES = 8
_PART_BYTES = 4096  # the bus likes records of this size


class HostPages:
    """The expander's slots as host memory beside an arena on a CPU."""

    def __init__(self, expander: Expander, arena_pages: Tensor) -> None:
        """arena_pages: (pages, page_bytes) uint8, the arena seen as plain pages."""
        self._arena = arena_pages
        self._buffer = LockedBuffer(expander.num_slots * arena_pages.shape[1])
        self._host = self._buffer.data.view(expander.num_slots, arena_pages.shape[1])

    def time_a_page(self) -> float:
        """Seconds of one page from host to arena, over pages nobody owns yet; the second pass counts."""
        num = min(_TIMED_PAGES, len(self._host), len(self._arena))
        for _ in range(2):
            self._wait()
            start_s = time.perf_counter()
            self.load([PageLoad(i, i) for i in range(num)])
            self._wait()
            took_s = time.perf_counter() - start_s
        return took_s / num

    def save(self, saves: Sequence[PageSave]) -> None:
        for save in saves:
            self._host[save.slot].copy_(self._arena[save.page], non_blocking=True)

    def load(self, loads: Sequence[PageLoad]) -> None:
        """Before anything that follows in the caller's stream reads these pages."""
        for load in loads:
            self._arena[load.page].copy_(self._host[load.slot])

    def finish_saves_before(self, *streams: torch.cuda.Stream | None) -> None:
        """What these streams do from now on comes after all saves so far."""

    def close(self) -> None:
        self._buffer.close()

    def _wait(self) -> None:
        """Until everything started has ended."""


class CardPages(HostPages):
    """The same beside a card: the host's memory is locked, and nobody on the host waits."""

    def __init__(self, expander: Expander, arena_pages: Tensor, geometry: PageGeometry, kernels: RowKernels) -> None:
        super().__init__(expander, arena_pages)
        self._buffer.lock()
        self._kernels = kernels
        self._saving, self._loading = (torch.cuda.Stream(arena_pages.device) for _ in range(2))
        self._has_saved = False
        # Of each layer, the latest; graphs wait for them.
        self.loaded = [torch.cuda.Event(external=True) for _ in range(geometry.num_layers)]
        layer_bytes = geometry.page_tokens * geometry.token_bytes // geometry.num_layers
        part = math.gcd(_PART_BYTES, layer_bytes, geometry.page_bytes)
        self._parts_per_page = geometry.page_bytes // part
        self._layer_parts = np.arange(geometry.num_layers * layer_bytes // part).reshape(geometry.num_layers, 1, -1)
        self._arena_parts, self._host_parts = (pages.view(-1, part) for pages in (self._arena, self._host))

    def save(self, saves: Sequence[PageSave]) -> None:
        if saves:
            self._has_saved = True
            self._saving.wait_stream(self._loading)  # a slot may be read there that is now written
            with InStream(self._saving):
                super().save(saves)

    def finish_saves_before(self, *streams: torch.cuda.Stream | None) -> None:
        if self._has_saved:
            for stream in streams:
                (stream or torch.cuda.current_stream()).wait_stream(self._saving)

    def load(self, loads: Sequence[PageLoad]) -> None:
        """Start it; `loaded` says, layer by layer, when it has ended."""
        self.finish_saves_before(self._loading)
        slots, pages = np.array(loads, np.int64).T[:, :, None] * self._parts_per_page
        with InStream(self._loading):
            sources, places = self._put(~(slots + self._layer_parts), np.int32), self._put(pages + self._layer_parts)
            for layer, loaded in enumerate(self.loaded):
                self._kernels.gather_few(
                    self._arena_parts, self._host_parts, sources[layer], self._arena_parts, places=places[layer]
                )
                loaded.record(self._loading)

    def _put(self, array: NDArray[np.int64], dtype: type = np.int64) -> Tensor:  # (layers, parts)
        flat: NDArray[Any] = np.ascontiguousarray(array.reshape(len(array), -1), dtype)
        return torch.from_numpy(flat).pin_memory().to(self._arena.device, non_blocking=True)

    def _wait(self) -> None:
        torch.cuda.synchronize()


def make_host_pages(
    expander: Expander, arena_pages: Tensor, geometry: PageGeometry, kernels: RowKernels
) -> HostPages | None:
    """The host tier's memory, timed; None if there is no tier."""
    if not expander.num_slots:
        return None
    pages = (
        CardPages(expander, arena_pages, geometry, kernels) if arena_pages.is_cuda else HostPages(expander, arena_pages)
    )
    expander.costs.page_s = pages.time_a_page()
    return pages
