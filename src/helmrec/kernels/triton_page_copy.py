"""Bring whole pages from the host in one launch of few programs, beside compute. Twin: `page_copy.py`.

Which pages to bring is read from the host's memory too: a launch needs no copy before it.
"""

# ruff: noqa: N803 - Triton's constants are in capitals
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageLaunch:
    """How many programs run, and how much each has in flight."""

    programs: int
    tile_bytes: int
    num_warps: int


BESIDE_COMPUTE = PageLaunch(programs=8, tile_bytes=64 << 10, num_warps=8)


@triton.jit
def _load_kernel(host, arena, loads, num_loads, PAGE_WORDS: tl.constexpr, TILE: tl.constexpr):
    """Page sizes are constants so that the compiler sees their alignment and moves 16 bytes at a time."""
    tiles_per_page = tl.cdiv(PAGE_WORDS, TILE)
    num_tiles = num_loads * tiles_per_page
    columns, step = tl.arange(0, TILE), tl.num_programs(0)
    tile = tl.program_id(0)
    slot = tl.load(loads + tile // tiles_per_page * 2, mask=tile < num_tiles, other=0)
    page = tl.load(loads + tile // tiles_per_page * 2 + 1, mask=tile < num_tiles, other=0)
    for tile in range(tl.program_id(0), num_tiles, step):
        upcoming = (tile + step) // tiles_per_page * 2
        next_slot = tl.load(loads + upcoming, mask=tile + step < num_tiles, other=0)
        next_page = tl.load(loads + upcoming + 1, mask=tile + step < num_tiles, other=0)
        at = tile % tiles_per_page * TILE + columns
        words = tl.load(host + slot.to(tl.int64) * PAGE_WORDS + at, mask=at < PAGE_WORDS)
        tl.store(arena + page.to(tl.int64) * PAGE_WORDS + at, words, mask=at < PAGE_WORDS)
        slot, page = next_slot, next_page


def load_pages(host: Tensor, arena: Tensor, loads: Tensor, launch: PageLaunch = BESIDE_COMPUTE) -> None:
    """arena[page] = host[slot] for each (slot, page) of `loads`; shapes as the twin's.

    The memory of `host` and of `loads` must be locked, and neither may change until this has run: it is read when the
    launch comes to it.
    """
    host, arena = host.view(torch.int32), arena.view(torch.int32)
    page_words, tile = host.shape[1], launch.tile_bytes // host.element_size()
    programs = min(launch.programs, len(loads) * triton.cdiv(page_words, tile))
    _load_kernel[(programs,)](
        host, arena, loads, len(loads), PAGE_WORDS=page_words, TILE=tile, num_warps=launch.num_warps
    )
