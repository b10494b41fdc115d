"""The dense halves of an HSTU layer in Triton and cuBLAS: fast twins of `layer.py`.

Norms, activations and the gate are one fused pass each; cuBLAS computes the matrix products. `project` and
`gate_output` belong together: `project` returns U without its SiLU, which the gate applies as it reads U. Nothing here
knows pages or requests.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.layer import Form, LayerWeights, Projected, split_projection

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def norm_rows(x, weight, bias, live, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of float32 rows whose columns beyond WIDTH are zero."""
    mean = tl.sum(x, axis=1) / WIDTH
    centred = tl.where(live, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    return centred * tl.rsqrt(variance + EPS)[:, None] * weight[None, :] + bias[None, :]


@triton.jit
def load_norm(weight, bias, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Rows and columns of this program, which of their values exist, and the norm's weight and bias in float32."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, PADDED)
    in_width = columns < WIDTH
    live = (rows < num_rows)[:, None] & in_width[None, :]
    w = tl.load(weight + columns, mask=in_width, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=in_width, other=0.0).to(tl.float32)
    return rows, columns, live, w, b


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(x, weight, bias, out, x_stride, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                 ROWS: tl.constexpr, EPS: tl.constexpr):
    rows, columns, live, w, b = load_norm(weight, bias, num_rows, WIDTH, PADDED, ROWS)
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=live, other=0.0).to(tl.float32)
    normed = norm_rows(values, w, b, live, WIDTH, EPS)
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], normed.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _silu_kernel(x, row_stride, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * PADDED + tl.arange(0, PADDED)
    at = x + rows[:, None] * row_stride + columns[None, :]
    live = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, (values * tl.sigmoid(values)).to(x.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(u, o, weight, bias, y, u_stride, o_stride, y_stride, num_rows, WIDTH: tl.constexpr,
                 PADDED: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr, CONCAT: tl.constexpr,
                 COPY_O: tl.constexpr):
    """y = silu(u) * norm(o), in concat form [silu(u) | o | silu(u) * norm(o)]; o is skipped if it is there already."""
    rows, columns, live, w, b = load_norm(weight, bias, num_rows, WIDTH, PADDED, ROWS)
    raw_u = tl.load(u + rows[:, None] * u_stride + columns[None, :], mask=live, other=0.0).to(tl.float32)
    raw_o = tl.load(o + rows[:, None] * o_stride + columns[None, :], mask=live, other=0.0)
    active = raw_u * tl.sigmoid(raw_u)
    gated = active * norm_rows(raw_o.to(tl.float32), w, b, live, WIDTH, EPS)
    to = y + rows[:, None] * y_stride + columns[None, :]
    if CONCAT:
        tl.store(to, active.to(y.dtype.element_ty), mask=live)
        if COPY_O:
            tl.store(to + WIDTH, raw_o, mask=live)
        to += 2 * WIDTH
    tl.store(to, gated.to(y.dtype.element_ty), mask=live)


# fmt: on


def project(x: Tensor, weights: LayerWeights, form: Form, num_heads: int) -> Projected:
    """[U | V | Q | K] = norm(x) @ W + beta, then SiLU on V, Q and K in the gated form. x: (tokens, dim).

    Unlike the twin's, U is left without its SiLU: `gate_output` of this module applies it.
    """
    uvqk = torch.addmm(weights.uvqk_beta, _norm(x, weights), weights.uvqk_weight)
    width = weights.output_norm_weight.shape[0]  # heads * v
    if form == "gated":
        silu_in_place(uvqk[:, width:])
    return split_projection(uvqk, width, num_heads)


def joined_buffer(x: Tensor, weights: LayerWeights) -> Tensor:  # (tokens, 3 * heads * v)
    """Where the concat form gathers [U | O | U * norm(O)]: let attention write O into its middle third."""
    return torch.empty((x.shape[0], weights.output_weight.shape[0]), dtype=x.dtype, device=x.device)


def gate_output(
    x: Tensor, u: Tensor, o: Tensor, weights: LayerWeights, form: Form, joined: Tensor | None = None
) -> Tensor:
    """x + gate(silu(u), norm(o)) @ W_o + b_o. x: (tokens, dim), u and o: (tokens, heads * v).

    x is updated in place and returned: a new tensor would cost a pass over it. u comes from `project` of this
    module. In the concat form, joined may be a buffer of `joined_buffer` whose middle third is o.
    """
    y = joined_buffer(x, weights) if joined is None else joined
    norm = weights.output_norm_weight, weights.output_norm_bias
    strides = u.stride(0), o.stride(0), y.stride(0)
    launch_rows(
        _gate_kernel,
        u.shape,
        u,
        o,
        *norm,
        y,
        *strides,
        EPS=weights.norm_eps,
        CONCAT=form == "concat",
        COPY_O=joined is None,
    )
    if weights.output_bias is not None:
        x.add_(weights.output_bias)
    return x.addmm_(y, weights.output_weight)


def _norm(x: Tensor, weights: LayerWeights) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm = weights.input_norm_weight, weights.input_norm_bias
    launch_rows(_norm_kernel, x.shape, x, *norm, out, x.stride(0), EPS=weights.norm_eps)
    return out


def silu_in_place(x: Tensor) -> None:
    """x: (rows, columns), any row stride."""
    rows, columns = 16, 256
    _silu_kernel[triton.cdiv(x.shape[0], rows), triton.cdiv(x.shape[1], columns)](
        x, x.stride(0), x.shape[0], WIDTH=x.shape[1], PADDED=columns, ROWS=rows
    )


def launch_rows(kernel: Any, shape: Sequence[int], *args: Any, **constants: Any) -> None:
    """Run a kernel over blocks of whole rows. shape: number and width of the rows; the number is the last argument.

    About 16 values of each operand per thread keep enough loads in flight.
    """
    num_rows, width = shape
    padded = triton.next_power_of_2(width)
    rows = max(1, 4096 // padded)
    kernel[(triton.cdiv(num_rows, rows),)](
        *args, num_rows, WIDTH=width, PADDED=padded, ROWS=rows, num_warps=8, **constants
    )
