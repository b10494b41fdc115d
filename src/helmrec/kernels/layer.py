"""The dense halves of an HSTU layer around attention: norm + projection, and gate + output.

Two published forms exist and checkpoints need the right one: "gated" (SiLU on U, V, Q and K) and
"concat" (SiLU on U alone, output from [U | O | U * norm(O)]). Nothing here knows pages or requests.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels.kv_rounding import encode, round_in_place

NORM_EPS = 1e-6
Form = Literal["gated", "concat"]


class RelativeBias(NamedTuple):
    """A bias of attention by distance and time. It is added to the scaled q.k before its SiLU, for all heads."""

    position: Tensor  # (tokens,) by distance of row and key
    time: Tensor  # (buckets + 1,)
    edges: Tensor  # (buckets,) int64, ascending: the bucket of a time is the number of edges that it reaches


class CodedWeight(NamedTuple):
    """A GEMM weight in eight-bit floats with one scale, a power of two, per output; row by row, as products read it."""

    codes: Tensor  # (out, in) float8_e4m3fn
    scale: Tensor  # (1, out) float32

    @classmethod
    def of(cls, weight: Tensor) -> "CodedWeight":
        """weight: (in, out)."""
        codes, exponents = encode(weight.T, torch.float8_e4m3fn)
        return cls(codes.contiguous(), (exponents.int() << 23).view(torch.float32)[None])

    def decoded(self, dtype: torch.dtype) -> Tensor:  # (in, out)
        return (self.codes.float() * self.scale.T).T.contiguous().to(dtype)


class CodedWeights(NamedTuple):
    """The GEMM weights of a layer whose products run on eight-bit floats."""

    uvqk: CodedWeight
    output: CodedWeight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One HSTU layer; GEMM weights are stored in x out, as published checkpoints store them."""

    uvqk_weight: Tensor  # (dim, heads * (2 v + 2 qk)), columns [U | V | Q | K]
    uvqk_beta: Tensor  # (heads * (2 v + 2 qk),)
    input_norm_weight: Tensor  # (dim,)
    input_norm_bias: Tensor
    output_weight: Tensor  # gated: (heads * v, dim); concat: (3 * heads * v, dim), rows [U | O | U * norm(O)]
    output_norm_weight: Tensor  # (heads * v,)
    output_norm_bias: Tensor
    output_bias: Tensor | None = None  # (dim,), of the output projection
    relative_bias: RelativeBias | None = None
    norm_eps: float = NORM_EPS
    coded: CodedWeights | None = None  # if given, products take codes; the GEMM weights above are then rounded too

    def in_fp8(self) -> "LayerWeights":
        """Round the GEMM weights to eight-bit floats, and let the layer round what they are multiplied with."""
        coded = CodedWeights(CodedWeight.of(self.uvqk_weight), CodedWeight.of(self.output_weight))
        dtype = self.uvqk_weight.dtype
        return replace(
            self,
            uvqk_weight=coded.uvqk.decoded(dtype),
            output_weight=coded.output.decoded(dtype),
            coded=coded,
        )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The parameters of a layer besides its weights."""

    form: Form
    num_heads: int
    scale: float  # of q.k before its SiLU
    normaliser: float  # the constant N


class Projected(NamedTuple):
    """Views into one projection buffer."""

    u: Tensor  # (tokens, heads * v)
    v: Tensor  # (tokens, heads, v)
    q: Tensor  # (tokens, heads, qk)
    k: Tensor  # (tokens, heads, qk)


def project(x: Tensor, weights: LayerWeights, form: Form, num_heads: int) -> Projected:
    """[U | V | Q | K] = activation(norm(x) @ W + beta). x: (tokens, dim)."""
    normed = F.layer_norm(x, x.shape[-1:], weights.input_norm_weight, weights.input_norm_bias, weights.norm_eps)
    if weights.coded is not None:
        round_in_place(normed, torch.float8_e4m3fn)
    uvqk = torch.addmm(weights.uvqk_beta, normed, weights.uvqk_weight)
    width = weights.output_norm_weight.shape[0]  # heads * v
    if form == "gated":
        uvqk = F.silu(uvqk)
    else:
        uvqk[:, :width] = F.silu(uvqk[:, :width])
    return split_projection(uvqk, width, num_heads)


def split_projection(uvqk: Tensor, width: int, num_heads: int) -> Projected:
    qk_width = (uvqk.shape[1] - 2 * width) // 2
    u, v, q, k = uvqk.split([width, width, qk_width, qk_width], dim=1)
    return Projected(u, *(t.unflatten(1, (num_heads, -1)) for t in (v, q, k)))


def gate_output(x: Tensor, u: Tensor, o: Tensor, weights: LayerWeights, form: Form) -> Tensor:
    """x + gate(u, norm(o)) @ W_o + b_o. x: (tokens, dim), u and o: (tokens, heads * v)."""
    normed = F.layer_norm(o, o.shape[-1:], weights.output_norm_weight, weights.output_norm_bias, weights.norm_eps)
    gated = u * normed
    y = gated if form == "gated" else torch.cat([u, o, gated], dim=1)
    if weights.coded is not None:
        round_in_place(y, torch.float8_e4m3fn)
    residual = x if weights.output_bias is None else x + weights.output_bias
    return torch.addmm(residual, y, weights.output_weight)
