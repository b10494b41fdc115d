"""The append of K/V to their pages in Triton: the fast twin of `append_kv` in `attention.py`."""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.ragged import RaggedBatch

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


@triton.jit
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


# fmt: on


def append_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch) -> None:
    """As the twin: isolate non-finite tokens, and write those that are kept into their pages. Dims contiguous.

    Scales values by the batch's `v_scale` on the way, which the twin's caller does.
    """
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
