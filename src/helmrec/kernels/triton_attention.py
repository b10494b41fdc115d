"""HSTU attention over paged K/V in Triton: the fast twin of `attention.py`.

One persistent kernel takes query tiles from a work list on the device. Resident keys are read from pages, the step's
own keys from the flat tensors, so that nothing waits for the append. This module does not know layers, weights or
owners.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels import hopper_attention
from helmrec.kernels.attention_plan import AttentionInputs, AttentionPlan, padded, plan_for
from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.layer import RelativeBias
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_tiles import (
    KeptPages,
    load_flat,
    load_paged,
    pages_descriptor,
    rows_descriptor,
    tma_can_read,
)
from helmrec.kernels.work_list import FIELDS

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _silu_of_twice(h, FAST_TANH: tl.constexpr):
    """silu(2h) = h + h * tanh(h): one special-function instruction instead of an exponential and a division."""
    if FAST_TANH:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1)
        active = h + h * t
    else:
        active = 2 * h * tl.sigmoid(2 * h)
    return active


@triton.jit
def _half_bias(bias, times, row, key, num_tokens, NUM_EDGES: tl.constexpr,
               EDGE_STEP: tl.constexpr):
    """Half the relative bias of rows and keys, both numbered in the whole history.

    bias: pointers to the biases by distance and by time bucket, and to the edges of the buckets.
    times: of this sequence's tokens, and last the time that follows them.
    """
    distance = row[:, None] - key[None, :]
    inside = (distance >= 0) & (row < num_tokens)[:, None]
    row_time = tl.load(times + row + 1, mask=row < num_tokens, other=0)
    wait = row_time[:, None] - tl.load(times + key, mask=key < num_tokens, other=0)[None, :]
    bucket = tl.zeros_like(distance)
    for i in tl.static_range(1, 32):  # bisection: the number of edges that the time reaches
        if EDGE_STEP >> i > 0:
            reached = bucket + (EDGE_STEP >> i)
            edge = tl.load(bias[2] + reached - 1, mask=inside & (reached <= NUM_EDGES), other=0)
            bucket = tl.where((reached <= NUM_EDGES) & (edge <= wait), reached, bucket)
    by_distance = tl.load(bias[0] + distance, mask=inside, other=0.0).to(tl.float32)
    return 0.5 * (by_distance + tl.load(bias[1] + bucket, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _in_window(row, key, end, window, num_full):
    """Which keys are near enough for each row. Rows from `end` on are candidates and stand at `end`."""
    at = tl.minimum(row, end)
    sees_all = (at >= end - num_full) & (num_full > 0)
    return (at[:, None] - key[None, :] <= window) | sees_all[:, None]


@triton.jit
def _weights(q, k, row, key, half_scale, bias, times, num_tokens, window, full, FAST_TANH: tl.constexpr,
             PRECISION: tl.constexpr, NUM_EDGES: tl.constexpr, EDGE_STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
             HAS_WINDOW: tl.constexpr):
    """What each row takes of each key, both numbered in the whole history, candidates after it."""
    half = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * half_scale
    if HAS_BIAS:
        half += _half_bias(bias, times, row, key, num_tokens, NUM_EDGES, EDGE_STEP)
    weights = _silu_of_twice(half, FAST_TANH)
    if HAS_WINDOW:
        weights = tl.where(_in_window(row, key, num_tokens, window, full), weights, 0.0)
    return weights


@triton.jit
def _add_block(acc, q, k, v, row, key, half_scale, bias, times, num_tokens, window, full, FAST_TANH: tl.constexpr,
               PRECISION: tl.constexpr, NUM_EDGES: tl.constexpr, EDGE_STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
               HAS_WINDOW: tl.constexpr):
    weights = _weights(q, k, row, key, half_scale, bias, times, num_tokens, window, full, FAST_TANH, PRECISION,
                       NUM_EDGES, EDGE_STEP, HAS_BIAS, HAS_WINDOW)
    return tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)


@triton.jit
def _add_masked_block(acc, q, k, v, visible, live, row, key, half_scale, bias, times, num_tokens, window, full,
                      FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, NUM_EDGES: tl.constexpr,
                      EDGE_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """As `_add_block`; values of keys that are not live may be anything, and are cleared: 0 * NaN is NaN."""
    weights = _weights(q, k, row, key, half_scale, bias, times, num_tokens, window, full, FAST_TANH, PRECISION,
                       NUM_EDGES, EDGE_STEP, HAS_BIAS, HAS_WINDOW)
    weights = tl.where(visible, weights, 0.0)
    v = tl.where(live[:, None], v, 0.0)
    return tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)


@triton.jit
def _store_rows(out, strides, values, row, row_end, head, first_dim, inv_normaliser, ROWS: tl.constexpr,
                WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Finished rows of one head, dims first_dim to first_dim + WIDTH; rows from row_end on are not stored."""
    rows = row + tl.arange(0, ROWS)
    dims = first_dim + tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * strides[0] + head * strides[1] + dims[None, :]
    live = (rows < row_end)[:, None] & (dims < DIM)[None, :]
    tl.store(out + at, (values * inv_normaliser).to(out.dtype.element_ty), mask=live)


