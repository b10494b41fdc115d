"""Compiled loads of pages on a card, from locked host memory: bit for bit, and nowhere else."""

import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from helmrec.kernels import page_copy
from helmrec.kernels.triton_page_copy import load_pages
from helmrec.memory.host_tier import LockedBuffer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_bytes", [16, 4_112, 1_310_720])
@pytest.mark.parametrize("num_loads", [0, 1, 3, 97])
def test_pages_land_where_they_should_and_nowhere_else(page_bytes: int, num_loads: int) -> None:
    num_slots, num_pages = 130, 101
    buffer = LockedBuffer(num_slots * page_bytes)
    buffer.data.random_()
    buffer.lock()
    host = buffer.data.view(num_slots, page_bytes)
    arena = torch.randint(0, 255, (num_pages, page_bytes), dtype=torch.uint8, device="cuda")
    loads, twin = torch.full((1 + num_pages, 2), -1, dtype=torch.int32).pin_memory(), arena.clone()
    loads[0, 0] = num_loads
    loads[1 : 1 + num_loads, 0] = torch.randperm(num_slots)[:num_loads]
    loads[1 : 1 + num_loads, 1] = torch.randperm(num_pages)[:num_loads]
    load_pages(host, arena, loads)
    page_copy.load_pages(host, twin, loads)
    torch.cuda.synchronize()
    buffer.close()
    assert torch.equal(arena, twin)
