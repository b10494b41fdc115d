"""HSTU layers with the fused kernels: the contract of `plain.py`, but x is updated in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helmrec.kernels import hopper_fp8_attention, triton_fp8_layer
from helmrec.kernels.attention_plan import multiplies_codes, plan_for
from helmrec.kernels.kv_rounding import Pages, ScaledPages, by_layer, holds_fp8, query_lift, round_in_place
from helmrec.kernels.layer import LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_append import append_kv
from helmrec.kernels.triton_attention import attend
from helmrec.kernels.triton_fp8_project import project_codes
from helmrec.kernels.triton_layer import gate_output, joined_buffer, project


def run_layers(
    x: Tensor, layers: Sequence[LayerWeights], shape: LayerShape, k_pages: Pages, v_pages: Pages, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    """Run all layers. What a layer with coded weights adds to x is added by the next one, as it reads x."""
    delta = None
    for weights, k, v in zip(layers, by_layer(k_pages), by_layer(v_pages), strict=True):
        if weights.coded is None:
            x = run_layer(x, weights, shape, k, v, batch)
        else:
            delta = _run_coded_layer(x, delta, weights, shape, (k, v), batch)
    return x if delta is None else x.add_(delta)


def run_layer(
    x: Tensor, weights: LayerWeights, shape: LayerShape, k_pages: Pages, v_pages: Pages, batch: RaggedBatch
) -> Tensor:  # (tokens, dim)
    """Run one layer; K/V are appended first. x: (tokens, dim), pages of it: (pages, page_tokens, heads, dim)."""
    if weights.coded is not None:
        return x.add_(_run_coded_layer(x, None, weights, shape, (k_pages, v_pages), batch))
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


def _run_coded_layer(
    x: Tensor,
    delta: Tensor | None,
    weights: LayerWeights,
    shape: LayerShape,
    pages: tuple[Pages, Pages],
    batch: RaggedBatch,
) -> Tensor:  # (tokens, dim)
    """Add delta to x, and return what the layer adds to x."""
    k_pages, v_pages = pages
    width = weights.output_norm_weight.shape[0]
    o = x.new_empty((x.shape[0], shape.num_heads, width // shape.num_heads))
    has_plain_scores = weights.relative_bias is None and batch.window is None
    has_equal_heads = weights.uvqk_beta.shape[0] == 4 * width
    in_codes = has_plain_scores and has_equal_heads and multiplies_codes(o, o, k_pages, v_pages, x.shape[1])
    if in_codes and isinstance(k_pages, ScaledPages) and isinstance(v_pages, ScaledPages):
        plan = plan_for(o, o, batch, "codes") if batch.plan is None else batch.plan
        u, tokens = project_codes(x, delta, weights, shape.form, (k_pages, v_pages), batch)
        hopper_fp8_attention.launch(tokens, (k_pages, v_pages), batch, o, plan, (shape.scale, shape.normaliser))
        return triton_fp8_layer.gate_output(u, o.flatten(1), weights, shape.form)
    u, v, q, k = triton_fp8_layer.project(x, delta, weights, shape.form, shape.num_heads)
    plan = plan_for(q, v, batch) if batch.plan is None else batch.plan
    if holds_fp8(k_pages):
        round_in_place(q, torch.float8_e4m3fn, query_lift(q.shape[2]))
    append_kv(k, v, k_pages, v_pages, batch)
    settings: dict[str, Any] = {"scale": shape.scale, "normaliser": shape.normaliser, "plan": plan}
    o = attend(q, k, v, k_pages, v_pages, batch, **settings, bias=weights.relative_bias)
    return triton_fp8_layer.gate_output(u, o.flatten(1), weights, shape.form)