@triton.jit
def _store_part(acc, item, head, out, out_strides, row, row_end, partials, arrivals, inv_normaliser,
                NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr, V: tl.constexpr, V_PADDED: tl.constexpr):
    """Publish this part of a split tile; the last part to arrive adds all parts in order and stores the rows."""
    part, parts, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    size: tl.constexpr = BLOCK_M * V_PADDED
    rows = tl.arange(0, BLOCK_M)[:, None] * V_PADDED
    base = partials + (slot * NUM_HEADS + head * parts).to(tl.int64) * size
    tl.store(base + part * size + rows + tl.arange(0, V_PADDED)[None, :], acc)
    tl.debug_barrier()  # every thread's stores come before the arrival that publishes them
    counter = arrivals + slot * NUM_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
        tl.store(counter, 0)  # for the next launch
        width: tl.constexpr = min(V_PADDED, 64)  # of a slice: few enough registers to keep its loads in flight
        for first in range(0, V_PADDED, width):
            total = tl.zeros((BLOCK_M, width), tl.float32)
            at = base + first + rows + tl.arange(0, width)[None, :]
            for i in range(parts):
                total += tl.load(at + i * size, cache_modifier=".cg")  # L1 does not see other programs' stores
            _store_rows(out, out_strides, total, row, row_end, head, first, inv_normaliser, BLOCK_M, width, V)


