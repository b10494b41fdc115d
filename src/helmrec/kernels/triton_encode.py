"""Codes of a step's queries, keys and values in one pass: what attention on eight-bit floats reads and pages keep.

The twin is `round_in_place` of the queries followed by `append_kv` in `attention.py`: the values that codes and scales
stand for are the ones it leaves in q, k and v.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.kv_rounding import NAN_EXPONENT, Codes, ScaledPages
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_rounding import FP8, encode_finite, exponent_of, power_of_two

OWN_TOKENS = 128  # tokens of a block of own values, which lie as pages of so many tokens would
_FP8, _NAN_EXPONENT = tl.constexpr(FP8), tl.constexpr(NAN_EXPONENT)
_BEYOND = tl.constexpr(31 * 2.0**123)  # rounded to eight bits, this and more is infinite in float32 and bfloat16

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _load_heads(source, strides, tokens, heads, dims, live):
    at = tokens[:, None] * strides[0] + heads[:, None] * strides[1] + dims[None, :]
    return tl.load(source + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _is_wrong(values):
    """Which rows hold a value that has no code."""
    return tl.max(tl.where(tl.abs(values) < _BEYOND, 0, 1), axis=1)  # 1 of NaN too


@triton.jit
def _of_token(flags, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """For every head of a token, whether one of its heads is flagged."""
    any_head = tl.max(tl.reshape(flags, (ROWS, HEADS)), axis=1)
    return tl.reshape(tl.broadcast_to(any_head[:, None], (ROWS, HEADS)), (ROWS * HEADS,))


@triton.jit
def _encode_rows(values, is_wrong, NATIVE: tl.constexpr):
    """Codes and biased exponents of rows; zeros with a scale of 1 for wrong ones."""
    finite = tl.where((is_wrong == 0)[:, None], values, 0.0)
    exponent = exponent_of(tl.max(tl.abs(finite), axis=1), _FP8)
    codes = encode_finite(finite * power_of_two(-exponent)[:, None], _FP8, NATIVE)
    return codes, exponent + 127


@triton.jit
def _store_flat(codes_out, exponents_out, codes, biased, tokens, heads, dims, live, is_token, num_tokens,
                NUM_HEADS: tl.constexpr, DIM: tl.constexpr):
    tl.store(codes_out + (tokens * NUM_HEADS + heads)[:, None] * DIM + dims[None, :], codes, mask=live)
    tl.store(exponents_out + heads * num_tokens + tokens, biased.to(tl.uint8), mask=is_token)


@triton.jit
def _store_paged(pages, exponents, strides, exponent_strides, codes, biased, slots, heads, dims, live, kept,
                 PAGE_TOKENS: tl.constexpr):
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    at = page * strides[0] + offset * strides[1] + heads * strides[2]
    tl.store(pages + at[:, None] + dims[None, :], codes, mask=live & kept[:, None])
    at = page * exponent_strides[0] + offset * exponent_strides[1] + heads * exponent_strides[2]
    tl.store(exponents + at, biased.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["num_tokens"])
def _encode_kernel(q, k, v, flats, pages, page_exponents, page_strides, exponent_strides, write_slots, v_scale,
                   q_strides, k_strides, v_strides, num_tokens, PAGE_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                   SCALED: tl.constexpr, NATIVE: tl.constexpr):
    """ROWS tokens with all heads. A token that is not finite is isolated as `isolate_non_finite` does it."""
    index = tl.arange(0, ROWS * HEADS)
    tokens = (tl.program_id(0) * ROWS + index // HEADS).to(tl.int64)
    heads, dims = index % HEADS, tl.arange(0, PADDED)
    is_token = (tokens < num_tokens) & (heads < NUM_HEADS)
    live = is_token[:, None] & (dims < DIM)[None, :]
    slots = tl.load(write_slots + tokens, mask=is_token, other=-1)
    kept = is_token & (slots >= 0)
    keys = _load_heads(k, k_strides, tokens, heads, dims, live)
    values = _load_heads(v, v_strides, tokens, heads, dims, live)
    if SCALED:
        factors = tl.load(v_scale + tokens, mask=is_token, other=0.0).to(tl.float32)
        values = (values * factors[:, None]).to(v.dtype.element_ty).to(tl.float32)
    is_wrong = _of_token(tl.maximum(_is_wrong(keys), _is_wrong(values)), ROWS, HEADS)
    codes, biased = _encode_rows(keys, is_wrong, NATIVE)
    biased = tl.where(is_wrong == 1, _NAN_EXPONENT, biased)
    _store_flat(flats[2], flats[3], codes, biased, tokens, heads, dims, live, is_token, num_tokens, NUM_HEADS, DIM)
    _store_paged(pages[0], page_exponents[0], page_strides, exponent_strides, codes, biased, slots, heads, dims, live,
                 kept, PAGE_TOKENS)
    codes, biased = _encode_rows(values, is_wrong, NATIVE)
    _store_flat(flats[4], flats[5], codes, biased, tokens, heads, dims, live, is_token, num_tokens, NUM_HEADS, DIM)
    _store_paged(pages[1], page_exponents[1], page_strides, exponent_strides, codes, biased, slots, heads, dims, live,
                 kept, PAGE_TOKENS)
    queries = _load_heads(q, q_strides, tokens, heads, dims, live)
    is_wrong = _is_wrong(queries)
    codes, biased = _encode_rows(queries, is_wrong, NATIVE)
    biased = tl.where(is_wrong == 1, _NAN_EXPONENT, biased)
    _store_flat(flats[0], flats[1], codes, biased, tokens, heads, dims, live, is_token, num_tokens, NUM_HEADS, DIM)


# fmt: on


class CodedTokens(NamedTuple):
    """Queries, keys and values of a step's own tokens in eight-bit floats."""

    q: Codes  # codes (tokens, heads, dim), biased exponents (heads, tokens)
    k: Codes
    v: Codes


