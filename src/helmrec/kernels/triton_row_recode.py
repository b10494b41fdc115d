"""Gathers and writes of rows whose master has another form than the arena. Twins: `row_gather.py`, `row_write.py`.

Rows are rounded, or decoded, as they are read: a row that is missed has the same values as one that is resident.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from helmrec.codes import NAN_EXPONENT
from helmrec.kernels.row_codec import Recoding
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_write import RowTargets
from helmrec.kernels.triton_rounding import (
    AS_THEY_ARE,
    decode,
    encode_scaled,
    exponent_of,
    format_of,
    power_of_two,
)
from helmrec.kernels.triton_row_gather import ALONE, BESIDE_COMPUTE, Launch, num_programs
from helmrec.kernels.triton_row_index import slots_of

_MORE_WARPS = 2  # than a launch has, since a program reads nothing while it rounds values
_AS_THEY_ARE, _NAN_EXPONENT = tl.constexpr(AS_THEY_ARE), tl.constexpr(NAN_EXPONENT)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _load(source, starts, live, DIM: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr):
    """Stored values or codes of rows, and the exponents of their scales, which are zero of rows as they are."""
    columns = tl.arange(0, PADDED)
    wanted = live[:, None] & (columns < DIM)[None, :]
    stored = tl.load(source + starts[:, None] + columns[None, :], mask=wanted, other=0)
    if FORMAT == _AS_THEY_ARE:
        biased = tl.zeros_like(starts).to(tl.uint8)
    else:
        biased = tl.load(source + starts + DIM, mask=live, other=0)
    return stored, biased


@triton.jit
def _store(target, starts, live, stored, biased, DIM: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr):
    columns = tl.arange(0, PADDED)
    tl.store(target + starts[:, None] + columns[None, :], stored, mask=live[:, None] & (columns < DIM)[None, :])
    if FORMAT != _AS_THEY_ARE:
        tl.store(target + starts + DIM, biased, mask=live)


@triton.jit
def _recode(stored, biased, DTYPE: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    """Decode rows of codes, or round rows as they are to codes. DTYPE: of stored rows of the target."""
    if TARGET == _AS_THEY_ARE:
        kept, kept_biased = decode(stored, biased, SOURCE).to(DTYPE), biased
    else:
        values = stored.to(tl.float32)
        finite = tl.min((tl.abs(values) < float("inf")).to(tl.int32), axis=1) == 1  # false of NaN
        exponent = exponent_of(tl.where(finite, tl.max(tl.abs(values), axis=1), 0.0), TARGET)
        kept = encode_scaled(tl.where(finite[:, None], values * power_of_two(-exponent)[:, None], 0.0), TARGET)
        kept_biased = tl.where(finite, exponent + 127, _NAN_EXPONENT).to(tl.uint8)
    return kept, kept_biased


@triton.jit(do_not_specialize=["num_entries"])  # else another number of rows may recompile it
def _gather_kernel(master, sources, places, count, out, num_entries, MASTER_STRIDE: tl.constexpr,
                   OUT_STRIDE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                   SKIPPED: tl.constexpr, HAS_PLACES: tl.constexpr, HAS_COUNT: tl.constexpr, SOURCE: tl.constexpr,
                   TARGET: tl.constexpr):
    if HAS_COUNT:
        num_entries = tl.minimum(num_entries, tl.load(count))
    for first in range(tl.program_id(0) * ROWS, num_entries, tl.num_programs(0) * ROWS):
        entries = first + tl.arange(0, ROWS)
        source = tl.load(sources + entries, mask=entries < num_entries, other=SKIPPED)
        live = source != SKIPPED
        place = entries.to(tl.int64)
        if HAS_PLACES:
            place = tl.load(places + entries, mask=live, other=0)
        stored, biased = _load(master, (-1 - source.to(tl.int64)) * MASTER_STRIDE, live, DIM, PADDED, SOURCE)
        kept, kept_biased = _recode(stored, biased, out.dtype.element_ty, SOURCE, TARGET)
        _store(out, place * OUT_STRIDE, live, kept, kept_biased, DIM, PADDED, TARGET)


@triton.jit(do_not_specialize=["first", "num"])  # else another slice may recompile it
def _write_kernel(values, row_ids, index, arena, master, first, num, VALUES_STRIDE: tl.constexpr,
                  ARENA_STRIDE: tl.constexpr, MASTER_STRIDE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
                  ROWS: tl.constexpr, HAS_MASTER: tl.constexpr, BUCKETS: tl.constexpr, SOURCE: tl.constexpr,
                  TARGET: tl.constexpr):
    for start in range(tl.program_id(0) * ROWS, num, tl.num_programs(0) * ROWS):
        entries = start + tl.arange(0, ROWS)
        is_row = entries < num
        place = (first + entries).to(tl.int64)
        row = tl.load(row_ids + place, mask=is_row, other=0)
        slot = slots_of(index, row, is_row, BUCKETS).to(tl.int64)
        stored, biased = _load(values, place * VALUES_STRIDE, is_row, DIM, PADDED, SOURCE)
        if HAS_MASTER:
            _store(master, row * MASTER_STRIDE, is_row, stored, biased, DIM, PADDED, SOURCE)
        kept, kept_biased = _recode(stored, biased, arena.dtype.element_ty, SOURCE, TARGET)
        _store(arena, slot * ARENA_STRIDE, is_row & (slot >= 0), kept, kept_biased, DIM, PADDED, TARGET)


# fmt: on


def gather_rows(
    arena_rows: Tensor,
    master: Tensor,
    sources: Tensor,
    out: Tensor,
    places: Tensor | None = None,
    count: Tensor | None = None,
    launch: Launch = ALONE,
    *,
    recoding: Recoding,
) -> None:
    """out[i] = the row ~sources[i] of the master in the arena's form, where sources[i] is not SKIP.

    Shapes, `places` and `count` as the twin's. The master's memory is used as in `triton_row_gather.gather_rows`.
    """
    if not sources.numel():
        return
    padded, rows = _tile(recoding, launch)
    _gather_kernel[(num_programs(sources.numel(), rows, launch, out.device),)](
        master,
        sources,
        sources if places is None else places,
        sources if count is None else count,
        out,
        sources.numel(),
        MASTER_STRIDE=master.stride(0),
        OUT_STRIDE=out.stride(0),
        DIM=recoding.source.dim,
        PADDED=padded,
        ROWS=rows,
        SKIPPED=SKIP,
        HAS_PLACES=places is not None,
        HAS_COUNT=count is not None,
        SOURCE=format_of(recoding.source.code),
        TARGET=format_of(recoding.target.code),
        num_warps=_MORE_WARPS * launch.num_warps,
    )


def write_rows(
    values: Tensor,
    rows: Tensor,
    first: int,
    num: int,
    targets: RowTargets,
    launch: Launch = BESIDE_COMPUTE,
    *,
    recoding: Recoding,
) -> None:
    """Write entries [first, first + num): each row in the master, and in the arena, in its form, if it is resident.

    Shapes as the twin's. The host is never waited for.
    """
    if not num:
        return
    padded, rows_at_once = _tile(recoding, launch)
    master = values if targets.master is None else targets.master
    _write_kernel[(num_programs(num, rows_at_once, launch, values.device),)](
        values,
        rows,
        targets.index.data,
        targets.arena_rows,
        master,
        first,
        num,
        VALUES_STRIDE=values.stride(0),
        ARENA_STRIDE=targets.arena_rows.stride(0),
        MASTER_STRIDE=master.stride(0),
        DIM=recoding.source.dim,
        PADDED=padded,
        ROWS=rows_at_once,
        HAS_MASTER=targets.master is not None,
        BUCKETS=targets.index.num_buckets,
        SOURCE=format_of(recoding.source.code),
        TARGET=format_of(recoding.target.code),
        num_warps=_MORE_WARPS * launch.num_warps,
    )


def _tile(recoding: Recoding, launch: Launch) -> tuple[int, int]:
    """Return columns and rows of a tile, which has as many values as the launch's has bytes."""
    padded = triton.next_power_of_2(recoding.source.dim)
    return padded, max(1, launch.tile_bytes // padded)
