"""The table of resident rows in Triton. Twin: `row_table.py`, which documents the contracts."""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_table import (
    ABSENT,
    CLAIMED,
    MIX_A,
    MIX_B,
    MOST_TOUCHES,
    SECOND,
    Admission,
    Claims,
    Control,
    Missed,
    RowTable,
    RowTally,
    Victims,
)

_BLOCK = 1024
_NOW, _GENERATION, _IS_FILLING = (tl.constexpr(int(i)) for i in (Control.NOW, Control.GENERATION, Control.IS_FILLING))
_ADMITTED, _EVICTED, _GHOSTS = (tl.constexpr(int(i)) for i in (RowTally.ADMITTED, RowTally.EVICTED, RowTally.GHOSTS))
_SKIP, _ABSENT, _CLAIMED = tl.constexpr(SKIP), tl.constexpr(ABSENT), tl.constexpr(CLAIMED)
_NEVER = tl.constexpr(-7)  # no entry of `slot_of` is
_MIX_A, _MIX_B, _SECOND = tl.constexpr(MIX_A), tl.constexpr(MIX_B), tl.constexpr(SECOND)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def mixed(value):
    """As the twin's `mixed_rows`."""
    value = (value ^ (value >> 16)) * _MIX_A
    value = (value ^ (value >> 15)) * _MIX_B
    return value ^ (value >> 16)


@triton.jit
def _mark(seen, hashed, generation, missed, WORDS: tl.constexpr):
    """Mark one bit of each row; returns whether it was marked, in this generation and in the other."""
    place = hashed & (32 * WORDS - 1)
    word = (place >> 5).to(tl.int64)
    shift = (place & 31).to(tl.int32)
    before = tl.atomic_or(seen + generation * WORDS + word, 1 << shift, mask=missed, sem="relaxed")
    other = tl.load(seen + (1 - generation) * WORDS + word, mask=missed, other=0)
    return (before >> shift) & 1, (other >> shift) & 1