def encode_tokens(
    q: Tensor, k: Tensor, v: Tensor, k_pages: ScaledPages, v_pages: ScaledPages, batch: RaggedBatch
) -> CodedTokens:
    """Round q, k and v, (tokens, heads, dim) of one dim, to codes, and write K/V of kept tokens to their pages.

    Tokens whose key or value is not finite are isolated. Values are scaled by the batch's `v_scale` first.
    """
    num_tokens, num_heads, dim = q.shape
    assert k.shape == v.shape == q.shape, f"q, k and v are alike, got {q.shape}, {k.shape}, {v.shape}"
    codes = [torch.empty((num_tokens, num_heads, dim), dtype=torch.uint8, device=q.device) for _ in range(3)]
    exponents = [torch.empty((num_heads, num_tokens), dtype=torch.uint8, device=q.device) for _ in range(3)]
    assert k_pages.codes.stride() == v_pages.codes.stride(), "K and V are kept alike"
    assert k_pages.exponents.stride() == v_pages.exponents.stride(), "K and V are kept alike"
    heads, padded = triton.next_power_of_2(num_heads), triton.next_power_of_2(dim)
    rows = max(1, 4096 // (heads * padded))
    _encode_kernel[(triton.cdiv(num_tokens, rows),)](
        *(q, k, v),
        tuple(t for pair in zip(codes, exponents, strict=True) for t in pair),
        tuple(pages.codes.view(torch.uint8) for pages in (k_pages, v_pages)),
        (k_pages.exponents, v_pages.exponents),
        k_pages.codes.stride()[:3],
        k_pages.exponents.stride(),
        batch.write_slots,
        batch.write_slots if batch.v_scale is None else batch.v_scale,
        *(t.stride()[:2] for t in (q, k, v)),
        num_tokens,
        PAGE_TOKENS=batch.page_tokens,
        NUM_HEADS=num_heads,
        HEADS=heads,
        DIM=dim,
        PADDED=padded,
        ROWS=rows,
        SCALED=batch.v_scale is not None,
        NATIVE=q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 9),
        num_warps=8,
    )
    pairs = zip(codes, exponents, strict=True)
    return CodedTokens(*(Codes(each.view(torch.float8_e4m3fn), scales) for each, scales in pairs))
