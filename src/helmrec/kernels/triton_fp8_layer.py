"""The dense halves of an HSTU layer with products of eight-bit floats: fast twins of `layer.py` for coded weights.

Norm and gate write codes and the scale of each token, a power of two, in the pass that computes them. A card with
eight-bit matrix units multiplies the codes; elsewhere they are decoded first, which gives the same products. As in
`triton_layer.py`, `project` returns U without its SiLU, which the gate applies.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.attention_plan import num_programs
from helmrec.kernels.layer import CodedWeight, Form, LayerWeights, Projected, split_projection
from helmrec.kernels.triton_layer import silu_in_place
from helmrec.kernels.triton_rounding import FP8, encode_finite, exponent_of, power_of_two

_FP8 = tl.constexpr(FP8)
WARP_WIDTH = 512  # values of a row that a warp takes: more of them take registers from other rows
_MOST_ROWS, _ROUNDS = 8, 32  # that a program takes one after another; programs of a multiprocessor, if rows are few
_EIGHT_BIT_UNITS = 9  # major compute capability with products of codes and one scale per row and column

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _load_row(source, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """One row in float32; zeros beyond WIDTH."""
    if WIDTH == PADDED:
        values = tl.load(source + columns)
    else:
        values = tl.load(source + columns, mask=columns < WIDTH, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _store_row(target, columns, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    if WIDTH == PADDED:
        tl.store(target + columns, values)
    else:
        tl.store(target + columns, values, mask=columns < WIDTH)


@triton.jit
def _norm_row(x, weight, bias, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of a row whose values beyond WIDTH are zero, as those of weight and bias are."""
    centred = x - tl.sum(x, axis=0) / WIDTH
    if WIDTH < PADDED:
        centred = tl.where(columns < WIDTH, centred, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    return centred * tl.rsqrt(variance + EPS) * weight + bias


@triton.jit
def silu(x, NATIVE: tl.constexpr):
    """x * sigmoid(x); NATIVE: by approximate instructions, off by a few units of the last digit of float32."""
    if NATIVE:
        active = tl.inline_asm_elementwise(
            """
            {
            .reg .f32 part;
            mul.f32 part, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 part, part;
            add.f32 part, part, 0f3F800000;
            rcp.approx.ftz.f32 part, part;
            mul.f32 $0, $1, part;
            }
            """,
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        active = x * tl.sigmoid(x)
    return active


@triton.jit
def _larger(one, other):
    """The larger absolute value of two; NaN if one is NaN."""
    return tl.maximum(tl.abs(one), tl.abs(other), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(values):
    """Scale of a row, NaN if it is not finite, and the factor by which its values become codes."""
    peak = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)  # in this order NaN is above infinity
    is_finite = peak < 0x7F800000
    exponent = exponent_of(tl.where(is_finite, peak, 0).to(tl.float32, bitcast=True), _FP8)
    return tl.where(is_finite, power_of_two(exponent), float("nan")), power_of_two(-exponent)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _norm_kernel(x, delta, weight, bias, out, scale, x_stride, num_rows, rows_each, WIDTH: tl.constexpr,
                 PADDED: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, NATIVE: tl.constexpr):
    """Codes and scales of norm(x); if ADD, of norm(x + delta), which x becomes. A program takes row after row."""
    columns = tl.arange(0, PADDED)
    w, b = _load_row(weight, columns, WIDTH, PADDED), _load_row(bias, columns, WIDTH, PADDED)
    first = tl.program_id(0).to(tl.int64) * rows_each
    for i in range(tl.minimum(rows_each, num_rows - first)):
        row = first + i
        values = _load_row(x + row * x_stride, columns, WIDTH, PADDED)
        if ADD:
            values += _load_row(delta + row * WIDTH, columns, WIDTH, PADDED)
            rounded = values.to(x.dtype.element_ty)
            _store_row(x + row * x_stride, columns, rounded, WIDTH, PADDED)
            values = rounded.to(tl.float32)
        normed = _norm_row(values, w, b, columns, WIDTH, PADDED, EPS)
        found, factor = _scale_of(normed)
        tl.store(scale + row, found)
        # Where the scale is NaN, any codes do.
        _store_row(out + row * WIDTH, columns, encode_finite(normed * factor, _FP8, NATIVE), WIDTH, PADDED)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _gate_kernel(u, o, weight, bias, y, scale, u_stride, o_stride, num_rows, rows_each, WIDTH: tl.constexpr,
                 PADDED: tl.constexpr, EPS: tl.constexpr, CONCAT: tl.constexpr, NATIVE: tl.constexpr):
    """Codes and scales of silu(u) * norm(o), in concat form of [silu(u) | o | silu(u) * norm(o)].

    A program takes row after row.
    """
    columns = tl.arange(0, PADDED)
    w, b = _load_row(weight, columns, WIDTH, PADDED), _load_row(bias, columns, WIDTH, PADDED)
    first = tl.program_id(0).to(tl.int64) * rows_each
    for i in range(tl.minimum(rows_each, num_rows - first)):
        row = first + i
        active = silu(_load_row(u + row * u_stride, columns, WIDTH, PADDED), NATIVE)
        raw_o = _load_row(o + row * o_stride, columns, WIDTH, PADDED)
        gated = active * _norm_row(raw_o, w, b, columns, WIDTH, PADDED, EPS)
        if CONCAT:
            found, factor = _scale_of(_larger(_larger(active, raw_o), gated))
            to = y + row * (3 * WIDTH)
            _store_row(to, columns, encode_finite(active * factor, _FP8, NATIVE), WIDTH, PADDED)
            _store_row(to + WIDTH, columns, encode_finite(raw_o * factor, _FP8, NATIVE), WIDTH, PADDED)
            _store_row(to + 2 * WIDTH, columns, encode_finite(gated * factor, _FP8, NATIVE), WIDTH, PADDED)
        else:
            found, factor = _scale_of(gated)
            _store_row(y + row * WIDTH, columns, encode_finite(gated * factor, _FP8, NATIVE), WIDTH, PADDED)
        tl.store(scale + row, found)


# fmt: on


class CodedRows(NamedTuple):
    """Activations in eight-bit floats with one scale per token."""

    codes: Tensor  # (tokens, width) uint8
    scale: Tensor  # (tokens, 1) float32

    @classmethod
    def empty(cls, tokens: int, width: int, device: torch.device) -> "CodedRows":
        codes = torch.empty((tokens, width), dtype=torch.uint8, device=device)
        return cls(codes, torch.empty((tokens, 1), dtype=torch.float32, device=device))


def project(
    x: Tensor, delta: Tensor | None, weights: LayerWeights, form: Form, num_heads: int
) -> Projected:  # U without its SiLU
    """[U | V | Q | K] = norm(x) @ W + beta, then SiLU on V, Q and K in the gated form. x: (tokens, dim).

    delta, (tokens, dim), is added to x in place first.
    """
    assert weights.coded is not None, "weights have no codes"
    uvqk = multiply(normed(x, delta, weights), weights.coded.uvqk, weights.uvqk_weight, weights.uvqk_beta)
    width = weights.output_norm_weight.shape[0]  # heads * v
    if form == "gated":
        silu_in_place(uvqk[:, width:])
    return split_projection(uvqk, width, num_heads)


def normed(x: Tensor, delta: Tensor | None, weights: LayerWeights) -> CodedRows:
    """Codes of norm(x). delta, (tokens, dim), is added to x in place first."""
    rows = CodedRows.empty(x.shape[0], x.shape[1], x.device)
    norm = weights.input_norm_weight, weights.input_norm_bias
    added = x if delta is None else delta
    constants = {"EPS": weights.norm_eps, "ADD": delta is not None, "NATIVE": is_native(x)}
    _launch(_norm_kernel, x.shape, x, added, *norm, *rows, x.stride(0), **constants)
    return rows


def gate_output(u: Tensor, o: Tensor, weights: LayerWeights, form: Form) -> Tensor:  # (tokens, dim)
    """gate(silu(u), norm(o)) @ W_o + b_o, which the layer adds to x. u and o: (tokens, heads * v)."""
    assert weights.coded is not None, "weights have no codes"
    rows = CodedRows.empty(u.shape[0], weights.output_weight.shape[0], u.device)
    norm = weights.output_norm_weight, weights.output_norm_bias
    constants = {"EPS": weights.norm_eps, "CONCAT": form == "concat", "NATIVE": is_native(u)}
    _launch(_gate_kernel, u.shape, u, o, *norm, *rows, u.stride(0), o.stride(0), **constants)
    return multiply(rows, weights.coded.output, weights.output_weight, weights.output_bias)


def multiply(rows: CodedRows, weight: CodedWeight, decoded: Tensor, bias: Tensor | None) -> Tensor:  # (tokens, out)
    """Products of codes, times both scales, plus bias, (out,). decoded: (in, out), what the codes of `weight` are."""
    codes, dtype = rows.codes.view(torch.float8_e4m3fn), decoded.dtype
    if can_multiply_codes(weight.codes, dtype):
        return torch._scaled_mm(
            codes, weight.codes.T, rows.scale, weight.scale, bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    left = (codes.float() * rows.scale).to(dtype)
    return left @ decoded if bias is None else torch.addmm(bias, left, decoded)


def can_multiply_codes(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device of a weight, (out, in), has matrix units for products of codes with results of dtype."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] < _EIGHT_BIT_UNITS:
        return False
    return dtype == torch.bfloat16 and all(size % 16 == 0 for size in weight.shape)


def is_native(like: Tensor) -> bool:
    """Whether the device of a tensor converts to eight-bit floats by itself."""
    return like.is_cuda and torch.cuda.get_device_capability(like.device) >= (8, 9)


def _launch(kernel: Any, shape: Sequence[int], *args: Any, **constants: Any) -> None:
    """Run a kernel over all rows, each taken by one warp or few. shape: number and width of the rows."""
    num_rows, width = shape
    padded = triton.next_power_of_2(width)
    rows_each = max(1, min(_MOST_ROWS, num_rows // (_ROUNDS * num_programs(args[0].device))))
    constants |= {"WIDTH": width, "PADDED": padded, "num_warps": max(1, padded // WARP_WIDTH)}
    kernel[(triton.cdiv(num_rows, rows_each),)](*args, num_rows, rows_each, **constants)
