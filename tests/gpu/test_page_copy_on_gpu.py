"""Compiled loads of pages on a card, from locked host memory: bit for bit, and nowhere else."""

import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from helmrec.kernels import page_copy
from helmrec.kernels.row_kernels import row_kernels
from helmrec.kernels.triton_page_copy import load_pages
from helmrec.memory.host_pages import HostPages
from helmrec.memory.kv_host_tier import KVHostTier, PageSave
from helmrec.memory.prefix import PageLoad
from helmrec.memory.row_master import LockedBuffer

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


def test_a_page_is_saved_as_it_was_though_it_is_overwritten_at_once() -> None:
    num, arena = 256, torch.zeros((512, 1 << 20), dtype=torch.uint8, device="cuda")
    arena[:num] = 7
    host = HostPages(KVHostTier(num), arena, row_kernels("triton"))
    try:
        torch.cuda.synchronize()
        host.save([PageSave(page, slot=page) for page in range(num)])  # some milliseconds of copying
        host.finish_saves_of([num - 1], None)
        arena[num - 1] = 9
        host.start_loading([PageLoad(slot=num - 1, page=num)])
        host.finish_loading()
        assert int(arena[num].min()) == int(arena[num].max()) == 7
        host.finish_saves_of(range(num, 512), None)  # nobody's: no wait, and nothing to see
    finally:
        torch.cuda.synchronize()
        host.close()
