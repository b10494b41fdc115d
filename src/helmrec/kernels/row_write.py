"""Writes new values of rows to the arena and to the master in plain torch. Twin: `triton_row_write.py`."""

from dataclasses import dataclass

from torch import Tensor

from helmrec.kernels.row_codec import Recoding
from helmrec.kernels.row_index import RowIndex


@dataclass(frozen=True, slots=True, eq=False)
class RowTargets:
    """Where rows are written to."""

    index: RowIndex  # of the slots of resident rows
    arena_rows: Tensor  # (slots, width)
    master: Tensor | None  # (rows, width) on the host; None: another process writes it


def write_rows(
    values: Tensor, rows: Tensor, first: int, num: int, targets: RowTargets, recoding: Recoding | None = None
) -> None:
    """Write entries [first, first + num): each row in the master, and in the arena if it is resident.

    values: (entries, width), in the master's form, and rows: (entries,) int64, distinct, both where the arena is.
    recoding: from the master's form of rows to the arena's, if they differ.
    """
    new, at = values[first : first + num], rows[first : first + num]
    slots = targets.index.slots_of(at)
    resident = (slots >= 0).nonzero().flatten()
    kept = new[resident] if recoding is None else recoding.source.recode(new[resident], recoding.target)
    targets.arena_rows[slots[resident].long()] = kept
    if targets.master is not None:
        targets.master[at.to(targets.master.device)] = new.to(targets.master.device)
