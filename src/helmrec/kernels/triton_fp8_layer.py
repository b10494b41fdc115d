"""The dense halves of an HSTU layer with products of eight-bit floats: fast twins of `layer.py` for coded weights.

Norm and gate write codes and the scale of each token, a power of two, in the pass that computes them. A card with
eight-bit matrix units multiplies the codes; elsewhere they are decoded first, which gives the same products. As in
`triton_layer.py`, `project` returns U without its SiLU, which the gate applies.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.layer import CodedWeight, Form, LayerWeights, Projected, split_projection
from helmrec.kernels.triton_layer import launch_rows, load_norm, norm_rows, silu_in_place
from helmrec.kernels.triton_rounding import FP8, encode_finite, exponent_of, power_of_two

_FP8 = tl.constexpr(FP8)
_EIGHT_BIT_UNITS = 9  # major compute capability with products of codes and one scale per row and column

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def _scale_of(peak):
    """Exponents of the scales of rows, and the scales; of rows that are not finite, NaN."""
    is_finite = peak < float("inf")
    exponent = exponent_of(tl.where(is_finite, peak, 0.0), _FP8)
    return exponent, tl.where(is_finite, power_of_two(exponent), float("nan"))


@triton.jit
def _peak(values):
    """Largest absolute value of each row; infinity if one is NaN."""
    size = tl.abs(values)
    return tl.max(tl.where(size < float("inf"), size, float("inf")), axis=1)


@triton.jit
def _store_codes(out, at, values, exponent, live, NATIVE: tl.constexpr):
    scaled = values * power_of_two(-exponent)[:, None]
    finite = tl.where(tl.abs(scaled) < float("inf"), scaled, 0.0)
    tl.store(out + at, encode_finite(finite, _FP8, NATIVE), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(x, delta, weight, bias, out, scale, x_stride, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                 ROWS: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, NATIVE: tl.constexpr):
    """Codes and scales of norm(x); if ADD, of norm(x + delta), which x becomes."""
    rows, columns, live, w, b = load_norm(weight, bias, num_rows, WIDTH, PADDED, ROWS)
    at = rows[:, None] * x_stride + columns[None, :]
    values = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + rows[:, None] * WIDTH + columns[None, :], mask=live, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=live)
        values = rounded.to(tl.float32)
    normed = tl.where(live, norm_rows(values, w, b, live, WIDTH, EPS), 0.0)
    exponent, factor = _scale_of(_peak(normed))
    tl.store(scale + rows, factor, mask=rows < num_rows)
    _store_codes(out, rows[:, None] * WIDTH + columns[None, :], normed, exponent, live, NATIVE)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(u, o, weight, bias, y, scale, u_stride, o_stride, num_rows, WIDTH: tl.constexpr,
                 PADDED: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr, CONCAT: tl.constexpr,
                 NATIVE: tl.constexpr):
    """Codes and scales of silu(u) * norm(o), in concat form of [silu(u) | o | silu(u) * norm(o)]."""
    rows, columns, live, w, b = load_norm(weight, bias, num_rows, WIDTH, PADDED, ROWS)
    raw_u = tl.load(u + rows[:, None] * u_stride + columns[None, :], mask=live, other=0.0).to(tl.float32)
    raw_o = tl.load(o + rows[:, None] * o_stride + columns[None, :], mask=live, other=0.0).to(tl.float32)
    active = raw_u * tl.sigmoid(raw_u)
    gated = tl.where(live, active * norm_rows(raw_o, w, b, live, WIDTH, EPS), 0.0)
    peak = _peak(gated)
    if CONCAT:
        peak = tl.maximum(peak, tl.maximum(_peak(active), _peak(raw_o)))
    exponent, factor = _scale_of(peak)
    tl.store(scale + rows, factor, mask=rows < num_rows)
    if CONCAT:
        at = rows[:, None] * (3 * WIDTH) + columns[None, :]
        _store_codes(y, at, active, exponent, live, NATIVE)
        _store_codes(y, at + WIDTH, raw_o, exponent, live, NATIVE)
        _store_codes(y, at + 2 * WIDTH, gated, exponent, live, NATIVE)
    else:
        _store_codes(y, rows[:, None] * WIDTH + columns[None, :], gated, exponent, live, NATIVE)


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
    rows = CodedRows.empty(x.shape[0], x.shape[1], x.device)
    norm = weights.input_norm_weight, weights.input_norm_bias
    added = x if delta is None else delta
    constants = {"EPS": weights.norm_eps, "ADD": delta is not None, "NATIVE": is_native(x)}
    launch_rows(_norm_kernel, x.shape, x, added, *norm, *rows, x.stride(0), **constants)
    uvqk = multiply(rows, weights.coded.uvqk, weights.uvqk_beta, x.dtype)
    width = weights.output_norm_weight.shape[0]  # heads * v
    if form == "gated":
        silu_in_place(uvqk[:, width:])
    return split_projection(uvqk, width, num_heads)


def gate_output(u: Tensor, o: Tensor, weights: LayerWeights, form: Form) -> Tensor:  # (tokens, dim)
    """gate(silu(u), norm(o)) @ W_o + b_o, which the layer adds to x. u and o: (tokens, heads * v)."""
    assert weights.coded is not None, "weights have no codes"
    rows = CodedRows.empty(u.shape[0], weights.output_weight.shape[0], u.device)
    norm = weights.output_norm_weight, weights.output_norm_bias
    constants = {"EPS": weights.norm_eps, "CONCAT": form == "concat", "NATIVE": is_native(u)}
    launch_rows(_gate_kernel, u.shape, u, o, *norm, *rows, u.stride(0), o.stride(0), **constants)
    return multiply(rows, weights.coded.output, weights.output_bias, u.dtype)


def multiply(
    rows: CodedRows, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # (tokens, out) of dtype
    """Products of codes, times both scales, plus bias, (out,)."""
    codes = rows.codes.view(torch.float8_e4m3fn)
    if can_multiply_codes(weight.codes, dtype):
        return torch._scaled_mm(
            codes, weight.codes.T, rows.scale, weight.scale, bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    decoded, right = (codes.float() * rows.scale).to(dtype), weight.decoded(dtype)
    return decoded @ right if bias is None else torch.addmm(bias, decoded, right)


def can_multiply_codes(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device of a weight, (out, in), has matrix units for products of codes with results of dtype."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] < _EIGHT_BIT_UNITS:
        return False
    return dtype == torch.bfloat16 and all(size % 16 == 0 for size in weight.shape)


def is_native(like: Tensor) -> bool:
    """Whether the device of a tensor converts to eight-bit floats by itself."""
    return like.is_cuda and torch.cuda.get_device_capability(like.device) >= (8, 9)
