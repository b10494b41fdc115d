"""Random rows to write, and where to."""

import torch
from torch import Tensor

from helmrec.kernels.row_table import ABSENT, CLAIMED
from helmrec.kernels.row_write import RowTargets

SLOTS, ROWS = 40, 70


def random_targets(row_dim: int, dtype: torch.dtype, *, has_master: bool) -> RowTargets:
    """Some rows are resident, some claimed, some absent; the stride of rows is a multiple of 16 bytes."""
    slot_of = torch.full((ROWS + 1,), ABSENT, dtype=torch.int32)
    order = torch.randperm(ROWS)
    slot_of[order[:30]] = torch.randperm(SLOTS)[:30].int()
    slot_of[order[30:40]] = CLAIMED
    slot_of[-1] = CLAIMED
    stride = -(-row_dim * dtype.itemsize // 16) * 16 // dtype.itemsize
    arena, master = (torch.randn(num, stride).to(dtype)[:, :row_dim] for num in (SLOTS, ROWS))
    return RowTargets(slot_of, arena, master if has_master else None)


def random_update(num: int, row_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and distinct rows."""
    return torch.randn(num, row_dim).to(dtype), torch.randperm(ROWS)[:num]
