"""The HSTU ranking model: computes logits from embedding rows. Inference only.

Append-stable by construction: positions count forward from the window's anchor, the attention normaliser is a constant
and times are gaps, so K/V of a token never depend on later tokens. Models with a query frame are the exception.
Nothing here knows users, owners or queues.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels import ModelKernels
from helmrec.kernels.embed import NORM_EPS, Lookups
from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.layer import LayerShape, LayerWeights, RelativeBias
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.row_codec import RowCodec
from helmrec.model.config import EncoderConfig, ModelConfig, RetrievalHead, StateHead

L2_EPS = 1e-6  # smallest length that a vector is divided by
_LAST_LOGARITHM = 43.6  # of a time that 63 bits hold


@dataclass(frozen=True, slots=True)
class QueryTerms:
    """Inputs from the queries of a step, in a model with a query frame."""

    context_gaps: Tensor  # (context tokens,) time bucket
    context_kept: Tensor  # (context tokens, 1) 1, or 0 where the row counts as zeros
    clocks: Tensor  # (candidates, 2 * cycles)


@dataclass(frozen=True, slots=True)
class DenseInput:
    """One step's tokens. Flat order per sequence: user context, new events, request context, candidates."""

    event_rows: Tensor  # (features, events, width of a stored row); "events" are new events and candidates here
    event_at: Tensor  # (events,) flat position
    actions: Tensor  # (events,) action, or the placeholder for candidates
    positions: Tensor  # (events,)
    gaps: Tensor  # (events,) time bucket
    context_rows: Tensor  # (context tokens, width of a stored row), grouped by context table
    context_at: Tensor  # (context tokens,) flat position
    context_counts: tuple[int, ...]  # tokens of each context table
    ragged: RaggedBatch
    query: QueryTerms | None = None


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every dense weight. GEMM weights of layers are in x out, those of MLPs out x in."""
    dim, hidden, frame = config.dim, config.hidden_dim, config.query_frame
    input_hidden = config.input_hidden_dim or hidden
    shapes: dict[str, tuple[int, ...]] = {
        "action_embedding.weight": (config.num_actions + 1, dim),  # the last row stands for "not yet known"
        "position_embedding.weight": (config.window + 1 if frame is None else frame.num_positions, dim),
        "time_embedding.weight": (config.time_buckets, dim),
    }
    has_mlp_head = config.retrieval is None and config.state_head is None
    if has_mlp_head or (config.retrieval is not None and config.retrieval.state_norm == "layer"):
        shapes |= {"output_norm.weight": (dim,), "output_norm.bias": (dim,)}
    if num_context := len(config.user_context) + len(config.request_context):
        shapes |= {"context.weight": (num_context, config.row_dim, dim), "context.bias": (num_context, dim)}
    if frame is not None:
        shapes |= {"output_mix.weight": (dim, dim + 2 * len(frame.cycles)), "output_mix.bias": (dim,)}
    for encoder in config.encoders:
        shapes |= _encoder_shapes(f"encoders.{encoder.name}", encoder, config, input_hidden)
    if config.state_head is not None:
        widths = (dim, *config.state_head.widths, config.num_tasks)
        for i, (fan_in, out) in enumerate(pairwise(widths)):
            shapes |= {f"state_head.layer{i}.weight": (out, fan_in), f"state_head.layer{i}.bias": (out,)}
    else:
        shapes |= _encoder_shapes("candidate_encoder", config.candidate_encoder, config, hidden)
    if has_mlp_head:
        shapes |= mlp_shapes("head", dim, hidden, config.num_tasks, has_norm=False)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of one layer; the names are those of `LayerWeights`."""
    width, num_columns = config.num_heads * config.v_dim, 2 * config.num_heads * (config.v_dim + config.qk_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "uvqk_weight": (config.dim, num_columns),
        "uvqk_beta": (num_columns,),
        "input_norm_weight": (config.dim,),
        "input_norm_bias": (config.dim,),
        "output_weight": (width * (1 if config.form == "gated" else 3), config.dim),
        "output_norm_weight": (width,),
        "output_norm_bias": (width,),
    }
    if config.output_bias:
        shapes["output_bias"] = (config.dim,)
    if config.attention_bias is not None:
        shapes |= {"position_bias": (config.window,), "time_bias": (config.attention_bias.time_buckets + 1,)}
    return shapes


def layer_weights(config: ModelConfig, weights: Mapping[str, Tensor], i: int, edges: Tensor | None) -> LayerWeights:
    """Return the weights of one layer. edges: those of `bias_edges`, in a model with an attention bias."""
    found: dict[str, Any] = {name: weights[f"layers.{i}.{name}"] for name in layer_shapes(config)}
    found["norm_eps"] = config.layer_norm_eps
    if edges is None:
        return LayerWeights(**found)
    bias = RelativeBias(found.pop("position_bias"), found.pop("time_bias"), edges)
    return LayerWeights(**found, relative_bias=bias)


