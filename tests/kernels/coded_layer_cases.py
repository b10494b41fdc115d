"""Layers with coded weights in the fused kernels and in their plain twin: one comparison for cards and interpreter."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from helmrec.kernels import fused, plain
from helmrec.kernels.kv_rounding import Pages, by_layer, empty_pages
from helmrec.kernels.layer import Form, LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from tests.kernels.ragged_cases import Heads, Lengths, cast, layout, on, relative_error


class LayerCase(NamedTuple):
    """Random layers over the new tokens of several sequences."""

    dim: int
    heads: Heads  # of one size
    form: Form
    lengths: list[Lengths]
    page_tokens: int
    normaliser: float
    device: str = "cpu"

    def error(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> float:
        """Relative error of what one fused layer adds to its input, against the twin in float64.

        It is a few percent in bfloat16: a value near the edge between two codes may go to either side. Every further
        layer rounds inputs that differ by that much.
        """
        batch, x, shape = self._batch(), self._input(dtype), self._shape()
        weights = self._weights(dtype)
        fast, exact = (self._pages(1, kv_dtype if kv_dtype != dtype else each) for each in (dtype, torch.float64))
        ours = fused.run_layers(x.clone(), [weights], shape, *fast, batch)  # it writes to its input
        theirs = plain.run_layers(x.double(), [cast(weights, torch.float64)], shape, *exact, batch)
        return relative_error(ours.double() - x.double(), theirs - x.double())

    def together_and_apart(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two fused layers in one call, where the second adds what the first one leaves, and in two calls."""
        batch, x, shape = self._batch(), self._input(dtype), self._shape()
        layers = [self._weights(dtype) for _ in range(2)]
        together = fused.run_layers(x.clone(), layers, shape, *self._pages(2, kv_dtype), batch)
        k_pages, v_pages = self._pages(2, kv_dtype)
        for weights, k, v in zip(layers, by_layer(k_pages), by_layer(v_pages), strict=True):
            x = fused.run_layer(x, weights, shape, k, v, batch)
        return together, x

    def _batch(self) -> RaggedBatch:
        return on(self.device, layout(self.lengths, self.page_tokens, 0, 0, np.random.default_rng(0)))

    def _shape(self) -> LayerShape:
        return LayerShape(self.form, self.heads.num, self.heads.qk**-0.5, self.normaliser)

    def _input(self, dtype: torch.dtype) -> Tensor:
        num_tokens = sum(each.new + each.candidates for each in self.lengths)
        return torch.randn((num_tokens, self.dim), device=self.device).to(dtype)

    def _pages(self, num_layers: int, dtype: torch.dtype) -> tuple[Pages, Pages]:
        num_pages = 1 + sum(-(-each.new // self.page_tokens) for each in self.lengths)
        size = (num_layers, num_pages, self.page_tokens, self.heads.num, self.heads.qk)
        device, transposed = torch.device(self.device), dtype == torch.float8_e4m3fn
        return empty_pages(size, dtype, device), empty_pages(size, dtype, device, transposed=transposed)

    def _weights(self, dtype: torch.dtype) -> LayerWeights:
        width = self.heads.num * self.heads.v

        def noise(*shape: int) -> Tensor:
            return (0.05 * torch.randn(shape, device=self.device)).to(dtype)

        return LayerWeights(
            noise(self.dim, 4 * width), noise(4 * width), 1 + noise(self.dim), noise(self.dim),
            noise(width * (3 if self.form == "concat" else 1), self.dim), 1 + noise(width), noise(width),
            noise(self.dim),
        ).in_fp8()  # fmt: skip
