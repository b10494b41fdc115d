"""An HSTU ranker that can be trained: the arithmetic of `helmrec.model.hstu`, on padded batches and with gradients.

It holds the weights under the names a model folder has them, so that saving it is all there is to exporting it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.histories import Batch
from helmrec.model.config import ITEM, ModelConfig
from helmrec.model.weights import random_dense

_LAYER_EPS, _NORM_EPS = 1e-6, 1e-5


class Learner(torch.nn.Module):
    """One feature table, no context, one task."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self._w = {name: torch.nn.Parameter(value) for name, value in random_dense(config, generator).items()}
        for name in ("position_embedding.weight", "time_embedding.weight", "action_embedding.weight"):
            self._w[name].data.mul_(0.1)
        self.rows = torch.nn.Parameter(0.1 * torch.randn((config.num_rows, config.row_dim), generator=generator))
        for name, value in self._w.items():
            self.register_parameter(name.replace(".", "/"), value)

    def dense(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._w.items()}

    def tables(self) -> dict[str, Tensor]:
        return {ITEM: self.rows.detach().clone()}

    def forward(self, batch: Batch, candidates: Tensor) -> Tensor:  # (batch, candidates) logits
        """candidates: (batch, candidates) items; each sees the history and itself, as when it is served."""
        history, lengths = torch.from_numpy(batch.items), torch.from_numpy(batch.lengths)
        w, window = self._w, history.shape[1]
        past = F.embedding(torch.from_numpy(batch.actions), w["action_embedding.weight"])
        past = past + F.embedding(torch.from_numpy(batch.gaps), w["time_embedding.weight"])
        past = past + w["position_embedding.weight"][:window]
        now = F.embedding(torch.from_numpy(batch.target_gap), w["time_embedding.weight"])
        now = now + F.embedding(lengths, w["position_embedding.weight"]) + w["action_embedding.weight"][-1]
        x = self._encode("encoders.item", F.embedding(torch.cat([history, candidates], 1), self.rows))
        x = x + torch.cat([past, now[:, None].expand(-1, candidates.shape[1], -1)], 1)
        is_event = (torch.arange(window) < lengths[:, None]).float()
        for i in range(self.config.num_layers):
            x = self._layer(f"layers.{i}.", x, is_event)
        user = F.layer_norm(x[:, window:], x.shape[-1:], w["output_norm.weight"], w["output_norm.bias"], _NORM_EPS)
        item = self._encode("candidate_encoder", F.embedding(candidates, self.rows))
        return self._mlp("head", user * item)[..., 0]

    def _layer(self, at: str, x: Tensor, is_event: Tensor) -> Tensor:
        w, c = self._w, self.config
        normed = F.layer_norm(x, x.shape[-1:], w[f"{at}input_norm_weight"], w[f"{at}input_norm_bias"], _LAYER_EPS)
        width, qk_width = c.num_heads * c.v_dim, c.num_heads * c.qk_dim
        mixed = normed @ w[f"{at}uvqk_weight"] + w[f"{at}uvqk_beta"]
        u, v, q, k = mixed.split([width, width, qk_width, qk_width], -1)
        q, k, v = (t.unflatten(-1, (c.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        o = (_attend(q, k, v, is_event) / c.normaliser).transpose(1, 2).flatten(2)
        weight, bias = w[f"{at}output_norm_weight"], w[f"{at}output_norm_bias"]
        u = F.silu(u)
        gated = u * F.layer_norm(o, o.shape[-1:], weight, bias, _LAYER_EPS)
        return x + torch.cat([u, o, gated], -1) @ w[f"{at}output_weight"]

    def _encode(self, name: str, x: Tensor) -> Tensor:
        out = self._mlp(name, x)
        return F.layer_norm(out, out.shape[-1:], self._w[f"{name}.3.weight"], self._w[f"{name}.3.bias"], _NORM_EPS)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        w = self._w
        hidden = F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"])
        gate = F.layer_norm(hidden, hidden.shape[-1:], w[f"{name}.1.weight"], w[f"{name}.1.bias"], _NORM_EPS)
        return F.linear(hidden * gate.sigmoid(), w[f"{name}.2.weight"], w[f"{name}.2.bias"])


def _attend(q: Tensor, k: Tensor, v: Tensor, is_event: Tensor) -> Tensor:  # (batch, heads, tokens, v)
    """Events see those up to themselves; a candidate sees all events and itself. is_event: (batch, window)."""
    window, scale = is_event.shape[1], 1 / math.sqrt(q.shape[-1])
    seen = F.silu(scale * (q @ k[:, :, :window].transpose(-1, -2))) * is_event[:, None, None]
    causal = torch.ones(q.shape[2], window)
    causal[:window] = causal[:window].tril()
    from_events = (seen * causal) @ v[:, :, :window]
    itself = F.silu(scale * (q * k).sum(-1, keepdim=True)) * v
    return from_events + F.pad(itself[:, :, window:], (0, 0, window, 0))
