"""The write of rows against its twin, in Triton's interpreter, and the twin against a loop."""

import os

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import row_write, triton_row_write
from helmrec.kernels.row_index import IndexForm
from helmrec.kernels.row_write import RowTargets
from helmrec.kernels.triton_row_gather import BESIDE_COMPUTE, Launch
from tests.kernels.row_write_cases import SLOTS, random_targets, random_update

FEW = Launch(programs=3, tile_bytes=1 << 9, num_warps=4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def copied(targets: RowTargets) -> RowTargets:
    """The same with its own memory; strides stay."""
    arena, master = targets.arena_rows, targets.master
    return RowTargets(targets.index.clone(), copied_rows(arena), None if master is None else copied_rows(master))


def copied_rows(rows: Tensor) -> Tensor:
    buffer = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype)
    return buffer.copy_(rows)


@pytest.mark.parametrize("has_master", [True, False], ids=["own master", "shared master"])
def test_the_twin_writes_resident_rows_and_the_master_and_nothing_else(has_master: bool) -> None:
    targets = random_targets(8, torch.float32, has_master=has_master)
    values, rows = random_update(30, 8, torch.float32)
    expected = copied(targets)
    for value, row in zip(values[5:20], rows[5:20].tolist(), strict=True):
        if expected.master is not None:
            expected.master[row] = value
        if (slot := int(expected.index.slots_of(torch.tensor([row])))) >= 0:
            expected.arena_rows[slot] = value
    row_write.write_rows(values, rows, 5, 15, targets)
    assert torch.equal(targets.arena_rows, expected.arena_rows)
    if has_master:
        assert targets.master is not None
        assert expected.master is not None
        assert torch.equal(targets.master, expected.master)


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("launch", [BESIDE_COMPUTE, FEW], ids=["beside compute", "few"])
@pytest.mark.parametrize("has_master", [True, False], ids=["own master", "shared master"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_dim", [1, 11, 16, 100, 512])
def test_rows_of_every_size_and_type_match_the_twin(
    row_dim: int, dtype: torch.dtype, has_master: bool, launch: Launch, form: IndexForm
) -> None:
    ours = random_targets(row_dim, dtype, has_master=has_master, form=form)
    twin, (values, rows) = copied(ours), random_update(50, row_dim, dtype)
    for first, num in ((0, 0), (0, 7), (7, 1), (8, 42)):
        row_write.write_rows(values, rows, first, num, twin)
        triton_row_write.write_rows(values, rows, first, num, ours, launch)
        assert torch.equal(ours.arena_rows, twin.arena_rows), (first, num)
        if ours.master is not None:
            assert twin.master is not None
            assert torch.equal(ours.master, twin.master), (first, num)
    assert int((twin.index.slots_of(rows) >= 0).sum()) > 0
    assert int((twin.index.slots_of(rows) < 0).sum()) > 0
    assert len(ours.arena_rows) == SLOTS
