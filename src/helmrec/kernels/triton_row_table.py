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
    SECOND,
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


@triton.jit(do_not_specialize=["num_entries"])  # else another number of rows may recompile it
def _find_kernel(rows, slot_of, heat, control, sources, missed_sources, missed_places, missed_count, num_entries,
                 IS_LRU: tl.constexpr, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entries, mask=entries < num_entries, other=_ABSENT)
    slot = tl.load(slot_of + row.to(tl.int64), mask=row >= 0, other=_ABSENT)
    hit = slot >= 0
    now = tl.load(control + _NOW).to(tl.float32)
    if not IS_LRU:
        old = tl.load(heat + slot.to(tl.int64), mask=hit, other=0.0)
        now = tl.maximum(old, now) + tl.log2(1.0 + tl.exp2(-tl.abs(old - now)))
    tl.store(heat + slot.to(tl.int64), now, mask=hit)
    tl.store(sources + entries, tl.where(hit, slot, _SKIP), mask=entries < num_entries)
    missed = (row >= 0) & (slot < 0)
    num = tl.sum(missed.to(tl.int32), axis=0)
    if num > 0:
        at = tl.atomic_add(missed_count, num) + tl.cumsum(missed.to(tl.int32), axis=0) - 1
        tl.store(missed_sources + at, -1 - row, mask=missed)
        tl.store(missed_places + at, entries.to(tl.int64), mask=missed)


@triton.jit
def _mixed(value):
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
        here_a, there_a = _mark(seen, _mixed(hashed), generation, missed, WORDS)
        here_b, there_b = _mark(seen, _mixed(hashed ^ _SECOND), generation, missed, WORDS)
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
def _publish_kernel(claim_rows, claim_entries, count, victims, victim_heat, slot_of, row_of, heat, ghosts, control,
                    tally, copies, num_ghosts, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    claimed = (i < tl.load(count)) & (i < LIMIT)
    row = tl.load(claim_rows + i, mask=claimed, other=0).to(tl.int64)
    entry = tl.load(claim_entries + i, mask=claimed, other=0)
    slot = tl.load(victims + i, mask=claimed, other=0)
    cold = tl.load(victim_heat + i, mask=claimed, other=float("inf"))
    given = claimed & (cold < float("inf")) & ((entry >= 0) | (cold == float("-inf")))
    evicted = tl.load(row_of + slot, mask=given, other=_ABSENT)
    left = given & (evicted >= 0)
    tl.store(slot_of + evicted.to(tl.int64), tl.full((BLOCK,), _ABSENT, tl.int32), mask=left)
    tl.store(slot_of + row, tl.where(given, slot.to(tl.int32), _ABSENT), mask=claimed)
    tl.store(row_of + slot, row.to(tl.int32), mask=given)
    now = tl.load(control + _NOW).to(tl.float32)
    tl.store(heat + slot, tl.full((BLOCK,), 0.0, tl.float32) + now, mask=given)
    tl.store(copies + i, tl.where(given, tl.where(entry >= 0, entry, -1 - entry), _SKIP), mask=i < LIMIT)
    num_left = tl.sum(left.to(tl.int64), axis=0)
    ghost = tl.atomic_add(tally + _GHOSTS, num_left) + tl.cumsum(left.to(tl.int64), axis=0) - 1
    tl.store(ghosts + ghost % num_ghosts, evicted, mask=left)
    tl.atomic_add(tally + _ADMITTED, tl.sum(given.to(tl.int64), axis=0))
    tl.atomic_add(tally + _EVICTED, num_left)


# fmt: on


def find(table: RowTable, rows: Tensor, sources: Tensor, missed: Missed, *, is_lru: bool) -> None:
    """As the twin, but a row in several entries may count more than once."""
    num = rows.numel()
    if num:
        _find_kernel[(triton.cdiv(num, _BLOCK),)](
            rows,
            table.slot_of,
            table.heat,
            table.control,
            sources,
            missed.sources,
            missed.places,
            missed.count,
            num,
            IS_LRU=is_lru,
            BLOCK=_BLOCK,
        )


def claim(table: RowTable, missed: Missed, claims: Claims, *, is_filtered: bool) -> None:
    """As the twin, but the entry that claims a row, and the rows beyond the limit, are not deterministic."""
    num = missed.sources.numel()
    if num:
        _claim_kernel[(triton.cdiv(num, _BLOCK),)](
            missed.sources,
            missed.places,
            missed.count,
            table.slot_of,
            table.seen,
            table.control,
            claims.rows,
            claims.entries,
            claims.count,
            LIMIT=claims.rows.numel(),
            WORDS=table.seen.shape[1],
            IS_FILTERED=is_filtered,
            BLOCK=_BLOCK,
        )


def publish(table: RowTable, claims: Claims, victims: Victims, copies: Tensor) -> None:
    limit = claims.rows.numel()
    _publish_kernel[(triton.cdiv(limit, _BLOCK),)](
        claims.rows,
        claims.entries,
        claims.count,
        victims.slots,
        victims.heat,
        table.slot_of,
        table.row_of,
        table.heat,
        table.ghosts,
        table.control,
        table.tally,
        copies,
        table.ghosts.numel(),
        LIMIT=limit,
        BLOCK=_BLOCK,
    )
