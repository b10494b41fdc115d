"""Random rows to write, and where to."""

import torch
from torch import Tensor

from helmrec.kernels.row_index import INDEXES, IndexForm
from helmrec.kernels.row_write import RowTargets

SLOTS, ROWS = 40, 70


def random_targets(
    row_dim: int, dtype: torch.dtype, *, has_master: bool, form: IndexForm = IndexForm.DENSE
) -> RowTargets:
    """Some rows are resident, some absent; the stride of rows is a multiple of 16 bytes."""
    index = INDEXES[form].allocate(ROWS, SLOTS, torch.device("cpu"))
    index.insert(torch.randperm(ROWS)[:30], torch.randperm(SLOTS)[:30])
    stride = -(-row_dim * dtype.itemsize // 16) * 16 // dtype.itemsize
    arena, master = (torch.randn(num, stride).to(dtype)[:, :row_dim] for num in (SLOTS, ROWS))
    return RowTargets(index, arena, master if has_master else None)


def random_update(num: int, row_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and distinct rows."""
    return torch.randn(num, row_dim).to(dtype), torch.randperm(ROWS)[:num]
