"""HSTU ranking: rows in, logits out. Inference only.

Append-stable by construction: positions count forward from the window's anchor, the attention normaliser is
a constant, time enters as gaps, so K/V of a token never depends on what follows it. Nothing here knows users,
owners or queues.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels import Kernels
from helmrec.kernels.layer import LayerWeights
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
    candidates: Tensor  # (candidates,) which of the events are candidates
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
    """Dense weights on one device, and the arithmetic over them."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], kernels: Kernels) -> None:
        self.config = config
        self._kernels = kernels
        self._weights = dict(weights)
        self._layers = [
            LayerWeights(*(weights[f"layers.{i}.{name}"] for name in _LAYER_FIELDS)) for i in range(config.num_layers)
        ]
        self._feature = {table.name: i for i, table in enumerate(config.features)}

    @property
    def dtype(self) -> torch.dtype:
        return self._weights["output_norm.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self._weights["output_norm.weight"].device

    @torch.inference_mode()
    def score(self, tokens: DenseInput, k_pages: Tensor, v_pages: Tensor) -> Tensor:  # (candidates, tasks) float32
        """Logits of all candidates; K/V of new history tokens are left in their pages.

        k_pages, v_pages: (layers, pages, page_tokens, heads, dim).
        """
        rows = tokens.event_rows.to(self.dtype)
        x = self._embed(tokens, rows)
        for weights, k, v in zip(self._layers, k_pages, v_pages, strict=True):
            x = self._layer(x, weights, k, v, tokens.ragged)
        return self._head(x[tokens.event_at[tokens.candidates]], rows[:, tokens.candidates])

    def _embed(self, tokens: DenseInput, rows: Tensor) -> Tensor:  # (tokens, dim)
        w = self._weights
        events = w["action_embedding.weight"][tokens.actions]
        events = events + w["position_embedding.weight"][tokens.positions] + w["time_embedding.weight"][tokens.gaps]
        for encoder in self.config.encoders:
            events = events + self._encode(f"encoders.{encoder.name}", encoder, rows)
        if not tokens.context_counts:
            return events
        x = events.new_empty((events.shape[0] + tokens.context_rows.shape[0], self.config.dim))
        x[tokens.event_at] = events
        x[tokens.context_at] = self._embed_context(tokens)
        return x

    def _embed_context(self, tokens: DenseInput) -> Tensor:  # (context tokens, dim)
        weight, bias = self._weights["context.weight"], self._weights["context.bias"]
        groups = tokens.context_rows.to(self.dtype).split(list(tokens.context_counts))
        return torch.cat([torch.addmm(bias[i], group, weight[i]) for i, group in enumerate(groups)])

    def _encode(self, name: str, encoder: EncoderConfig, rows: Tensor) -> Tensor:  # rows: (features, n, row_dim)
        parts = [rows[self._feature[table]] for table in encoder.tables]
        x = torch.cat(parts, dim=1) if encoder.pooling == "concat" else torch.stack(parts).sum(0)
        y = self._mlp(name, x)
        return F.layer_norm(
            y, y.shape[-1:], self._weights[f"{name}.3.weight"], self._weights[f"{name}.3.bias"], _MLP_EPS
        )

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        """Linear, swish gated by the layer norm of its own input, linear."""
        w = self._weights
        hidden = F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"])
        gate = F.layer_norm(hidden, hidden.shape[-1:], w[f"{name}.1.weight"], w[f"{name}.1.bias"], _MLP_EPS)
        return F.linear(hidden * gate.sigmoid(), w[f"{name}.2.weight"], w[f"{name}.2.bias"])

    def _layer(self, x: Tensor, weights: LayerWeights, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch) -> Tensor:
        config, kernels = self.config, self._kernels
        u, v, q, k = kernels.project(x, weights, config.form, config.num_heads)
        kernels.append_kv(k, v, k_pages, v_pages, batch)
        scale = config.qk_dim**-0.5
        o = kernels.attend(q, k, v, k_pages, v_pages, batch, scale=scale, normaliser=float(config.normaliser))
        return kernels.gate_output(x, u, o.flatten(1), weights, config.form)

    def _head(self, x: Tensor, rows: Tensor) -> Tensor:
        w, encoder = self._weights, self.config.candidate_encoder
        user = F.layer_norm(x, x.shape[-1:], w["output_norm.weight"], w["output_norm.bias"], _MLP_EPS)
        item = self._encode("candidate_encoder", encoder, rows)
        return self._mlp("head", user * item).float()
