"""HSTU attention on eight-bit floats for Hopper, in Gluon: both products multiply codes.

The schedule of `hopper_attention.py` with one more role: a warp lays out the scales of a block ahead of the two
warpgroups that compute. The scale of a key multiplies its column of scores, the scale of a query its row. The scale of
a value is part of the weight that multiplies it. Weights are eight-bit floats too, brought into range by a power of two
that bounds the block (`hopper_scales.py`); the sum so far follows when that grows. A power of two changes no digit of a
weight, so it does not matter in which blocks keys come. Values lie transposed, tokens side by side, as the matrix units
read them.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from helmrec.kernels.attention_plan import AttentionPlan
from helmrec.kernels.coded_tokens import OWN_TOKENS, CodedTokens
from helmrec.kernels.hopper_scales import lay_out_scales
from helmrec.kernels.hopper_tiles import (
    fetch,
    load_tile,
    locate,
    make_barriers,
    next_slot,
    pages_descriptor,
    publish,
    read_tile,
    rows_descriptor,
    sees,
    store_part,
    store_rows,
    take,
)
from helmrec.kernels.hopper_weights import as_operand, ceilings_of, pack, power_of_two, weigh
from helmrec.kernels.kv_rounding import ScaledPages, query_lift
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.work_list import FIELDS

_SHARED_BYTES = 222 * 1024  # for queries and rings; scales and barriers need a little more
_MAX_SLOTS = 8  # of a ring: more of small blocks would only add scales and barriers

# One argument a line would bury the kernels.
# fmt: off


@gluon.jit
def _fetch_values(flat, pages, first_block, table, layout, block, head, pipe, slot, phase, page_rows,
                  PAGE_TOKENS: gl.constexpr, OWN_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
                  NUM_HEADS: gl.constexpr, SLOTS: gl.constexpr):
    """As `fetch`, of values: DIM rows of BLOCK_N tokens. Own tokens lie in blocks of OWN_TOKENS, as in pages."""
    ring, full, empty = pipe
    is_resident, token = locate(block, layout, BLOCK_N)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BLOCK_N * DIM)
    if is_resident:
        at = gl.load(table + token // PAGE_TOKENS) * page_rows + head * DIM
        load_tile(pages, [at, token % PAGE_TOKENS], full.index(slot), ring.index(slot))
    else:
        at = ((first_block + token // OWN_TOKENS) * NUM_HEADS + head) * DIM
        load_tile(flat, [at, token % OWN_TOKENS], full.index(slot), ring.index(slot))
    return next_slot(slot, phase, SLOTS)


@gluon.jit
def _producer(inputs, sources, page_rows, state, queries, k_pipe, v_pipe, tickets, barriers, FIELDS: gl.constexpr,
              NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr, OWN_TOKENS: gl.constexpr,
              BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr):
    """Take tickets until none is left, and fetch each tile's blocks in the order K0 K1 V0 K2 V1 .. of their use."""
    work, batch, num_context, table_stride = inputs
    q_flat, k_flat, v_flat, k_pages, v_pages = sources
    q_full, q_empty, ticket_full, ticket_empty = barriers
    num_tickets = gl.load(work) * NUM_HEADS
    number, k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0, 0
    ticket = gl.atomic_add(state, 1, sem="relaxed")
    publish(ticket, number, tickets, ticket_full, ticket_empty)
    while ticket < num_tickets:
        item = work + FIELDS * (1 + ticket // NUM_HEADS)
        head = ticket % NUM_HEADS
        row, start, _, _, table, layout = read_tile(item, batch, num_context, table_stride, BLOCK_M, BLOCK_N)
        first = _first_value_block(start, gl.load(item), OWN_TOKENS)
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        mbarrier.wait(q_empty.index(0), (number & 1) ^ 1)
        mbarrier.expect(q_full.index(0), BLOCK_M * DIM)
        for group in gl.static_range(2):
            load_tile(q_flat, [start + row + group * 64, head * DIM], q_full.index(0), queries.index(group))
        for block in range(lo, hi):
            k_slot, k_phase = fetch(k_flat, k_pages, start, table, layout, block, head, k_pipe, k_slot, k_phase,
                                    page_rows[0], PAGE_TOKENS, BLOCK_N, DIM, K_SLOTS)
            if block > lo:
                v_slot, v_phase = _fetch_values(v_flat, v_pages, first, table, layout, block - 1, head, v_pipe,
                                                v_slot, v_phase, page_rows[1], PAGE_TOKENS, OWN_TOKENS, BLOCK_N, DIM,
                                                NUM_HEADS, V_SLOTS)
        v_slot, v_phase = _fetch_values(v_flat, v_pages, first, table, layout, hi - 1, head, v_pipe, v_slot, v_phase,
                                        page_rows[1], PAGE_TOKENS, OWN_TOKENS, BLOCK_N, DIM, NUM_HEADS, V_SLOTS)
        ticket = gl.atomic_add(state, 1, sem="relaxed")
        number += 1
        publish(ticket, number, tickets, ticket_full, ticket_empty)
    if gl.atomic_add(state + 1, 1) == gl.num_programs(0) - 1:  # the last program to leave rewinds the counters
        gl.store(state, 0)
        gl.store(state + 1, 0)


@gluon.jit
def _first_value_block(start, sequence, OWN_TOKENS: gl.constexpr):
    """As `first_value_block` of the pass that encodes."""
    return (start + OWN_TOKENS - 1) // OWN_TOKENS + sequence


@gluon.jit
def _clear_dead_values(values, layout, length, block, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Zero the columns of a block of values that are unused or of another sequence: zero weight times NaN is NaN.

    Both warpgroups do this to the same block; they write the same bytes.
    """
    is_resident, token = locate(block, layout, BLOCK_N)
    live = gl.where(is_resident, layout[0], length) - token
    if live < BLOCK_N:
        threads: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_N, BLOCK_N // 16], [4, 1], [1, 0])
        places = gl.arange(0, BLOCK_N, gl.SliceLayout(0, threads))
        tokens = (places & ~15) | ((places & 12) >> 1) | ((places & 2) << 2) | (places & 1)  # whose lane order this is
        for i in gl.static_range(DIM // 32):
            part = values.slice(i * 32, 32)
            codes = part.load(threads).to(gl.uint8, bitcast=True)
            kept = gl.where((tokens < live)[None, :], codes, 0).to(gl.uint8)
            part.store(kept.to(values.dtype, bitcast=True))
        hopper.fence_async_shared()


@gluon.jit
def _step(acc, weights, ceiling, query, q_factor, k_pipe, scales, k_slot, k_phase, v_pipe, slot, phase, layout, shared,
          length, block, first_row, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
          K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr):
    """Scores of this block and the values of the one before, in flight together; returns the sum and new weights."""
    ring, k_full, k_empty = k_pipe
    values, v_full, v_empty = v_pipe
    if MASKED:
        mbarrier.wait(v_full.index(slot), phase)
        _clear_dead_values(values.index(slot), layout, length, block - 1, BLOCK_N, DIM)
    mbarrier.wait(k_full.index(k_slot), k_phase)
    operand = as_operand(weights, BLOCK_N, WEIGHTS)
    zero = gl.zeros([64, BLOCK_N], gl.float16, SCORES)
    scores = hopper.warpgroup_mma(query, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if not MASKED:
        mbarrier.wait(v_full.index(slot), phase)
    acc = hopper.warpgroup_mma(operand, values.index(slot).permute((1, 0)), acc, is_async=True)
    k_ceiling, next_ceiling = ceilings_of(scales, k_slot)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    active = weigh(scores, q_factor, k_ceiling, scales, k_slot, SCORES)
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    if MASKED:
        active = gl.where(sees(layout, shared, block, first_row, BLOCK_N, SCORES), active, 0.0).to(gl.float16)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    following = pack(active, BLOCK_N)
    mbarrier.arrive(v_empty.index(slot), count=1)
    if next_ceiling > ceiling:
        acc = acc * power_of_two(gl.maximum(ceiling - next_ceiling + 127, 0))
    k_slot, k_phase = next_slot(k_slot, k_phase, K_SLOTS)
    slot, phase = next_slot(slot, phase, V_SLOTS)
    return acc, following, next_ceiling, k_slot, k_phase, slot, phase


@gluon.jit
def _add_last(acc, weights, v_pipe, slot, phase, layout, length, block, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
              WEIGHTS: gl.constexpr):
    """Add the values of the last block of a tile."""
    values, v_full, v_empty = v_pipe
    mbarrier.wait(v_full.index(slot), phase)
    _clear_dead_values(values.index(slot), layout, length, block, BLOCK_N, DIM)
    operand = as_operand(weights, BLOCK_N, WEIGHTS)
    acc = hopper.warpgroup_mma(operand, values.index(slot).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(slot), count=1)
    return acc


@gluon.jit
def _finish(acc, ceiling, q_exponents, item, head, outputs, row, end, factor, GROUP: gl.constexpr,
            NUM_HEADS: gl.constexpr, DIM: gl.constexpr, BOUND: gl.constexpr, LAYOUT: gl.constexpr):
    """Apply the factors that `weigh` left out, and store 64 rows or a part of their sum."""
    out, out_strides, partials, arrivals = outputs
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    q_exponent = gl.load(q_exponents + rows, mask=rows < end, other=127).to(gl.int32)
    exponent = gl.where(q_exponent < 255, q_exponent + ceiling + (BOUND - 254), 255)
    acc = acc * power_of_two(gl.minimum(gl.maximum(exponent, 0), 255))[:, None]
    if gl.load(item + 5) > 1:
        store_part(acc, item, head, out, out_strides, row, end, partials, arrivals, factor, GROUP, NUM_HEADS, DIM,
                   LAYOUT)
    else:
        store_rows(out, out_strides, acc, row, end, head, 0, factor, DIM, LAYOUT)


@gluon.jit
def _consumer(inputs, outputs, queries, q_exponents, q_stride, k_pipe, scales, v_pipe, tickets, barriers,
              half_scale, factor, GROUP: gl.constexpr, FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr,
              DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr,
              V_SLOTS: gl.constexpr, BOUND: gl.constexpr):
    """Compute 64 of a tile's rows, tile after tile."""
    work, batch, num_context, table_stride = inputs
    ring, k_full, k_empty = k_pipe
    q_full, q_empty, ticket_full, ticket_empty = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    num_tickets = gl.load(work) * NUM_HEADS
    query = queries.index(GROUP)
    number, k_slot, k_phase, slot, phase = 0, 0, 0, 0, 0
    ticket = take(number, tickets, ticket_full, ticket_empty)
    while ticket < num_tickets:
        item = work + FIELDS * (1 + ticket // NUM_HEADS)
        head = ticket % NUM_HEADS
        row, start, end, shared, _, layout = read_tile(item, batch, num_context, table_stride, BLOCK_M, BLOCK_N)
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        first_row = row + GROUP * 64
        q_at = q_exponents + head.to(gl.int64) * q_stride
        rows = start + first_row + gl.arange(0, 64, gl.SliceLayout(1, scores_layout))
        # The scale of a query times half that of q.k; those of keys are below their ceiling, whose bias is taken off.
        q_factor = power_of_two(gl.load(q_at + rows, mask=rows < end, other=127).to(gl.int32)) * half_scale
        masked_from = gl.maximum(gl.minimum(layout[0] // BLOCK_N + layout[1], hi), lo + 1)
        mbarrier.wait(q_full.index(0), number & 1)
        mbarrier.wait(k_full.index(k_slot), k_phase)
        zero = gl.zeros([64, BLOCK_N], gl.float16, scores_layout)
        scores = hopper.warpgroup_mma(query, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        k_ceiling, ceiling = ceilings_of(scales, k_slot)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        active = weigh(scores, q_factor, k_ceiling, scales, k_slot, scores_layout)
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        k_slot, k_phase = next_slot(k_slot, k_phase, K_SLOTS)
        active = gl.where(sees(layout, shared, lo, first_row, BLOCK_N, scores_layout), active, 0.0).to(gl.float16)
        weights = pack(active, BLOCK_N)
        acc = gl.zeros([64, DIM], gl.float32, acc_layout)
        for block in range(lo + 1, masked_from):
            acc, weights, ceiling, k_slot, k_phase, slot, phase = _step(
                acc, weights, ceiling, query, q_factor, k_pipe, scales, k_slot, k_phase, v_pipe, slot, phase, layout,
                shared, end - start, block, first_row, False, BLOCK_N, DIM, K_SLOTS, V_SLOTS, scores_layout,
                weights_layout)
        for block in range(masked_from, hi):
            acc, weights, ceiling, k_slot, k_phase, slot, phase = _step(
                acc, weights, ceiling, query, q_factor, k_pipe, scales, k_slot, k_phase, v_pipe, slot, phase, layout,
                shared, end - start, block, first_row, True, BLOCK_N, DIM, K_SLOTS, V_SLOTS, scores_layout,
                weights_layout)
        mbarrier.arrive(q_empty.index(0), count=1)
        acc = _add_last(acc, weights, v_pipe, slot, phase, layout, end - start, hi - 1, BLOCK_N, DIM, weights_layout)
        slot, phase = next_slot(slot, phase, V_SLOTS)
        _finish(acc, ceiling, q_at, item, head, outputs, start + first_row, end, factor, GROUP, NUM_HEADS, DIM, BOUND,
                acc_layout)
        number += 1
        ticket = take(number, tickets, ticket_full, ticket_empty)


# What differs from batch to batch or arena to arena is read by single threads and not worth a compilation of its own.
@gluon.jit(
    do_not_specialize=["flat_stride", "table_stride", "num_context"],
    do_not_specialize_on_alignment=["cu_tokens", "num_resident", "num_new", "page_table"],
)
def _attention_kernel(
    q_flat, k_flat, v_flat, k_pages, v_pages, q_exponents, k_exponents, v_exponents, flat_stride, k_page_exponents,
    v_page_exponents, exponent_strides, out, out_strides, work, state, cu_tokens, num_resident, num_new, page_table,
    table_stride, partials, arrivals, num_context, half_scale, factor, page_rows,
    FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr,
    OWN_TOKENS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr, BOUND: gl.constexpr,
):
    scales_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(q_flat.dtype, [2, BLOCK_M // 2, DIM], q_flat.layout)
    keys = gl.allocate_shared_memory(k_flat.dtype, [K_SLOTS, BLOCK_N, DIM], k_flat.layout)
    values = gl.allocate_shared_memory(v_flat.dtype, [V_SLOTS, DIM, BLOCK_N], v_flat.layout)
    scales = (gl.allocate_shared_memory(gl.float16, [K_SLOTS, BLOCK_N], scales_layout),
              gl.allocate_shared_memory(gl.float16, [K_SLOTS, BLOCK_N], scales_layout),
              gl.allocate_shared_memory(gl.int32, [K_SLOTS, 2], scales_layout))
    tickets = gl.allocate_shared_memory(gl.int32, [2, 1], scales_layout)
    # Keys are full when the producer has fetched codes and the scaler has written scales; both consumers free them.
    k_pipe = (keys, make_barriers(K_SLOTS, 2), make_barriers(K_SLOTS, 2))
    v_pipe = (values, make_barriers(V_SLOTS, 1), make_barriers(V_SLOTS, 2))
    barriers = (make_barriers(1, 1), make_barriers(1, 2), make_barriers(2, 1), make_barriers(2, 3))
    sources = (q_flat, k_flat, v_flat, k_pages, v_pages)
    exponents = (k_exponents, v_exponents, flat_stride, k_page_exponents, v_page_exponents, exponent_strides)
    inputs = (work, (cu_tokens, num_resident, num_new, page_table), num_context, table_stride)
    outputs = (out, out_strides, partials, arrivals)
    gl.warp_specialize(
        [
            (_consumer, (inputs, outputs, queries, q_exponents, flat_stride, k_pipe, scales, v_pipe, tickets, barriers,
                         half_scale, factor, 0, FIELDS, NUM_HEADS, DIM, BLOCK_M, BLOCK_N, K_SLOTS, V_SLOTS, BOUND)),
            (_consumer, (inputs, outputs, queries, q_exponents, flat_stride, k_pipe, scales, v_pipe, tickets, barriers,
                         half_scale, factor, 1, FIELDS, NUM_HEADS, DIM, BLOCK_M, BLOCK_N, K_SLOTS, V_SLOTS, BOUND)),
            (lay_out_scales, (inputs, exponents, k_pipe, scales, tickets, barriers, FIELDS, NUM_HEADS, DIM, PAGE_TOKENS,
                       BLOCK_M, BLOCK_N, K_SLOTS, BOUND)),
            (_producer, (inputs, sources, page_rows, state, queries, k_pipe, v_pipe, tickets, barriers, FIELDS,
                         NUM_HEADS, DIM, PAGE_TOKENS, OWN_TOKENS, BLOCK_M, BLOCK_N, K_SLOTS, V_SLOTS)),
        ],
        [4, 1, 1],
        [232, 40, 40],  # the registers of a multiprocessor, less what fetching and scaling can do without
    )


# fmt: on


def _value_rows(codes: Tensor, page_stride: int, columns: int, block_n: int) -> Any:
    """Tiles of one head's values of `block_n` tokens, of blocks of (heads, dim, columns)."""
    num_blocks, heads, dim = codes.shape[0], *codes.shape[1:3]
    rows = (num_blocks - 1) * (page_stride // columns) + heads * dim
    layout = gl.NVMMASharedLayout.get_default_for([dim, block_n], gl.float8e4nv)
    return TensorDescriptor(codes, [rows, columns], [columns, 1], [dim, block_n], layout)


def launch(
    tokens: CodedTokens,
    pages: tuple[ScaledPages, ScaledPages],
    batch: RaggedBatch,
    out: Tensor,
    plan: AttentionPlan,
    scores: tuple[float, float],
) -> None:
    """Run the plan's work list. pages: of K and V, if `multiplies_codes`; scores: scale of q.k and normaliser."""
    k_pages, v_pages = pages
    tiling, dim = plan.tiling, tokens.q.codes.shape[2]
    block = tiling.block_n * dim
    slots = min(2 * _MAX_SLOTS, (_SHARED_BYTES - tiling.block_m * dim) // block)
    by_head = v_pages.codes.permute(0, 2, 3, 1)  # (pages, heads, dim, page_tokens)
    page_rows = k_pages.codes.stride(0) // k_pages.codes.stride(1), by_head.stride(0) // batch.page_tokens
    _attention_kernel[(tiling.num_programs,)](
        rows_descriptor(tokens.q.codes, tokens.q.codes.shape[0], tokens.q.codes.stride(0), tiling.block_m // 2),
        rows_descriptor(tokens.k.codes, tokens.k.codes.shape[0], tokens.k.codes.stride(0), tiling.block_n),
        _value_rows(tokens.v.codes, tokens.v.codes.stride(0), OWN_TOKENS, tiling.block_n),
        pages_descriptor(k_pages.codes, tiling.block_n),
        _value_rows(by_head, by_head.stride(0), batch.page_tokens, tiling.block_n),
        *(each.exponents for each in tokens),
        *(tokens.q.exponents.stride(0), k_pages.exponents, v_pages.exponents, k_pages.exponents.stride()),
        *(out, out.stride()[:2], plan.work, plan.state, batch.cu_tokens, batch.num_resident, batch.num_new),
        *(batch.page_table, batch.page_table.stride(0), plan.partials, plan.arrivals, batch.num_context),
        *(scores[0] / 2, scores[0] / 2 / scores[1], page_rows, FIELDS, tiling.num_heads, dim, batch.page_tokens),
        *(OWN_TOKENS, tiling.block_m, tiling.block_n, slots - slots // 2, slots // 2),
        # No product of codes is above dim * 448 * 448 / 2**lift, no weight above twice that / 2**BOUND, below 448.
        10 + dim.bit_length() - 1 - query_lift(dim),
        num_warps=4,
    )
