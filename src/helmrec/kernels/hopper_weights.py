"""Weights of attention on eight-bit floats for Hopper, in Gluon: from products of codes to the operand of the next.

Nothing here knows keys, tiles or pages.
"""

# ruff: noqa: N803 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _weights_of_pairs() -> str:
    """Instructions for four pairs of weights in float16: scores, scales of keys, of queries, and of weights.

    silu(2 h) = h * (1 + tanh(h)).
    """
    lines = [".reg .b32 half, tanh, scaled;"]
    for i in range(4):
        score, key, query, weight = (f"${4 + 4 * operand + i}" for operand in range(4))
        lines += [f"mul.rn.f16x2 half, {score}, {key};", f"mul.rn.f16x2 half, half, {query};"]
        lines += ["tanh.approx.f16x2 tanh, half;"]
        lines += [f"mul.rn.f16x2 scaled, {score}, {weight};", f"fma.rn.f16x2 ${i}, scaled, tanh, scaled;"]
    return "{" + "\n".join(lines) + "}"


_WEIGHTS = gl.constexpr(_weights_of_pairs())

# One argument a line would bury the kernels.
# fmt: off


@gluon.jit
def power_of_two(exponents):
    """Scales in float32 of biased exponents, int32; 255 gives infinity, and zero times that is NaN."""
    return (exponents << 23).to(gl.float32, bitcast=True)


@gluon.jit
def ceilings_of(scales, slot):
    """Of keys, and of keys and values."""
    pair: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    both = scales[2].index(slot).load(pair)
    which = gl.arange(0, 2, pair)
    return gl.sum(gl.where(which == 0, both, 0), axis=0), gl.sum(gl.where(which == 1, both, 0), axis=0)


@gluon.jit
def weigh(scores, q_factor, k_ceiling, scales, slot, SCORES: gl.constexpr):
    """Weights, not masked, of the products of codes.

    silu(2 h) = h * (1 + tanh(h)), where h is half the scaled q.k. The factor of the sum is another than that of
    tanh: the scale of the query and half the scale of q.k are left to the end.
    """
    k_scale = scales[0].index(slot).load(gl.SliceLayout(0, SCORES))[None, :]
    w_scale = scales[1].index(slot).load(gl.SliceLayout(0, SCORES))[None, :]
    q_scale = gl.minimum(q_factor * power_of_two(k_ceiling), 65504.0)[:, None]  # tanh of more is 1
    operands = [scores, k_scale, q_scale.to(gl.float16), w_scale]
    return gl.inline_asm_elementwise(
        _WEIGHTS, "=&r,=&r,=&r,=&r" + ",r" * 16, operands, dtype=gl.float16, is_pure=True, pack=8)


@gluon.jit
def pack(weights, BLOCK_N: gl.constexpr):
    """Codes of weights, four in an integer, in the order in which values lie (`lane_order`).

    Of every 16 columns of scores a lane holds two and the two that follow eight later; of an operand it holds four
    that are side by side. In this order they are the same, so nothing moves between lanes. Codes that are carried
    from block to block one by one would take a register each.
    """
    ordered = weights.reshape(64, BLOCK_N // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, BLOCK_N // 4, 2, 2)
    first, second = gl.split(ordered.permute(0, 1, 3, 2))
    both = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f16x2 low, $2;
        cvt.rn.satfinite.e4m3x2.f16x2 high, $3;
        mov.b32 $0, {low, high};
        mov.b32 $1, $0;
        }
        """,
        "=&r,=&r,r,r", [first, second], dtype=gl.int32, is_pure=False, pack=2)
    packed, _ = gl.split(both)
    return packed


@gluon.jit
def as_operand(packed, BLOCK_N: gl.constexpr, WEIGHTS: gl.constexpr):
    """Packed codes as the left operand of a product."""
    twice = gl.join(packed, packed)
    each = gl.convert_layout(gl.join(twice, twice).reshape(64, BLOCK_N), WEIGHTS)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [each], dtype=gl.float8e4nv, is_pure=False, pack=4)
