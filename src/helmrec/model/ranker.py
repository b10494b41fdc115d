"""The HSTU ranking model as a PyTorch module to train: the arithmetic of the engine, on ragged batches.

It does not know pages, caches or engines.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helmrec.kernels import embed
from helmrec.kernels.layer import LayerWeights, RelativeBias, gate_output, split_projection
from helmrec.model.config import EncoderConfig, ModelConfig
from helmrec.model.hstu import bias_edges, dot_product, layer_weights, state_logits
from helmrec.model.rank_batch import Layout, QueryInputs, RankBatch
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import AttentionWindow, RankRequest

Rows = Mapping[str, Tensor]
_TABLES = "tables."  # where the names of their parameters begin
_TABLE_SCALE = 0.1  # size of the random entries of tables
_MAX_EDGES = 124  # of time buckets; larger ones do not fit 64 bits


class HstuRanker(nn.Module):
    """Computes logits of candidates, (candidates, tasks), with gradients to all weights.

    Parameters have the names of a model folder: dense weights those of `dense_shapes`, tables `tables.NAME.rows`.
    They are float32, or what `.to(dtype)` makes them; `save_model` writes them in the dtypes of the configuration.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, tables: Callable[[Rows], Rows] | None = None) -> None:
        """Make a model with random weights. `tables` takes the place of its embedding tables, as `rows` describes."""
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        for name, value in random_dense(config, generator).items():
            _register(self, name, value.float() * (_TABLE_SCALE if name.endswith("_embedding.weight") else 1.0))
        self.tables: Callable[[Rows], Rows] = EmbeddingTables(config, generator) if tables is None else tables
        # The smallest wait of each time bucket from 1 on: two buckets per octave.
        edges = [-(-((2 + i % 2) << i // 2) // 2) for i in range(min(config.time_buckets - 1, _MAX_EDGES))]
        self._gap_edges: Tensor
        self.register_buffer("_gap_edges", torch.tensor(edges), persistent=False)
        self._bias_edges: Tensor | None
        self.register_buffer("_bias_edges", bias_edges(config), persistent=False)

    @classmethod
    def from_model(cls, model: LoadedModel) -> "HstuRanker":
        """Copy the weights of a loaded model, to train them further."""
        ranker = cls(model.config)
        ranker.load_state_dict(model.dense | {f"{_TABLES}{name}.rows": rows for name, rows in model.tables.items()})
        return ranker

    def rows(self, ids: Rows) -> Rows:
        """Look up ids by table, (n,) each, and return rows by table, (n, row_dim) each.

        Called once per batch. Override it, or pass `tables`, to train other embedding modules, such as TorchRec's.
        """
        return self.tables(ids)

    def dense(self) -> dict[str, Tensor]:
        """Return copies of all weights except tables, in the configuration's dtype."""
        weights, dtype = self._weights(), getattr(torch, self.config.dtype)
        return {name: _copy(value, dtype) for name, value in weights.items() if not name.startswith(_TABLES)}

    def table_rows(self) -> dict[str, Tensor]:
        """Return copies of the tables that this module holds, in the configuration's row dtype."""
        weights, dtype = self._weights(), getattr(torch, self.config.row_dtype)
        names = {table.name: f"{_TABLES}{table.name}.rows" for table in self.config.tables}
        return {table: _copy(weights[name], dtype) for table, name in names.items() if name in weights}

    def forward(self, batch: RankBatch | Sequence[RankRequest]) -> Tensor:  # (candidates, tasks) logits
        """Score the candidates of all requests. Each sees the history and itself, as when it is served."""
        config, w = self.config, self._weights()
        batch = batch if isinstance(batch, RankBatch) else RankBatch.of(batch, config)
        batch.check(config)
        sample = w["position_embedding.weight"]
        batch = batch.to(sample.device)
        layout = Layout.of(batch, config)
        ids = {t.name: torch.cat([batch.events[t.name], batch.candidates[t.name]]) for t in config.features}
        ids |= {t.name: batch.context[t.name] for t in (*config.user_context, *config.request_context)}
        for table in config.tables:
            if table.unknown_row is not None:
                ids[table.name] = torch.where(ids[table.name] < table.num_rows, ids[table.name], table.unknown_row)
        rows = {name: each.to(sample.dtype) for name, each in self.rows(ids).items()}
        x = torch.cat([*self._context(w, rows, layout.query), self._events(w, rows, batch, layout)])
        for i in range(config.num_layers):
            x = self._layer(x, layer_weights(config, w, i, self._bias_edges), layout)
        if config.state_head is not None:
            return state_logits(config.state_head, x[layout.prefix_slots.numel() :], w)
        last_rows = {t.name: rows[t.name][batch.actions.numel() :] for t in config.features}
        items = _encode(w, "candidate_encoder", config.candidate_encoder, last_rows)
        if config.retrieval is not None:
            return dot_product(config.retrieval, x[layout.last_tokens[layout.candidate_owner]], items, w)
        x = x[layout.prefix_slots.numel() :]
        if layout.query is not None:
            mixed = torch.cat([x, layout.query.clocks.to(x.dtype)], 1)
            x = F.linear(mixed, w["output_mix.weight"], w["output_mix.bias"])
        user = F.layer_norm(x, x.shape[-1:], w["output_norm.weight"], w["output_norm.bias"], embed.NORM_EPS)
        return _mlp(w, "head", user * items)

    def _weights(self) -> dict[str, Tensor]:
        """Return the parameters by name, as they are now: wrappers such as `functional_call` may replace them."""
        return dict(self.named_parameters(remove_duplicate=False))

    def _context(self, w: Rows, rows: Rows, query: QueryInputs | None) -> list[Tensor]:
        """Embed the context tokens, (requests, dim) of each context table."""
        tokens = []
        for i, table in enumerate((*self.config.user_context, *self.config.request_context)):
            own = rows[table.name]
            if query is not None:
                own = own.masked_fill(query.context_kept[:, i, None] == 0, 0.0)
            token = torch.addmm(w["context.bias"][i], own, w["context.weight"][i])
            if query is not None:
                token = token + F.embedding(query.context_ages, w["time_embedding.weight"])
            tokens.append(token)
        return tokens

    def _events(self, w: Rows, rows: Rows, batch: RankBatch, layout: Layout) -> Tensor:
        """Embed events and candidates, (events + candidates, dim); without candidates if they are no tokens."""
        owner = layout.candidate_owner
        if self.config.retrieval is not None:
            owner, rows = owner[:0], {name: each[: batch.actions.numel()] for name, each in rows.items()}
        unknown = torch.full_like(owner, self.config.num_actions)
        if layout.query is not None:
            positions, buckets = layout.query.positions, layout.query.ages
        else:
            waits = torch.cat([layout.waits, layout.request_waits[owner]])
            positions = torch.cat([layout.positions, batch.lengths[owner]])
            buckets = torch.bucketize(waits, self._gap_edges, right=True)
        x = F.embedding(torch.cat([batch.actions, unknown]), w["action_embedding.weight"])
        x = x + F.embedding(positions, w["position_embedding.weight"])
        x = x + F.embedding(buckets, w["time_embedding.weight"])
        for encoder in self.config.encoders:
            x = x + _encode(w, f"encoders.{encoder.name}", encoder, rows)
        return x

    def _layer(self, x: Tensor, weights: LayerWeights, layout: Layout) -> Tensor:  # (tokens, dim)
        form, width = self.config.form, weights.output_norm_weight.shape[0]
        normed = F.layer_norm(x, x.shape[-1:], weights.input_norm_weight, weights.input_norm_bias, weights.norm_eps)
        uvqk = torch.addmm(weights.uvqk_beta, normed, weights.uvqk_weight)
        uvqk = F.silu(uvqk) if form == "gated" else torch.cat([F.silu(uvqk[:, :width]), uvqk[:, width:]], 1)
        u, v, q, k = split_projection(uvqk, width, self.config.num_heads)
        bias = None if weights.relative_bias is None else _bias(weights.relative_bias, layout)
        o = _attend(q * self.config.score_scale, k, v, layout, bias, self.config.attention_window)
        o = o / self.config.normaliser
        if layout.query is not None:  # divided by the length of the request, too
            o = o / layout.query.num_tokens[layout.token_owner][:, None, None].to(o.dtype)
        return gate_output(x, u, o.flatten(1), weights, form)


class EmbeddingTables(nn.Module):
    """One embedding table for each table of a model."""

    def __init__(self, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        for table in config.tables:
            rows = torch.randn((table.num_rows, config.row_dim), generator=generator)
            _register(self, f"{table.name}.rows", _TABLE_SCALE * rows)

    def forward(self, ids: Rows) -> Rows:
        rows = dict(self.named_parameters(remove_duplicate=False))
        return {table: F.embedding(each, rows[f"{table}.rows"]) for table, each in ids.items()}


def _register(module: nn.Module, name: str, value: Tensor) -> None:
    """Make a parameter with a dotted name. Modules on its way hold nothing else."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            setattr(module, part, nn.Module())  # unlike add_module, allows names such as "type"
        module = module._modules[part]  # type: ignore[assignment]
    module.register_parameter(last, nn.Parameter(value))


def _copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to("cpu", dtype, copy=True)


def _encode(w: Rows, name: str, encoder: EncoderConfig, rows: Rows) -> Tensor:  # (n, dim)
    """Combine the rows of an encoder's tables; apply its linear map, or its MLP and the norm of its output."""
    parts = [rows[table] for table in encoder.tables]
    x = torch.cat(parts, 1) if encoder.pooling == "concat" else torch.stack(parts).sum(0)
    if encoder.kind == "linear":
        return F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"])
    out = _mlp(w, name, x)
    return F.layer_norm(out, out.shape[-1:], w[f"{name}.3.weight"], w[f"{name}.3.bias"], embed.NORM_EPS)


def _mlp(w: Rows, name: str, x: Tensor) -> Tensor:
    """Apply linear, gate by the sigmoid of its layer norm, linear."""
    hidden = F.linear(x, w[f"{name}.0.weight"], w[f"{name}.0.bias"])
    gated = embed.gate_hidden(hidden, w[f"{name}.1.weight"], w[f"{name}.1.bias"])
    return F.linear(gated, w[f"{name}.2.weight"], w[f"{name}.2.bias"])


def _bias(bias: RelativeBias, layout: Layout) -> Tensor:  # (requests, 1, prefix_len, prefix_len)
    """Compute the bias of every row and key of events, padded; for rows and keys of padding it is anything."""
    places = torch.arange(layout.prefix_len, device=layout.times.device)
    distance = places[:, None] - places
    waits = layout.times[:, 1:, None] - layout.times[:, None, :-1]
    buckets = torch.bucketize(waits.clamp(min=0), bias.edges, right=True)
    return (bias.position[distance.clamp(min=0)] + bias.time[buckets])[:, None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, window: AttentionWindow | None
) -> Tensor:  # (tokens, heads, v)
    """Sum SiLU(q.k) v over the visible keys. A token sees the prefix up to itself, a candidate all of it and itself.

    The prefixes are padded here with values of zero, which add nothing to a sum.
    """
    num = layout.prefix_slots.numel()
    places = ((layout.prefix_slots, layout.prefix_len), (layout.candidate_slots, layout.candidates_len))
    k_prefix, v_prefix = (_pad(each[:num], *places[0], layout.num_requests) for each in (k, v))
    seen: list[Tensor] = []
    for own, (slots, length) in zip((q[:num], q[num:]), places, strict=True):
        scores = _pad(own, slots, length, layout.num_requests) @ k_prefix.transpose(2, 3)
        weights = F.silu(scores) if seen else F.silu(scores if bias is None else scores + bias).tril()
        if window is not None:
            weights = weights * _in_window(window, layout, is_candidate=bool(seen)).to(weights.dtype)
        seen.append((weights @ v_prefix).transpose(1, 2).flatten(0, 1).index_select(0, slots))
    itself = F.silu((q[num:] * k[num:]).sum(-1, keepdim=True)) * v[num:]
    return torch.cat([seen[0], seen[1] + itself])


def _in_window(
    window: AttentionWindow, layout: Layout, *, is_candidate: bool
) -> Tensor:  # (requests, 1, rows or 1, prefix_len)
    """Return which keys are near enough for each row of the prefix, or for all candidates, who stand at its end."""
    keys, end = torch.arange(layout.prefix_len, device=layout.num_prefix.device), layout.num_prefix[:, None, None, None]
    rows = end if is_candidate else keys[None, None, :, None]
    return (rows - keys <= window.length) | ((rows >= end - window.tail) & (window.tail > 0))


def _pad(flat: Tensor, slots: Tensor, length: int, num_requests: int) -> Tensor:  # (requests, heads, length, dim)
    padded = flat.new_zeros((num_requests * length, *flat.shape[1:])).index_copy(0, slots, flat)
    return padded.unflatten(0, (num_requests, length)).transpose(1, 2)
