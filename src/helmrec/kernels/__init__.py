"""Compute kernels in Triton, each with a plain torch twin. Nothing here knows owners or users."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helmrec.kernels import embed, plain
from helmrec.kernels.embed import Lookups
from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.layer import LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.row_codec import RowCodec


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """The kernels of a model, plain or compiled. `plain` and `embed` document the contracts."""

    run_layers: Callable[[Tensor, Sequence[LayerWeights], LayerShape, Pages, Pages, RaggedBatch], Tensor]
    pool_rows: Callable[[Tensor, Tensor, torch.dtype, RowCodec], Tensor]
    gate_hidden: Callable[[Tensor, Tensor, Tensor], Tensor]
    sum_parts: Callable[[Tensor, Tensor, Lookups, Tensor, Tensor, Tensor], None]


def model_kernels(name: str) -> ModelKernels:
    """Return the kernels named "torch", which run anywhere, or "triton", which need a card or Triton's interpreter."""
    if name == "torch":
        return ModelKernels(plain.run_layers, embed.pool_rows, embed.gate_hidden, embed.sum_parts)
    from helmrec.kernels import fused, triton_embed  # noqa: PLC0415 - triton is not on every machine

    return ModelKernels(fused.run_layers, triton_embed.pool_rows, triton_embed.gate_hidden, triton_embed.sum_parts)
