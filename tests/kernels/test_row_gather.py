"""The row gather against its twin, in Triton's interpreter."""

import os

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import row_gather, triton_row_gather
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.triton_row_gather import ALONE, Launch

FEW = Launch(programs=3, tile_bytes=1 << 10, num_warps=4)
SLOTS, ROWS = 40, 70


def strided(num: int, row_dim: int, dtype: torch.dtype, align: int = 16) -> Tensor:
    """Random rows whose stride is padded to a multiple of `align` bytes; NaN lies between them."""
    stride = -(-row_dim * dtype.itemsize // align) * align // dtype.itemsize
    buffer = torch.full((num, stride), torch.nan, dtype=dtype)
    buffer[:, :row_dim] = torch.randn(num, row_dim)
    return buffer[:, :row_dim]


def random_sources(num: int, slots: int = SLOTS, rows: int = ROWS) -> Tensor:
    """A third each of hits, misses and padding."""
    kinds = torch.randint(0, 3, (num,))
    hits, misses = torch.randint(0, slots, (num,)), ~torch.randint(0, rows, (num,))
    return torch.where(kinds == 0, hits, torch.where(kinds == 1, misses, SKIP)).int()


def check(arena: Tensor, master: Tensor, sources: Tensor, launch: Launch = ALONE) -> None:
    """Outputs are poisoned: what is skipped must stay so in both."""
    shape = (len(sources), arena.shape[1])
    ours, in_order, twin = (torch.full(shape, -7.0, dtype=arena.dtype) for _ in range(3))
    row_gather.gather_rows(arena, master, sources, twin)
    triton_row_gather.gather_rows(arena, master, sources, ours, launch=launch)
    ordered, places = sources.sort()
    triton_row_gather.gather_rows(arena, master, ordered, in_order, places=places, launch=launch)
    assert torch.equal(ours, twin)
    assert torch.equal(in_order, twin)
    assert (twin[sources == SKIP] == -7).all()
    assert twin.isfinite().all()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("launch", [ALONE, FEW], ids=["alone", "few"])
@pytest.mark.parametrize("num", [1, 2, 37, 200])
def test_hits_misses_and_padding_match_the_twin(num: int, launch: Launch) -> None:
    arena, master = (strided(n, 64, torch.float32) for n in (SLOTS, ROWS))
    check(arena, master, random_sources(num), launch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row_dim", [1, 11, 16, 68, 100, 300, 1024])
def test_rows_of_every_size_and_type_match_the_twin(row_dim: int, dtype: torch.dtype) -> None:
    arena, master = (strided(n, row_dim, dtype) for n in (SLOTS, ROWS))
    check(arena, master, random_sources(53), FEW)


def test_strides_may_differ() -> None:
    check(strided(SLOTS, 24, torch.float32, align=128), strided(ROWS, 24, torch.float32), random_sources(50))


@pytest.mark.parametrize("kind", ["hits", "misses", "padding"])
def test_one_kind_alone_matches_the_twin(kind: str) -> None:
    arena, master = (strided(n, 32, torch.float32) for n in (SLOTS, ROWS))
    sources = {"hits": torch.arange(SLOTS), "misses": ~torch.arange(ROWS), "padding": torch.full((20,), SKIP)}
    check(arena, master, sources[kind].int())


def test_no_entries_are_no_work() -> None:
    arena, master = (strided(n, 32, torch.float32) for n in (SLOTS, ROWS))
    check(arena, master, torch.empty(0, dtype=torch.int32))


def test_one_row_may_be_read_many_times() -> None:
    arena, master = (strided(n, 32, torch.float32) for n in (SLOTS, ROWS))
    check(arena, master, torch.tensor([3, ~3, 3, ~3, ~3, SKIP, 3], dtype=torch.int32))


def test_only_so_many_are_read_as_a_count_on_the_device_says() -> None:
    arena, master = (strided(n, 32, torch.float32) for n in (SLOTS, ROWS))
    sources, places = random_sources(50), torch.randperm(50)
    ours, twin = (torch.full((50, 32), -7.0) for _ in range(2))
    for num in (0, 17, 50):
        count = torch.tensor([num], dtype=torch.int32)
        row_gather.gather_rows(arena, master, sources, twin, places=places, count=count)
        triton_row_gather.gather_rows(arena, master, sources, ours, places=places, count=count, launch=FEW)
        assert torch.equal(ours, twin)
        assert (twin[places[num:]] == -7).all()
