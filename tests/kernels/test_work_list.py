"""The work list covers every row and every key block once, and fits its buffers."""

import heapq
from itertools import pairwise

import numpy as np
import pytest

from helmrec.kernels.work_list import (
    ITEM_COST,
    PART_COST,
    SUM_COST,
    Counts,
    Tiling,
    _ends_earlier,
    build_work,
    max_items,
    put_work,
)
from helmrec.kernels.work_list import Lengths as Int32s


def lengths_of(rng: np.random.Generator, sequences: int, longest: int) -> tuple[Int32s, Int32s, Int32s]:
    resident, new, candidates = (rng.integers(0, longest, sequences) for _ in range(3))
    rows = np.where(rng.random(sequences) < 0.2, 0, new + candidates)
    new = np.minimum(new, rows)
    return (
        np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        resident.astype(np.int32),
        new.astype(np.int32),
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_tile_is_there_once_and_its_parts_meet(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tiling = Tiling(128, int(rng.choice([64, 128])), 4, int(rng.integers(1, 200)), int(rng.integers(0, 100)))
    cu_tokens, resident, new = lengths_of(rng, int(rng.integers(1, 12)), int(rng.integers(1, 5000)))
    work = build_work(cu_tokens, resident, new, 0, tiling)
    rows = np.diff(cu_tokens)
    expected = {(i, row) for i, n in enumerate(rows) for row in range(0, n, 128)}
    tiles: dict[tuple[int, int], list[Int32s]] = {}
    for item in work:
        tiles.setdefault((int(item[0]), int(item[1])), []).append(item)
    assert tiles.keys() == expected
    for parts in tiles.values():
        assert [int(p[4]) for p in parts] == list(range(len(parts)))
        assert all(p[5] == len(parts) and p[2] < p[3] for p in parts)
        assert parts[0][2] == 0
        assert all(a[3] == b[2] for a, b in pairwise(parts))
    cut = work[work[:, 5] > 1]
    assert len(cut) <= tiling.max_parts
    assert sorted((cut[:, 6] + cut[:, 4]).tolist()) == list(range(len(cut)))
    assert len(work) <= max_items(int(cu_tokens[-1]), len(rows), tiling)


def test_blocks_of_a_tile_are_those_its_rows_see() -> None:
    tiling = Tiling(block_m=128, block_n=64, num_heads=1, num_programs=1, max_parts=0)
    # 100 resident, 130 new, 300 candidates: 2 blocks resident, 3 own ones in front of the candidates.
    cu_tokens = np.array([0, 430], np.int32)
    work = build_work(cu_tokens, np.array([100], np.int32), np.array([130], np.int32), 0, tiling)
    blocks = {int(item[1]): int(item[3]) for item in work}
    assert blocks == {0: 2 + 2, 128: 2 + 3 + 1, 256: 2 + 3 + 2, 384: 2 + 3 + 1}


def test_blocks_before_the_window_are_skipped() -> None:
    tiling = Tiling(block_m=128, block_n=64, num_heads=1, num_programs=1, max_parts=0, window=100)
    cu_tokens, resident, new = np.array([0, 430], np.int32), np.array([1_000], np.int32), np.array([130], np.int32)
    work = build_work(cu_tokens, resident, new, 0, tiling)
    # 16 blocks resident; a row sees 100 tokens before it, a candidate those before the first candidate.
    assert {int(item[1]): (int(item[2]), int(item[3])) for item in work} == {
        0: (900 // 64, 16 + 2),
        128: (16 + 28 // 64, 16 + 3 + 1),
        256: (16 + 30 // 64, 16 + 3 + 2),
        384: (16 + 30 // 64, 16 + 3 + 1),
    }
    whole = build_work(cu_tokens, resident, new, 0, tiling._replace(tail=3))
    first = {int(item[1]): int(item[2]) for item in whole}
    assert first == {0: 0, 128: 0, 256: 0, 384: 0}, (
        "row 127 is one of the last three before the candidates, and row 129"
    )


def test_no_rows_no_work() -> None:
    empty = np.zeros(3, np.int32)
    assert len(build_work(np.zeros(4, np.int32), empty, empty, 0, Tiling(128, 128, 4, 132, 96))) == 0


def ends_at(num_blocks: Int32s, parts: Counts, num_programs: int) -> float:
    """When the last program ends, by the heap of the standard library."""
    free_at = [0.0] * num_programs
    for blocks, num_parts in zip(num_blocks.tolist(), parts.tolist(), strict=True):
        cost = ITEM_COST + blocks / num_parts + (PART_COST if num_parts > 1 else 0.0)
        for part in range(num_parts):
            adds_up = 1 < num_parts == part + 1
            heapq.heapreplace(free_at, free_at[0] + (cost + SUM_COST * num_parts if adds_up else cost))
    return max(free_at)


@pytest.mark.parametrize("seed", range(50))
def test_parts_are_compared_with_whole_tiles_by_when_the_last_program_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, num_programs = int(rng.integers(0, 40)), int(rng.integers(1, 40))
    tiles = rng.integers(0, 60, (num, 4)).astype(np.int32)
    parts = np.where(rng.random(num) < 0.3, rng.integers(1, 6, num), 1)
    parts[: num // 3] = 1
    split, whole = (ends_at(tiles[:, 2], each, num_programs) for each in (parts, np.ones_like(parts)))
    assert _ends_earlier(tiles, parts, Tiling(128, 64, 4, 4 * num_programs, 96)) == (split < whole)


def test_items_are_put_behind_their_number_unless_they_do_not_fit() -> None:
    tiling = Tiling(128, 128, 4, 132, 96)
    lengths = lengths_of(np.random.default_rng(0), 8, 3_000)
    items = build_work(*lengths, 1, tiling)
    work = np.full((len(items) + 3, 8), -1, np.int32)
    assert put_work(work, *lengths, 1, tiling) == work[0, 0] == len(items)
    np.testing.assert_array_equal(work[1 : len(items) + 1], items)
    assert (work[len(items) + 1 :] == -1).all()
    short = np.zeros((len(items), 8), np.int32)
    assert put_work(short, *lengths, 1, tiling) == len(items)
    assert not short.any()
