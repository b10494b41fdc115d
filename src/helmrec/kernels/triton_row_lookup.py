"""Finds the rows of a step in Triton. Twin: `row_lookup.py`, which documents the contracts.

Entries of absent rows are collected first. Each finds the cell of its row in a hash table, and the first entry of a
cell reads the row: which one that is does not depend on the order in which programs run. A counting sort then puts the
rows to read into buckets of addresses.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_index import ABSENT
from helmrec.kernels.row_lookup import BUCKETS, Lookup, bucket_shift
from helmrec.kernels.row_table import Control, Missed, RowTable
from helmrec.kernels.triton_row_index import block_of, mixed, slots_of

_FEW = 256  # entries of a program that probes the hash table: more programs, shorter loops
_PAIRED = 64  # entries of a program that compares each with every sequence
_NOW = tl.constexpr(int(Control.NOW))
_SKIP, _ABSENT = tl.constexpr(SKIP), tl.constexpr(ABSENT)
_FREE = tl.constexpr(-1)  # cell without a row; also less than every rank
_NEVER = tl.constexpr(-7)  # no cell holds it
_BITS = tl.constexpr(2**31 - 1)  # flipped in an entry they give its rank: the first entry has the greatest

# One argument a line would bury the kernels.
# fmt: off


@triton.jit(do_not_specialize=["num_entries"])  # else another number of rows may recompile it
def _find_kernel(rows, index, heat, control, sources, is_missed, absent_entries, absent_count, num_entries,
                 INDEX_BUCKETS: tl.constexpr, IS_LRU: tl.constexpr, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entries, mask=entries < num_entries, other=_ABSENT)
    slot = slots_of(index, row, row >= 0, INDEX_BUCKETS)
    hit = slot >= 0
    now = tl.load(control + _NOW).to(tl.float32)
    if not IS_LRU:
        old = tl.load(heat + slot.to(tl.int64), mask=hit, other=0.0)
        now = tl.maximum(old, now) + tl.log2(1.0 + tl.exp2(-tl.abs(old - now)))
    tl.store(heat + slot.to(tl.int64), now, mask=hit)
    tl.store(sources + entries, tl.where(hit, slot, _SKIP), mask=entries < num_entries)
    tl.store(is_missed + entries, tl.zeros((BLOCK,), tl.int8), mask=entries < num_entries)
    absent = (row >= 0) & (slot < 0)
    num = tl.sum(absent.to(tl.int32), axis=0)
    if num > 0:
        at = tl.atomic_add(absent_count, num) + tl.cumsum(absent.to(tl.int32), axis=0) - 1
        tl.store(absent_entries + at, entries, mask=absent)


@triton.jit(do_not_specialize=["last_cell"])
def _enter_kernel(rows, absent_entries, absent_cells, absent_count, keys, ranks, last_cell, BLOCK: tl.constexpr):
    """Find the cell of each absent row, and leave the rank of its first entry there."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_absent = tl.load(absent_count)
    if tl.program_id(0) * BLOCK >= num_absent:
        return
    is_used = i < num_absent
    entry = tl.load(absent_entries + i, mask=is_used, other=0)
    row = tl.load(rows + entry, mask=is_used, other=0)
    cell = mixed(row.to(tl.uint32)).to(tl.int32) & last_cell
    pending = is_used
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        # An entry that has its cell compares with a value that no cell holds, so that it changes nothing.
        found = tl.atomic_cas(keys + cell, tl.where(pending, _FREE, _NEVER), row)
        pending = pending & (found != _FREE) & (found != row)
        cell = tl.where(pending, (cell + 1) & last_cell, cell)
    tl.atomic_max(ranks + cell, entry ^ _BITS, mask=is_used, sem="relaxed")
    tl.store(absent_cells + i, cell, mask=is_used)


