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

from helmrec.codes import NAN_EXPONENT
from helmrec.kernels.kv_rounding import Codes, ScaledPages, query_lift
from helmrec.kernels.kv_rounding import lane_order as lanes_of
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_rounding import FP8, encode_finite, exponent_of, lane_order, power_of_two, token_at

OWN_TOKENS = 128  # tokens of a block of own values, which lie as pages of so many tokens would
_ROWS = 32  # tokens of a program: as many bytes of each dim are written side by side as the memory takes at once
_FP8, _NAN_EXPONENT = tl.constexpr(FP8), tl.constexpr(NAN_EXPONENT)
_BEYOND = tl.constexpr(31 * 2.0**123)  # rounded to eight bits, this and more is infinite in float32 and bfloat16

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def first_value_block(start, sequence, OWN_TOKENS: tl.constexpr):
    """Where the own values of a sequence begin, in blocks of OWN_TOKENS: every sequence begins a new one."""
    return (start + OWN_TOKENS - 1) // OWN_TOKENS + sequence


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
    any_head = tl.max(tl.reshape(flags, (HEADS, ROWS)), axis=0)
    return tl.reshape(tl.broadcast_to(any_head[None, :], (HEADS, ROWS)), (ROWS * HEADS,))


@triton.jit
def _encode_rows(values, is_wrong, LIFT: tl.constexpr, NATIVE: tl.constexpr):
    """Codes and biased exponents of rows; zeros for wrong ones."""
    finite = tl.where((is_wrong == 0)[:, None], values, 0.0)
    exponent = exponent_of(tl.max(tl.abs(finite), axis=1), _FP8) + LIFT
    codes = encode_finite(finite * power_of_two(-exponent)[:, None], _FP8, NATIVE)
    return codes, exponent + 127


@triton.jit
def _store_flat(codes_out, exponents_out, codes, biased, tokens, heads, dims, live, is_token, num_tokens,
                NUM_HEADS: tl.constexpr, DIM: tl.constexpr):
    tl.store(codes_out + (tokens * NUM_HEADS + heads)[:, None] * DIM + dims[None, :], codes, mask=live)
    tl.store(exponents_out + heads * num_tokens + tokens, biased.to(tl.uint8), mask=is_token)


@triton.jit
def _store_exponents(exponents, strides, biased, slots, heads, kept, PAGE_TOKENS: tl.constexpr):
    at = slots // PAGE_TOKENS * strides[0] + slots % PAGE_TOKENS * strides[1] + heads * strides[2]
    tl.store(exponents + at, biased.to(tl.uint8), mask=kept)


@triton.jit
def _store_keys(pages, strides, codes, slots, heads, dims, live, kept, PAGE_TOKENS: tl.constexpr):
    at = slots // PAGE_TOKENS * strides[0] + slots % PAGE_TOKENS * strides[1] + heads * strides[2]
    tl.store(pages + at[:, None] + dims[None, :], codes, mask=live & kept[:, None])


