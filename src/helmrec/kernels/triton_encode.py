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
from helmrec.kernels.triton_pairs import (
    encode_fours,
    encode_pairs,
    high_of,
    load_pairs,
    low_of,
    peak_bits,
    scale_pairs,
    store_bytes,
    store_fours,
    store_pairs,
)
from helmrec.kernels.triton_rounding import FP8, exponent_of, lane_order, power_of_two, token_at

OWN_TOKENS = 128  # tokens of a block of own values, which lie as pages of so many tokens would
REGISTERS: int | None = None  # of a thread, at most; None: as many as the compiler takes
MOST_ROWS, MOST_VALUES = 32, 16_384  # tokens of a program, and values of each operand that its registers hold
_FP8, _NAN_EXPONENT = tl.constexpr(FP8), tl.constexpr(NAN_EXPONENT)
_BEYOND = tl.constexpr(0x7F780000)  # 31 * 2**123; rounded to eight bits, this and more is infinite in bfloat16

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def first_value_block(start, sequence, OWN_TOKENS: tl.constexpr):
    """Where the own values of a sequence begin, in blocks of OWN_TOKENS: every sequence begins a new one."""
    return (start + OWN_TOKENS - 1) // OWN_TOKENS + sequence


@triton.jit
def sequence_at(block, cu_tokens, num_sequences, OWN_TOKENS: tl.constexpr):
    """The last sequence whose own values begin in this block or before it, and where its tokens begin and end."""
    sequence, start, end = -1, 0, 2147483647
    for first in range(0, num_sequences + 1, 32):
        each = first + tl.arange(0, 32)
        starts = tl.load(cu_tokens + each, mask=each <= num_sequences, other=2147483647)
        begins = (each < num_sequences) & ((each == 0) | (first_value_block(starts, each, OWN_TOKENS) <= block))
        sequence += tl.sum(begins.to(tl.int32), axis=0)
        start = tl.maximum(start, tl.max(tl.where(begins, starts, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(begins, 2147483647, starts), axis=0))
    return sequence, start, end


@triton.jit
def _load_values(v, strides, v_scale, tokens, heads, is_token, PAIRS: tl.constexpr, PADDED: tl.constexpr,
                 SCALED: tl.constexpr):
    values = load_pairs(v, strides, tokens, heads, is_token, PAIRS, PADDED)
    if SCALED:
        values = scale_pairs(values, tl.load(v_scale + tokens, mask=is_token, other=0.0).to(tl.float32))
    return values


@triton.jit
def _exponents(peaks, LIFT: tl.constexpr):
    return exponent_of(peaks.to(tl.float32, bitcast=True), _FP8) + LIFT


@triton.jit
def _in_pages(slots, heads, strides, PAGE_TOKENS: tl.constexpr):
    return slots // PAGE_TOKENS * strides[0] + slots % PAGE_TOKENS * strides[1] + heads * strides[2]


@triton.jit
def _encode_apart(k, v, flats, pages, bytes_of, exponents, page_exponents, k_page_strides, v_byte_strides,
                  exponent_strides, write_slots, v_scale, strides, block, chunk, first_token, end, num_tokens,
                  PAGE_TOKENS: tl.constexpr, OWN_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
                  PAIRS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
                  NATIVE: tl.constexpr):
    """Keys and values of tokens whose slots are anywhere, or of which some are not finite: one of four at a time."""
    fours: tl.constexpr = ROWS // 4
    index = tl.arange(0, fours * HEADS)
    heads, own_bytes = index // fours, bytes_of[0] + block.to(tl.int64) * (NUM_HEADS * 2 * PAIRS * OWN_TOKENS) + chunk
    of_head = heads < NUM_HEADS
    for i in range(4):
        place = index % fours * 4 + i
        tokens = first_token + token_at(place)
        is_token = (tokens < end) & of_head
        keys = load_pairs(k, strides[1], tokens, heads, is_token, PAIRS, PADDED)
        values = _load_values(v, strides[2], v_scale, tokens, heads, is_token, PAIRS, PADDED, SCALED)
        k_peaks, v_peaks = peak_bits(keys), peak_bits(values)
        of_token = tl.max(tl.reshape(tl.maximum(k_peaks, v_peaks), (HEADS, fours)), axis=0)
        of_row = tl.reshape(tl.broadcast_to(of_token[None, :], (HEADS, fours)), (fours * HEADS,))
        is_wrong = of_row >= _BEYOND  # a token is isolated as a whole
        slots = tl.load(write_slots + tokens, mask=is_token, other=-1)
        kept = is_token & (slots >= 0)
        in_exponents = _in_pages(slots, heads, exponent_strides, PAGE_TOKENS)

        exponent = _exponents(tl.where(is_wrong, 0, k_peaks), 0)
        codes = encode_pairs(tl.where(is_wrong[:, None], 0, keys), exponent, NATIVE)
        biased = tl.where(is_wrong, _NAN_EXPONENT, exponent + 127).to(tl.uint8)
        store_pairs(flats[1], (tokens * NUM_HEADS + heads) * PAIRS, codes, is_token, PAIRS, PADDED)
        tl.store(exponents[1] + heads * num_tokens + tokens, biased, mask=is_token)
        in_pages = _in_pages(slots, heads, k_page_strides, PAGE_TOKENS)
        store_pairs(pages[0], in_pages, codes, kept, PAIRS, PADDED)
        tl.store(page_exponents[0] + in_exponents, biased, mask=kept)

        exponent = _exponents(tl.where(is_wrong, 0, v_peaks), 0)
        codes = encode_pairs(tl.where(is_wrong[:, None], 0, values), exponent, NATIVE)
        biased = (exponent + 127).to(tl.uint8)
        # Zeros after the last token: the block has no other owner.
        in_block = heads * (2 * PAIRS * OWN_TOKENS) + place
        store_bytes(own_bytes, in_block, codes, OWN_TOKENS, of_head, PAIRS, PADDED)
        tl.store(exponents[2] + heads * num_tokens + tokens, biased, mask=is_token)
        in_pages = slots // PAGE_TOKENS * v_byte_strides[0] + heads * v_byte_strides[1]
        in_pages += lane_order(slots % PAGE_TOKENS)
        store_bytes(bytes_of[1], in_pages, codes, PAGE_TOKENS, kept, PAIRS, PADDED)
        tl.store(page_exponents[1] + in_exponents, biased, mask=kept)


@triton.jit
def _store_four_exponents(to, t0, t1, t2, t3, e0, e1, e2, e3, is0, is1, is2, is3, stride):
    tl.store(to + t0 * stride, (e0 + 127).to(tl.uint8), mask=is0)
    tl.store(to + t1 * stride, (e1 + 127).to(tl.uint8), mask=is1)
    tl.store(to + t2 * stride, (e2 + 127).to(tl.uint8), mask=is2)
    tl.store(to + t3 * stride, (e3 + 127).to(tl.uint8), mask=is3)


@triton.jit
def _encode_keys_and_values(k, v, flats, pages, bytes_of, exponents, page_exponents, k_page_strides, v_page_strides,
                            v_byte_strides, exponent_strides, write_slots, v_scale, strides, block, chunk, first_token,
                            end, num_tokens, PAGE_TOKENS: tl.constexpr, OWN_TOKENS: tl.constexpr,
                            NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr,
                            ROWS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr):
    """Values are taken in four parts, the first, second, .. of every four places, so that codes of the four tokens that
    lie side by side are made in one register.
    """
    fours: tl.constexpr = ROWS // 4
    rows, index, index4 = tl.arange(0, ROWS), tl.arange(0, ROWS * HEADS), tl.arange(0, fours * HEADS)
    heads, heads4, four = index // ROWS, index4 // fours, index4 % fours
    tokens = first_token + index % ROWS
    t0, t1 = first_token + token_at(four * 4), first_token + token_at(four * 4 + 1)
    t2, t3 = first_token + token_at(four * 4 + 2), first_token + token_at(four * 4 + 3)
    of_head, of_head4 = heads < NUM_HEADS, heads4 < NUM_HEADS
    is_token = (tokens < end) & of_head
    is0, is1, is2, is3 = (t0 < end) & of_head4, (t1 < end) & of_head4, (t2 < end) & of_head4, (t3 < end) & of_head4
    keys = load_pairs(k, strides[1], tokens, heads, is_token, PAIRS, PADDED)
    v0 = _load_values(v, strides[2], v_scale, t0, heads4, is0, PAIRS, PADDED, SCALED)
    v1 = _load_values(v, strides[2], v_scale, t1, heads4, is1, PAIRS, PADDED, SCALED)
    v2 = _load_values(v, strides[2], v_scale, t2, heads4, is2, PAIRS, PADDED, SCALED)
    v3 = _load_values(v, strides[2], v_scale, t3, heads4, is3, PAIRS, PADDED, SCALED)
    slots = tl.load(write_slots + first_token + rows, mask=first_token + rows < end, other=-1)
    slot = tl.load(write_slots + first_token)
    is_whole = (slot >= 0) & (slot % ROWS == 0) & (tl.max(tl.where(slots == slot + rows, 0, 1), axis=0) == 0)
    peaks, p0, p1, p2, p3 = peak_bits(keys), peak_bits(v0), peak_bits(v1), peak_bits(v2), peak_bits(v3)
    most = tl.maximum(tl.max(peaks, axis=0), tl.max(tl.maximum(tl.maximum(p0, p1), tl.maximum(p2, p3)), axis=0))
    if (most < _BEYOND) & (is_whole | (tl.max(slots, axis=0) < 0)):  # all are finite, and kept side by side or not
        page, place = slot // PAGE_TOKENS, tl.multiple_of(slot % PAGE_TOKENS, ROWS)
        exponent = _exponents(peaks, 0)
        codes, biased = encode_pairs(keys, exponent, NATIVE), (exponent + 127).to(tl.uint8)
        store_pairs(flats[1], (tokens * NUM_HEADS + heads) * PAIRS, codes, is_token, PAIRS, PADDED)
        tl.store(exponents[1] + heads * num_tokens + tokens, biased, mask=is_token)
        if is_whole:
            in_page = (place + index % ROWS) * k_page_strides[1] + heads * k_page_strides[2]
            store_pairs(pages[0] + page * k_page_strides[0], in_page, codes, of_head, PAIRS, PADDED)
            in_page = (place + index % ROWS) * exponent_strides[1] + heads * exponent_strides[2]
            tl.store(page_exponents[0] + page * exponent_strides[0] + in_page, biased, mask=of_head)

        e0, e1, e2, e3 = _exponents(p0, 0), _exponents(p1, 0), _exponents(p2, 0), _exponents(p3, 0)
        f0, f1 = power_of_two(-e0)[:, None], power_of_two(-e1)[:, None]
        f2, f3 = power_of_two(-e2)[:, None], power_of_two(-e3)[:, None]
        low = encode_fours(low_of(v0) * f0, low_of(v1) * f1, low_of(v2) * f2, low_of(v3) * f3, NATIVE)
        high = encode_fours(high_of(v0) * f0, high_of(v1) * f1, high_of(v2) * f2, high_of(v3) * f3, NATIVE)
        own_block = flats[2] + block.to(tl.int64) * (NUM_HEADS * 2 * PAIRS * OWN_TOKENS // 4) + chunk // 4
        in_block = heads4 * (2 * PAIRS * OWN_TOKENS // 4) + four
        store_fours(own_block, in_block, low, high, of_head4, OWN_TOKENS // 4, PAIRS, PADDED)
        of_values = exponents[2] + heads4 * num_tokens
        _store_four_exponents(of_values, t0, t1, t2, t3, e0, e1, e2, e3, is0, is1, is2, is3, 1)
        if is_whole:
            to = pages[1] + page * v_page_strides[0] + place // 4
            store_fours(to, heads4 * v_page_strides[1] + four, low, high, of_head4, PAGE_TOKENS // 4, PAIRS, PADDED)
            of_values = page_exponents[1] + page * exponent_strides[0] + heads4 * exponent_strides[2]
            of_values += (place - first_token) * exponent_strides[1]
            _store_four_exponents(of_values, t0, t1, t2, t3, e0, e1, e2, e3, is0, is1, is2, is3, exponent_strides[1])
    else:
        _encode_apart(k, v, flats, pages, bytes_of, exponents, page_exponents, k_page_strides, v_byte_strides,
                      exponent_strides, write_slots, v_scale, strides, block, chunk, first_token, end, num_tokens,
                      PAGE_TOKENS, OWN_TOKENS, NUM_HEADS, HEADS, PAIRS, PADDED, ROWS, SCALED, NATIVE)


@triton.jit
def _encode_queries(q, flats, exponents, strides, first_token, end, num_tokens, NUM_HEADS: tl.constexpr,
                    HEADS: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                    LIFT: tl.constexpr, NATIVE: tl.constexpr):
    index = tl.arange(0, ROWS * HEADS)
    heads, tokens = index // ROWS, first_token + index % ROWS
    is_token = (tokens < end) & (heads < NUM_HEADS)
    queries = load_pairs(q, strides, tokens, heads, is_token, PAIRS, PADDED)
    peaks = peak_bits(queries)
    is_wrong = (peaks >= _BEYOND).to(tl.int32)
    exponent = _exponents(tl.where(is_wrong == 1, 0, peaks), LIFT)
    codes = encode_pairs(tl.where((is_wrong == 1)[:, None], 0, queries), exponent, NATIVE)
    biased = tl.where(is_wrong == 1, _NAN_EXPONENT, exponent + 127).to(tl.uint8)
    store_pairs(flats[0], (tokens * NUM_HEADS + heads) * PAIRS, codes, is_token, PAIRS, PADDED)
    tl.store(exponents[0] + heads * num_tokens + tokens, biased, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"],
            do_not_specialize_on_alignment=["cu_tokens"])
def _encode_kernel(q, k, v, flats, pages, bytes_of, exponents, page_exponents, k_page_strides, v_page_strides,
                   v_byte_strides, exponent_strides, write_slots, v_scale, cu_tokens, strides, num_tokens,
                   num_sequences, PAGE_TOKENS: tl.constexpr, OWN_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                   SCALED: tl.constexpr, LIFT: tl.constexpr, NATIVE: tl.constexpr):
    """ROWS tokens of a sequence with all heads: keys and values, or queries.

    q, k and v hold two values in an integer, so that a program holds its keys and values until it knows whether all
    are finite.
    """
    block = tl.program_id(0) // (OWN_TOKENS // ROWS)
    chunk = tl.program_id(0) % (OWN_TOKENS // ROWS) * ROWS
    sequence, start, end = sequence_at(block, cu_tokens, num_sequences, OWN_TOKENS)
    own = (block - first_value_block(start, sequence, OWN_TOKENS)) * OWN_TOKENS + chunk
    first_token = (start + own).to(tl.int64)
    if first_token < end:
        if tl.program_id(1) == 0:
            _encode_keys_and_values(k, v, flats, pages, bytes_of, exponents, page_exponents, k_page_strides,
                                    v_page_strides, v_byte_strides, exponent_strides, write_slots, v_scale, strides,
                                    block, chunk, first_token, end, num_tokens, PAGE_TOKENS, OWN_TOKENS, NUM_HEADS,
                                    HEADS, PAIRS, PADDED, ROWS, SCALED, NATIVE)
        else:
            _encode_queries(q, flats, exponents, strides[0], first_token, end, num_tokens, NUM_HEADS, HEADS, PAIRS,
                            PADDED, ROWS, LIFT, NATIVE)


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

    They are bfloat16. Tokens whose key or value is not finite are isolated. Values are scaled by the batch's `v_scale`
    first. Pages of values are transposed. Codes of rows that belong to no sequence are not written.
    """
    num_tokens, num_heads, dim = q.shape
    assert k.shape == v.shape == q.shape, f"q, k and v are alike, got {q.shape}, {k.shape}, {v.shape}"
    assert q.dtype == torch.bfloat16, f"codes are made of bfloat16, got {q.dtype}"
    assert v_pages.in_lane_order, "attention on codes reads values with tokens side by side"
    assert k_pages.exponents.stride() == v_pages.exponents.stride(), "K and V are kept alike"
    # A sequence begins at most one block later than the tokens before it fill, and each of them adds at most one.
    num_blocks = triton.cdiv(num_tokens, OWN_TOKENS) + batch.num_sequences
    shapes = ((num_tokens, num_heads, dim),) * 2 + ((num_blocks, num_heads, dim, OWN_TOKENS),)
    codes = [torch.empty(shape, dtype=torch.uint8, device=q.device) for shape in shapes]
    exponents = [torch.empty((num_heads, num_tokens), dtype=torch.uint8, device=q.device) for _ in range(3)]
    heads, padded = triton.next_power_of_2(num_heads), max(16, triton.next_power_of_2(dim))
    rows = max(16, min(MOST_ROWS, batch.page_tokens, MOST_VALUES // (heads * padded)))
    by_head = v_pages.codes.view(torch.uint8).permute(0, 2, 3, 1)  # (pages, heads, dim, page_tokens)
    in_pairs = [each.view(torch.int32) for each in (q, k, v)]
    in_pages = k_pages.codes.view(torch.int16), by_head.view(torch.int32)
    _encode_kernel[(num_blocks * (OWN_TOKENS // rows), 2)](
        *in_pairs,
        tuple(each.view(dtype) for each, dtype in zip(codes, (torch.int16, torch.int16, torch.int32), strict=True)),
        in_pages,
        (codes[2], by_head),
        tuple(exponents),
        (k_pages.exponents, v_pages.exponents),
        in_pages[0].stride()[:3],
        in_pages[1].stride()[:2],
        by_head.stride()[:2],
        k_pages.exponents.stride(),
        batch.write_slots,
        batch.write_slots if batch.v_scale is None else batch.v_scale,
        batch.cu_tokens,
        tuple(each.stride()[:2] for each in in_pairs),
        num_tokens,
        batch.num_sequences,
        PAGE_TOKENS=batch.page_tokens,
        OWN_TOKENS=OWN_TOKENS,
        NUM_HEADS=num_heads,
        HEADS=heads,
        PAIRS=dim // 2,
        PADDED=padded // 2,
        ROWS=rows,
        SCALED=batch.v_scale is not None,
        LIFT=query_lift(dim),
        NATIVE=q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 9),
        num_warps=max(4, heads * padded * rows // 1024),
        maxnreg=REGISTERS,
    )
    pairs = zip(codes, exponents, strict=True)
    return CodedTokens(*(Codes(each.view(torch.float8_e4m3fn), scales) for each, scales in pairs))
