"""One HSTU layer in plain torch: the reference for the fast kernels."""

from torch import Tensor

from helmrec.kernels.attention import append_kv, attend
from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.layer import LayerShape, LayerWeights, gate_output, project
from helmrec.kernels.ragged import RaggedBatch


def run_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, k_pages: Pages, v_pages: Pages, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    """Run one layer; K/V are appended first. x: (tokens, dim), pages of it: (pages, page_tokens, heads, dim)."""
    u, v, q, k = project(x, weights, shape.form, shape.num_heads)
    if batch.v_scale is not None:
        v.mul_(batch.v_scale)
    append_kv(k, v, k_pages, v_pages, batch)
    o = attend(
        q, k, v, k_pages, v_pages, batch, scale=shape.scale, normaliser=shape.normaliser, bias=weights.relative_bias
    )
    return gate_output(x, u, o.flatten(1), weights, shape.form)