def bias_edges(config: ModelConfig, device: torch.device | None = None) -> Tensor | None:
    """Return the smallest time of each bucket after the first, where the model has an attention bias."""
    if config.attention_bias is None:
        return None
    logarithms = [config.attention_bias.bucket_width * (i + 1) for i in range(config.attention_bias.time_buckets)]
    edges = [math.ceil(math.exp(each)) for each in logarithms if each < _LAST_LOGARITHM]
    return torch.tensor(edges, dtype=torch.int64, device=device)


def _encoder_shapes(name: str, encoder: EncoderConfig, config: ModelConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    fan_in = config.row_dim * (len(encoder.tables) if encoder.pooling == "concat" else 1)
    if encoder.kind == "linear":
        return {f"{name}.0.weight": (config.dim, fan_in), f"{name}.0.bias": (config.dim,)}
    return mlp_shapes(name, fan_in, hidden, config.dim, has_norm=True)


def mlp_shapes(name: str, fan_in: int, hidden: int, out: int, *, has_norm: bool) -> dict[str, tuple[int, ...]]:
    """Return the weights of linear, norm, linear and, with `has_norm`, a norm of the result."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.0.weight": (hidden, fan_in),
        f"{name}.0.bias": (hidden,),
        f"{name}.1.weight": (hidden,),
        f"{name}.1.bias": (hidden,),
        f"{name}.2.weight": (out, hidden),
        f"{name}.2.bias": (out,),
    }
    return shapes | ({f"{name}.3.weight": (out,), f"{name}.3.bias": (out,)} if has_norm else {})


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """An encoder and the features whose rows it reads."""

    encoder: EncoderConfig
    features: list[int]
    on_device: Tensor  # the same

    @classmethod
    def of(cls, encoder: EncoderConfig, features: Iterable[int], device: torch.device) -> "_Inputs":
        chosen = list(features)
        return cls(encoder, chosen, torch.tensor(chosen, device=device))


def dot_product(head: RetrievalHead, states: Tensor, items: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Score candidates, (candidates, 1). states and items: (candidates, dim) of one floating type."""
    if head.state_norm == "layer":
        weight, bias = (weights[f"output_norm.{part}"].to(states.dtype) for part in ("weight", "bias"))
        states = F.layer_norm(states, states.shape[-1:], weight, bias, NORM_EPS)
    elif head.state_norm == "l2":
        states = F.normalize(states, dim=-1, eps=L2_EPS)
    if head.item_norm == "l2":
        items = F.normalize(items, dim=-1, eps=L2_EPS)
    return (states * items).sum(-1, keepdim=True) / head.temperature


def state_logits(head: StateHead, states: Tensor, weights: Mapping[str, Tensor]) -> Tensor:  # (candidates, tasks)
    """Apply a plain MLP to the states of candidates, (candidates, dim), brought to length 1."""
    x, last = F.normalize(states, dim=-1, eps=L2_EPS), len(head.widths)
    for i in range(last + 1):
        x = F.linear(x, weights[f"state_head.layer{i}.weight"], weights[f"state_head.layer{i}.bias"])
        if i < last:
            x = F.relu(x) if head.activation == "relu" else F.gelu(x)
    return x


class HstuModel:
    """Dense weights on one device, and the arithmetic over them: embed, layers, head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: ModelKernels,
        row_codec: RowCodec | None = None,
        *,
        in_fp8: bool = False,
    ) -> None:
        """in_fp8: the products of the layers take eight-bit floats. row_codec: of the rows that a step reads."""
        self.config = config
        self.row_codec = row_codec or RowCodec(config.row_dim, getattr(torch, config.row_dtype))
        self._kernels = kernels
        self._weights = dict(weights)
        edges = bias_edges(config, self.device)
        layers = (layer_weights(config, weights, i, edges) for i in range(config.num_layers))
        self._layers = [layer.in_fp8() if in_fp8 else layer for layer in layers]
        self._shape = LayerShape(config.form, config.num_heads, config.score_scale, float(config.normaliser))
        place = {table.name: i for i, table in enumerate(config.features)}
        self.head_features = [place[table] for table in config.candidate_encoder.tables]  # whose rows `head` is given
        self._event_inputs = [
            _Inputs.of(encoder, [place[table] for table in encoder.tables], self.device) for encoder in config.encoders
        ]
        self._head_inputs = _Inputs.of(config.candidate_encoder, range(len(self.head_features)), self.device)
        self._mlp_inputs = [inputs for inputs in self._event_inputs if inputs.encoder.kind == "mlp"]
        self._linear_inputs = [inputs for inputs in self._event_inputs if inputs.encoder.kind == "linear"]
        self._first = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._norm_weight, self._norm_bias = (
            torch.stack([weights[f"encoders.{inputs.encoder.name}.3.{part}"] for inputs in self._mlp_inputs])
            if self._mlp_inputs
            else torch.empty((0, config.dim), dtype=self.dtype, device=self.device)
            for part in ("weight", "bias")
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._weights["position_embedding.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self._weights["position_embedding.weight"].device

    def embed(self, tokens: DenseInput, x: Tensor) -> None:
        """Write token embeddings in flat order to x, (tokens, dim); rows of x without a token are not changed."""
        w = self._weights
        lookups = Lookups(
            action_table=w["action_embedding.weight"],
            actions=tokens.actions,
            position_table=w["position_embedding.weight"],
            positions=tokens.positions,
            time_table=w["time_embedding.weight"],
            gaps=tokens.gaps,
        )
        encoded = x.new_empty((len(self._mlp_inputs), tokens.event_at.shape[0], x.shape[1]))
        for inputs, out in zip(self._mlp_inputs, encoded, strict=True):
            self._mlp(f"encoders.{inputs.encoder.name}", self._pool(inputs, tokens.event_rows), out)
        self._kernels.sum_parts(x, tokens.event_at, lookups, encoded, self._norm_weight, self._norm_bias)
        for inputs in self._linear_inputs:
            part = self._linear(f"encoders.{inputs.encoder.name}", self._pool(inputs, tokens.event_rows))
            x.index_add_(0, tokens.event_at, part)
        if tokens.context_counts:
            x[tokens.context_at] = self._embed_context(tokens)

    def layers(self, x: Tensor, k_pages: Pages, v_pages: Pages, batch: RaggedBatch) -> Tensor:  # (tokens, dim)
        """Run all layers; K/V of new history tokens are written to their pages. x may be overwritten.

        k_pages, v_pages: (layers, pages, page_tokens, heads, dim).
        """
        return self._kernels.run_layers(x, self._layers, self._shape, k_pages, v_pages, batch)

    def head(self, x: Tensor, rows: Tensor, query: QueryTerms | None = None) -> Tensor:  # (candidates, tasks) float32
        """Compute logits from the candidates' tokens and their rows, (head_features, candidates, width).

        With a retrieval head, x has the state of the request's last token for each candidate.
        """
        w, name = self._weights, "candidate_encoder"
        if self.config.state_head is not None:
            return state_logits(self.config.state_head, x, w).float()
        pooled = self._pool(self._head_inputs, rows)
        if self._head_inputs.encoder.kind == "linear":
            item = self._linear(name, pooled)
        else:
            item = self._mlp(name, pooled)
            item = F.layer_norm(item, item.shape[-1:], w[f"{name}.3.weight"], w[f"{name}.3.bias"], NORM_EPS)
        if self.config.retrieval is not None:
            return dot_product(self.config.retrieval, x.float(), item.float(), w)
        if query is not None:
            x = F.linear(torch.cat([x, query.clocks.to(x.dtype)], 1), w["output_mix.weight"], w["output_mix.bias"])
        user = F.layer_norm(x, x.shape[-1:], w["output_norm.weight"], w["output_norm.bias"], NORM_EPS)
        return self._mlp("head", user * item).float()

    def _embed_context(self, tokens: DenseInput) -> Tensor:  # (context tokens, dim)
        weight, bias = self._weights["context.weight"], self._weights["context.bias"]
        rows, query = self._sum(tokens.context_rows[None], self._first), tokens.query
        if query is not None:
            rows = rows.masked_fill(query.context_kept == 0, 0.0)  # not a product, since zero times NaN is NaN
        groups = rows.split(list(tokens.context_counts))
        embedded = torch.cat([torch.addmm(bias[i], group, weight[i]) for i, group in enumerate(groups)])
        if query is not None:
            embedded += F.embedding(query.context_gaps, self._weights["time_embedding.weight"])
        return embedded

    def _pool(self, inputs: "_Inputs", rows: Tensor) -> Tensor:  # (n, fan-in of the encoder)
        """Combine the rows of an encoder's tables; rows: (all features, n, width)."""
        if inputs.encoder.pooling == "sum" or len(inputs.features) == 1:
            return self._sum(rows, inputs.on_device)
        return torch.cat([self._sum(rows, feature) for feature in inputs.on_device.split(1)], dim=1)

    def _sum(self, rows: Tensor, features: Tensor) -> Tensor:  # (n, row_dim)
        return self._kernels.pool_rows(rows, features, self.dtype, self.row_codec)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.0.weight"], self._weights[f"{name}.0.bias"])

    def _mlp(self, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply linear, gate by the sigmoid of its layer norm, linear."""
        w = self._weights
        hidden = F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"])
        gated = self._kernels.gate_hidden(hidden, w[f"{name}.1.weight"], w[f"{name}.1.bias"])
        return torch.addmm(w[f"{name}.2.bias"], gated, w[f"{name}.2.weight"].T, out=out)