@triton.jit
def _claim_kernel(missed_sources, missed_places, missed_count, slot_of, seen, control, claim_rows, claim_entries,
                  count, LIMIT: tl.constexpr, WORDS: tl.constexpr, IS_FILTERED: tl.constexpr,
                  BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_missed = tl.load(missed_count)
    if tl.program_id(0) * BLOCK >= num_missed:
        return
    source = tl.load(missed_sources + i, mask=i < num_missed, other=_SKIP)
    missed = source != _SKIP
    entries = tl.load(missed_places + i, mask=missed, other=0).to(tl.int32)
    row = tl.where(missed, -1 - source, 0)
    earned = missed
    wanted = missed
    if IS_FILTERED:
        generation = tl.load(control + _GENERATION).to(tl.int64)
        hashed = row.to(tl.uint32)
        here_a, there_a = _mark(seen, mixed(hashed), generation, missed, WORDS)
        here_b, there_b = _mark(seen, mixed(hashed ^ _SECOND), generation, missed, WORDS)
        earned = missed & (((here_a & here_b) | (there_a & there_b)) != 0)
        wanted = earned | (missed & (tl.load(control + _IS_FILLING).to(tl.int32) != 0))
    # An entry that does not claim compares with a value that never occurs, so that it changes nothing.
    place = slot_of + row.to(tl.int64)
    found = tl.atomic_cas(place, tl.where(wanted, _ABSENT, _NEVER), tl.full((BLOCK,), _CLAIMED, tl.int32))
    won = tl.where(wanted, found, _NEVER) == _ABSENT
    base = tl.atomic_add(count, tl.sum(won.to(tl.int32), axis=0))
    at = base + tl.cumsum(won.to(tl.int32), axis=0) - 1
    tl.store(claim_rows + at, row, mask=won & (at < LIMIT))
    tl.store(claim_entries + at, tl.where(earned, entries, -1 - entries), mask=won & (at < LIMIT))
    tl.store(place, tl.full((BLOCK,), _ABSENT, tl.int32), mask=won & (at >= LIMIT))


@triton.jit
def _counted(touches, row, used, SIZE: tl.constexpr):
    """The lesser of the two counters of each row."""
    hashed = row.to(tl.uint32)
    first = (mixed(hashed) & (SIZE - 1)).to(tl.int64)
    second = (mixed(hashed ^ _SECOND) & (SIZE - 1)).to(tl.int64)
    low = tl.load(touches + first, mask=used, other=0).to(tl.int32) & 15
    high = tl.load(touches + second, mask=used, other=0).to(tl.int32) >> 4
    return tl.minimum(low, high)


@triton.jit
def _raise(touches, row, least, used, SIZE: tl.constexpr):
    """Raise both counters of each row. Stores of rows that share a byte may undo each other: a touch is then lost."""
    hashed = row.to(tl.uint32)
    first = (mixed(hashed) & (SIZE - 1)).to(tl.int64)
    second = (mixed(hashed ^ _SECOND) & (SIZE - 1)).to(tl.int64)
    low = tl.load(touches + first, mask=used, other=0).to(tl.int32)
    tl.store(touches + first, ((low & 0xF0) | tl.maximum(low & 15, least)).to(tl.uint8), mask=used)
    high = tl.load(touches + second, mask=used, other=0).to(tl.int32)
    tl.store(touches + second, ((high & 15) | (tl.maximum(high >> 4, least) << 4)).to(tl.uint8), mask=used)


@triton.jit
def _claim_by_frequency_kernel(missed_sources, missed_places, missed_count, slot_of, touches, control, claim_rows,
                               claim_entries, claim_heat, count, MOST: tl.constexpr, LIMIT: tl.constexpr,
                               SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_missed = tl.load(missed_count)
    if tl.program_id(0) * BLOCK >= num_missed:
        return
    missed = i < num_missed
    row = -1 - tl.load(missed_sources + i, mask=missed, other=-1)
    num = tl.minimum(_counted(touches, row, missed, SIZE) + 1, MOST)
    _raise(touches, row, num, missed, SIZE)
    claimed = missed & (i < LIMIT)
    now = tl.load(control + _NOW).to(tl.float32)
    tl.store(claim_rows + i, row, mask=claimed)
    tl.store(claim_entries + i, tl.load(missed_places + i, mask=claimed, other=0).to(tl.int32), mask=claimed)
    tl.store(claim_heat + i, now + tl.log2(num.to(tl.float32)), mask=claimed)
    tl.store(slot_of + row.to(tl.int64), tl.full((BLOCK,), _CLAIMED, tl.int32), mask=claimed)
    if tl.program_id(0) == 0:
        tl.store(count, num_missed)


@triton.jit
def _publish_kernel(claim_rows, claim_entries, count, claim_heat, victims, victim_heat, slot_of, row_of, heat, touches,
                    ghosts, control, tally, copies, num_ghosts, MOST: tl.constexpr, LIMIT: tl.constexpr,
                    SIZE: tl.constexpr, BY_HEAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    claimed = (i < tl.load(count)) & (i < LIMIT)
    row = tl.load(claim_rows + i, mask=claimed, other=0).to(tl.int64)
    entry = tl.load(claim_entries + i, mask=claimed, other=0)
    slot = tl.load(victims + i, mask=claimed, other=0)
    cold = tl.load(victim_heat + i, mask=claimed, other=float("inf"))
    now = tl.full((BLOCK,), 0.0, tl.float32) + tl.load(control + _NOW).to(tl.float32)
    if BY_HEAT:
        warm = tl.load(claim_heat + i, mask=claimed, other=float("-inf"))
        given = claimed & (cold < float("inf")) & (warm > cold)
    else:
        warm = now
        given = claimed & (cold < float("inf")) & ((entry >= 0) | (cold == float("-inf")))
    evicted = tl.load(row_of + slot, mask=given, other=_ABSENT)
    left = given & (evicted >= 0)
    if BY_HEAT:
        num = tl.minimum(tl.exp2(tl.where(left, cold - now, 0.0)) + 0.5, MOST).to(tl.int32)
        _raise(touches, evicted, num, left, SIZE)
    tl.store(slot_of + evicted.to(tl.int64), tl.full((BLOCK,), _ABSENT, tl.int32), mask=left)
    tl.store(slot_of + row, tl.where(given, slot.to(tl.int32), _ABSENT), mask=claimed)
    tl.store(row_of + slot, row.to(tl.int32), mask=given)
    tl.store(heat + slot, warm, mask=given)
    tl.store(copies + i, tl.where(given, tl.where(entry >= 0, entry, -1 - entry), _SKIP), mask=i < LIMIT)
    num_left = tl.sum(left.to(tl.int64), axis=0)
    ghost = tl.atomic_add(tally + _GHOSTS, num_left) + tl.cumsum(left.to(tl.int64), axis=0) - 1
    tl.store(ghosts + ghost % num_ghosts, evicted, mask=left)
    tl.atomic_add(tally + _ADMITTED, tl.sum(given.to(tl.int64), axis=0))
    tl.atomic_add(tally + _EVICTED, num_left)


# fmt: on


def claim(table: RowTable, missed: Missed, claims: Claims, *, admission: Admission) -> None:
    """As the twin, but which rows are beyond the limit is not deterministic."""
    num, limit = missed.sources.numel(), claims.rows.numel()
    if not num:
        return
    grid, wanted = (triton.cdiv(num, _BLOCK),), (missed.sources, missed.places, missed.count, table.slot_of)
    if admission == Admission.FREQUENCY:
        _claim_by_frequency_kernel[grid](
            *wanted,
            table.touches,
            table.control,
            claims.rows,
            claims.entries,
            claims.heat,
            claims.count,
            MOST=MOST_TOUCHES,
            LIMIT=limit,
            SIZE=table.touches.numel(),
            BLOCK=_BLOCK,
        )
        return
    _claim_kernel[grid](
        *wanted,
        table.seen,
        table.control,
        claims.rows,
        claims.entries,
        claims.count,
        LIMIT=limit,
        WORDS=table.seen.shape[1],
        IS_FILTERED=admission == Admission.SECOND_TOUCH,
        BLOCK=_BLOCK,
    )


def publish(table: RowTable, claims: Claims, victims: Victims, copies: Tensor, *, by_heat: bool = False) -> None:
    limit = claims.rows.numel()
    _publish_kernel[(triton.cdiv(limit, _BLOCK),)](
        claims.rows,
        claims.entries,
        claims.count,
        claims.heat,
        victims.slots,
        victims.heat,
        table.slot_of,
        table.row_of,
        table.heat,
        table.touches,
        table.ghosts,
        table.control,
        table.tally,
        copies,
        table.ghosts.numel(),
        MOST=MOST_TOUCHES,
        LIMIT=limit,
        SIZE=table.touches.numel(),
        BY_HEAT=by_heat,
        BLOCK=_BLOCK,
    )
