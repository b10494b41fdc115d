"""HSTU attention over pages of eight-bit floats for Hopper, in Gluon: q.k from codes, weights times values in bfloat16.

The schedule of `hopper_attention.py` with one more role: a warpgroup decodes values, and lays out the scales of keys,
ahead of the two that compute. The scale of a key multiplies its column of scores, the scale of a query its row; both
are powers of two, so the scores are those of the decoded keys and queries.
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

from helmrec.kernels.attention_plan import AttentionPlan
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
from helmrec.kernels.kv_rounding import ScaledPages
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_encode import CodedTokens
from helmrec.kernels.work_list import FIELDS, Tiling

_SHARED_BYTES = 222 * 1024  # for queries and rings; scales and barriers need a little more
_VALUE_SLOTS = 2  # decoded
_MAX_SLOTS = 8  # of a ring: more of small blocks would only add scales and barriers

# One argument a line would bury the kernels.
# fmt: off


@gluon.jit
def _producer(inputs, sources, page_rows, state, queries, k_pipe, v_pipe, tickets, barriers, FIELDS: gl.constexpr,
              NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr):
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
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        mbarrier.wait(q_empty.index(0), (number & 1) ^ 1)
        mbarrier.expect(q_full.index(0), BLOCK_M * DIM)
        for group in gl.static_range(2):
            load_tile(q_flat, [start + row + group * 64, head * DIM], q_full.index(0), queries.index(group))
        for block in range(lo, hi):
            k_slot, k_phase = fetch(k_flat, k_pages, start, table, layout, block, head, k_pipe, k_slot, k_phase,
                                    page_rows, PAGE_TOKENS, BLOCK_N, DIM, K_SLOTS)
            if block > lo:
                v_slot, v_phase = fetch(v_flat, v_pages, start, table, layout, block - 1, head, v_pipe, v_slot,
                                        v_phase, page_rows, PAGE_TOKENS, BLOCK_N, DIM, V_SLOTS)
        v_slot, v_phase = fetch(v_flat, v_pages, start, table, layout, hi - 1, head, v_pipe, v_slot, v_phase,
                                page_rows, PAGE_TOKENS, BLOCK_N, DIM, V_SLOTS)
        ticket = gl.atomic_add(state, 1, sem="relaxed")
        number += 1
        publish(ticket, number, tickets, ticket_full, ticket_empty)
    if gl.atomic_add(state + 1, 1) == gl.num_programs(0) - 1:  # the last program to leave rewinds the counters
        gl.store(state, 0)
        gl.store(state + 1, 0)


@gluon.jit
def _load_exponents(flat, flat_stride, pages, strides, start, length, table, layout, block, head,
                    PAGE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Biased exponents of the scales of a block; of tokens that it does not hold, those of 1."""
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = gl.arange(0, BLOCK_N, threads)
    is_resident, token = locate(block, layout, BLOCK_N)
    if is_resident:
        page = gl.load(table + token // PAGE_TOKENS).to(gl.int64)
        at = pages + page * strides[0] + head * strides[2] + (token % PAGE_TOKENS + columns) * strides[1]
        found = gl.load(at, mask=token + columns < layout[0], other=127)
    else:
        at = flat + head.to(gl.int64) * flat_stride + start + token + columns
        found = gl.load(at, mask=token + columns < length, other=127)
    return found


@gluon.jit
def _power_of_two(exponents):
    """Scales in float32; a biased exponent of 255 gives infinity, and zero times that is NaN."""
    return (exponents.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _widen(codes):
    """Eight-bit floats, as bytes, to bfloat16, 2**60 too small: sign and digits move to their places."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, digits, factor;
        mov.b32 factor, 0x5d805d80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.b32 digits, low, 4;
        and.b32 digits, digits, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, digits, 0xea;
        shr.b32 digits, high, 4;
        and.b32 digits, digits, 0x07f007f0;
        lop3.b32 high, high, 0x80008000, digits, 0xea;
        mul.bf16x2 $0, low, factor;
        mul.bf16x2 $1, high, factor;
        }
        """,
        "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)


@gluon.jit
def _decode_values(codes, exponents, scales, out, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Values of a block in bfloat16.

    Rows that are unused or of another sequence have a scale of 1, and any byte stands for a finite number here: a
    weight of zero times such a value is zero.
    """
    scales.store(_power_of_two(exponents) * 1152921504606846976.0)  # 2**60
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    for i in gl.static_range(BLOCK_N // 32):
        scale = scales.slice(i * 32, 32).load(gl.SliceLayout(1, threads)).to(gl.bfloat16)
        values = _widen(codes.slice(i * 32, 32).load(threads).to(gl.uint8, bitcast=True)) * scale[:, None]
        out.slice(i * 32, 32).store(values)
    hopper.fence_async_shared()


@gluon.jit
def _decode_block(exponents, v_pipe, slot, phase, value_pipe, value_slot, value_phase, scales, BLOCK_N: gl.constexpr,
                  DIM: gl.constexpr, V_SLOTS: gl.constexpr, VALUE_SLOTS: gl.constexpr):
    """Decode the next block of V, once it is there and its place is free; returns the next positions."""
    ring, full, empty = v_pipe
    values, values_full, values_empty = value_pipe
    mbarrier.wait(full.index(slot), phase)
    mbarrier.wait(values_empty.index(value_slot), value_phase ^ 1)
    _decode_values(ring.index(slot), exponents, scales, values.index(value_slot), BLOCK_N, DIM)
    mbarrier.arrive(values_full.index(value_slot), count=1)
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, V_SLOTS)
    value_slot, value_phase = next_slot(value_slot, value_phase, VALUE_SLOTS)
    return slot, phase, value_slot, value_phase


@gluon.jit
def _decoder(inputs, exponents, k_pipe, k_scales, v_pipe, value_pipe, v_scales, tickets, barriers, half_scale,
             FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr,
             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
             VALUE_SLOTS: gl.constexpr):
    """Prepare what the consumers need besides codes of K: scales of keys, and decoded values, tile after tile."""
    work, batch, num_context, table_stride = inputs
    k_flat, v_flat, flat_stride, k_pages, v_pages, strides = exponents
    k_full, k_empty = k_pipe[1], k_pipe[2]
    ticket_full, ticket_empty = barriers[2], barriers[3]
    num_tickets = gl.load(work) * NUM_HEADS
    number, k_slot, k_phase, slot, phase, value_slot, value_phase = 0, 0, 0, 0, 0, 0, 0
    ticket = take(number, tickets, ticket_full, ticket_empty)
    while ticket < num_tickets:
        item = work + FIELDS * (1 + ticket // NUM_HEADS)
        head = ticket % NUM_HEADS
        _, start, end, _, table, layout = read_tile(item, batch, num_context, table_stride, BLOCK_M, BLOCK_N)
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        length = end - start
        of_keys = _load_exponents(k_flat, flat_stride, k_pages, strides, start, length, table, layout, lo, head,
                                  PAGE_TOKENS, BLOCK_N)
        of_values = of_keys
        for block in range(lo, hi):
            mbarrier.wait(k_empty.index(k_slot), k_phase ^ 1)
            k_scales.index(k_slot).store(_power_of_two(of_keys) * half_scale)
            mbarrier.arrive(k_full.index(k_slot), count=1)
            k_slot, k_phase = next_slot(k_slot, k_phase, K_SLOTS)
            # Those of the next turn, so that nothing waits for them.
            of_keys = _load_exponents(k_flat, flat_stride, k_pages, strides, start, length, table, layout,
                                      gl.minimum(block + 1, hi - 1), head, PAGE_TOKENS, BLOCK_N)
            next_values = _load_exponents(v_flat, flat_stride, v_pages, strides, start, length, table, layout, block,
                                          head, PAGE_TOKENS, BLOCK_N)
            if block > lo:
                slot, phase, value_slot, value_phase = _decode_block(
                    of_values, v_pipe, slot, phase, value_pipe, value_slot, value_phase, v_scales, BLOCK_N, DIM,
                    V_SLOTS, VALUE_SLOTS)
            of_values = next_values
        slot, phase, value_slot, value_phase = _decode_block(
            of_values, v_pipe, slot, phase, value_pipe, value_slot, value_phase, v_scales, BLOCK_N, DIM, V_SLOTS,
            VALUE_SLOTS)
        number += 1
        ticket = take(number, tickets, ticket_full, ticket_empty)


@gluon.jit
def _scaled(scores, q_scale, k_scale):
    """Half the scaled q.k from products of codes; half the scale of q.k is part of the scales of keys."""
    return scores * q_scale[:, None] * k_scale[None, :]


@gluon.jit
def _step(acc, weights, query, q_scale, k_pipe, k_scales, k_slot, k_phase, value_pipe, slot, phase, layout, shared,
          block, first_row, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr,
          VALUE_SLOTS: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr):
    """Scores of this block and the values of the one before, in flight together; returns the sum and new weights."""
    ring, k_full, k_empty = k_pipe
    values, values_full, values_empty = value_pipe
    mbarrier.wait(k_full.index(k_slot), k_phase)
    zero = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    scores = hopper.warpgroup_mma(query, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(values_full.index(slot), phase)
    acc = hopper.warpgroup_mma(weights, values.index(slot), acc, is_async=True)
    k_scale = k_scales.index(k_slot).load(gl.SliceLayout(0, SCORES))
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    h = _scaled(scores, q_scale, k_scale)
    active = activate_masked(h, layout, shared, block, first_row, BLOCK_N, SCORES) if MASKED else activate(h)
    following = gl.convert_layout(active.to(weights.dtype), WEIGHTS)
    acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(values_empty.index(slot), count=1)
    k_slot, k_phase = next_slot(k_slot, k_phase, K_SLOTS)
    slot, phase = next_slot(slot, phase, VALUE_SLOTS)
    return acc, following, k_slot, k_phase, slot, phase


@gluon.jit
def _consumer(inputs, outputs, queries, q_exponents, q_stride, k_pipe, k_scales, value_pipe, tickets, barriers,
              inv_normaliser, GROUP: gl.constexpr, FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr,
              BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr, VALUE_SLOTS: gl.constexpr):
    """Compute 64 of a tile's rows, tile after tile."""
    work, batch, num_context, table_stride = inputs
    out, out_strides, partials, arrivals = outputs
    ring, k_full, k_empty = k_pipe
    values, values_full, values_empty = value_pipe
    q_full, q_empty, ticket_full, ticket_empty = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(DIM, 128), 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
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
        rows = start + first_row + gl.arange(0, 64, gl.SliceLayout(1, scores_layout))
        q_scale = _power_of_two(gl.load(q_exponents + head.to(gl.int64) * q_stride + rows, mask=rows < end, other=127))
        masked_from = gl.maximum(gl.minimum(layout[0] // BLOCK_N + layout[1], hi), lo + 1)
        mbarrier.wait(q_full.index(0), number & 1)
        mbarrier.wait(k_full.index(k_slot), k_phase)
        zero = gl.zeros([64, BLOCK_N], gl.float32, scores_layout)
        scores = hopper.warpgroup_mma(query, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        k_scale = k_scales.index(k_slot).load(gl.SliceLayout(0, scores_layout))
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        k_slot, k_phase = next_slot(k_slot, k_phase, K_SLOTS)
        active = activate_masked(_scaled(scores, q_scale, k_scale), layout, shared, lo, first_row, BLOCK_N,
                                 scores_layout)
        weights = gl.convert_layout(active.to(values.dtype), weights_layout)
        acc = gl.zeros([64, DIM], gl.float32, acc_layout)
        for block in range(lo + 1, masked_from):
            acc, weights, k_slot, k_phase, slot, phase = _step(
                acc, weights, query, q_scale, k_pipe, k_scales, k_slot, k_phase, value_pipe, slot, phase, layout,
                shared, block, first_row, False, BLOCK_N, K_SLOTS, VALUE_SLOTS, scores_layout, weights_layout)
        for block in range(masked_from, hi):
            acc, weights, k_slot, k_phase, slot, phase = _step(
                acc, weights, query, q_scale, k_pipe, k_scales, k_slot, k_phase, value_pipe, slot, phase, layout,
                shared, block, first_row, True, BLOCK_N, K_SLOTS, VALUE_SLOTS, scores_layout, weights_layout)
        mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(values_full.index(slot), phase)
        acc = hopper.warpgroup_mma(weights, values.index(slot), acc, is_async=True)
        acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(values_empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, VALUE_SLOTS)
        if gl.load(item + 5) > 1:
            store_part(acc, item, head, out, out_strides, start + first_row, end, partials, arrivals, inv_normaliser,
                       GROUP, NUM_HEADS, DIM, acc_layout)
        else:
            store_rows(out, out_strides, acc, start + first_row, end, head, 0, inv_normaliser, DIM, acc_layout)
        number += 1
        ticket = take(number, tickets, ticket_full, ticket_empty)


# What differs from batch to batch or arena to arena is read by single threads and not worth a compilation of its own.
@gluon.jit(
    do_not_specialize=["flat_stride", "table_stride", "num_context", "page_rows"],
    do_not_specialize_on_alignment=["cu_tokens", "num_resident", "num_new", "page_table"],
)
def _attention_kernel(
    q_flat, k_flat, v_flat, k_pages, v_pages, q_exponents, k_exponents, v_exponents, flat_stride, k_page_exponents,
    v_page_exponents, exponent_strides, out, out_strides, work, state, cu_tokens, num_resident, num_new, page_table,
    table_stride, partials, arrivals, num_context, half_scale, inv_normaliser, page_rows,
    FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    VALUE_SLOTS: gl.constexpr,
):
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], gl.bfloat16)
    scales_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(q_flat.dtype, [2, BLOCK_M // 2, DIM], q_flat.layout)
    keys = gl.allocate_shared_memory(k_flat.dtype, [K_SLOTS, BLOCK_N, DIM], k_flat.layout)
    codes = gl.allocate_shared_memory(v_flat.dtype, [V_SLOTS, BLOCK_N, DIM], v_flat.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [VALUE_SLOTS, BLOCK_N, DIM], values_layout)
    k_scales = gl.allocate_shared_memory(gl.float32, [K_SLOTS, BLOCK_N], scales_layout)
    v_scales = gl.allocate_shared_memory(gl.float32, [BLOCK_N], scales_layout)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 1], scales_layout)
    # Keys are full when the producer has fetched codes and the decoder has written scales; both consumers free them.
    k_pipe = (keys, make_barriers(K_SLOTS, 2), make_barriers(K_SLOTS, 2))
    v_pipe = (codes, make_barriers(V_SLOTS, 1), make_barriers(V_SLOTS, 1))
    value_pipe = (values, make_barriers(VALUE_SLOTS, 1), make_barriers(VALUE_SLOTS, 2))
    barriers = (make_barriers(1, 1), make_barriers(1, 2), make_barriers(2, 1), make_barriers(2, 3))
    sources = (q_flat, k_flat, v_flat, k_pages, v_pages)
    exponents = (k_exponents, v_exponents, flat_stride, k_page_exponents, v_page_exponents, exponent_strides)
    inputs = (work, (cu_tokens, num_resident, num_new, page_table), num_context, table_stride)
    outputs = (out, out_strides, partials, arrivals)
    gl.warp_specialize(
        [
            (_consumer, (inputs, outputs, queries, q_exponents, flat_stride, k_pipe, k_scales, value_pipe, tickets,
                         barriers, inv_normaliser, 0, FIELDS, NUM_HEADS, DIM, BLOCK_M, BLOCK_N, K_SLOTS,
                         VALUE_SLOTS)),
            (_consumer, (inputs, outputs, queries, q_exponents, flat_stride, k_pipe, k_scales, value_pipe, tickets,
                         barriers, inv_normaliser, 1, FIELDS, NUM_HEADS, DIM, BLOCK_M, BLOCK_N, K_SLOTS,
                         VALUE_SLOTS)),
            (_decoder, (inputs, exponents, k_pipe, k_scales, v_pipe, value_pipe, v_scales, tickets, barriers,
                        half_scale, FIELDS, NUM_HEADS, DIM, PAGE_TOKENS, BLOCK_M, BLOCK_N, K_SLOTS, V_SLOTS,
                        VALUE_SLOTS)),
            (_producer, (inputs, sources, page_rows, state, queries, k_pipe, v_pipe, tickets, barriers, FIELDS,
                         NUM_HEADS, DIM, PAGE_TOKENS, BLOCK_M, BLOCK_N, K_SLOTS, V_SLOTS)),
        ],
        [4, 4, 1],
        [208, 56, 40],  # the registers of a multiprocessor, less what fetching and decoding can do without
    )


# fmt: on


def supports(q: Tensor, v: Tensor, k_pages: ScaledPages, v_pages: ScaledPages, tiling: Tiling) -> bool:
    """Whether the copy engine and the matrix units can read pages like these. q, v: (tokens, heads, dim), projected."""
    dim = q.shape[2]
    if not (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 and dim in (64, 128, 256)):
        return False
    if q.dtype != torch.bfloat16 or k_pages.dtype != torch.float8_e4m3fn or v.shape[2] != dim or not q.numel():
        return False
    if tiling.block_n % 32 or k_pages.shape[1] % tiling.block_n:
        return False
    return all(_is_readable(pages.codes, dim) for pages in (k_pages, v_pages)) and (
        k_pages.codes.stride() == v_pages.codes.stride() and k_pages.exponents.stride() == v_pages.exponents.stride()
    )


def _is_readable(codes: Tensor, dim: int) -> bool:
    rows_are_whole = codes.stride(0) % codes.stride(1) == 0 and codes.stride()[-2:] == (dim, 1)
    return rows_are_whole and codes.data_ptr() % 16 == 0 and codes.stride(1) % 16 == 0 and codes.numel() > 0


def launch(
    tokens: CodedTokens,
    pages: tuple[ScaledPages, ScaledPages],
    batch: RaggedBatch,
    out: Tensor,
    plan: AttentionPlan,
    scores: tuple[float, float],
) -> None:
    """Run the plan's work list. pages: of K and V, which `supports` allows; scores: scale of q.k and normaliser."""
    k_pages, v_pages = pages
    tiling, dim = plan.tiling, tokens.q.codes.shape[2]
    block = tiling.block_n * dim
    slots = min(2 * _MAX_SLOTS, (_SHARED_BYTES - tiling.block_m * dim - _VALUE_SLOTS * 2 * block) // block)
    page_rows = k_pages.codes.stride(0) // k_pages.codes.stride(1)
    flats = ((tokens.q, tiling.block_m // 2), (tokens.k, tiling.block_n), (tokens.v, tiling.block_n))
    _attention_kernel[(tiling.num_programs,)](
        *(rows_descriptor(t.codes, t.codes.shape[0], t.codes.stride(0), rows) for t, rows in flats),
        *(pages_descriptor(t.codes, tiling.block_n) for t in (k_pages, v_pages)),
        *(each.exponents for each in tokens),
        *(tokens.q.exponents.stride(0), k_pages.exponents, v_pages.exponents, k_pages.exponents.stride()),
        *(out, out.stride()[:2], plan.work, plan.state, batch.cu_tokens, batch.num_resident, batch.num_new),
        *(batch.page_table, batch.page_table.stride(0), plan.partials, plan.arrivals, batch.num_context),
        *(scores[0] / 2, 1 / scores[1], page_rows, FIELDS, tiling.num_heads, dim, batch.page_tokens),
        *(tiling.block_m, tiling.block_n, slots - slots // 2, slots // 2, _VALUE_SLOTS),
        num_warps=4,
    )
