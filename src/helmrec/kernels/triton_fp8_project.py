"""The projection of a coded layer and the codes of its queries, keys and values in one pass, in Triton.

A tile of the product holds one head of some tokens of one sequence, so its rows are what one scale is of. Q, K and V
therefore never leave the card's registers in sixteen bits. The twin is `project` of `triton_fp8_layer.py` followed by
`encode_tokens` of `coded_tokens.py`. A key or value that is not finite isolates its own head, not the whole token: rows
that see the token are not finite in that head, which the norm of the gate spreads to all heads.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from helmrec.codes import NAN_EXPONENT
from helmrec.kernels.coded_tokens import OWN_TOKENS, CodedTokens, num_blocks
from helmrec.kernels.kv_rounding import Codes, ScaledPages, query_lift
from helmrec.kernels.layer import CodedWeight, Form, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_fp8_layer import CodedRows, is_native, normed, silu
from helmrec.kernels.triton_rounding import FP8, encode_finite, exponent_of, lane_order, power_of_two

_FP8, _NAN_EXPONENT = tl.constexpr(FP8), tl.constexpr(NAN_EXPONENT)
_BEYOND = tl.constexpr(0x7F780000)  # 31 * 2**123; rounded to eight bits, this and more is infinite in bfloat16


class Tile(NamedTuple):
    """How a program multiplies."""

    rows: int
    depth: int  # of one step of the product
    num_warps: int
    num_stages: int
    registers: int | None = None  # of a thread, at most


# By size of a head. Where two programs fit a multiprocessor, one stores while the other multiplies.
TILES = {64: Tile(128, 128, 8, 4, 128), 128: Tile(128, 128, 8, 3, 128), 256: Tile(128, 128, 8, 4)}

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _first_value_block(start, sequence, OWN_TOKENS: tl.constexpr):
    """Where the own values of a sequence begin, in blocks of OWN_TOKENS: every sequence begins a new one."""
    return (start + OWN_TOKENS - 1) // OWN_TOKENS + sequence


@triton.jit
def _sequence_at(block, cu_tokens, num_sequences, OWN_TOKENS: tl.constexpr):
    """The last sequence whose own values begin in this block or before it, and where its tokens begin and end."""
    sequence, start, end = -1, 0, 2147483647
    for first in range(0, num_sequences + 1, 32):
        each = first + tl.arange(0, 32)
        starts = tl.load(cu_tokens + each, mask=each <= num_sequences, other=2147483647)
        begins = (each < num_sequences) & ((each == 0) | (_first_value_block(starts, each, OWN_TOKENS) <= block))
        sequence += tl.sum(begins.to(tl.int32), axis=0)
        start = tl.maximum(start, tl.max(tl.where(begins, starts, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(begins, 2147483647, starts), axis=0))
    return sequence, start, end


@triton.jit
def _decoded(codes):
    """Values in float32 of codes of eight-bit floats, (rows, columns) uint8."""
    wide = codes.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # the same digits as a float16, 2**8 too small
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _product(rows, weight, first_token, first_output, DEPTH: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
             DIM: tl.constexpr, NATIVE: tl.constexpr):
    acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
    for at in range(0, DEPTH, STEP):
        left = rows.load([first_token, at])
        right = weight.load([first_output, at])
        if NATIVE:
            acc = tl.dot(left, right.T, acc)
        else:
            acc += tl.dot(_decoded(left), _decoded(right).T)
    return acc


@triton.jit
def _rounded_silu(values, NATIVE: tl.constexpr):
    return silu(values, NATIVE).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _encode(values, LIFT: tl.constexpr, NATIVE: tl.constexpr):
    """Codes of rows, zero where one is not finite, and biased exponents, which then say so."""
    peaks = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_wrong = peaks >= _BEYOND
    exponents = exponent_of(tl.where(is_wrong, 0, peaks).to(tl.float32, bitcast=True), _FP8) + LIFT
    scaled = tl.where(is_wrong[:, None], 0.0, values * power_of_two(-exponents)[:, None])
    codes = encode_finite(scaled, _FP8, NATIVE)
    return codes, tl.where(is_wrong, _NAN_EXPONENT, exponents + 127).to(tl.uint8)


@triton.jit
def _store_keys(codes, biased, flat, pages, exponents, page_exponents, page_strides, exponent_strides, write_slots,
                tokens, is_token, head, num_tokens, PAGE_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr,
                DIM: tl.constexpr):
    dims = tl.arange(0, DIM)[None, :]
    tl.store(flat + ((tokens * NUM_HEADS + head) * DIM)[:, None] + dims, codes, mask=is_token[:, None])
    tl.store(exponents + head * num_tokens + tokens, biased, mask=is_token)
    slots = tl.load(write_slots + tokens, mask=is_token, other=-1)
    kept, page, place = slots >= 0, slots // PAGE_TOKENS, slots % PAGE_TOKENS
    at = page * page_strides[0] + place * page_strides[1] + head * page_strides[2]
    tl.store((pages + at)[:, None] + dims, codes, mask=kept[:, None])
    at = page * exponent_strides[0] + place * exponent_strides[1] + head * exponent_strides[2]
    tl.store(page_exponents + at, biased, mask=kept)


@triton.jit
def _store_values(codes, biased, flat, pages, exponents, page_exponents, page_strides, exponent_strides, write_slots,
                  tokens, is_token, first_token, block, chunk, head, num_tokens, PAGE_TOKENS: tl.constexpr,
                  OWN_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Values lie transposed, tokens in lane order. After the last token come zeros: the block has no other owner."""
    groups: tl.constexpr = ROWS // 16
    # Bits 3, 2 and 1 of a token become bits 1, 3 and 2 of its place.
    ordered = tl.permute(tl.reshape(codes, (groups, 2, 4, 2, DIM)), (0, 2, 1, 3, 4))
    by_dim = tl.trans(tl.reshape(ordered, (ROWS, DIM)))
    dims, rows = tl.arange(0, DIM)[:, None], tl.arange(0, ROWS)
    own = flat + (block.to(tl.int64) * NUM_HEADS + head) * (DIM * OWN_TOKENS) + chunk
    tl.store(own + dims * OWN_TOKENS + rows[None, :], by_dim)
    tl.store(exponents + head * num_tokens + tokens, biased, mask=is_token)
    slots = tl.load(write_slots + tokens, mask=is_token, other=-1)
    kept, page, place = slots >= 0, slots // PAGE_TOKENS, slots % PAGE_TOKENS
    at = page * exponent_strides[0] + place * exponent_strides[1] + head * exponent_strides[2]
    tl.store(page_exponents + at, biased, mask=kept)
    if tl.max(slots, axis=0) >= 0:
        first = tl.load(write_slots + first_token)
        is_whole = (first >= 0) & (first % ROWS == 0) & (tl.max(tl.where(slots == first + rows, 0, 1), axis=0) == 0)
        if is_whole & (PAGE_TOKENS % ROWS == 0):
            of_head = pages + first // PAGE_TOKENS * page_strides[0] + head * page_strides[1]
            to = of_head + tl.multiple_of(first % PAGE_TOKENS, ROWS)
            tl.store(to + dims * PAGE_TOKENS + rows[None, :], by_dim)
        else:
            apart = page * page_strides[0] + head * page_strides[1] + lane_order(place)
            tl.store((pages + apart)[:, None] + tl.arange(0, DIM)[None, :] * PAGE_TOKENS, codes, mask=kept[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"], do_not_specialize_on_alignment=["cu_tokens"])
def _project_kernel(rows, weight, scale, out_scale, bias, u, flats, pages, exponents, page_exponents, k_page_strides,
                    v_page_strides, exponent_strides, write_slots, v_scale, cu_tokens, num_tokens, num_sequences,
                    DEPTH: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, NUM_HEADS: tl.constexpr,
                    DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, OWN_TOKENS: tl.constexpr, SCALED: tl.constexpr,
                    GATED: tl.constexpr, LIFT: tl.constexpr, NATIVE: tl.constexpr):
    """One head of U, V, Q or K of ROWS tokens of a sequence."""
    output = tl.program_id(0) % (4 * NUM_HEADS)
    part, head = tl.program_id(0) // (4 * NUM_HEADS), output % NUM_HEADS
    block, chunk = part // (OWN_TOKENS // ROWS), part % (OWN_TOKENS // ROWS) * ROWS
    sequence, start, end = _sequence_at(block, cu_tokens, num_sequences, OWN_TOKENS)
    first_token = start + (block - _first_value_block(start, sequence, OWN_TOKENS)) * OWN_TOKENS + chunk
    if first_token < end:
        tokens = (first_token + tl.arange(0, ROWS)).to(tl.int64)
        outputs = output * DIM + tl.arange(0, DIM)
        is_token = tokens < end
        of_rows, of_outputs = tl.load(scale + tokens, mask=is_token, other=0.0), tl.load(out_scale + outputs)
        added = tl.load(bias + outputs).to(tl.float32)
        acc = _product(rows, weight, first_token, output * DIM, DEPTH, STEP, ROWS, DIM, NATIVE)
        rounded = (acc * of_rows[:, None] * of_outputs[None, :] + added[None, :]).to(tl.bfloat16)
        if output < NUM_HEADS:
            at = tokens[:, None] * (NUM_HEADS * DIM) + outputs[None, :]
            tl.store(u + at, rounded, mask=is_token[:, None])
        else:
            values = rounded.to(tl.float32)
            if GATED:
                values = _rounded_silu(values, NATIVE)
            if output < 2 * NUM_HEADS:
                if SCALED:
                    factors = tl.load(v_scale + tokens, mask=is_token, other=0.0).to(tl.float32)
                    values = (values * factors[:, None]).to(tl.bfloat16).to(tl.float32)
                codes, biased = _encode(tl.where(is_token[:, None], values, 0.0), 0, NATIVE)
                _store_values(codes, biased, flats[2], pages[1], exponents[2], page_exponents[1], v_page_strides,
                              exponent_strides, write_slots, tokens, is_token, first_token, block, chunk, head,
                              num_tokens, PAGE_TOKENS, OWN_TOKENS, NUM_HEADS, DIM, ROWS)
            elif output < 3 * NUM_HEADS:
                codes, biased = _encode(values, LIFT, NATIVE)
                to = flats[0] + ((tokens * NUM_HEADS + head) * DIM)[:, None]
                tl.store(to + tl.arange(0, DIM)[None, :], codes, mask=is_token[:, None])
                tl.store(exponents[0] + head * num_tokens + tokens, biased, mask=is_token)
            else:
                codes, biased = _encode(values, 0, NATIVE)
                _store_keys(codes, biased, flats[1], pages[0], exponents[1], page_exponents[0], k_page_strides,
                            exponent_strides, write_slots, tokens, is_token, head, num_tokens, PAGE_TOKENS, NUM_HEADS,
                            DIM)


# fmt: on


class ProjectedCodes(NamedTuple):
    """What attention and gate read."""

    u: Tensor  # (tokens, heads * dim), without its SiLU
    tokens: CodedTokens


def project_codes(
    x: Tensor,
    delta: Tensor | None,
    weights: LayerWeights,
    form: Form,
    pages: tuple[ScaledPages, ScaledPages],
    batch: RaggedBatch,
) -> ProjectedCodes:
    """[U | V | Q | K] of norm(x) as `project` makes it, with Q, K and V in codes and K/V in their pages.

    delta, (tokens, dim), is added to x in place first. All heads are of one size.
    """
    assert weights.coded is not None, "weights have no codes"
    rows = normed(x, delta, weights)
    return encode_product(rows, weights.coded.uvqk, weights.uvqk_beta, form, pages, batch)


def encode_product(
    rows: CodedRows,
    weight: CodedWeight,
    bias: Tensor,
    form: Form,
    pages: tuple[ScaledPages, ScaledPages],
    batch: RaggedBatch,
) -> ProjectedCodes:
    """Multiply codes, and encode what attention reads. weight: of [U | V | Q | K], (4 * heads * head dim, dim)."""
    k_pages, v_pages = pages
    num_heads, dim, device = *k_pages.shape[-2:], rows.codes.device
    num_tokens, depth = rows.codes.shape
    tile, native = Tile(*TILES[dim]), is_native(rows.codes)
    assert v_pages.in_lane_order, "attention on codes reads values with tokens side by side"
    assert depth % 16 == 0, f"the copy engine reads rows of whole 16 bytes, got {depth}"
    blocks = num_blocks(num_tokens, batch.num_sequences)
    shapes = ((num_tokens, num_heads, dim),) * 2 + ((blocks, num_heads, dim, OWN_TOKENS),)
    codes = [torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes]
    exponents = [torch.empty((num_heads, num_tokens), dtype=torch.uint8, device=device) for _ in range(3)]
    u = torch.empty((num_tokens, num_heads * dim), dtype=bias.dtype, device=device)
    by_head = v_pages.codes.view(torch.uint8).permute(0, 2, 3, 1)  # (pages, heads, dim, page_tokens)
    keys = k_pages.codes.view(torch.uint8)
    left, right = (
        each.view(torch.float8_e4m3fn) if native else each.view(torch.uint8) for each in (rows.codes, weight.codes)
    )
    grid = (blocks * (OWN_TOKENS // tile.rows) * 4 * num_heads,)
    _project_kernel[grid](
        TensorDescriptor(left, list(left.shape), [depth, 1], [tile.rows, tile.depth]),
        TensorDescriptor(right, list(right.shape), [depth, 1], [dim, tile.depth]),
        *(rows.scale, weight.scale, bias, u, tuple(codes), (keys, by_head), tuple(exponents)),
        *((k_pages.exponents, v_pages.exponents), keys.stride()[:3], by_head.stride()[:2]),
        *(k_pages.exponents.stride(), batch.write_slots),
        *(batch.write_slots if batch.v_scale is None else batch.v_scale, batch.cu_tokens),
        *(num_tokens, batch.num_sequences),
        DEPTH=depth,
        STEP=tile.depth,
        ROWS=tile.rows,
        NUM_HEADS=num_heads,
        DIM=dim,
        PAGE_TOKENS=batch.page_tokens,
        OWN_TOKENS=OWN_TOKENS,
        SCALED=batch.v_scale is not None,
        GATED=form == "gated",
        LIFT=query_lift(dim),
        NATIVE=native,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.registers,
    )
    pairs = zip(codes, exponents, strict=True)
    return ProjectedCodes(u, CodedTokens(*(Codes(each.view(torch.float8_e4m3fn), scales) for each, scales in pairs)))
