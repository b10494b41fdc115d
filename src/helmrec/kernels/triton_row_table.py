"""The table of resident rows in Triton. Twin: `row_table.py`, which documents the contracts."""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_index import ABSENT, SECOND
from helmrec.kernels.row_table import (
    MOST_TOUCHES,
    Admission,
    Claims,
    Control,
    Missed,
    RowTable,
    RowTally,
    Victims,
)
from helmrec.kernels.triton_row_index import block_of, clear, insert, mixed, slots_of

_WIDE = 1024  # slots of a program that does the same for each
_LEVELLED = 256  # rows of a program that compares each with every number of touches
_NOW, _GENERATION, _IS_FILLING = (tl.constexpr(int(i)) for i in (Control.NOW, Control.GENERATION, Control.IS_FILLING))
_HAND, _CAPACITY = tl.constexpr(int(Control.HAND)), tl.constexpr(int(Control.CAPACITY))
_ADMITTED, _EVICTED = tl.constexpr(int(RowTally.ADMITTED)), tl.constexpr(int(RowTally.EVICTED))
_GHOSTS, _REFUSED = tl.constexpr(int(RowTally.GHOSTS)), tl.constexpr(int(RowTally.REFUSED))
_SKIP, _ABSENT, _SECOND = tl.constexpr(SKIP), tl.constexpr(ABSENT), tl.constexpr(SECOND)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _mark(seen, hashed, generation, missed, WORDS: tl.constexpr):
    """Mark one bit of each row; returns whether it was marked, in this generation and in the other."""
    place = hashed & (32 * WORDS - 1)
    word = (place >> 5).to(tl.int64)
    shift = (place & 31).to(tl.int32)
    before = tl.atomic_or(seen + generation * WORDS + word, 1 << shift, mask=missed, sem="relaxed")
    other = tl.load(seen + (1 - generation) * WORDS + word, mask=missed, other=0)
    return (before >> shift) & 1, (other >> shift) & 1


