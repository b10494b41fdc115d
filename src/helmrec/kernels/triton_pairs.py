"""Values of bfloat16 two in a register, and their codes of eight bits two or four in one.

Nothing here knows pages or which tokens are kept: every row is a token and a head, wherever it lies.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from helmrec.kernels.triton_rounding import FP8, encode_scaled, power_of_two

_FP8 = tl.constexpr(FP8)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def load_pairs(source, strides, tokens, heads, is_token, PAIRS: tl.constexpr, PADDED: tl.constexpr):
    """Two values of 16 bits in each integer: rows of a token and a head, half as long as a head."""
    pairs = tl.arange(0, PADDED)
    at = (source + tokens * strides[0] + heads * strides[1])[:, None] + pairs[None, :]
    return tl.load(at, mask=is_token[:, None] & (pairs < PAIRS)[None, :], other=0)


@triton.jit
def low_of(pairs):
    """The first value of each pair in float32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_of(pairs):
    """The second value of each pair in float32."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def scale_pairs(pairs, factors):
    """Values times the factor of their row, rounded to bfloat16."""
    low = (low_of(pairs) * factors[:, None]).to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)
    high = (high_of(pairs) * factors[:, None]).to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def peak_bits(pairs):
    """The largest absolute value of each row, as the bits of a float32; in this order NaN is above infinity."""
    return tl.max(tl.maximum(pairs & 0x7FFF0000, (pairs << 16) & 0x7FFF0000), axis=1)


@triton.jit
def encode_pairs(pairs, exponents, NATIVE: tl.constexpr):
    """Two codes in each integer of 16 bits."""
    factors = power_of_two(-exponents)[:, None]
    low, high = low_of(pairs) * factors, high_of(pairs) * factors
    if NATIVE:
        codes = tl.inline_asm_elementwise("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high],
                                          dtype=tl.int16, is_pure=True, pack=1)
    else:
        codes = encode_scaled(low, _FP8).to(tl.int16) | (encode_scaled(high, _FP8).to(tl.int16) << 8)
    return codes


@triton.jit
def encode_fours(first, second, third, fourth, NATIVE: tl.constexpr):
    """The codes of four values in one integer."""
    if NATIVE:
        codes = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1)
    else:
        codes = encode_scaled(first, _FP8).to(tl.int32) | (encode_scaled(second, _FP8).to(tl.int32) << 8)
        codes |= (encode_scaled(third, _FP8).to(tl.int32) << 16) | (encode_scaled(fourth, _FP8).to(tl.int32) << 24)
    return codes


@triton.jit
def store_pairs(target, row_starts, codes, mask, PAIRS: tl.constexpr, PADDED: tl.constexpr):
    pairs = tl.arange(0, PADDED)
    tl.store((target + row_starts)[:, None] + pairs[None, :], codes, mask=mask[:, None] & (pairs < PAIRS)[None, :])


@triton.jit
def store_fours(target, row_starts, low, high, of_head, columns, PAIRS: tl.constexpr, PADDED: tl.constexpr):
    """Codes of four tokens each. target: integers of four tokens, a dim every `columns` of them."""
    pairs = tl.arange(0, PADDED)
    mask = of_head[:, None] & (pairs < PAIRS)[None, :]
    at = (target + row_starts)[:, None] + (2 * columns) * pairs[None, :]
    tl.store(at, low, mask=mask)
    tl.store(at + columns, high, mask=mask)


@triton.jit
def store_bytes(target, row_starts, codes, columns, mask, PAIRS: tl.constexpr, PADDED: tl.constexpr):
    """Two codes of a token, byte by byte. target: bytes, a dim every `columns` of them."""
    pairs = tl.arange(0, PADDED)
    at = (target + row_starts)[:, None] + (2 * columns) * pairs[None, :]
    mask = mask[:, None] & (pairs < PAIRS)[None, :]
    tl.store(at, (codes & 0xFF).to(tl.uint8), mask=mask)
    tl.store(at + columns, ((codes >> 8) & 0xFF).to(tl.uint8), mask=mask)


# fmt: on
