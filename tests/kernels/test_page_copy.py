"""Loads of pages against their twin, in Triton's interpreter."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import page_copy, triton_page_copy

SLOTS, PAGES = 9, 7


@pytest.mark.parametrize("page_bytes", [64, 1_000, 4_096])
@pytest.mark.parametrize("num_loads", [0, 1, 2, 7])
@pytest.mark.parametrize("programs", [1, 3, 64])
def test_pages_land_where_they_should_and_nowhere_else(page_bytes: int, num_loads: int, programs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    host, arena = (
        torch.randint(0, 255, (num, page_bytes), dtype=torch.uint8, generator=generator) for num in (SLOTS, PAGES)
    )
    slots, pages = (torch.randperm(num, generator=generator)[:num_loads] for num in (SLOTS, PAGES))
    loads, twin = torch.full((1 + PAGES, 2), -1, dtype=torch.int32), arena.clone()
    loads[0, 0] = num_loads
    loads[1 : 1 + num_loads] = torch.stack([slots, pages], 1)
    page_copy.load_pages(host, twin, loads)
    triton_page_copy.load_pages(host, arena, loads, programs, tile_bytes=256)
    assert torch.equal(arena, twin)
    assert torch.equal(twin[pages], host[slots])
