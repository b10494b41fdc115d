"""The index of resident rows inside Triton kernels. Twin: `row_index.py`, which documents both forms.

Each function takes the index as its tensor and BUCKETS, the buckets of a compact index, or 0 for a dense one. Rows are
at least 0 where `wanted`. Programs may insert and clear at the same time, but not the same row.
"""

# ruff: noqa: N803 - Triton's constants are in capitals
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from helmrec.kernels.row_index import ABSENT, MIX_A, MIX_B, SECOND, WAYS, RowIndex

_ABSENT, _WAYS = tl.constexpr(ABSENT), tl.constexpr(WAYS)
_NEVER = tl.constexpr(-7)  # no entry holds it
_MIX_A, _MIX_B, _SECOND = tl.constexpr(MIX_A), tl.constexpr(MIX_B), tl.constexpr(SECOND)


def block_of(index: RowIndex) -> int:
    """Return the rows of a program that looks rows up: a compact index needs eight registers for one."""
    return 256 if index.num_buckets else 1024


@triton.jit
def mixed(value):
    """As the twin's `mixed_rows`."""
    value = (value ^ (value >> 16)) * _MIX_A
    value = (value ^ (value >> 15)) * _MIX_B
    return value ^ (value >> 16)


@triton.jit
def _first_bucket(row, BUCKETS: tl.constexpr):
    return ((mixed(row.to(tl.uint32)).to(tl.uint64) * BUCKETS) >> 32).to(tl.int64)


@triton.jit
def _second_bucket(row, BUCKETS: tl.constexpr):
    return ((mixed(row.to(tl.uint32) ^ _SECOND).to(tl.uint64) * BUCKETS) >> 32).to(tl.int64)


@triton.jit
def _place_in(index, row, bucket, wanted):
    """The place of each row in a bucket, or -1."""
    way = tl.arange(0, _WAYS)
    start = bucket * (2 * _WAYS)
    held = tl.load(index + start[:, None] + way[None, :], mask=wanted[:, None], other=_ABSENT)
    found = tl.max(tl.where(held == row[:, None], way[None, :], -1), axis=1)
    return tl.where(wanted & (found >= 0), start + found, -1)


@triton.jit
def _place_of(index, row, wanted, BUCKETS: tl.constexpr):
    """The place of each row in either of its buckets, or -1; _WAYS further is its slot."""
    place = _place_in(index, row, _first_bucket(row, BUCKETS), wanted)
    other = _place_in(index, row, _second_bucket(row, BUCKETS), wanted & (place < 0))
    return tl.maximum(place, other)


@triton.jit
def slots_of(index, row, wanted, BUCKETS: tl.constexpr):
    """The slot of each row, or ABSENT."""
    if BUCKETS == 0:
        slot = tl.load(index + row.to(tl.int64), mask=wanted, other=_ABSENT)
    else:
        place = _place_of(index, row, wanted, BUCKETS)
        slot = tl.load(index + place + _WAYS, mask=place >= 0, other=_ABSENT)
    return slot


@triton.jit
def insert(index, row, slot, wanted, BUCKETS: tl.constexpr):
    """Enter rows; returns which are new, and which found both of their buckets full."""
    # An entry that takes part no more compares with a value that never occurs, so that it changes nothing.
    if BUCKETS == 0:
        found = tl.atomic_cas(index + row.to(tl.int64), tl.where(wanted, _ABSENT, _NEVER), slot, sem="relaxed")
        is_new = wanted & (found == _ABSENT)
        is_refused = wanted & (row < 0)
    else:
        is_new, is_refused = _insert_into_buckets(index, row, slot, wanted, BUCKETS)
    return is_new, is_refused


@triton.jit
def _insert_into_buckets(index, row, slot, wanted, BUCKETS: tl.constexpr):
    """Take the first free entry that nobody else takes, or find the row there; then try the second bucket.

    Two programs may insert the same row if none clears entries meanwhile: both then try the same entries in the same
    order, and the later one finds the row.
    """
    way = tl.arange(0, _WAYS)
    pending = wanted & (_place_of(index, row, wanted, BUCKETS) < 0)
    start, second = _first_bucket(row, BUCKETS) * (2 * _WAYS), _second_bucket(row, BUCKETS) * (2 * _WAYS)
    place = tl.zeros_like(start) - 1
    is_second, is_refused = wanted & (row < 0), wanted & (row < 0)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        # Volatile, since other programs write these entries now.
        held = tl.load(index + start[:, None] + way[None, :], mask=pending[:, None], other=_ABSENT, volatile=True)
        pending = pending & (tl.max((held == row[:, None]).to(tl.int32), axis=1) == 0)
        free = tl.min(tl.where(held == _ABSENT, way[None, :], _WAYS), axis=1)
        has_room = pending & (free < _WAYS)
        at = start + tl.where(has_room, free, 0)
        found = tl.atomic_cas(index + at, tl.where(has_room, _ABSENT, _NEVER), row, sem="relaxed")
        place = tl.where(has_room & (found == _ABSENT), at, place)
        is_full = pending & (free == _WAYS)
        is_refused = is_refused | (is_full & is_second)
        pending = pending & (place < 0) & ((is_full & is_second) == 0)
        start = tl.where(is_full, second, start)
        is_second = is_second | is_full
    tl.store(index + place + _WAYS, slot, mask=place >= 0)
    return place >= 0, is_refused


@triton.jit
def clear(index, row, wanted, BUCKETS: tl.constexpr):
    """Remove rows. The slot of a free entry is left as it is, since another program may be writing it already."""
    if BUCKETS == 0:
        tl.store(index + row.to(tl.int64), tl.zeros_like(row) + _ABSENT, mask=wanted)
    else:
        place = _place_of(index, row, wanted, BUCKETS)
        # An exchange happens once; a store may be repeated by another thread when the entry has a new row.
        tl.atomic_xchg(index + place, tl.zeros_like(row) + _ABSENT, mask=place >= 0, sem="relaxed")
