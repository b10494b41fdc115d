"""Codes of K/V and of rows in Triton: the fast twin of `encode` and `decode` in `kv_rounding.py`.

Written with integer operations, so that cards without eight-bit floats and the interpreter run them too.
"""

# ruff: noqa: N803 - Triton's constants are in capitals
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from helmrec.kernels.kv_rounding import CODE_DTYPES, FORMATS

AS_THEY_ARE, FP8, INT8 = 0, 1, 2  # FORMAT of pages and rows
FORMAT_OF = {torch.float8_e4m3fn: FP8, torch.int8: INT8}
_FP8, _INT8 = (tl.constexpr(each) for each in (FP8, INT8))
_FP8_TOP, _FP8_CARRY, _FP8_LOWEST = (tl.constexpr(each) for each in FORMATS[torch.float8_e4m3fn])
_INT8_TOP, _INT8_CARRY, _INT8_LOWEST = (tl.constexpr(each) for each in FORMATS[torch.int8])


def format_of(code: str | None) -> int:
    """Return the FORMAT of a name of `CODE_DTYPES`; None: values as they are."""
    return AS_THEY_ARE if code is None else FORMAT_OF[CODE_DTYPES[code]]


@triton.jit
def lane_order(token):
    """As its twin: the place of a token's value in its page, where tokens lie side by side."""
    return (token & ~15) | ((token & 6) << 1) | ((token & 8) >> 2) | (token & 1)


@triton.jit
def exponent_of(peak, FORMAT: tl.constexpr):
    """Exponents of the scales for these largest absolute values, float32."""
    bits = peak.to(tl.int32, bitcast=True)
    if FORMAT == _FP8:
        exponent = tl.maximum(((bits + _FP8_CARRY) >> 23) - 127 - _FP8_TOP, _FP8_LOWEST)
    else:
        exponent = tl.maximum(((bits + _INT8_CARRY) >> 23) - 127 - _INT8_TOP, _INT8_LOWEST)
    return exponent


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_scaled(scaled, FORMAT: tl.constexpr):
    """Codes as uint8 of finite float32 values that fit; to the nearest, ties to even."""
    if FORMAT == _FP8:
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 codes are multiples of 2**-9: adding 2**23 rounds to whole ones, in the low bits of the sum.
        small = (tl.abs(scaled) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    else:
        code = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # rounds to whole numbers, as above
    return (code & 0xFF).to(tl.uint8)


@triton.jit
def encode_finite(scaled, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """As `encode_scaled`; NATIVE: by the card's own conversion, which gives the same codes of eight-bit floats."""
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else encode_scaled(scaled, FORMAT)


@triton.jit
def decode(codes, exponents, FORMAT: tl.constexpr):
    """Values in float32 of codes, (rows, dims) uint8, with the biased exponents of each row, (rows,)."""
    if FORMAT == _FP8:
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # the same digits as a float16, 2**8 too small
        values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    scale = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return values * scale[:, None]
