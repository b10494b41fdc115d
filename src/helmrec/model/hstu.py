"""HSTU ranking: rows in, logits out. Inference only.

Append-stable by construction: positions count forward from the window's anchor, the attention normaliser is
a constant, time enters as gaps, so K/V of a token never depends on what follows it. Nothing here knows users,
owners or queues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels import RunLayer
from helmrec.kernels.layer import LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from helmrec.model.config import EncoderConfig, ModelConfig

_MLP_EPS = 1e-5
_LAYER_FIELDS = tuple(LayerWeights.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class DenseInput:
    """One step's tokens. Flat order per sequence: user context, new events, request context, candidates."""

    event_rows: Tensor  # (features, events, row_dim); "events" are new events and candidates here
    event_at: Tensor  # (events,) flat position
    actions: Tensor  # (events,) action, or the placeholder for candidates
    positions: Tensor  # (events,)
    gaps: Tensor  # (events,) time bucket
    context_rows: Tensor  # (context tokens, row_dim), grouped by context table
    context_at: Tensor  # (context tokens,) flat position
    context_counts: tuple[int, ...]  # tokens of each context table
    ragged: RaggedBatch


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every dense weight. GEMM weights of layers are in x out, those of MLPs out x in."""
    dim, hidden = config.dim, config.hidden_dim
    width, qk_width = config.num_heads * config.v_dim, config.num_heads * config.qk_dim
    shapes: dict[str, tuple[int, ...]] = {
        "action_embedding.weight": (config.num_actions + 1, dim),  # the last row stands for "not yet known"
        "position_embedding.weight": (config.window + 1, dim),
        "time_embedding.weight": (config.time_buckets, dim),
        "output_norm.weight": (dim,),
        "output_norm.bias": (dim,),
    }
    if num_context := len(config.user_context) + len(config.request_context):
        shapes |= {"context.weight": (num_context, config.row_dim, dim), "context.bias": (num_context, dim)}
    for encoder in config.encoders:
        shapes |= _mlp_shapes(f"encoders.{encoder.name}", _fan_in(encoder, config), hidden, dim, has_norm=True)
    shapes |= _mlp_shapes("candidate_encoder", _fan_in(config.candidate_encoder, config), hidden, dim, has_norm=True)
    shapes |= _mlp_shapes("head", dim, hidden, config.num_tasks, has_norm=False)
    for i in range(config.num_layers):
        layer = (
            (dim, 2 * width + 2 * qk_width),
            (2 * width + 2 * qk_width,),
            (dim,),
            (dim,),
            (width * (1 if config.form == "gated" else 3), dim),
            (width,),
            (width,),
        )
        shapes |= {f"layers.{i}.{name}": shape for name, shape in zip(_LAYER_FIELDS, layer, strict=True)}
    return shapes


def _fan_in(encoder: EncoderConfig, config: ModelConfig) -> int:
    return config.row_dim * (len(encoder.tables) if encoder.pooling == "concat" else 1)


def _mlp_shapes(name: str, fan_in: int, hidden: int, out: int, *, has_norm: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.0.weight": (hidden, fan_in),
        f"{name}.0.bias": (hidden,),
        f"{name}.1.weight": (hidden,),
        f"{name}.1.bias": (hidden,),
        f"{name}.2.weight": (out, hidden),
        f"{name}.2.bias": (out,),
    }
    return shapes | ({f"{name}.3.weight": (out,), f"{name}.3.bias": (out,)} if has_norm else {})


class HstuModel:
    """Dense weights on one device, and the arithmetic over them: embed, layers, head."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], run_layer: RunLayer) -> None:
        self.config = config
        self._run_layer = run_layer
        self._weights = dict(weights)
        self._layers = [
            LayerWeights(*(weights[f"layers.{i}.{name}"] for name in _LAYER_FIELDS)) for i in range(config.num_layers)
        ]
        self._shape = LayerShape(config.form, config.num_heads, config.qk_dim**-0.5, float(config.normaliser))
        self._feature = {table.name: i for i, table in enumerate(config.features)}

    @property
    def dtype(self) -> torch.dtype:
        return self._weights["output_norm.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self._weights["output_norm.weight"].device

    @property
    def head_features(self) -> list[int]:
        """Feature tables whose rows the head reads for each candidate."""
        return [self._feature[table] for table in self.config.candidate_encoder.tables]

    def embed(self, tokens: DenseInput, num_tokens: int) -> Tensor:  # (num_tokens, dim)
        """Token embeddings in flat order; rows of x that no token claims are left as they come."""
        w = self._weights
        events = F.embedding(tokens.actions, w["action_embedding.weight"])
        events = events + F.embedding(tokens.positions, w["position_embedding.weight"])
        events = events + F.embedding(tokens.gaps, w["time_embedding.weight"])
        for encoder in self.config.encoders:
            rows = [tokens.event_rows[self._feature[table]] for table in encoder.tables]
            events = events + self._encode(f"encoders.{encoder.name}", encoder, rows)
        if not tokens.context_counts and num_tokens == events.shape[0]:
            return events
        x = events.new_empty((num_tokens, self.config.dim))
        x[tokens.event_at] = events
        if tokens.context_counts:
            x[tokens.context_at] = self._embed_context(tokens)
        return x

    def layers(self, x: Tensor, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch) -> Tensor:  # (tokens, dim)
        """All layers; K/V of new history tokens are left in their pages. x may be overwritten.

        k_pages, v_pages: (layers, pages, page_tokens, heads, dim).
        """
        for weights, k, v in zip(self._layers, k_pages, v_pages, strict=True):
            x = self._run_layer(x, weights, self._shape, k, v, batch)
        return x

    def head(self, x: Tensor, rows: Sequence[Tensor]) -> Tensor:  # (candidates, tasks) float32
        """Logits from the candidates' tokens and, per table of `head_features`, their rows (candidates, row_dim)."""
        w, encoder = self._weights, self.config.candidate_encoder
        user = F.layer_norm(x, x.shape[-1:], w["output_norm.weight"], w["output_norm.bias"], _MLP_EPS)
        item = self._encode("candidate_encoder", encoder, rows)
        return self._mlp("head", user * item).float()

    def _embed_context(self, tokens: DenseInput) -> Tensor:  # (context tokens, dim)
        weight, bias = self._weights["context.weight"], self._weights["context.bias"]
        groups = tokens.context_rows.to(self.dtype).split(list(tokens.context_counts))
        return torch.cat([torch.addmm(bias[i], group, weight[i]) for i, group in enumerate(groups)])

    def _encode(self, name: str, encoder: EncoderConfig, rows: Sequence[Tensor]) -> Tensor:  # (n, dim)
        """rows: one (n, row_dim) per table of the encoder."""
        w = self._weights
        if encoder.pooling == "concat":
            x = torch.cat([part.to(self.dtype) for part in rows], dim=1)
        else:
            x = rows[0].to(self.dtype)
            for part in rows[1:]:
                x = x + part
        y = self._mlp(name, x.to(self.dtype))
        return F.layer_norm(y, y.shape[-1:], w[f"{name}.3.weight"], w[f"{name}.3.bias"], _MLP_EPS)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        """Linear, swish gated by the layer norm of its own input, linear."""
        w = self._weights
        hidden = F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"])
        gate = F.layer_norm(hidden, hidden.shape[-1:], w[f"{name}.1.weight"], w[f"{name}.1.bias"], _MLP_EPS)
        return F.linear(hidden * gate.sigmoid(), w[f"{name}.2.weight"], w[f"{name}.2.bias"])
