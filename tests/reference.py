"""HSTU ranking in plain float64 NumPy, written from the published description and not from the code under test.

One request at a time, no pages, no batches, no caches: slow and obvious.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.model.config import EncoderConfig, ModelConfig
from helmrec.types import RankRequest

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def rounded(x: Array, kv_dtype: str) -> Array:
    """Nearest multiples of a power of two, or nearest numbers of four binary digits; the same scale along a head."""
    largest, lowest = {"fp8_e4m3": (448.0, -15), "int8": (127.0, -24)}[kv_dtype]
    out = np.empty_like(x)
    for at in np.ndindex(x.shape[:-1]):
        peak = np.abs(x[at]).max()
        if not np.isfinite(peak):
            out[at] = np.nan
            continue
        exponent = lowest
        while peak > largest * 2.0**exponent:
            exponent += 1
        scaled = x[at] / 2.0**exponent
        step = np.ones_like(scaled)
        if kv_dtype == "fp8_e4m3":
            _, digits = np.frexp(scaled)  # scaled = m * 2**digits, 0.5 <= m < 1
            step = 2.0 ** np.maximum(digits - 4, -9)
        out[at] = np.rint(scaled / step) * step * 2.0**exponent
    return out


@dataclass(frozen=True)
class Shape:
    num_heads: int
    qk_dim: int
    v_dim: int
    normaliser: float
    form: str
    scale: float | None = None  # of q.k; by default 1 / sqrt(qk_dim)
    window: int | None = None  # tokens before it that a token sees
    eps: float = 1e-6  # of the norms
    tail: int = 0  # last tokens before the candidates that see all of them, and so do candidates
    kv_dtype: str = "model"  # to which keys and values are rounded


def layer_shape(config: ModelConfig, kv_dtype: str = "model") -> Shape:
    return Shape(
        config.num_heads,
        config.qk_dim,
        config.v_dim,
        config.normaliser,
        config.form,
        config.qk_scale,
        config.max_attn_len,
        config.layer_norm_eps,
        config.full_attn_tail,
        kv_dtype,
    )


def visible(num_tokens: int, num_candidates: int, window: int | None = None, tail: int = 0) -> NDArray[np.bool_]:
    """Causal; candidates come last and see everything before the first candidate, and themselves.

    With a window, a token sees so many tokens before it; a candidate stands where the first of them does.
    """
    mask = np.tril(np.ones((num_tokens, num_tokens), np.bool_))
    first = num_tokens - num_candidates
    mask[first:, first:] = np.eye(num_candidates, dtype=np.bool_)
    for row in range(num_tokens if window is not None else 0):
        at = min(row, first)
        if not (tail and at >= first - tail):
            mask[row, : max(0, at - window)] = False  # type: ignore[operator]
    return mask


def relative_bias(times: Sequence[int], w: Weights, width: float) -> Array:  # (events, events)
    """By distance, and by the logarithm of the time from a key's event to the event after the row's.

    times: of all events, and of the request.
    """
    num = len(times) - 1
    bias = np.zeros((num, num))
    for i in range(num):
        for j in range(i + 1):
            bucket = int(np.log(max(1, times[i + 1] - times[j])) / width)
            bias[i, j] = w["position_bias"][i - j] + w["time_bias"][min(bucket, len(w["time_bias"]) - 1)]
    return bias


def hstu_layer(x: Array, num_candidates: int, w: Weights, shape: Shape, bias: Array | float = 0.0) -> Array:
    """One sequence through one layer. x: (tokens, dim)."""
    normed = layer_norm(x, w["input_norm_weight"], w["input_norm_bias"], shape.eps)
    mixed = normed @ w["uvqk_weight"] + w["uvqk_beta"]
    width, qk_width = shape.num_heads * shape.v_dim, shape.num_heads * shape.qk_dim
    u, v, q, k = np.split(mixed, np.cumsum([width, width, qk_width]), axis=1)
    u = silu(u)
    if shape.form == "gated":
        v, q, k = silu(v), silu(q), silu(k)
    if shape.kv_dtype != "model":
        k, v = (
            rounded(each.reshape(len(x), shape.num_heads, -1), shape.kv_dtype).reshape(len(x), -1) for each in (k, v)
        )
    out = np.empty_like(v)
    mask = visible(len(x), num_candidates, shape.window, shape.tail)
    wrong = np.asarray(~(np.isfinite(k).all(1) & np.isfinite(v).all(1)))  # such a token harms only those that see it
    for head in range(shape.num_heads):
        at_qk = slice(head * shape.qk_dim, (head + 1) * shape.qk_dim)
        at_v = slice(head * shape.v_dim, (head + 1) * shape.v_dim)
        logits = q[:, at_qk] @ k[:, at_qk].T * (shape.qk_dim**-0.5 if shape.scale is None else shape.scale) + bias
        weights = np.where(mask, np.where(wrong, np.nan, silu(logits) / shape.normaliser), 0.0)
        out[:, at_v] = weights @ np.where(wrong[:, None], 0.0, v[:, at_v])
    gated = u * layer_norm(out, w["output_norm_weight"], w["output_norm_bias"], shape.eps)
    y = gated if shape.form == "gated" else np.concatenate([u, out, gated], axis=1)
    return x + y @ w["output_weight"] + w.get("output_bias", 0.0)


def layer_weights(weights: Weights, i: int) -> dict[str, Array]:
    start = f"layers.{i}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}


def time_bucket(gap: int, num_buckets: int) -> int:
    """0 for no gap, then two buckets per octave."""
    if gap == 0:
        return 0
    octave = gap.bit_length() - 1
    return min(1 + 2 * octave + (1 if gap >= 1.5 * 2**octave else 0), num_buckets - 1)


def anchor(first_event: int, num_events: int, window: int) -> int:
    end = first_event + num_events
    start = max(first_event, end - window)
    if start == 0:
        return 0
    step = window // 4
    while step > 1 and 4 * step > end - start:
        step = 1 if step % 2 else step // 2
    return int(np.ceil(start / step)) * step


class Reference:
    """Scores of one model; rows can be replaced, as an online trainer would."""

    def __init__(
        self,
        config: ModelConfig,
        dense: Mapping[str, Any],
        tables: Mapping[str, Any],
        kv_dtype: str = "model",
        row_dtype: str = "model",
    ) -> None:
        self.config = config
        self._row_dtype = row_dtype  # to which rows are rounded
        self._shape = layer_shape(config, kv_dtype)
        self._dense: Weights = {name: value.double().numpy() for name, value in dense.items()}
        self._tables = {name: value.double().numpy().copy() for name, value in tables.items()}

    def update_rows(self, table: str, ids: Sequence[int], values: Array) -> None:
        self._tables[table][list(ids)] = values

    def rows(self, table: str, ids: Sequence[int]) -> Array:
        return self._tables[table][list(ids)]

    def _read(self, table: str, ids: NDArray[np.int64]) -> Array:
        rows = self._tables[table][ids]
        return rows if self._row_dtype == "model" else rounded(rows, self._row_dtype)

    def scores(self, request: RankRequest) -> Array:
        config, w = self.config, self._dense
        skip = anchor(request.first_event, len(request.items), config.window) - request.first_event
        times = [int(t) for t in request.timestamps][skip:]
        gaps = [0, *(b - a for a, b in pairwise(times))][: len(times)]
        num, num_candidates = len(times), len(request.candidates)
        if config.retrieval is not None:
            return self._retrieval_scores(request, skip, gaps, times)
        history = self._events(request.items, request.features, skip)
        x_history = self._encode_all(history)
        for i in range(num):
            x_history[i] += w["action_embedding.weight"][int(request.actions[skip + i])]
            x_history[i] += w["position_embedding.weight"][i]
            x_history[i] += w["time_embedding.weight"][time_bucket(gaps[i], config.time_buckets)]
        since = 0 if request.request_time is None or not times else request.request_time - times[-1]
        candidates = self._events(request.candidates, request.candidate_features, 0)
        x_candidates = self._encode_all(candidates) + w["action_embedding.weight"][config.num_actions]
        x_candidates = x_candidates + w["position_embedding.weight"][num]
        x_candidates = x_candidates + w["time_embedding.weight"][time_bucket(since, config.time_buckets)]
        user, per_request = self._context(request)
        x = np.concatenate([user, x_history, per_request, x_candidates])
        shape = self._shape
        for i in range(config.num_layers):
            x = hstu_layer(x, num_candidates, layer_weights(w, i), shape)
        if config.state_head is not None:
            return self._state_scores(x[len(x) - num_candidates :])
        top = layer_norm(x[len(x) - num_candidates :], w["output_norm.weight"], w["output_norm.bias"], 1e-5)
        return self._mlp("head", top * self._encode("candidate_encoder", config.candidate_encoder, candidates))

    def _state_scores(self, x: Array) -> Array:
        x, head = x / np.maximum(1e-6, np.sqrt((x**2).sum(1, keepdims=True))), self.config.state_head
        assert head is not None
        assert head.activation == "relu"
        for i in range(len(head.widths) + 1):
            x = x @ self._dense[f"state_head.layer{i}.weight"].T + self._dense[f"state_head.layer{i}.bias"]
            x = np.maximum(x, 0.0) if i < len(head.widths) else x
        return x

    def _retrieval_scores(self, request: RankRequest, skip: int, gaps: Sequence[int], times: Sequence[int]) -> Array:
        """The state of the last token times the candidates' encodings; candidates are no tokens."""
        config, w, head = self.config, self._dense, self.config.retrieval
        assert head is not None
        x = self._encode_all(self._events(request.items, request.features, skip))
        for i, gap in enumerate(gaps):
            x[i] += w["action_embedding.weight"][int(request.actions[skip + i])] + w["position_embedding.weight"][i]
            x[i] += w["time_embedding.weight"][time_bucket(gap, config.time_buckets)]
        user, per_request = self._context(request)
        x = np.concatenate([user, x, per_request])
        shape = self._shape
        now = times[-1] if request.request_time is None else request.request_time
        for i in range(config.num_layers):
            layer, given = layer_weights(w, i), config.attention_bias
            bias = 0.0 if given is None else relative_bias([*times, now], layer, given.bucket_width)
            x = hstu_layer(x, 0, layer, shape, bias)
        state = x[-1]
        if head.state_norm == "layer":
            state = layer_norm(state, w["output_norm.weight"], w["output_norm.bias"], 1e-5)
        elif head.state_norm == "l2":
            state = state / max(1e-6, np.sqrt((state**2).sum()))
        candidates = self._events(request.candidates, request.candidate_features, 0)
        items = self._encode("candidate_encoder", config.candidate_encoder, candidates)
        if head.item_norm == "l2":
            items = items / np.maximum(1e-6, np.sqrt((items**2).sum(1, keepdims=True)))
        return (items @ state / head.temperature)[:, None]

    def _events(self, items: Any, features: Mapping[str, Any], skip: int) -> dict[str, Array]:
        return {
            table.name: self._read(table.name, np.asarray(items if i == 0 else features[table.name], np.int64)[skip:])
            for i, table in enumerate(self.config.features)
        }

    def _context(self, request: RankRequest) -> tuple[Array, Array]:
        rows = []
        for i, table in enumerate((*self.config.user_context, *self.config.request_context)):
            row = self._read(table.name, np.asarray(request.context[table.name]))
            rows.append(row @ self._dense["context.weight"][i] + self._dense["context.bias"][i])
        stacked = np.array(rows).reshape(-1, self.config.dim)
        split = len(self.config.user_context)
        return stacked[:split], stacked[split:]

    def _encode_all(self, rows: Mapping[str, Array]) -> Array:
        return np.sum([self._encode(f"encoders.{e.name}", e, rows) for e in self.config.encoders], axis=0)

    def _encode(self, name: str, encoder: EncoderConfig, rows: Mapping[str, Array]) -> Array:
        parts = [rows[table] for table in encoder.tables]
        x = np.concatenate(parts, axis=1) if encoder.pooling == "concat" else np.sum(parts, axis=0)
        if encoder.kind == "linear":
            return x @ self._dense[f"{name}.0.weight"].T + self._dense[f"{name}.0.bias"]
        return layer_norm(self._mlp(name, x), self._dense[f"{name}.3.weight"], self._dense[f"{name}.3.bias"], 1e-5)

    def _mlp(self, name: str, x: Array) -> Array:
        w = self._dense
        hidden = x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        gate = layer_norm(hidden, w[f"{name}.1.weight"], w[f"{name}.1.bias"], 1e-5)
        return (hidden / (1 + np.exp(-gate))) @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]
