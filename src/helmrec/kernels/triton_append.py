"""The append of K/V to their pages in Triton: the fast twin of `append_kv` in `attention.py`."""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.kv_rounding import Pages, ScaledPages
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_rounding import FORMAT_OF, decode, encode_scaled, exponent_of, lane_order, power_of_two

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _load_rows(source, strides, rows, live, DIM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Whole token rows, all heads; and which of them hold a value that is not finite."""
    columns = tl.arange(0, PADDED)
    at = (rows * strides[0])[:, None] + (columns // DIM * strides[1] + columns % DIM)[None, :]
    taken = tl.load(source + at, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)
    is_finite = tl.abs(taken.to(tl.float32)) < float("inf")  # false of NaN
    return taken, tl.min(is_finite.to(tl.int32), axis=1) == 0


@triton.jit
def _store_rows_in(target, row_starts, head_stride, values, mask, DIM: tl.constexpr, WIDTH: tl.constexpr,
                   PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    at = row_starts[:, None] + (columns // DIM * head_stride + columns % DIM)[None, :]
    tl.store(target + at, values, mask=mask[:, None] & (columns < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kernel(k, v, k_pages, v_pages, write_slots, v_scale, k_strides, v_strides, k_page_strides, v_page_strides,
                   num_tokens, PAGE_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, QK: tl.constexpr, V: tl.constexpr,
                   QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr):
    """Isolate tokens that are not finite, as the twin does, and copy ROWS tokens to their slots; below zero is none.

    If SCALED, the values are multiplied by the factor of their token first, in place.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_tokens
    slot = tl.load(write_slots + rows, mask=live, other=-1)
    page, offset, kept = slot // PAGE_TOKENS, slot % PAGE_TOKENS, slot >= 0
    keys, wrong_key = _load_rows(k, k_strides, rows, live, QK, NUM_HEADS * QK, QK_WIDTH)
    values, wrong_value = _load_rows(v, v_strides, rows, live, V, NUM_HEADS * V, V_WIDTH)
    is_wrong = wrong_key | wrong_value
    changed = live & is_wrong
    if SCALED:
        factors = tl.load(v_scale + rows, mask=live, other=0.0).to(tl.float32)
        values = values.to(tl.float32) * factors[:, None]
        changed = live
    keys = tl.where(is_wrong[:, None], float("nan"), keys).to(k.dtype.element_ty)
    values = tl.where(is_wrong[:, None], 0.0, values).to(v.dtype.element_ty)
    _store_rows_in(k_pages, page * k_page_strides[0] + offset * k_page_strides[1], k_page_strides[2], keys, kept, QK,
                   NUM_HEADS * QK, QK_WIDTH)
    _store_rows_in(v_pages, page * v_page_strides[0] + offset * v_page_strides[1], v_page_strides[2], values, kept, V,
                   NUM_HEADS * V, V_WIDTH)
    _store_rows_in(k, rows * k_strides[0], k_strides[1], keys, live & is_wrong, QK, NUM_HEADS * QK, QK_WIDTH)
    _store_rows_in(v, rows * v_strides[0], v_strides[1], values, changed, V, NUM_HEADS * V, V_WIDTH)


@triton.jit
def _load_head(source, strides, rows, live, head, DIM: tl.constexpr, PADDED: tl.constexpr):
    """One head of ROWS tokens in float32."""
    dims = tl.arange(0, PADDED)
    at = (rows * strides[0])[:, None] + head * strides[1] + dims[None, :]
    return tl.load(source + at, mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _round_rows(values, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Codes and biased exponents of rows, what they stand for in DTYPE, and which rows are not finite then."""
    peak = tl.max(tl.abs(values), axis=1)
    finite = tl.min((tl.abs(values) < float("inf")).to(tl.int32), axis=1) == 1  # false of NaN
    exponent = exponent_of(tl.where(finite, peak, 0.0), FORMAT)
    scaled = tl.where(finite[:, None], values * power_of_two(-exponent)[:, None], 0.0)
    codes = encode_scaled(scaled, FORMAT)
    biased = (exponent + 127).to(tl.uint8)
    rounded = decode(codes, biased, FORMAT).to(DTYPE)
    still_finite = tl.min((tl.abs(rounded.to(tl.float32)) < float("inf")).to(tl.int32), axis=1) == 1
    return codes, biased, rounded, (finite & still_finite) == 0


@triton.jit
def _store_codes(pages, exponents, strides, exponent_strides, page, offset, kept, head, codes, biased,
                 DIM: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr):
    dims = tl.arange(0, PADDED)
    place = lane_order(offset) if LANES else offset
    at = page * strides[0] + place * strides[1] + head * strides[2]
    tl.store(pages + at[:, None] + dims[None, :] * strides[3], codes, mask=kept[:, None] & (dims < DIM)[None, :])
    at = page * exponent_strides[0] + offset * exponent_strides[1] + head * exponent_strides[2]
    tl.store(exponents + at, biased, mask=kept)


@triton.jit(do_not_specialize=["num_tokens"])
def _append_codes_kernel(k, v, k_pages, v_pages, k_exponents, v_exponents, write_slots, v_scale, k_strides, v_strides,
                         k_page_strides, v_page_strides, k_exponent_strides, v_exponent_strides, num_tokens,
                         PAGE_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, QK: tl.constexpr, V: tl.constexpr,
                         QK_PADDED: tl.constexpr, V_PADDED: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
                         FORMAT: tl.constexpr, LANES: tl.constexpr):
    """As `_append_kernel`, with pages of codes: k and v of every token are rounded in place too."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_tokens
    slot = tl.load(write_slots + rows, mask=live, other=-1)
    page, offset, kept = slot // PAGE_TOKENS, slot % PAGE_TOKENS, slot >= 0
    factors = tl.full((ROWS,), 1.0, tl.float32)
    if SCALED:
        factors = tl.load(v_scale + rows, mask=live, other=0.0).to(tl.float32)
    is_wrong = tl.zeros((ROWS,), tl.int1)
    for head in range(NUM_HEADS):  # a token is isolated as a whole, so all heads are looked at before one is stored
        keys = _load_head(k, k_strides, rows, live, head, QK, QK_PADDED)
        values = _load_head(v, v_strides, rows, live, head, V, V_PADDED)
        if SCALED:
            values = (values * factors[:, None]).to(v.dtype.element_ty).to(tl.float32)
        _, _, _, wrong_key = _round_rows(keys, k.dtype.element_ty, FORMAT)
        _, _, _, wrong_value = _round_rows(values, v.dtype.element_ty, FORMAT)
        is_wrong = is_wrong | wrong_key | wrong_value
    qk_dims, v_dims = tl.arange(0, QK_PADDED), tl.arange(0, V_PADDED)
    for head in range(NUM_HEADS):
        keys = _load_head(k, k_strides, rows, live, head, QK, QK_PADDED)
        values = _load_head(v, v_strides, rows, live, head, V, V_PADDED)
        if SCALED:
            values = (values * factors[:, None]).to(v.dtype.element_ty).to(tl.float32)
        codes, biased, rounded, _ = _round_rows(tl.where(is_wrong[:, None], 0.0, keys), k.dtype.element_ty, FORMAT)
        biased = tl.where(is_wrong, 255, biased.to(tl.int32)).to(tl.uint8)  # reads as NaN
        rounded = tl.where(is_wrong[:, None], float("nan"), rounded).to(k.dtype.element_ty)
        _store_codes(k_pages, k_exponents, k_page_strides, k_exponent_strides, page, offset, kept, head, codes, biased,
                     QK, QK_PADDED, False)
        tl.store(k + (rows * k_strides[0])[:, None] + head * k_strides[1] + qk_dims[None, :], rounded,
                 mask=live[:, None] & (qk_dims < QK)[None, :])
        codes, biased, rounded, _ = _round_rows(tl.where(is_wrong[:, None], 0.0, values), v.dtype.element_ty, FORMAT)
        _store_codes(v_pages, v_exponents, v_page_strides, v_exponent_strides, page, offset, kept, head, codes, biased,
                     V, V_PADDED, LANES)
        tl.store(v + (rows * v_strides[0])[:, None] + head * v_strides[1] + v_dims[None, :], rounded,
                 mask=live[:, None] & (v_dims < V)[None, :])


# fmt: on


def append_kv(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, batch: RaggedBatch) -> None:
    """As the twin: isolate non-finite tokens, and write those that are kept into their pages. Dims contiguous.

    Scales values by the batch's `v_scale` on the way, which the twin's caller does.
    """
    if isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor):
        _append(k, v, k_pages, v_pages, batch)
    else:
        assert isinstance(k_pages, ScaledPages), "K and V are kept alike"
        assert isinstance(v_pages, ScaledPages), "K and V are kept alike"
        _append_codes(k, v, k_pages, v_pages, batch)


def _append_codes(k: Tensor, v: Tensor, k_pages: ScaledPages, v_pages: ScaledPages, batch: RaggedBatch) -> None:
    tokens, heads, qk = k.shape
    qk_padded, v_padded = (triton.next_power_of_2(dim) for dim in (qk, v.shape[2]))
    rows = max(1, 2048 // max(qk_padded, v_padded))
    _append_codes_kernel[(triton.cdiv(tokens, rows),)](
        k,
        v,
        *(pages.codes.view(torch.uint8) for pages in (k_pages, v_pages)),
        *(pages.exponents for pages in (k_pages, v_pages)),
        batch.write_slots,
        batch.write_slots if batch.v_scale is None else batch.v_scale,
        k.stride()[:2],
        v.stride()[:2],
        k_pages.codes.stride(),
        v_pages.codes.stride(),
        k_pages.exponents.stride(),
        v_pages.exponents.stride(),
        tokens,
        PAGE_TOKENS=batch.page_tokens,
        NUM_HEADS=heads,
        QK=qk,
        V=v.shape[2],
        QK_PADDED=qk_padded,
        V_PADDED=v_padded,
        ROWS=rows,
        SCALED=batch.v_scale is not None,
        FORMAT=FORMAT_OF[k_pages.dtype],
        LANES=v_pages.in_lane_order,
        num_warps=4,
    )


def _append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch) -> None:
    tokens, heads, qk = k.shape
    qk_width, v_width = (triton.next_power_of_2(heads * dim) for dim in (qk, v.shape[2]))
    rows = max(1, 4096 // max(qk_width, v_width))
    _append_kernel[(triton.cdiv(tokens, rows),)](
        k,
        v,
        k_pages,
        v_pages,
        batch.write_slots,
        batch.write_slots if batch.v_scale is None else batch.v_scale,
        k.stride()[:2],
        v.stride()[:2],
        k_pages.stride()[:3],
        v_pages.stride()[:3],
        tokens,
        PAGE_TOKENS=batch.page_tokens,
        NUM_HEADS=heads,
        QK=qk,
        V=v.shape[2],
        QK_WIDTH=qk_width,
        V_WIDTH=v_width,
        ROWS=rows,
        SCALED=batch.v_scale is not None,
        num_warps=8,
    )
