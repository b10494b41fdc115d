"""The compiled row gather on a card, misses read from locked host memory: bit for bit, into poisoned outputs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from helmrec.kernels import row_gather
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.triton_row_gather import ALONE, BESIDE_COMPUTE, Launch, gather_rows
from helmrec.memory.row_master import LockedBuffer

pytestmark = pytest.mark.gpu

BUFFER_BYTES = (2 << 30) + (64 << 20)  # offsets beyond 31 bits
LAUNCHES = pytest.mark.parametrize("launch", [ALONE, BESIDE_COMPUTE], ids=["alone", "beside"])


@pytest.fixture(scope="module")
def buffer() -> Iterator[LockedBuffer]:
    buffer = LockedBuffer(BUFFER_BYTES)
    buffer.data.view(torch.int64).random_()
    buffer.lock()
    yield buffer
    buffer.close()


@pytest.fixture(scope="module")
def arena() -> Tensor:
    return torch.randint(-(2**62), 2**62, (BUFFER_BYTES // 8,), device="cuda").view(torch.uint8)


def records(data: Tensor, row_bytes: int, dtype: torch.dtype) -> Tensor:
    """The memory as records at a stride of a multiple of 16 bytes."""
    stride = -(-row_bytes // 16) * 16
    data = data[: data.numel() // stride * stride]
    return data.view(dtype).view(-1, stride // dtype.itemsize)[:, : row_bytes // dtype.itemsize]


def random_sources(num: int, num_slots: int, num_rows: int) -> Tensor:
    """A third each of hits, misses and padding; the first and the last record of both are among them."""
    kinds = torch.randint(0, 3, (num,))
    hits, misses = torch.randint(0, num_slots, (num,)), ~torch.randint(0, num_rows, (num,))
    sources = torch.where(kinds == 0, hits, torch.where(kinds == 1, misses, SKIP))
    sources[:4] = torch.tensor([0, num_slots - 1, ~0, ~(num_rows - 1)])[: sources[:4].numel()]
    return sources.int()


def gather_in_order(arena: Tensor, master: Tensor, sources: Tensor, out: Tensor, launch: Launch = ALONE) -> None:
    ordered, places = sources.sort()
    gather_rows(arena, master, ordered, out, places=places, launch=launch)


def check(arena: Tensor, master: Tensor, sources: Tensor, launch: Launch) -> None:
    """As integers, so that random bits are compared as they are."""
    shape, where = (len(sources), arena.shape[1]), sources.cuda()
    ours, in_order, twin = (torch.full(shape, 77, dtype=arena.dtype, device="cuda") for _ in range(3))
    gather_rows(arena, master, where, ours, launch=launch)
    gather_in_order(arena, master, where, in_order, launch)
    row_gather.gather_rows(arena, master, where, twin)
    assert torch.equal(ours, twin)
    assert torch.equal(in_order, twin)
    assert (ours.cpu()[sources == SKIP] == 77).all()


@LAUNCHES
@pytest.mark.parametrize("row_bytes", [4, 128, 256, 272, 1024, 1200, 2000, 4096])
def test_rows_of_every_size_match_plain_indexing(
    row_bytes: int, launch: Launch, buffer: LockedBuffer, arena: Tensor
) -> None:
    rows, slots = (records(data, row_bytes, torch.int32) for data in (buffer.data, arena))
    check(slots, rows, random_sources(5_003, len(slots), len(rows)), launch)


@LAUNCHES
@pytest.mark.parametrize("row_bytes", [2, 22, 130])
def test_odd_rows_match_plain_indexing(row_bytes: int, launch: Launch, buffer: LockedBuffer, arena: Tensor) -> None:
    rows, slots = (records(data, row_bytes, torch.int16) for data in (buffer.data, arena))
    check(slots, rows, random_sources(1_001, len(slots), len(rows)), launch)


@pytest.mark.parametrize("num", [0, 1, 3, 16, 100_000])
def test_any_number_of_entries_matches_plain_indexing(num: int, buffer: LockedBuffer, arena: Tensor) -> None:
    rows, slots = (records(data, 1024, torch.int32) for data in (buffer.data, arena))
    check(slots, rows, random_sources(num, len(slots), len(rows)), ALONE)


@pytest.mark.parametrize("gather", [gather_rows, gather_in_order])
def test_a_captured_gather_sees_new_sources_and_new_rows(
    gather: Callable[[Tensor, Tensor, Tensor, Tensor], None], buffer: LockedBuffer, arena: Tensor
) -> None:
    rows, slots = (records(data, 512, torch.int32) for data in (buffer.data, arena))
    sources = torch.full((9_000,), SKIP, dtype=torch.int32, device="cuda")
    out = torch.zeros((9_000, 128), dtype=torch.int32, device="cuda")
    gather(slots, rows, sources, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather(slots, rows, sources, out)
    for _ in range(5):
        new = random_sources(9_000, len(slots), len(rows))
        sources.copy_(new)
        changed = ~new[(new < 0) & (new != SKIP)].long()
        rows[changed] = torch.randint(0, 2**31 - 1, (len(changed), 128), dtype=torch.int32)
        expected = out.clone()
        row_gather.gather_rows(slots, rows, sources, expected)
        graph.replay()
        assert torch.equal(out, expected)
