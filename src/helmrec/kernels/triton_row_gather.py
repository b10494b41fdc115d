"""Gathers embedding rows in one launch: hits from HBM, misses over the bus. Twin: `row_gather.py`.

The master is host memory registered with the driver, which kernels can read. Programs are persistent: few programs
with long loops keep the bus busy next to other compute; a full grid is for a gather that runs alone.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.row_gather import SKIP


@dataclass(frozen=True, slots=True)
class Launch:
    """The number of programs, and the bytes that each has in flight."""

    programs: int | None  # None: two on each multiprocessor
    tile_bytes: int
    num_warps: int


# Reads from the host fill the queues of the card's memory long before they fill the card: what else runs then waits
# behind them. So they have little more in flight than the bus needs, and reads of resident rows few programs, too.
ALONE = Launch(None, 8 << 10, 4)
BUS_ALONE = Launch(16, 64 << 10, 8)
BESIDE_COMPUTE = Launch(8, 64 << 10, 8)
_VECTOR = 16  # bytes of the widest load
_PER_MULTIPROCESSOR = 2
_MOST_ROWS = 2048  # of a program at once: more of tiny rows take long to compile
_WORDS = (torch.int32, torch.int16, torch.uint8)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit(do_not_specialize=["num_entries"])  # else another number of rows may recompile it
def _gather_kernel(arena, master, sources, places, count, out, num_entries, ARENA_STRIDE: tl.constexpr,
                   MASTER_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                   ROWS: tl.constexpr, ALIGN: tl.constexpr, SKIPPED: tl.constexpr, HAS_PLACES: tl.constexpr,
                   HAS_COUNT: tl.constexpr):
    """Strides are constants so that the compiler sees their alignment and moves 16 bytes at a time."""
    if HAS_COUNT:
        num_entries = tl.minimum(num_entries, tl.load(count))
    columns = tl.arange(0, PADDED)
    step = tl.num_programs(0) * ROWS
    entries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(sources + entries, mask=entries < num_entries, other=SKIPPED)
    for _ in range(tl.program_id(0) * ROWS, num_entries, step):
        upcoming = tl.load(sources + entries + step, mask=entries + step < num_entries, other=SKIPPED)
        wide = source.to(tl.int64)
        start = tl.where(wide >= 0, arena + wide * ARENA_STRIDE, master + (-1 - wide) * MASTER_STRIDE)
        start = tl.multiple_of(start, ALIGN)  # the compiler cannot derive it for a choice of two pointers
        live = (source != SKIPPED)[:, None] & (columns < WIDTH)[None, :]
        values = tl.load(start[:, None] + columns[None, :], mask=live)
        place = entries.to(tl.int64)
        if HAS_PLACES:
            place = tl.load(places + entries, mask=source != SKIPPED, other=0)
        tl.store(out + place[:, None] * OUT_STRIDE + columns[None, :], values, mask=live)
        entries += step
        source = upcoming


# fmt: on


def gather_rows(
    arena_rows: Tensor,
    master: Tensor,
    sources: Tensor,
    out: Tensor,
    places: Tensor | None = None,
    count: Tensor | None = None,
    launch: Launch = ALONE,
) -> None:
    """out[i] = arena_rows[s] if s >= 0 else master[~s], where s = sources[i] is not SKIP.

    Shapes, `places` and `count` as the twin's. master's memory must be registered with the driver for as long as this
    runs. The host is never waited for, and every address is fixed by the arguments, so that a graph may capture it.
    Rows move 16 bytes at a time where their size is a multiple of 16, and as far as their size allows elsewhere. Of
    128k rows of 1 KiB spread over 16 GiB, 50 GB/s cross the bus if they come in order of address, 30 if not.
    """
    arena_rows, master, out = as_words(arena_rows, master, out)
    num_entries, width = sources.numel(), out.shape[1]
    if not num_entries:
        return
    rows = rows_of_tile(launch, width * out.element_size())
    _gather_kernel[(num_programs(num_entries, rows, launch, out.device),)](
        arena_rows,
        master,
        sources,
        sources if places is None else places,
        sources if count is None else count,
        out,
        num_entries,
        ARENA_STRIDE=arena_rows.stride(0),
        MASTER_STRIDE=master.stride(0),
        OUT_STRIDE=out.stride(0),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=rows,
        ALIGN=math.gcd(_VECTOR, *(part for t in (arena_rows, master) for part in (t.data_ptr(), _row_stride(t)))),
        SKIPPED=SKIP,
        HAS_PLACES=places is not None,
        HAS_COUNT=count is not None,
        num_warps=launch.num_warps,
    )


def rows_of_tile(launch: Launch, row_bytes: int) -> int:
    """Return how many rows a program reads at once: a power of two, with a tile's bytes unless rows are tiny."""
    return min(_MOST_ROWS, triton.next_power_of_2(triton.cdiv(launch.tile_bytes, row_bytes)))


def num_programs(num_entries: int, rows_at_once: int, launch: Launch, device: torch.device) -> int:
    """Return the size of the grid of a launch."""
    return min(triton.cdiv(num_entries, rows_at_once), launch.programs or _grid_of(device))


def as_words(*tensors: Tensor) -> list[Tensor]:
    """View rows in the widest words that divide all row sizes and strides."""
    row_bytes = [t.shape[1] * t.element_size() for t in tensors]
    sizes = (*row_bytes, *(_row_stride(t) for t in tensors))
    word = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))
    return [t.view(word) for t in tensors]


def _row_stride(rows: Tensor) -> int:
    """In bytes."""
    return rows.stride(0) * rows.element_size()


def _grid_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs programs one after the other
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count * _PER_MULTIPROCESSOR
