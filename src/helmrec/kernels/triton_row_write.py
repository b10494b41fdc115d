"""Writes new values of rows to the arena and to the master in one launch. Twin: `row_write.py`.

The master is host memory registered with the driver, which kernels can write over the bus. Few programs with long loops
leave the rest of the card to the step that computes meanwhile.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.row_write import RowTargets
from helmrec.kernels.triton_row_gather import BESIDE_COMPUTE, Launch, as_words, num_programs, rows_of_tile
from helmrec.kernels.triton_row_index import slots_of

# One argument a line would bury the kernel.
# fmt: off


@triton.jit(do_not_specialize=["first", "num"])  # else another slice may recompile it
def _write_kernel(values, row_ids, index, arena, master, first, num, VALUES_STRIDE: tl.constexpr,
                  ARENA_STRIDE: tl.constexpr, MASTER_STRIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                  ROWS: tl.constexpr, HAS_MASTER: tl.constexpr, BUCKETS: tl.constexpr):
    """Strides are constants so that the compiler sees their alignment and moves 16 bytes at a time."""
    columns = tl.arange(0, PADDED)
    for start in range(tl.program_id(0) * ROWS, num, tl.num_programs(0) * ROWS):
        entries = start + tl.arange(0, ROWS)
        is_row = entries < num
        place = (first + entries).to(tl.int64)
        row = tl.load(row_ids + place, mask=is_row, other=0)
        slot = slots_of(index, row, is_row, BUCKETS).to(tl.int64)
        live = is_row[:, None] & (columns < WIDTH)[None, :]
        new = tl.load(values + place[:, None] * VALUES_STRIDE + columns[None, :], mask=live)
        if HAS_MASTER:
            tl.store(master + row[:, None] * MASTER_STRIDE + columns[None, :], new, mask=live)
        resident = live & (slot >= 0)[:, None]
        tl.store(arena + slot[:, None] * ARENA_STRIDE + columns[None, :], new, mask=resident)


# fmt: on


def write_rows(
    values: Tensor, rows: Tensor, first: int, num: int, targets: RowTargets, launch: Launch = BESIDE_COMPUTE
) -> None:
    """Write entries [first, first + num): each row in the master, and in the arena if it is resident.

    Shapes as the twin's. The master's memory must be registered with the driver for as long as this runs. The host is
    never waited for.
    """
    if not num:
        return
    master = targets.arena_rows if targets.master is None else targets.master
    values, arena_rows, master = as_words(values, targets.arena_rows, master)
    width = values.shape[1]
    rows_at_once = rows_of_tile(launch, width * values.element_size())
    _write_kernel[(num_programs(num, rows_at_once, launch, values.device),)](
        values,
        rows,
        targets.index.data,
        arena_rows,
        master,
        first,
        num,
        VALUES_STRIDE=values.stride(0),
        ARENA_STRIDE=arena_rows.stride(0),
        MASTER_STRIDE=master.stride(0),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=rows_at_once,
        HAS_MASTER=targets.master is not None,
        BUCKETS=targets.index.num_buckets,
        num_warps=launch.num_warps,
    )