@triton.jit
def _attend_item(  # one tile from start to end: splitting it further would only hand the same locals around
    item, head, q_flat, k_flat, v_flat, k_pages, v_pages, out, q_strides, k_strides, v_strides, k_page_strides,
    v_page_strides, out_strides, cu_tokens, num_resident, num_new, page_table, table_stride, partials, arrivals,
    num_context, half_scale, inv_normaliser, bias, times, cu_times, window, num_full, exponents, exponent_strides,
    NUM_HEADS: tl.constexpr, QK: tl.constexpr, V: tl.constexpr, QK_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, NUM_EDGES: tl.constexpr, EDGE_STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TAIL: tl.constexpr, FORMAT: tl.constexpr,
    LANES: tl.constexpr,
):
    sequence, row, lo, hi = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    start, end = tl.load(cu_tokens + sequence), tl.load(cu_tokens + sequence + 1)
    resident = tl.load(num_resident + sequence)
    shared = tl.load(num_new + sequence) + num_context  # own rows that later rows see
    table = page_table + sequence.to(tl.int64) * table_stride

    # Blocks are numbered: resident, then own blocks every row of the tile sees whole, then masked own ones.
    paged = tl.cdiv(resident, BLOCK_N)
    whole = tl.minimum(row + 1, shared) // BLOCK_N
    seen = tl.cdiv(tl.minimum(row + BLOCK_M, shared), BLOCK_N)
    skipped = tl.maximum(row // BLOCK_N - seen, 0)  # other candidates' blocks, between history and the diagonal

    q = load_flat(q_flat, q_strides, start + row, end, head, BLOCK_M, QK, QK_PADDED, USE_TMA)
    acc = tl.zeros((BLOCK_M, V_PADDED), tl.float32)
    rows = row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    num_tokens = resident + shared  # of the history; with a bias, all rows are of it
    full = 0
    if HAS_TAIL:
        full = tl.load(num_full + sequence)
    if HAS_BIAS:
        times += tl.load(cu_times + sequence)

    row_at = resident + rows
    for block in tl.range(lo, tl.minimum(hi, resident // BLOCK_N)):
        k = load_paged(k_pages, k_page_strides, exponents[0], exponent_strides, table, block * BLOCK_N, resident, head,
                       PAGE_TOKENS, BLOCK_N, QK, QK_PADDED, USE_TMA, FORMAT, False)
        v = load_paged(v_pages, v_page_strides, exponents[1], exponent_strides, table, block * BLOCK_N, resident, head,
                       PAGE_TOKENS, BLOCK_N, V, V_PADDED, USE_TMA, FORMAT, LANES)
        acc = _add_block(acc, q, k, v, row_at, block * BLOCK_N + columns, half_scale, bias, times, num_tokens, window,
                         full, FAST_TANH, PRECISION, NUM_EDGES, EDGE_STEP, HAS_BIAS, HAS_WINDOW)
    for block in tl.range(tl.maximum(lo, paged), tl.minimum(hi, paged + whole)):
        own = (block - paged) * BLOCK_N
        k = load_flat(k_flat, k_strides, start + own, end, head, BLOCK_N, QK, QK_PADDED, USE_TMA)
        v = load_flat(v_flat, v_strides, start + own, end, head, BLOCK_N, V, V_PADDED, USE_TMA)
        acc = _add_block(acc, q, k, v, row_at, resident + own + columns, half_scale, bias, times, num_tokens, window,
                         full, FAST_TANH, PRECISION, NUM_EDGES, EDGE_STEP, HAS_BIAS, HAS_WINDOW)
    # At most one block: the page the resident tokens end in.
    for block in tl.range(tl.maximum(lo, resident // BLOCK_N), tl.minimum(hi, paged), num_stages=1):
        k = load_paged(k_pages, k_page_strides, exponents[0], exponent_strides, table, block * BLOCK_N, resident, head,
                       PAGE_TOKENS, BLOCK_N, QK, QK_PADDED, USE_TMA, FORMAT, False)
        v = load_paged(v_pages, v_page_strides, exponents[1], exponent_strides, table, block * BLOCK_N, resident, head,
                       PAGE_TOKENS, BLOCK_N, V, V_PADDED, USE_TMA, FORMAT, LANES)
        key = block * BLOCK_N + columns
        live = key < resident
        acc = _add_masked_block(acc, q, k, v, live[None, :], live, row_at, key, half_scale, bias, times, num_tokens,
                                window, full, FAST_TANH, PRECISION, NUM_EDGES, EDGE_STEP, HAS_BIAS, HAS_WINDOW)
    # The diagonal. A candidate's own key is one of a block of them: that costs less than a loop of its own.
    for block in tl.range(tl.maximum(lo, paged + whole), hi, num_stages=1):
        own = block - paged
        own += tl.where(own >= seen, skipped, 0)
        at = start + own * BLOCK_N
        k = load_flat(k_flat, k_strides, at, end, head, BLOCK_N, QK, QK_PADDED, USE_TMA)
        v = load_flat(v_flat, v_strides, at, end, head, BLOCK_N, V, V_PADDED, USE_TMA)
        column = own * BLOCK_N + columns
        visible = (column[None, :] <= tl.minimum(rows, shared - 1)[:, None]) | (column[None, :] == rows[:, None])
        acc = _add_masked_block(acc, q, k, v, visible, start + column < end, row_at, resident + column, half_scale,
                                bias, times, num_tokens, window, full, FAST_TANH, PRECISION, NUM_EDGES, EDGE_STEP,
                                HAS_BIAS, HAS_WINDOW)

    if tl.load(item + 5) > 1:
        _store_part(acc, item, head, out, out_strides, start + row, end, partials, arrivals, inv_normaliser, NUM_HEADS,
                    BLOCK_M, V, V_PADDED)
    else:
        _store_rows(out, out_strides, acc, start + row, end, head, 0, inv_normaliser, BLOCK_M, V_PADDED, V)


@triton.jit
def _attention_kernel(
    work, state, q_flat, k_flat, v_flat, k_pages, v_pages, out, q_strides, k_strides, v_strides, k_page_strides,
    v_page_strides, out_strides, cu_tokens, num_resident, num_new, page_table, table_stride, partials, arrivals,
    num_context, half_scale, inv_normaliser, bias, times, cu_times, window, num_full, exponents, exponent_strides,
    FIELDS: tl.constexpr, NUM_HEADS: tl.constexpr, QK: tl.constexpr, V: tl.constexpr, QK_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, NUM_EDGES: tl.constexpr,
    EDGE_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TAIL: tl.constexpr,
    FORMAT: tl.constexpr, LANES: tl.constexpr,
):
    """Take (item, head) tickets until none is left; the last program to leave rewinds the counters."""
    num_tickets = tl.load(work) * NUM_HEADS
    ticket = tl.atomic_add(state, 1, sem="relaxed")
    while ticket < num_tickets:
        _attend_item(work + FIELDS * (1 + ticket // NUM_HEADS), ticket % NUM_HEADS, q_flat, k_flat, v_flat, k_pages,
                     v_pages, out, q_strides, k_strides, v_strides, k_page_strides, v_page_strides, out_strides,
                     cu_tokens, num_resident, num_new, page_table, table_stride, partials, arrivals, num_context,
                     half_scale, inv_normaliser, bias, times, cu_times, window, num_full, exponents, exponent_strides,
                     NUM_HEADS, QK, V, QK_PADDED, V_PADDED, PAGE_TOKENS, BLOCK_M, BLOCK_N, USE_TMA, FAST_TANH,
                     PRECISION, NUM_EDGES, EDGE_STEP, HAS_BIAS, HAS_WINDOW, HAS_TAIL, FORMAT, LANES)
        ticket = tl.atomic_add(state, 1, sem="relaxed")
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state, 0)
        tl.store(state + 1, 0)


# fmt: on


def attend(
    q: Tensor,  # (tokens, heads, qk)
    k: Tensor,  # (tokens, heads, qk)
    v: Tensor,  # (tokens, heads, v)
    k_pages: Pages,  # (pages, page_tokens, heads, qk)
    v_pages: Pages,  # (pages, page_tokens, heads, v)
    batch: RaggedBatch,
    *,
    scale: float,
    normaliser: float,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,  # (tokens, heads, v), any row and head stride
    bias: RelativeBias | None = None,
) -> Tensor:
    """Attention of every new token, context token and candidate of the batch, as the twin defines it.

    New tokens are read from k and v, resident ones from pages; values of tokens are finite, as `append_kv` leaves
    them. Rows of no sequence are left as they are in out. Without a plan one is made, which waits for the device.
    """
    plan = plan_for(q, v, batch) if plan is None else plan
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    kept = KeptPages.of(k_pages, v_pages, unused=batch.cu_tokens)
    sources = AttentionInputs(q, k, v, kept.k, kept.v)
    if bias is None and batch.window is None and hopper_attention.supports(sources, plan.tiling.block_n):
        hopper_attention.launch(sources, batch, out, plan, scale, normaliser)
    else:
        _launch(sources, kept, batch, out, plan, _Scores(scale, normaliser, bias))
    return out


class _Scores(NamedTuple):
    """How q.k becomes a weight."""

    scale: float
    normaliser: float
    bias: RelativeBias | None


def _launch(
    sources: AttentionInputs,
    kept: KeptPages,
    batch: RaggedBatch,
    out: Tensor,
    plan: AttentionPlan,
    scores: _Scores,
) -> None:
    q, k, v, k_pages, v_pages = sources
    bias = scores.bias
    assert bias is None or batch.times is not None, "a bias by time needs times"
    unused = batch.cu_tokens  # in place of pointers that are not read
    tiling, launch = plan.tiling, plan.launch
    use_tma = q.dtype != torch.float32 and tma_can_read(sources, tiling.block_n)
    readers: tuple[Any, ...] = sources
    if use_tma:
        flat = (rows_descriptor(t, n) for t, n in ((q, tiling.block_m), (k, tiling.block_n), (v, tiling.block_n)))
        readers = (*flat, pages_descriptor(k_pages, tiling.block_n), pages_descriptor(v_pages, tiling.block_n))
    _attention_kernel[(tiling.num_programs,)](
        plan.work,
        plan.state,
        *readers,
        out,
        q.stride()[:2],
        k.stride()[:2],
        v.stride()[:2],
        k_pages.stride(),
        v_pages.stride(),
        out.stride()[:2],
        batch.cu_tokens,
        batch.num_resident,
        batch.num_new,
        batch.page_table,
        batch.page_table.stride(0),
        plan.partials,
        plan.arrivals,
        batch.num_context,
        scores.scale / 2,
        1 / scores.normaliser,
        (unused,) * 3 if bias is None else tuple(bias),
        unused if batch.times is None else batch.times,
        unused if batch.cu_times is None else batch.cu_times,
        0 if batch.window is None else batch.window.length,
        unused if batch.num_full is None else batch.num_full,
        kept.exponents,
        kept.exponent_strides,
        **_constants(sources, batch, plan, bias),
        USE_TMA=use_tma,
        FORMAT=kept.format,
        LANES=kept.lanes,
        num_warps=launch.num_warps,
        # A bias and decoded blocks take shared memory too.
        num_stages=launch.num_stages if bias is None and not kept.format else min(2, launch.num_stages),
    )


def _constants(
    sources: AttentionInputs, batch: RaggedBatch, plan: AttentionPlan, bias: RelativeBias | None
) -> dict[str, Any]:
    """What a kernel is compiled for, besides how it reads pages."""
    q, qk_dim, v_dim, tiling = sources.q, sources.q.shape[2], sources.v.shape[2], plan.tiling
    half = q.dtype != torch.float32
    return {
        "FIELDS": FIELDS,
        "NUM_HEADS": tiling.num_heads,
        "QK": qk_dim,
        "V": v_dim,
        "QK_PADDED": padded(qk_dim),
        "V_PADDED": padded(v_dim),
        "PAGE_TOKENS": batch.page_tokens,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "FAST_TANH": half and q.is_cuda,
        "PRECISION": "tf32" if half else "ieee",
        "NUM_EDGES": 0 if bias is None else bias.edges.numel(),
        "EDGE_STEP": 1 if bias is None else triton.next_power_of_2(bias.edges.numel() + 1),
        "HAS_BIAS": bias is not None,
        "HAS_WINDOW": batch.window is not None,
        "HAS_TAIL": batch.window is not None and batch.num_full is not None,
    }
