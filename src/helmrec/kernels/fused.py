"""One HSTU layer with the fused kernels: the contract of `plain.run_layer`, but x is updated in place."""

from typing import Any

from torch import Tensor

from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.layer import LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_append import append_kv
from helmrec.kernels.triton_attention import attend
from helmrec.kernels.triton_layer import gate_output, joined_buffer, project


def run_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, k_pages: Pages, v_pages: Pages, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    u, v, q, k = project(x, weights, shape.form, shape.num_heads)
    append_kv(k, v, k_pages, v_pages, batch)
    settings: dict[str, Any] = {"scale": shape.scale, "normaliser": shape.normaliser, "plan": batch.plan}
    settings["bias"] = weights.relative_bias
    if shape.form == "gated":
        o = attend(q, k, v, k_pages, v_pages, batch, **settings)
        return gate_output(x, u, o.flatten(1), weights, shape.form)
    joined = joined_buffer(x, weights)  # attention writes O to its place, so that the gate need not copy it
    o = joined[:, u.shape[1] : 2 * u.shape[1]]
    out = o.unflatten(1, v.shape[1:])
    attend(q, k, v, k_pages, v_pages, batch, **settings, out=out)
    return gate_output(x, u, o, weights, shape.form, joined)
