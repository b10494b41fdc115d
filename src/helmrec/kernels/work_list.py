"""The work list of a persistent attention kernel: query tiles in order, the last long ones split into parts.

Pure Numba over lengths; it does not know tensors, pages or what a head computes.
"""

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Lengths = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

FIELDS = 8  # of an item: sequence, first row, first block, end block, part, parts, slot, unused
MIN_PART_BLOCKS = 8  # a smaller part costs more to start and add up than to compute


class Costs(NamedTuple):
    """Costs in blocks, measured on an H200."""

    item: float = 1.5  # starting and storing an item
    part: float = 3.0  # publishing a part
    add: float = 2.0  # adding up each part of a tile


class Tiling(NamedTuple):
    """Tile sizes of the kernel, the number of its programs, and the parts that its workspace holds."""

    block_m: int  # query rows per tile
    block_n: int  # keys per block
    num_heads: int
    num_programs: int
    max_parts: int
    window: int = 0  # tokens before it that a row sees; 0 is all of them
    tail: int = 0  # last rows before the candidates that see all, if there is a window
    costs: Costs = Costs()


def max_items(max_tokens: int, max_sequences: int, tiling: Tiling) -> int:
    """Return the most items that a batch of these sizes can need."""
    return max_tokens // tiling.block_m + max_sequences + tiling.max_parts


@njit(cache=True)
def build_work(
    cu_tokens: Lengths, num_resident: Lengths, num_new: Lengths, num_context: int, tiling: Tiling
) -> Lengths:  # (items, FIELDS)
    """Split every sequence's own rows into tiles, and the last tiles into parts of their keys.

    Tiles of one sequence stay together, so that the programs running at one time share its keys in the
    L2 cache; the last three rounds run from long to short, so that all programs end at about the same time.
    Sequences without rows get no item.
    """
    tiles = _tiles(cu_tokens, num_resident, num_new, num_context, tiling)
    tail = max(0, len(tiles) - 3 * tiling.num_programs // tiling.num_heads)
    tiles[tail:] = tiles[tail:][np.argsort(-tiles[tail:, 2], kind="mergesort")]
    whole = np.ones(len(tiles), np.int64)
    if len(tiles) * tiling.num_heads > 8 * tiling.num_programs:  # too many rounds for an uneven last one to matter
        return _items(tiles, whole)
    parts = _parts(tiles, tiling)
    return _items(tiles, parts if _duration(tiles, parts, tiling) < _duration(tiles, whole, tiling) else whole)


@njit(cache=True)
def _tiles(
    cu_tokens: Lengths, num_resident: Lengths, num_new: Lengths, num_context: int, tiling: Tiling
) -> Lengths:  # (tiles, 4): sequence, first row, key blocks, first of them
    """List the tiles by decreasing cost of their sequence; within one from its end, where rows see the most keys."""
    num_rows = cu_tokens[1:] - cu_tokens[:-1]
    cost = num_rows.astype(np.int64) * (num_resident + num_new + 1)
    tiles = np.empty((int(np.sum((num_rows + tiling.block_m - 1) // tiling.block_m)), 4), np.int32)
    count = 0
    for i in np.argsort(-cost, kind="mergesort"):
        for tile in range((num_rows[i] - 1) // tiling.block_m, -1, -1):
            row = tile * tiling.block_m
            tiles[count, 0] = i
            tiles[count, 1] = row
            shared = num_new[i] + num_context
            tiles[count, 3] = _first_block(row, num_rows[i], num_resident[i], shared, tiling)
            num_blocks = _num_blocks(row, num_rows[i], num_resident[i], shared, tiling)
            tiles[count, 2] = num_blocks - tiles[count, 3]
            count += 1
    return tiles


@njit(cache=True)
def _num_blocks(row: int, num_rows: int, resident: int, shared: int, tiling: Tiling) -> int:
    """Return the key blocks of a tile: resident ones, own ones that later rows see too, and its diagonal."""
    n = tiling.block_n
    seen = (min(row + tiling.block_m, shared) + n - 1) // n
    diagonal = (min(row + tiling.block_m, num_rows) + n - 1) // n - max(row // n, seen)
    return (resident + n - 1) // n + seen + max(diagonal, 0)


@njit(cache=True)
def _first_block(row: int, num_rows: int, resident: int, shared: int, tiling: Tiling) -> int:
    """Return the first key block that a row of the tile sees: 0, or where the window of its first row begins."""
    last = min(row + tiling.block_m, num_rows) - 1
    if tiling.window == 0 or (tiling.tail > 0 and min(last, shared) >= shared - tiling.tail):
        return 0
    n, first = tiling.block_n, max(0, resident + min(row, shared) - tiling.window)
    if first < resident:
        return first // n
    return (resident + n - 1) // n + (first - resident) // n


@njit(cache=True)
def _parts(tiles: Lengths, tiling: Tiling) -> Counts:  # (tiles,)
    """Return the parts of each tile: a part takes at most twice an even share of the work left when it starts."""
    parts = np.ones(len(tiles), np.int64)
    left, room = 0, tiling.max_parts
    for t in range(len(tiles) - 1, -1, -1):  # from the end, where splitting matters, while the workspace has room
        left += tiles[t, 2] * tiling.num_heads
        longest = max(2 * left // tiling.num_programs, MIN_PART_BLOCKS)
        needed = (tiles[t, 2] + longest - 1) // longest
        if 1 < needed <= room:
            parts[t] = needed
            room -= needed
    return parts


@njit(cache=True)
def _duration(tiles: Lengths, parts: Counts, tiling: Tiling) -> float:
    """Estimate when the last program ends, in blocks, if each takes the next item as soon as it is free.

    The heads of an item follow one another, so one simulated program represents `num_heads` programs.
    """
    free_at = [0.0 for _ in range(max(1, tiling.num_programs // tiling.num_heads))]
    for t in range(len(tiles)):
        cost = tiling.costs.item + tiles[t, 2] / parts[t]
        if parts[t] > 1:
            cost += tiling.costs.part
        for part in range(parts[t]):
            adds_up = 1 < parts[t] == part + 1
            heapq.heapreplace(free_at, free_at[0] + cost + (tiling.costs.add * parts[t] if adds_up else 0.0))
    return max(free_at)


@njit(cache=True)
def _items(tiles: Lengths, parts: Counts) -> Lengths:  # (items, FIELDS)
    work = np.zeros((int(np.sum(parts)), FIELDS), np.int32)
    count, slot = 0, 0
    for t in range(len(tiles)):
        for part in range(parts[t]):
            work[count, :2] = tiles[t, :2]
            work[count, 2] = tiles[t, 3] + part * tiles[t, 2] // parts[t]
            work[count, 3] = tiles[t, 3] + (part + 1) * tiles[t, 2] // parts[t]
            work[count, 4] = part
            work[count, 5] = parts[t]
            work[count, 6] = slot
            count += 1
        if parts[t] > 1:
            slot += parts[t]
    return work