@triton.jit
def _own_kernel(rows, absent_entries, absent_cells, absent_count, ranks, repeat_sources, repeat_places, repeat_count,
                is_missed, buckets, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The first entry of a row reads it and is counted in its bucket; the others are repeats."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_absent = tl.load(absent_count)
    if tl.program_id(0) * BLOCK >= num_absent:
        return
    is_used = i < num_absent
    entry = tl.load(absent_entries + i, mask=is_used, other=0)
    cell = tl.load(absent_cells + i, mask=is_used, other=0)
    first = tl.load(ranks + cell, mask=is_used, other=0) ^ _BITS
    reads = is_used & (first == entry)
    row = tl.load(rows + entry, mask=reads, other=0)
    tl.store(is_missed + entry, tl.full((BLOCK,), 1, tl.int8), mask=reads)
    tl.atomic_add(buckets + (row >> SHIFT), 1, mask=reads, sem="relaxed")
    repeats = is_used & (first != entry)
    num = tl.sum(repeats.to(tl.int32), axis=0)
    if num > 0:
        at = tl.atomic_add(repeat_count, num) + tl.cumsum(repeats.to(tl.int32), axis=0) - 1
        tl.store(repeat_sources + at, first, mask=repeats)
        tl.store(repeat_places + at, entry.to(tl.int64), mask=repeats)


@triton.jit
def _begin_buckets_kernel(buckets, missed_count, BUCKETS: tl.constexpr):
    """Replace the number of rows in each bucket by the place of its first row."""
    i = tl.arange(0, BUCKETS)
    num = tl.load(buckets + i)
    tl.store(buckets + i, tl.cumsum(num, axis=0) - num)
    tl.store(missed_count, tl.sum(num, axis=0))


@triton.jit
def _place_kernel(rows, absent_entries, absent_count, is_missed, buckets, missed_sources, missed_places,
                  SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_absent = tl.load(absent_count)
    if tl.program_id(0) * BLOCK >= num_absent:
        return
    is_used = i < num_absent
    entry = tl.load(absent_entries + i, mask=is_used, other=0)
    reads = tl.load(is_missed + entry, mask=is_used, other=0) != 0
    row = tl.load(rows + entry, mask=reads, other=0)
    at = tl.atomic_add(buckets + (row >> SHIFT), 1, mask=reads, sem="relaxed")
    tl.store(missed_sources + at, -1 - row, mask=reads)
    tl.store(missed_places + at, entry.to(tl.int64), mask=reads)


@triton.jit(do_not_specialize=["num_of_events", "num_events"])
def _count_kernel(missed_places, missed_count, cu_events, counts, num_of_events, num_events, num_sequences,
                  PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """num_of_events: entries that are rows of events."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_missed = tl.load(missed_count)
    if tl.program_id(0) * BLOCK >= num_missed:
        return
    sequences = tl.arange(0, PADDED)
    ends = tl.load(cu_events + 1 + sequences, mask=sequences < num_sequences, other=_BITS).to(tl.int32)
    place = tl.load(missed_places + i, mask=i < num_missed, other=0).to(tl.int32)
    of_event = tl.sum((ends[None, :] <= (place % num_events)[:, None]).to(tl.int32), axis=1)
    owner = tl.where(place < num_of_events, of_event, (place - num_of_events) % num_sequences)
    of_each = (owner[:, None] == sequences[None, :]) & (i < num_missed)[:, None]
    num = tl.sum(of_each.to(tl.int32), axis=0)
    tl.atomic_add(counts + sequences, num.to(tl.int64), mask=num > 0, sem="relaxed")


# fmt: on


def count_by_sequence(missed: Missed, cu_events: Tensor, num_features: int, num_events: int, counts: Tensor) -> None:
    counts.zero_()
    num, num_sequences = missed.places.numel(), counts.numel()
    if num:
        _count_kernel[(triton.cdiv(num, _PAIRED),)](
            missed.places,
            missed.count,
            cu_events,
            counts,
            num_features * num_events,
            num_events,
            num_sequences,
            PADDED=triton.next_power_of_2(num_sequences),
            BLOCK=_PAIRED,
        )


def find(table: RowTable, rows: Tensor, lookup: Lookup, *, is_lru: bool) -> None:
    """As the twin, but the order inside a bucket is chance, and a resident row in several entries may count each."""
    num = rows.numel()
    absent, missed, repeats = lookup.absent, lookup.missed, lookup.repeats
    is_missed = lookup.is_missed.view(dtype=torch.int8)
    shift, few = bucket_shift(table.num_rows), (triton.cdiv(num, _FEW),)
    keys, ranks = lookup.cells
    lookup.counters.zero_()
    if not num:
        return
    lookup.cells.fill_(-1)
    block = block_of(table.index)
    _find_kernel[(triton.cdiv(num, block),)](
        rows,
        table.index.data,
        table.heat,
        table.control,
        lookup.sources,
        is_missed,
        absent.entries,
        absent.count,
        num,
        INDEX_BUCKETS=table.index.num_buckets,
        IS_LRU=is_lru,
        BLOCK=block,
    )
    wanted = (rows, absent.entries, absent.cells, absent.count)
    _enter_kernel[few](*wanted, keys, ranks, keys.numel() - 1, BLOCK=_FEW)
    again = (repeats.sources, repeats.places, repeats.count)
    _own_kernel[few](*wanted, ranks, *again, is_missed, lookup.counters, SHIFT=shift, BLOCK=_FEW)
    _begin_buckets_kernel[(1,)](lookup.counters, missed.count, BUCKETS=BUCKETS, num_warps=8)
    found = (rows, absent.entries, absent.count, is_missed, lookup.counters)
    _place_kernel[few](*found, missed.sources, missed.places, SHIFT=shift, BLOCK=_FEW)