@triton.jit(do_not_specialize=["limit"])  # else steps of another size would recompile it
def _claim_kernel(missed_sources, missed_places, missed_count, index, seen, control, claim_rows, claim_entries,
                  count, limit, BUCKETS: tl.constexpr, WORDS: tl.constexpr, IS_FILTERED: tl.constexpr,
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
        if tl.load(control + _IS_FILLING) == 0:
            wanted = earned
    claims = wanted & (slots_of(index, row, wanted, BUCKETS) < 0)
    base = tl.atomic_add(count, tl.sum(claims.to(tl.int32), axis=0))
    at = base + tl.cumsum(claims.to(tl.int32), axis=0) - 1
    tl.store(claim_rows + at, row, mask=claims & (at < limit))
    tl.store(claim_entries + at, tl.where(earned, entries, -1 - entries), mask=claims & (at < limit))


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


@triton.jit(do_not_specialize=["limit"])
def _weigh_kernel(missed_sources, missed_count, touches, claim_touches, counters, limit, MOST: tl.constexpr,
                  SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Count a touch of each missed row, and the claims of each number of touches."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_missed = tl.load(missed_count)
    if tl.program_id(0) * BLOCK >= num_missed:
        return
    missed = i < num_missed
    row = -1 - tl.load(missed_sources + i, mask=missed, other=-1)
    num = tl.minimum(_counted(touches, row, missed, SIZE) + 1, MOST)
    _raise(touches, row, num, missed, SIZE)
    claimed = missed & (i < limit)
    tl.store(claim_touches + i, num, mask=claimed)
    level = tl.arange(0, MOST + 1)
    of_each = (num[:, None] == level[None, :]) & claimed[:, None]
    tl.atomic_add(counters + 1 + level, tl.sum(of_each.to(tl.int32), axis=0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(counters, num_missed)


@triton.jit(do_not_specialize=["limit"])
def _claim_hottest_first_kernel(missed_sources, missed_places, claim_touches, control, claim_rows, claim_entries,
                                claim_heat, counters, limit, MOST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_claims = tl.minimum(tl.load(counters), limit)
    if tl.program_id(0) * BLOCK >= num_claims:
        return
    claimed = i < num_claims
    num = tl.load(claim_touches + i, mask=claimed, other=0)
    level = tl.arange(0, MOST + 1)
    of_each = (num[:, None] == level[None, :]) & claimed[:, None]
    ones = of_each.to(tl.int32)
    placed = tl.atomic_add(counters + 2 + MOST + level, tl.sum(ones, axis=0), sem="relaxed")
    in_level = tl.load(counters + 1 + level)
    hotter = tl.sum(in_level, axis=0) - tl.cumsum(in_level, axis=0)
    at = tl.sum(tl.where(of_each, tl.cumsum(ones, axis=0) - 1 + (hotter + placed)[None, :], 0), axis=1)
    now = tl.load(control + _NOW).to(tl.float32)
    tl.store(claim_rows + at, -1 - tl.load(missed_sources + i, mask=claimed, other=-1), mask=claimed)
    tl.store(claim_entries + at, tl.load(missed_places + i, mask=claimed, other=0).to(tl.int32), mask=claimed)
    tl.store(claim_heat + at, now + tl.log2(tl.maximum(num, 1).to(tl.float32)), mask=claimed)


@triton.jit(do_not_specialize=["num_slots"])
def _window_kernel(pages, control, heat, slots, slot_heat, num_slots, PER_PAGE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    capacity = tl.load(control + _CAPACITY).to(tl.int64)
    ordinal = (tl.load(control + _HAND).to(tl.int64) + i) % tl.maximum(capacity, 1)
    page = tl.load(pages + ordinal // PER_PAGE, mask=i < num_slots, other=0)
    slot = page * PER_PAGE + ordinal % PER_PAGE
    tl.store(slots + i, slot, mask=i < num_slots)
    tl.store(slot_heat + i, tl.load(heat + slot, mask=i < capacity, other=float("inf")), mask=i < num_slots)


@triton.jit(do_not_specialize=["limit"])
def _publish_kernel(claim_rows, claim_entries, count, claim_heat, victims, victim_heat, index, row_of, heat, touches,
                    ghosts, control, tally, copies, num_ghosts, limit, MOST: tl.constexpr, BUCKETS: tl.constexpr,
                    SIZE: tl.constexpr, BY_HEAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_claims = tl.minimum(tl.load(count), limit)
    if tl.program_id(0) * BLOCK >= num_claims:
        tl.store(copies + i, tl.full((BLOCK,), _SKIP, tl.int32), mask=i < limit)
        return
    claimed = i < num_claims
    row = tl.load(claim_rows + i, mask=claimed, other=0)
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
    clear(index, evicted, left, BUCKETS)
    is_new, refused = insert(index, row, slot.to(tl.int32), given, BUCKETS)
    tl.store(row_of + slot, tl.where(is_new, row, _ABSENT), mask=given)
    tl.store(heat + slot, tl.where(is_new, warm, float("-inf")), mask=given)
    tl.store(copies + i, tl.where(is_new, tl.where(entry >= 0, entry, -1 - entry), _SKIP), mask=i < limit)
    num_left = tl.sum(left.to(tl.int64), axis=0)
    ghost = tl.atomic_add(tally + _GHOSTS, num_left) + tl.cumsum(left.to(tl.int64), axis=0) - 1
    tl.store(ghosts + ghost % num_ghosts, evicted, mask=left)
    tl.atomic_add(tally + _ADMITTED, tl.sum(is_new.to(tl.int64), axis=0))
    tl.atomic_add(tally + _EVICTED, num_left)
    if BUCKETS != 0:
        tl.atomic_add(tally + _REFUSED, tl.sum(refused.to(tl.int64), axis=0))


# fmt: on


def claim(table: RowTable, missed: Missed, claims: Claims, *, admission: Admission) -> None:
    """As the twin, but which rows are beyond the limit is not deterministic."""
    num, limit, block = missed.sources.numel(), claims.rows.numel(), block_of(table.index)
    if not num:
        return
    if admission == Admission.FREQUENCY:
        _claim_by_frequency(table, missed, claims)
        return
    grid, wanted = (triton.cdiv(num, block),), (missed.sources, missed.places, missed.count)
    _claim_kernel[grid](
        *wanted,
        table.index.data,
        table.seen,
        table.control,
        claims.rows,
        claims.entries,
        claims.count,
        limit,
        BUCKETS=table.index.num_buckets,
        WORDS=table.seen.shape[1],
        IS_FILTERED=admission == Admission.SECOND_TOUCH,
        BLOCK=block,
    )


def _claim_by_frequency(table: RowTable, missed: Missed, claims: Claims) -> None:
    limit, grid = claims.rows.numel(), (triton.cdiv(missed.sources.numel(), _LEVELLED),)
    sizes = {"MOST": MOST_TOUCHES, "BLOCK": _LEVELLED}
    _weigh_kernel[grid](
        missed.sources,
        missed.count,
        table.touches,
        claims.touches,
        claims.counters,
        limit,
        SIZE=table.touches.numel(),
        **sizes,
    )
    placed = (claims.rows, claims.entries, claims.heat, claims.counters)
    _claim_hottest_first_kernel[grid](
        missed.sources, missed.places, claims.touches, table.control, *placed, limit, **sizes
    )


def window(table: RowTable, pages: Tensor, rows_per_page: int, slots: Tensor, heat: Tensor) -> None:
    num = slots.numel()
    _window_kernel[(triton.cdiv(num, _WIDE),)](
        pages, table.control, table.heat, slots, heat, num, PER_PAGE=rows_per_page, BLOCK=_WIDE
    )


def publish(table: RowTable, claims: Claims, victims: Victims, copies: Tensor, *, by_heat: bool = False) -> None:
    """As the twin, but which of several rows gets the last entry of a bucket is not deterministic."""
    limit, block = claims.rows.numel(), block_of(table.index)
    _publish_kernel[(triton.cdiv(limit, block),)](
        claims.rows,
        claims.entries,
        claims.count,
        claims.heat,
        victims.slots,
        victims.heat,
        table.index.data,
        table.row_of,
        table.heat,
        table.touches,
        table.ghosts,
        table.control,
        table.tally,
        copies,
        table.ghosts.numel(),
        limit,
        MOST=MOST_TOUCHES,
        BUCKETS=table.index.num_buckets,
        SIZE=table.touches.numel(),
        BY_HEAT=by_heat,
        BLOCK=block,
    )
