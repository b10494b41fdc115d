"""One HSTU layer in plain torch: the reference every fast kernel is held against."""

from torch import Tensor

from helmrec.kernels.attention import append_kv, attend
from helmrec.kernels.layer import LayerShape, LayerWeights, gate_output, project
from helmrec.kernels.ragged import RaggedBatch


def run_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    """x: (tokens, dim). pages: (pages, page_tokens, heads, dim) of this layer; K/V are appended first."""
    u, v, q, k = project(x, weights, shape.form, shape.num_heads)
    if batch.v_scale is not None:
        v.mul_(batch.v_scale)
    append_kv(k, v, k_pages, v_pages, batch)
    o = attend(q, k, v, k_pages, v_pages, batch, scale=shape.scale, normaliser=shape.normaliser)
    return gate_output(x, u, o.flatten(1), weights, shape.form)
