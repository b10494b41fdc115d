"""The embedding stage in Triton, one pass over memory between two matrix products: fast twin of `embed.py`."""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from helmrec.kernels.embed import NORM_EPS, Lookups
from helmrec.kernels.row_codec import RowCodec
from helmrec.kernels.triton_layer import launch_rows, load_norm, norm_rows
from helmrec.kernels.triton_rounding import AS_THEY_ARE, decode, format_of

_AS_THEY_ARE = tl.constexpr(AS_THEY_ARE)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit(do_not_specialize=["num_rows"])
def _pool_kernel(rows, features, out, feature_stride, row_stride, num_rows, NUM_FEATURES: tl.constexpr,
                 WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr,
                 IN_FLOAT16: tl.constexpr):
    """IN_FLOAT16: rows of codes stand for float16, which does not hold all that a code times its scale may be."""
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, PADDED)
    live = (at < num_rows)[:, None] & (columns < WIDTH)[None, :]
    total = tl.zeros((ROWS, PADDED), tl.float32)
    for i in tl.static_range(NUM_FEATURES):
        plane = rows + tl.load(features + i) * feature_stride
        stored = tl.load(plane + at[:, None] * row_stride + columns[None, :], mask=live, other=0)
        if FORMAT == _AS_THEY_ARE:
            total += stored.to(tl.float32)
        else:
            biased = tl.load(plane + at * row_stride + WIDTH, mask=at < num_rows, other=0)
            values = decode(stored, biased, FORMAT)
            total += values.to(tl.float16).to(tl.float32) if IN_FLOAT16 else values
    tl.store(out + at[:, None] * WIDTH + columns[None, :], total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(hidden, weight, bias, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                 EPS: tl.constexpr):
    rows, columns, live, w, b = load_norm(weight, bias, num_rows, WIDTH, PADDED, ROWS)
    at = hidden + rows[:, None] * WIDTH + columns[None, :]
    values = tl.load(at, mask=live, other=0.0).to(tl.float32)
    gated = values * tl.sigmoid(norm_rows(values, w, b, live, WIDTH, EPS))
    tl.store(at, gated.to(hidden.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(x, at, actions, action_table, positions, position_table, gaps, time_table, encoded, weight, bias,
                num_rows, NUM_ENCODERS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                EPS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, PADDED)
    in_width, in_range = columns < WIDTH, rows < num_rows
    live = in_range[:, None] & in_width[None, :]
    action = tl.load(actions + rows, mask=in_range, other=0).to(tl.int64)
    position = tl.load(positions + rows, mask=in_range, other=0).to(tl.int64)
    gap = tl.load(gaps + rows, mask=in_range, other=0).to(tl.int64)
    total = tl.load(action_table + action[:, None] * WIDTH + columns[None, :], mask=live, other=0.0).to(tl.float32)
    total += tl.load(position_table + position[:, None] * WIDTH + columns[None, :], mask=live, other=0.0).to(tl.float32)
    total += tl.load(time_table + gap[:, None] * WIDTH + columns[None, :], mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(NUM_ENCODERS):
        w = tl.load(weight + i * WIDTH + columns, mask=in_width, other=0.0).to(tl.float32)
        b = tl.load(bias + i * WIDTH + columns, mask=in_width, other=0.0).to(tl.float32)
        source = encoded + (i * num_rows + rows)[:, None] * WIDTH + columns[None, :]
        total += norm_rows(tl.load(source, mask=live, other=0.0).to(tl.float32), w, b, live, WIDTH, EPS)
    target = tl.load(at + rows, mask=in_range, other=0).to(tl.int64)
    tl.store(x + target[:, None] * WIDTH + columns[None, :], total.to(x.dtype.element_ty), mask=live)


# fmt: on


def pool_rows(
    rows: Tensor, features: Tensor, dtype: torch.dtype, codec: RowCodec | None = None
) -> Tensor:  # (n, row_dim) of dtype
    """The sum of the rows of some features, added up in float32; arguments as the twin's, `features` on the device."""
    width, form = (rows.shape[2], AS_THEY_ARE) if codec is None else (codec.dim, format_of(codec.code))
    out = torch.empty((rows.shape[1], width), dtype=dtype, device=rows.device)
    strides = rows.stride(0), rows.stride(1)
    constants = {"FORMAT": form, "IN_FLOAT16": codec is not None and codec.dtype == torch.float16}
    launch_rows(_pool_kernel, out.shape, rows, features, out, *strides, NUM_FEATURES=features.numel(), **constants)
    return out


def gate_hidden(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # (n, width)
    """hidden * sigmoid(norm(hidden)), in place."""
    launch_rows(_gate_kernel, hidden.shape, hidden, weight, bias, EPS=NORM_EPS)
    return hidden


def sum_parts(x: Tensor, at: Tensor, lookups: Lookups, encoded: Tensor, weight: Tensor, bias: Tensor) -> None:
    """x[at[i]] = the token's three lookups + norm(encoded[0, i]) + ..., added up in float32; shapes as the twin's."""
    num_encoders, *shape = encoded.shape
    tables = (
        *(lookups.actions, lookups.action_table),
        *(lookups.positions, lookups.position_table),
        *(lookups.gaps, lookups.time_table),
    )
    launch_rows(_sum_kernel, shape, x, at, *tables, encoded, weight, bias, NUM_ENCODERS=num_encoders, EPS=NORM_EPS)
