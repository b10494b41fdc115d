"""Parts that the attention kernels for Hopper share, in Gluon: ring slots, tiles, tickets, activation, output.

Nothing here knows the type of keys and values.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Gluon's names changed between Triton 3.6 and 3.9; both are served.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}

# One argument a line would bury the kernels.
# fmt: off


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The ring position after this one; the phase flips at every turn."""
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def read_tile(item, batch, num_context, table_stride, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """What producer and consumers must agree on: the sequence's bounds, and how the tile numbers its key blocks.

    Whole resident blocks come first, then own ones every row sees whole, then the masked ones: the page the
    resident tokens end in, own blocks up to the diagonal, the diagonal of the candidates.
    """
    cu_tokens, num_resident, num_new, page_table = batch
    sequence = gl.load(item)
    row = gl.load(item + 1)
    start = gl.load(cu_tokens + sequence)
    end = gl.load(cu_tokens + sequence + 1)
    resident = gl.load(num_resident + sequence)
    shared = gl.load(num_new + sequence) + num_context  # own rows that later rows see
    whole = gl.minimum(row + 1, shared) // BLOCK_N
    seen = (gl.minimum(row + BLOCK_M, shared) + BLOCK_N - 1) // BLOCK_N
    skipped = gl.maximum(row // BLOCK_N - seen, 0)  # other candidates' blocks, between history and the diagonal
    table = page_table + sequence.to(gl.int64) * table_stride
    return row, start, end, shared, table, (resident, whole, seen, skipped)


@gluon.jit
def locate(block, layout, BLOCK_N: gl.constexpr):
    """Whether a block is resident, and the first token it holds: of the history, or of the sequence's own rows."""
    resident, whole, seen, skipped = layout
    paged = resident // BLOCK_N
    partial = gl.where(resident % BLOCK_N > 0, 1, 0)
    after = block - paged - whole
    is_resident = (block < paged) | ((after == 0) & (partial == 1))
    own = block - paged - gl.where(after >= 0, partial, 0)
    own += gl.where(own >= seen, skipped, 0)
    return is_resident, gl.where(is_resident, gl.where(block < paged, block, paged), own) * BLOCK_N


@gluon.jit
def fetch(flat, pages, start, table, layout, block, head, pipe, slot, phase, page_rows, PAGE_TOKENS: gl.constexpr,
          BLOCK_N: gl.constexpr, DIM: gl.constexpr, SLOTS: gl.constexpr):
    """Send one K or V block on its way into a ring slot, once the slot is free; returns the next position."""
    ring, full, empty = pipe
    is_resident, token = locate(block, layout, BLOCK_N)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BLOCK_N * DIM * ring.dtype.primitive_bitwidth // 8)
    if is_resident:
        at = gl.load(table + token // PAGE_TOKENS) * page_rows + token % PAGE_TOKENS
        load_tile(pages, [at, head * DIM], full.index(slot), ring.index(slot))
    else:
        load_tile(flat, [start + token, head * DIM], full.index(slot), ring.index(slot))
    return next_slot(slot, phase, SLOTS)


@gluon.jit
def publish(ticket, number, tickets, ticket_full, ticket_empty):
    """Hand a ticket to both consumers; a slot is reused every other time."""
    slot = number & 1
    mbarrier.wait(ticket_empty.index(slot), ((number >> 1) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tickets.index(slot).store(gl.full([1], ticket, gl.int32, layout))
    mbarrier.arrive(ticket_full.index(slot), count=1)


@gluon.jit
def take(number, tickets, ticket_full, ticket_empty, NUM_WARPS: gl.constexpr = 4):
    slot = number & 1
    mbarrier.wait(ticket_full.index(slot), (number >> 1) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    ticket = gl.sum(tickets.index(slot).load(layout), axis=0)
    mbarrier.arrive(ticket_empty.index(slot), count=1)
    return ticket


@gluon.jit
def tanh(h):
    """One special-function instruction; an exponential and a division would be two."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(h):
    """silu(2 h) = h + h * tanh(h)."""
    return h + h * tanh(h)


@gluon.jit
def sees(layout, shared, block, first_row, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of 64 queries sees which key of a block."""
    is_resident, token = locate(block, layout, BLOCK_N)
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = token + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    last = gl.where(is_resident, layout[0] - 1, gl.minimum(rows, shared - 1))
    itself = gl.where(is_resident, -1, rows)
    return (columns[None, :] <= last[:, None]) | (columns[None, :] == itself[:, None])


@gluon.jit
def activate_masked(h, layout, shared, block, first_row, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """As `activate`, zero where the query does not see the key."""
    return gl.where(sees(layout, shared, block, first_row, BLOCK_N, LAYOUT), activate(h), 0.0)


@gluon.jit
def store_rows(out, strides, values, row, row_end, head, first_dim, inv_normaliser, WIDTH: gl.constexpr,
                LAYOUT: gl.constexpr):
    """64 finished rows of one head, dims first_dim to first_dim + WIDTH; rows from row_end on are not stored."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    dims = first_dim + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = rows.to(gl.int64)[:, None] * strides[0] + head * strides[1] + dims[None, :]
    gl.store(out + at, (values * inv_normaliser).to(out.dtype.element_ty), mask=(rows < row_end)[:, None])


@gluon.jit
def _sum_parts(base, parts, head, out, out_strides, row, row_end, inv_normaliser, DIM: gl.constexpr):
    """Add up all parts of 64 rows in slices of 64 dims: few enough registers to keep a slice's loads in flight."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    dims = gl.arange(0, 64, gl.SliceLayout(0, layout))
    for first in range(0, DIM, 64):
        total = gl.zeros([64, 64], gl.float32, layout)
        for i in range(parts):
            at = base + i * 64 * DIM + first + rows[:, None] * DIM + dims[None, :]
            total += gl.load(at, cache_modifier=".cg")  # L1 does not see other programs' stores
        store_rows(out, out_strides, total, row, row_end, head, first, inv_normaliser, 64, layout)


@gluon.jit
def store_part(acc, item, head, out, out_strides, row, row_end, partials, arrivals, inv_normaliser,
                GROUP: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Publish these rows of a part of a split tile; the last part to arrive adds all parts in order and stores them."""
    part, parts, slot = gl.load(item + 4), gl.load(item + 5), gl.load(item + 6)
    size: gl.constexpr = 64 * DIM
    base = partials + ((slot * NUM_HEADS + head * parts) * 2 + GROUP * parts).to(gl.int64) * size
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] * DIM
    gl.store(base + part * size + rows + gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))[None, :], acc)
    barrier()  # every thread's stores come before the arrival that publishes them
    counter = arrivals + (slot * NUM_HEADS + head) * 2 + GROUP
    if gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
        gl.store(counter, 0)  # for the next launch
        _sum_parts(base, parts, head, out, out_strides, row, row_end, inv_normaliser, DIM)


@gluon.jit
def make_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


# fmt: on


def pages_descriptor(pages: Tensor, rows: int) -> Any:
    """Pages as one run of token rows: a page starts every stride(0) // stride(1) rows, the rows between are others'."""
    num_rows = (pages.shape[0] - 1) * (pages.stride(0) // pages.stride(1)) + pages.shape[1]
    return rows_descriptor(pages, num_rows, pages.stride(1), rows)


def rows_descriptor(t: Tensor, num_rows: int, row_stride: int, rows: int) -> Any:
    """Tiles of `rows` token rows of one head, of a tensor of (.., heads, dim)."""
    dtype = _TYPES[t.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, t.shape[-1]], dtype)
    return TensorDescriptor(t, [num_rows, t.shape[-2] * t.shape[-1]], [row_stride, 1], [rows, t.shape[-1]], layout)