@triton.jit
def _store_values(pages, strides, codes, slots, heads, dims, live, kept, PAGE_TOKENS: tl.constexpr):
    places = lane_order(slots % PAGE_TOKENS)
    at = (slots // PAGE_TOKENS * strides[0] + heads * strides[2] + places)[:, None] + dims[None, :] * PAGE_TOKENS
    tl.store(pages + at, codes, mask=live & kept[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _encode_kernel(q, k, v, flats, pages, page_exponents, k_page_strides, v_page_strides, exponent_strides,
                   write_slots, v_scale, cu_tokens, q_strides, k_strides, v_strides, num_tokens, num_sequences,
                   PAGE_TOKENS: tl.constexpr, OWN_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
                   DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
                   LIFT: tl.constexpr, NATIVE: tl.constexpr):
    """ROWS tokens of a sequence with all heads, in lane order. A token that is not finite is isolated as
    `isolate_non_finite` does it.
    """
    block = tl.program_id(0) // (OWN_TOKENS // ROWS)
    chunk = tl.program_id(0) % (OWN_TOKENS // ROWS) * ROWS
    sequence = 0
    for i in range(1, num_sequences):
        sequence += tl.where(first_value_block(tl.load(cu_tokens + i), i, OWN_TOKENS) <= block, 1, 0)
    start, end = tl.load(cu_tokens + sequence), tl.load(cu_tokens + sequence + 1)
    own = (block - first_value_block(start, sequence, OWN_TOKENS)) * OWN_TOKENS + chunk
    first_token = (start + own).to(tl.int64)
    if first_token < end:
        index = tl.arange(0, ROWS * HEADS)
        rows, heads, dims = index % ROWS, index // ROWS, tl.arange(0, PADDED)
        tokens = first_token + token_at(rows)
        is_token = (tokens < end) & (heads < NUM_HEADS)
        live = is_token[:, None] & (dims < DIM)[None, :]
        slots = tl.load(write_slots + tokens, mask=is_token, other=-1)
        kept = is_token & (slots >= 0)
        first_slot = tl.load(write_slots + first_token)
        of_head = heads < NUM_HEADS
        strays = tl.max(tl.where(of_head & (slots != first_slot + tokens - first_token), 1, 0), axis=0)
        is_whole = (first_slot >= 0) & (first_slot % ROWS == 0) & (strays == 0)
        keys = _load_heads(k, k_strides, tokens, heads, dims, live)
        values = _load_heads(v, v_strides, tokens, heads, dims, live)
        if SCALED:
            factors = tl.load(v_scale + tokens, mask=is_token, other=0.0).to(tl.float32)
            values = (values * factors[:, None]).to(v.dtype.element_ty).to(tl.float32)
        is_wrong = _of_token(tl.maximum(_is_wrong(keys), _is_wrong(values)), ROWS, HEADS)
        codes, biased = _encode_rows(keys, is_wrong, 0, NATIVE)
        biased = tl.where(is_wrong == 1, _NAN_EXPONENT, biased)
        _store_flat(flats[2], flats[3], codes, biased, tokens, heads, dims, live, is_token, num_tokens, NUM_HEADS, DIM)
        _store_keys(pages[0], k_page_strides, codes, slots, heads, dims, live, kept, PAGE_TOKENS)
        _store_exponents(page_exponents[0], exponent_strides, biased, slots, heads, kept, PAGE_TOKENS)
        codes, biased = _encode_rows(values, is_wrong, 0, NATIVE)
        at = (heads * (DIM * OWN_TOKENS) + rows)[:, None] + dims[None, :] * OWN_TOKENS
        own_block = flats[4] + block.to(tl.int64) * (NUM_HEADS * DIM * OWN_TOKENS) + chunk
        every_token = of_head[:, None] & (dims < DIM)[None, :]  # zeros after the last one: the block has no other owner
        tl.store(own_block + at, codes, mask=every_token)
        tl.store(flats[5] + heads * num_tokens + tokens, biased.to(tl.uint8), mask=is_token)
        if is_whole:
            place = tl.multiple_of(first_slot % PAGE_TOKENS, ROWS)
            page = pages[1] + first_slot // PAGE_TOKENS * v_page_strides[0] + place
            beside = (heads * v_page_strides[2] + rows)[:, None] + dims[None, :] * PAGE_TOKENS
            tl.store(page + beside, codes, mask=every_token)
        else:
            _store_values(pages[1], v_page_strides, codes, slots, heads, dims, live, kept, PAGE_TOKENS)
        _store_exponents(page_exponents[1], exponent_strides, biased, slots, heads, kept, PAGE_TOKENS)
        queries = _load_heads(q, q_strides, tokens, heads, dims, live)
        is_wrong = _is_wrong(queries)
        codes, biased = _encode_rows(queries, is_wrong, LIFT, NATIVE)
        biased = tl.where(is_wrong == 1, _NAN_EXPONENT, biased)
        _store_flat(flats[0], flats[1], codes, biased, tokens, heads, dims, live, is_token, num_tokens, NUM_HEADS, DIM)


# fmt: on


class CodedTokens(NamedTuple):
    """Queries, keys and values of a step's own tokens in eight-bit floats; biased exponents (heads, tokens)."""

    q: Codes  # codes (tokens, heads, dim)
    k: Codes
    v: Codes  # codes (blocks, heads, dim, OWN_TOKENS): each sequence begins a block, its tokens are in lane order

    def values(self, batch: RaggedBatch) -> Tensor:  # (tokens, heads, dim) float8_e4m3fn
        """Codes of values token by token, for comparisons."""
        codes, starts = self.v.codes.view(torch.uint8), batch.cu_tokens.long()
        out = torch.zeros(self.k.codes.shape, dtype=torch.uint8, device=codes.device)
        for i in range(batch.num_sequences):
            own = torch.arange(int(starts[i + 1] - starts[i]), device=codes.device)
            block = -(-starts[i] // OWN_TOKENS) + i + own // OWN_TOKENS
            out[starts[i] + own] = codes[block, :, :, lanes_of(own % OWN_TOKENS)]
        return out.view(torch.float8_e4m3fn)


def encode_tokens(
    q: Tensor, k: Tensor, v: Tensor, k_pages: ScaledPages, v_pages: ScaledPages, batch: RaggedBatch
) -> CodedTokens:
    """Round q, k and v, (tokens, heads, dim) of one dim, to codes, and write K/V of kept tokens to their pages.

    Tokens whose key or value is not finite are isolated. Values are scaled by the batch's `v_scale` first. Pages of
    values are transposed. Codes of rows that belong to no sequence are not written.
    """
    num_tokens, num_heads, dim = q.shape
    assert k.shape == v.shape == q.shape, f"q, k and v are alike, got {q.shape}, {k.shape}, {v.shape}"
    assert v_pages.in_lane_order, "attention on codes reads values with tokens side by side"
    assert k_pages.exponents.stride() == v_pages.exponents.stride(), "K and V are kept alike"
    # A sequence begins at most one block later than the tokens before it fill, and each of them adds at most one.
    num_blocks = triton.cdiv(num_tokens, OWN_TOKENS) + batch.num_sequences
    shapes = ((num_tokens, num_heads, dim),) * 2 + ((num_blocks, num_heads, dim, OWN_TOKENS),)
    codes = [torch.empty(shape, dtype=torch.uint8, device=q.device) for shape in shapes]
    exponents = [torch.empty((num_heads, num_tokens), dtype=torch.uint8, device=q.device) for _ in range(3)]
    heads, padded = triton.next_power_of_2(num_heads), triton.next_power_of_2(dim)
    _encode_kernel[(num_blocks * (OWN_TOKENS // _ROWS),)](
        *(q, k, v),
        tuple(t for pair in zip(codes, exponents, strict=True) for t in pair),
        tuple(pages.codes.view(torch.uint8) for pages in (k_pages, v_pages)),
        (k_pages.exponents, v_pages.exponents),
        k_pages.codes.stride()[:3],
        v_pages.codes.stride()[:3],
        k_pages.exponents.stride(),
        batch.write_slots,
        batch.write_slots if batch.v_scale is None else batch.v_scale,
        batch.cu_tokens,
        *(t.stride()[:2] for t in (q, k, v)),
        num_tokens,
        batch.num_sequences,
        PAGE_TOKENS=batch.page_tokens,
        OWN_TOKENS=OWN_TOKENS,
        NUM_HEADS=num_heads,
        HEADS=heads,
        DIM=dim,
        PADDED=padded,
        ROWS=_ROWS,
        SCALED=batch.v_scale is not None,
        LIFT=query_lift(dim),
        NATIVE=q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 9),
        num_warps=min(16, max(4, heads * padded * _ROWS // 2048)),
    )
    pairs = zip(codes, exponents, strict=True)
    return CodedTokens(*(Codes(each.view(torch.float8_e4m3fn), scales) for each, scales in pairs))
