"""HSTU layers in plain torch: the reference for the fast kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helmrec.kernels.attention import append_kv, attend
from helmrec.kernels.kv_rounding import Pages, by_layer, holds_fp8, query_lift, round_in_place
from helmrec.kernels.layer import LayerShape, LayerWeights, gate_output, project
from helmrec.kernels.ragged import RaggedBatch


def run_layers(
    x: Tensor, layers: Sequence[LayerWeights], shape: LayerShape, k_pages: Pages, v_pages: Pages, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    """Run all layers. k_pages, v_pages: (layers, pages, page_tokens, heads, dim)."""
    for weights, k, v in zip(layers, by_layer(k_pages), by_layer(v_pages), strict=True):
        x = run_layer(x, weights, shape, k, v, batch)
    return x


def run_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, k_pages: Pages, v_pages: Pages, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    """Run one layer; K/V are appended first. x: (tokens, dim), pages of it: (pages, page_tokens, heads, dim)."""
    u, v, q, k = project(x, weights, shape.form, shape.num_heads)
    if batch.v_scale is not None:
        v.mul_(batch.v_scale)
    if weights.coded is not None and holds_fp8(k_pages):
        round_in_place(q, torch.float8_e4m3fn, query_lift(q.shape[2]))  # then q.k is a product of eight-bit floats
    append_kv(k, v, k_pages, v_pages, batch)
    o = attend(
        q, k, v, k_pages, v_pages, batch, scale=shape.scale, normaliser=shape.normaliser, bias=weights.relative_bias
    )
    return gate_output(x, u, o.flatten(1), weights, shape.form)
