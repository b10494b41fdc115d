"""Writes new values of rows to the arena and to the master in plain torch. Twin: `triton_row_write.py`."""

from dataclasses import dataclass

from torch import Tensor

from helmrec.kernels.row_index import RowIndex


@dataclass(frozen=True, slots=True, eq=False)
class RowTargets:
    """Where rows are written to."""

    index: RowIndex  # of the slots of resident rows
    arena_rows: Tensor  # (slots, row_dim)
    master: Tensor | None  # (rows, row_dim) on the host; None: another process writes it


def write_rows(values: Tensor, rows: Tensor, first: int, num: int, targets: RowTargets) -> None:
    """Write entries [first, first + num): each row in the master, and in the arena if it is resident.

    values: (entries, row_dim) and rows: (entries,) int64, distinct, both where the arena is.
    """
    new, at = values[first : first + num], rows[first : first + num]
    slots = targets.index.slots_of(at)
    resident = (slots >= 0).nonzero().flatten()
    targets.arena_rows[slots[resident].long()] = new[resident]
    if targets.master is not None:
        targets.master[at.to(targets.master.device)] = new.to(targets.master.device)
