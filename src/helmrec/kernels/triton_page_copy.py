"""Loads whole pages from the host in one launch of few programs, next to other compute. Twin: `page_copy.py`.

The list of pages is read from host memory too, so that nothing is copied before and a graph may capture it.
"""

# ruff: noqa: N803 - Triton's constants are in capitals
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 8  # half as many are enough without other compute
_TILE_BYTES = 64 << 10  # that each program has in flight


@triton.jit
def _load_kernel(host, arena, loads, PAGE_WORDS: tl.constexpr, TILE: tl.constexpr):
    """Page sizes are constants so that the compiler sees their alignment and moves 16 bytes at a time."""
    tiles_per_page = tl.cdiv(PAGE_WORDS, TILE)
    num_tiles = tl.load(loads) * tiles_per_page
    columns, first, step = tl.arange(0, TILE), tl.program_id(0), tl.num_programs(0)
    pairs = loads + 2
    slot = tl.load(pairs + first // tiles_per_page * 2, mask=first < num_tiles, other=0)
    page = tl.load(pairs + first // tiles_per_page * 2 + 1, mask=first < num_tiles, other=0)
    for tile in range(first, num_tiles, step):
        upcoming, has_next = (tile + step) // tiles_per_page * 2, tile + step < num_tiles
        next_slot = tl.load(pairs + upcoming, mask=has_next, other=0)
        next_page = tl.load(pairs + upcoming + 1, mask=has_next, other=0)
        at = tile % tiles_per_page * TILE + columns
        words = tl.load(host + slot.to(tl.int64) * PAGE_WORDS + at, mask=at < PAGE_WORDS)
        tl.store(arena + page.to(tl.int64) * PAGE_WORDS + at, words, mask=at < PAGE_WORDS)
        slot, page = next_slot, next_page


def load_pages(
    host: Tensor, arena: Tensor, loads: Tensor, programs: int = _PROGRAMS, tile_bytes: int = _TILE_BYTES
) -> None:
    """arena[page] = host[slot] for each (slot, page) that `loads` names; shapes as the twin's.

    The memory of `host` and of `loads` must be locked, and neither may change until the kernel has run.
    """
    host, arena = host.view(torch.int32), arena.view(torch.int32)
    tile = tile_bytes // host.element_size()
    _load_kernel[(programs,)](host, arena, loads, PAGE_WORDS=host.shape[1], TILE=tile, num_warps=8)
