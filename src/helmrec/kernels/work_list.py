"""The work list of a persistent attention kernel: query tiles in order, the last long ones split into parts.

Pure Numba over lengths; it does not know tensors, pages or what a head computes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Lengths = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

FIELDS = 8  # of an item: sequence, first row, first block, end block, part, parts, slot, unused
MIN_PART_BLOCKS = 8  # a smaller part costs more to start and add up than to compute
# In blocks, measured on an H200: starting and storing an item, publishing a part, adding up each part of a tile.
ITEM_COST, PART_COST, SUM_COST = 1.5, 3.0, 2.0


class Tiling(NamedTuple):
    """Tile sizes of the kernel, the number of its programs, and the parts that its workspace holds."""

    block_m: int  # query rows per tile
    block_n: int  # keys per block
    num_heads: int
    num_programs: int
    max_parts: int
    window: int = 0  # tokens before it that a row sees; 0 is all of them
    tail: int = 0  # last rows before the candidates that see all, if there is a window


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
    if len(tiles) * tiling.num_heads > 8 * tiling.num_programs:  # too many rounds for an uneven last one to matter
        return _items(tiles, np.ones(len(tiles), np.int64))
    parts = _parts(tiles, tiling)
    if not _ends_earlier(tiles, parts, tiling):
        parts[:] = 1
    return _items(tiles, parts)


@njit(cache=True)
def put_work(
    work: Lengths, cu_tokens: Lengths, num_resident: Lengths, num_new: Lengths, num_context: int, tiling: Tiling
) -> int:
    """Put the number of items into row 0 of `work` and the items into the next rows, if they fit; return the number."""
    items = build_work(cu_tokens, num_resident, num_new, num_context, tiling)
    count = len(items)
    if count < len(work):
        work[0, 0] = count
        for i in range(count):
            for field in range(FIELDS):
                work[1 + i, field] = items[i, field]
    return count


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
def _ends_earlier(tiles: Lengths, parts: Counts, tiling: Tiling) -> bool:
    """Estimate whether the last program ends earlier with tiles in parts than with whole ones.

    Each program takes the next item as soon as it is free. The heads of an item follow one another, so one simulated
    program represents `num_heads` programs.
    """
    num, first = len(tiles), 0
    while first < num and parts[first] == 1:
        first += 1
    if first == num:
        return False
    whole = np.zeros(max(1, tiling.num_programs // tiling.num_heads))  # when each program is free, in blocks
    for t in range(first):
        _take(whole, ITEM_COST + tiles[t, 2])
    split = whole.copy()
    for t in range(first, num):
        _take(whole, ITEM_COST + tiles[t, 2])
        cost = ITEM_COST + tiles[t, 2] / parts[t]
        if parts[t] > 1:
            cost += PART_COST
            for _ in range(parts[t] - 1):
                _take(split, cost)
            cost += SUM_COST * parts[t]  # the last one adds all of them up
        _take(split, cost)
    return split.max() < whole.max()


@njit(cache=True)
def _take(free_at: npt.NDArray[np.float64], cost: float) -> None:
    """Let the program that is free first take an item. free_at: a heap; `heapq` compiles to slower code."""
    end, at, child = free_at[0] + cost, 0, 1
    while child < free_at.size:
        if child + 1 < free_at.size and free_at[child + 1] < free_at[child]:
            child += 1
        if free_at[child] >= end:
            break
        free_at[at] = free_at[child]
        at, child = child, 2 * child + 1
    free_at[at] = end


@njit(cache=True)
def _items(tiles: Lengths, parts: Counts) -> Lengths:  # (items, FIELDS)
    work = np.zeros((int(np.sum(parts)), FIELDS), np.int32)
    count, slot = 0, 0
    for t in range(len(tiles)):
        sequence, row, num_blocks, first = tiles[t, 0], tiles[t, 1], tiles[t, 2], tiles[t, 3]
        for part in range(parts[t]):
            work[count, 0], work[count, 1] = sequence, row
            work[count, 2] = first + part * num_blocks // parts[t]
            work[count, 3] = first + (part + 1) * num_blocks // parts[t]
            work[count, 4], work[count, 5], work[count, 6] = part, parts[t], slot
            count += 1
        if parts[t] > 1:
            slot += parts[t]
    return work
