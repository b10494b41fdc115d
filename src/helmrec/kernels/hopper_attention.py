"""HSTU attention over paged K/V for Hopper, in Gluon: the schedule of `triton_attention.py` with explicit roles.

One warp fetches tiles with the copy engine, page lookups included; two warpgroups compute 64 query rows each
and overlap a block's activation with its neighbour's matrix products. Only what the hardware can read is taken
here (`supports` says what); everything else is left to the portable kernel.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from helmrec.kernels.attention_plan import AttentionInputs, AttentionPlan
from helmrec.kernels.hopper_tiles import (
    activate,
    activate_masked,
    fetch,
    load_tile,
    locate,
    make_barriers,
    next_slot,
    pages_descriptor,
    publish,
    read_tile,
    rows_descriptor,
    store_part,
    store_rows,
    take,
)
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.work_list import FIELDS

_SHARED_BYTES = 224 * 1024  # for the query tile and the ring; the barriers need a little more

# One argument a line would bury the kernels.
# fmt: off


@gluon.jit
def _producer(inputs, sources, page_rows, state, queries, pipe, tickets, barriers, FIELDS: gl.constexpr,
              NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr, SLOTS: gl.constexpr):
    """Take tickets until none is left, and fetch each tile's blocks in the order K0 K1 V0 K2 V1 .. of their use."""
    work, batch, num_context, table_stride = inputs
    q_flat, k_flat, v_flat, k_pages, v_pages = sources
    q_full, q_empty, ticket_full, ticket_empty = barriers
    num_tickets = gl.load(work) * NUM_HEADS
    number, slot, phase = 0, 0, 0
    ticket = gl.atomic_add(state, 1, sem="relaxed")
    publish(ticket, number, tickets, ticket_full, ticket_empty)
    while ticket < num_tickets:
        item = work + FIELDS * (1 + ticket // NUM_HEADS)
        head = ticket % NUM_HEADS
        row, start, _, _, table, layout = read_tile(item, batch, num_context, table_stride, BLOCK_M, BLOCK_N)
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        mbarrier.wait(q_empty.index(0), (number & 1) ^ 1)
        mbarrier.expect(q_full.index(0), BLOCK_M * DIM * 2)
        for group in gl.static_range(2):
            load_tile(q_flat, [start + row + group * 64, head * DIM], q_full.index(0), queries.index(group))
        for block in range(lo, hi):
            slot, phase = fetch(k_flat, k_pages, start, table, layout, block, head, pipe, slot, phase, page_rows,
                                PAGE_TOKENS, BLOCK_N, DIM, SLOTS)
            if block > lo:
                slot, phase = fetch(v_flat, v_pages, start, table, layout, block - 1, head, pipe, slot, phase,
                                    page_rows, PAGE_TOKENS, BLOCK_N, DIM, SLOTS)
        slot, phase = fetch(v_flat, v_pages, start, table, layout, hi - 1, head, pipe, slot, phase, page_rows,
                            PAGE_TOKENS, BLOCK_N, DIM, SLOTS)
        ticket = gl.atomic_add(state, 1, sem="relaxed")
        number += 1
        publish(ticket, number, tickets, ticket_full, ticket_empty)
    if gl.atomic_add(state + 1, 1) == gl.num_programs(0) - 1:  # the last program to leave rewinds the counters
        gl.store(state, 0)
        gl.store(state + 1, 0)


@gluon.jit
def _clear_dead_values(values, layout, length, block, BLOCK_N: gl.constexpr):
    """Zero the rows of a V block that are unused or of another sequence: zero weight times NaN is NaN.

    Both warpgroups do this to the same block; they write the same bytes.
    """
    is_resident, token = locate(block, layout, BLOCK_N)
    live = gl.where(is_resident, layout[0], length) - token
    if live < BLOCK_N:
        threads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        rows = gl.arange(0, 16, gl.SliceLayout(1, threads))
        for i in gl.static_range(BLOCK_N // 16):
            if live < (i + 1) * 16:
                part = values.slice(i * 16, 16)
                kept = part.load(threads)
                part.store(gl.where((rows + i * 16 < live)[:, None], kept, 0.0).to(kept.dtype))
        hopper.fence_async_shared()


@gluon.jit
def _step(acc, weights, query, pipe, slot, phase, layout, shared, length, block, first_row, half_scale,
          MASKED: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, SCORES: gl.constexpr,
          WEIGHTS: gl.constexpr):
    """Scores of this block and the values of the one before, in flight together; returns the sum and new weights."""
    ring, full, empty = pipe
    v_slot, v_phase = next_slot(slot, phase, SLOTS)
    if MASKED:
        mbarrier.wait(full.index(v_slot), v_phase)
        _clear_dead_values(ring.index(v_slot), layout, length, block - 1, BLOCK_N)
    mbarrier.wait(full.index(slot), phase)
    zero = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    scores = hopper.warpgroup_mma(query, ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if not MASKED:
        mbarrier.wait(full.index(v_slot), v_phase)
    acc = hopper.warpgroup_mma(weights, ring.index(v_slot), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty.index(slot), count=1)
    if MASKED:
        active = activate_masked(scores * half_scale, layout, shared, block, first_row, BLOCK_N, SCORES)
    else:
        active = activate(scores * half_scale)
    following = gl.convert_layout(active.to(weights.dtype), WEIGHTS)
    acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(empty.index(v_slot), count=1)
    slot, phase = next_slot(v_slot, v_phase, SLOTS)
    return acc, following, slot, phase


@gluon.jit
def _consumer(inputs, outputs, queries, pipe, tickets, barriers, half_scale, inv_normaliser, GROUP: gl.constexpr,
              FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr, SLOTS: gl.constexpr):
    """Compute 64 of a tile's rows, tile after tile."""
    work, batch, num_context, table_stride = inputs
    out, out_strides, partials, arrivals = outputs
    ring, full, empty = pipe
    q_full, q_empty, ticket_full, ticket_empty = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    num_tickets = gl.load(work) * NUM_HEADS
    query = queries.index(GROUP)
    number, slot, phase = 0, 0, 0
    ticket = take(number, tickets, ticket_full, ticket_empty)
    while ticket < num_tickets:
        item = work + FIELDS * (1 + ticket // NUM_HEADS)
        row, start, end, shared, _, layout = read_tile(item, batch, num_context, table_stride, BLOCK_M, BLOCK_N)
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        first_row = row + GROUP * 64
        masked_from = gl.maximum(gl.minimum(layout[0] // BLOCK_N + layout[1], hi), lo + 1)
        mbarrier.wait(q_full.index(0), number & 1)
        mbarrier.wait(full.index(slot), phase)
        zero = gl.zeros([64, BLOCK_N], gl.float32, scores_layout)
        scores = hopper.warpgroup_mma(query, ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
        active = activate_masked(scores * half_scale, layout, shared, lo, first_row, BLOCK_N, scores_layout)
        weights = gl.convert_layout(active.to(ring.dtype), weights_layout)
        acc = gl.zeros([64, DIM], gl.float32, acc_layout)
        for block in range(lo + 1, masked_from):
            acc, weights, slot, phase = _step(acc, weights, query, pipe, slot, phase, layout, shared, end - start,
                                              block, first_row, half_scale, False, BLOCK_N, SLOTS, scores_layout,
                                              weights_layout)
        for block in range(masked_from, hi):
            acc, weights, slot, phase = _step(acc, weights, query, pipe, slot, phase, layout, shared, end - start,
                                              block, first_row, half_scale, True, BLOCK_N, SLOTS, scores_layout,
                                              weights_layout)
        mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(full.index(slot), phase)
        _clear_dead_values(ring.index(slot), layout, end - start, hi - 1, BLOCK_N)
        acc = hopper.warpgroup_mma(weights, ring.index(slot), acc, is_async=True)
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
        head = ticket % NUM_HEADS
        if gl.load(item + 5) > 1:
            store_part(acc, item, head, out, out_strides, start + first_row, end, partials, arrivals, inv_normaliser,
                        GROUP, NUM_HEADS, DIM, acc_layout)
        else:
            store_rows(out, out_strides, acc, start + first_row, end, head, 0, inv_normaliser, DIM, acc_layout)
        number += 1
        ticket = take(number, tickets, ticket_full, ticket_empty)


@gluon.jit(  # a batch of another size must not compile it again while it is served, nor pages of an audit
    do_not_specialize=["table_stride", "num_context", "page_rows"],
    do_not_specialize_on_alignment=["cu_tokens", "num_resident", "num_new", "page_table"],
)
def _attention_kernel(
    q_flat, k_flat, v_flat, k_pages, v_pages, out, out_strides, work, state, cu_tokens, num_resident, num_new,
    page_table, table_stride, partials, arrivals, num_context, half_scale, inv_normaliser, page_rows,
    FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):
    queries = gl.allocate_shared_memory(q_flat.dtype, [2, BLOCK_M // 2, DIM], q_flat.layout)
    ring = gl.allocate_shared_memory(k_flat.dtype, [SLOTS, BLOCK_N, DIM], k_flat.layout)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # What one producer fills is full at one arrival, and free again when both consumers have arrived.
    pipe = (ring, make_barriers(SLOTS, 1), make_barriers(SLOTS, 2))
    barriers = (make_barriers(1, 1), make_barriers(1, 2), make_barriers(2, 1), make_barriers(2, 2))
    sources = (q_flat, k_flat, v_flat, k_pages, v_pages)
    inputs = (work, (cu_tokens, num_resident, num_new, page_table), num_context, table_stride)
    outputs = (out, out_strides, partials, arrivals)
    gl.warp_specialize(
        [
            (_consumer, (inputs, outputs, queries, pipe, tickets, barriers, half_scale, inv_normaliser, 0, FIELDS,
                         NUM_HEADS, DIM, BLOCK_M, BLOCK_N, SLOTS)),
            (_consumer, (inputs, outputs, queries, pipe, tickets, barriers, half_scale, inv_normaliser, 1, FIELDS,
                         NUM_HEADS, DIM, BLOCK_M, BLOCK_N, SLOTS)),
            (_producer, (inputs, sources, page_rows, state, queries, pipe, tickets, barriers, FIELDS, NUM_HEADS, DIM,
                         PAGE_TOKENS, BLOCK_M, BLOCK_N, SLOTS)),
        ],
        [4, 1],
        [232, 40],  # the registers of a multiprocessor, less what the one fetching warp's group can do without
    )


# fmt: on


def supports(sources: AttentionInputs, block_n: int) -> bool:
    """Whether copy engine and matrix units support the layout of these tensors; block_n: keys of a block."""
    q, k_pages, v_pages = sources.q, sources.k_pages, sources.v_pages
    dim = q.shape[2]
    if not (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 and dim in (64, 128, 256)):
        return False
    if q.dtype == torch.float32 or block_n % 16 or k_pages.shape[1] % block_n:
        return False
    packed = all(t.dtype == q.dtype and t.shape[-1] == dim and t.stride()[-2:] == (dim, 1) for t in sources)
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.numel() > 0 for t in sources)
    whole_rows = k_pages.stride(0) % k_pages.stride(1) == 0 and k_pages.stride() == v_pages.stride()
    return packed and aligned and whole_rows


def launch(
    sources: AttentionInputs, batch: RaggedBatch, out: Tensor, plan: AttentionPlan, scale: float, normaliser: float
) -> None:
    """Run the plan's work list over q, k, v, k_pages and v_pages; `supports` must be true for them."""
    q, k, v, k_pages, v_pages = sources
    tiling, dim = plan.tiling, q.shape[2]
    slots = (_SHARED_BYTES - tiling.block_m * dim * 2) // (tiling.block_n * dim * 2)
    page_rows = k_pages.stride(0) // k_pages.stride(1)
    _attention_kernel[(tiling.num_programs,)](
        rows_descriptor(q, q.shape[0], q.stride(0), tiling.block_m // 2),
        *(rows_descriptor(t, t.shape[0], t.stride(0), tiling.block_n) for t in (k, v)),
        *(pages_descriptor(t, tiling.block_n) for t in (k_pages, v_pages)),
        *(out, out.stride()[:2], plan.work, plan.state, batch.cu_tokens, batch.num_resident, batch.num_new),
        *(batch.page_table, batch.page_table.stride(0), plan.partials, plan.arrivals, batch.num_context),
        *(scale / 2, 1 / normaliser, page_rows, FIELDS, tiling.num_heads, dim, batch.page_tokens),
        *(tiling.block_m, tiling.block_n, min(slots, 12)),
        num_warps=4,
    )
