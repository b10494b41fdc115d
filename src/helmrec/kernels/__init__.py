"""Compute kernels: Triton where it pays, each beside its plain torch twin. Nothing here knows owners or users."""

from typing import NamedTuple, Protocol

from torch import Tensor

from helmrec.kernels import attention, layer
from helmrec.kernels.layer import Form, LayerWeights, Projected
from helmrec.kernels.ragged import RaggedBatch


class Project(Protocol):
    def __call__(self, x: Tensor, weights: LayerWeights, form: Form, num_heads: int) -> Projected: ...


class AppendKV(Protocol):
    def __call__(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch) -> None: ...


class Attend(Protocol):
    def __call__(  # noqa: PLR0913 - six tensors and two scalars are the operation
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: RaggedBatch,
        *,
        scale: float,
        normaliser: float,
    ) -> Tensor: ...


class GateOutput(Protocol):
    def __call__(self, x: Tensor, u: Tensor, o: Tensor, weights: LayerWeights, form: Form) -> Tensor: ...


class Kernels(NamedTuple):
    """The four operations of a layer, in the order they run."""

    project: Project
    append_kv: AppendKV
    attend: Attend
    gate_output: GateOutput


TWINS = Kernels(layer.project, attention.append_kv, attention.attend, layer.gate_output)
"""Plain torch on any device: the reference every fast kernel is held against."""
