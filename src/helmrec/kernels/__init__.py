"""Compute kernels: Triton where it pays, each beside its plain torch twin. Nothing here knows owners or users.

`run_layer` of `plain` and of `fused` are the same operation; `layer_for` picks by name.
"""

from collections.abc import Callable

from torch import Tensor

from helmrec.kernels import plain
from helmrec.kernels.layer import LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch

RunLayer = Callable[[Tensor, LayerWeights, LayerShape, Tensor, Tensor, RaggedBatch], Tensor]


def layer_for(name: str) -> RunLayer:
    """The layer called "torch", which runs anywhere, or "triton", which needs a card (or Triton's interpreter)."""
    if name == "torch":
        return plain.run_layer
    from helmrec.kernels import fused  # noqa: PLC0415 - triton is not on every machine

    return fused.run_layer
