"""Scores of Meta's DLRMv3 in plain float64 NumPy, from published weights by their published names.

Written from the description of the published model, not from the importer under test: one request at a time, nothing
folded, nothing cached. The layers are those of `tests/reference.py`, which golden vectors of Meta's own code hold.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from helmrec.types import RankRequest
from tests.reference import Shape, hstu_layer, layer_norm

Array = NDArray[np.float64]
_PRE = "_hstu_transducer._input_preprocessor."
_POST = "_hstu_transducer._output_postprocessor."
_BUCKET_S = np.float32(60)
_NORM_EPS = 1e-5


class MetaReference:
    """A published model, its tables by published name."""

    def __init__(self, weights: Mapping[str, Tensor], tables: Mapping[str, Tensor], num_heads: int) -> None:
        self._w: dict[str, Array] = {name: value.double().numpy() for name, value in weights.items()}
        self._bits = [int(bit) for bit in self._w[f"{_PRE}_action_encoder._combined_action_weights"]]
        self._tables = {name: value.double().numpy() for name, value in tables.items()}
        self._num_heads = num_heads
        self._num_layers = len({name.split(".")[3] for name in self._w if "_stu_layers" in name})

    def scores(self, request: RankRequest, normaliser: int | None = None) -> Array:  # (candidates, tasks)
        """Logits. Attention is divided by `normaliser`; of a request alone, that is its own length."""
        num, num_candidates = len(request.items), len(request.candidates)
        now = request.request_time
        if now is None:
            now = int(request.timestamps[-1]) if num else 0
        x = np.concatenate([self._user(request), self._events(request), self._candidates(request)])
        x = x * np.sqrt(x.shape[1])
        times = np.array([0, *request.timestamps, *[now] * num_candidates])
        x = x + self._positions(num, num_candidates) + self._times(now - times)
        shape = self._shape(normaliser or len(x))
        for i in range(self._num_layers):
            prefix = f"_hstu_transducer._stu_module._stu_layers.{i}._"
            layer = {name.removeprefix(prefix): value for name, value in self._w.items() if name.startswith(prefix)}
            x = hstu_layer(x, num_candidates, layer, shape)
        return self._head(x[-num_candidates:], now, request)

    def _shape(self, normaliser: int) -> Shape:
        width = len(self._w["_hstu_transducer._stu_module._stu_layers.0._output_norm_weight"])
        columns = len(self._w["_hstu_transducer._stu_module._stu_layers.0._uvqk_beta"])
        heads = self._num_heads
        return Shape(heads, (columns - 2 * width) // 2 // heads, width // heads, normaliser, "concat")

    def _user(self, request: RankRequest) -> Array:  # (1, dim)
        row = self._tables["user_id"][request.context["user"]]
        if len(request.items) + len(request.candidates) < 20:
            row = np.zeros_like(row)
        weights = self._w[f"{_PRE}_batched_contextual_linear_weights"][0]
        return (row @ weights + self._w[f"{_PRE}_batched_contextual_linear_bias"][0])[None]

    def _content(self, items: Array, categories: Array) -> Array:
        return self._mlp(f"{_PRE}_content_embedding_mlp", items) + self._mlp(
            f"{_PRE}_additional_embedding_mlp", categories
        )

    def _rows(self, ids: object, categories: object) -> tuple[Array, Array]:
        return (
            self._tables["item_id"][np.asarray(ids, np.int64)],
            self._tables["item_category_id"][np.asarray(categories, np.int64)],
        )

    def _events(self, request: RankRequest) -> Array:
        bit_rows = self._w[f"{_PRE}_action_encoder._action_embedding_table"]
        actions = np.zeros((len(request.items), len(self._bits) * bit_rows.shape[1]))
        for i, action in enumerate(request.actions):
            actions[i] = np.concatenate(
                [row * bool(int(action) & b) for b, row in zip(self._bits, bit_rows, strict=True)]
            )
        content = self._content(*self._rows(request.items, request.features["category"]))
        return content + self._mlp(f"{_PRE}_action_embedding_mlp", actions)

    def _candidates(self, request: RankRequest) -> Array:
        content = self._content(*self._rows(request.candidates, request.candidate_features["category"]))
        unknown = self._w[f"{_PRE}_action_encoder._target_action_embedding_table"]
        return content + self._mlp(f"{_PRE}_action_embedding_mlp", unknown)

    def _positions(self, num: int, num_candidates: int) -> Array:
        """The user's token has place 0; candidates have 1, the last event 2, the one before it 3, and so on."""
        table = self._w["_hstu_transducer._positional_encoder._position_embeddings_weight"]
        places = [0, *range(num + 1, 1, -1), *[1] * num_candidates]
        return table[np.minimum(places, len(table) - 1)]

    def _times(self, ages: NDArray[np.int64]) -> Array:
        table = self._w["_hstu_transducer._positional_encoder._timestamp_embeddings_weight"]
        roots = np.sqrt(np.maximum(ages.astype(np.float32), np.float32(1e-6)) / _BUCKET_S)
        return table[np.clip(roots.astype(np.int32), 0, len(table) - 1)]

    def _head(self, x: Array, now: int, request: RankRequest) -> Array:
        angles = [(now // 3_600) % 24 / 24 * 2 * 3.14, (now // 86_400) % 7 / 7 * 2 * 3.14]
        clock = [part(angle) for angle in angles for part in (np.cos, np.sin)]
        joined = np.concatenate([x, np.tile(clock, (len(x), 1))], axis=1)
        combiner = f"{_POST}_time_feature_combiner"
        user = joined @ self._w[f"{combiner}.weight"].T + self._w[f"{combiner}.bias"]
        norm = f"{_POST}_layer_norm"
        user = layer_norm(user, self._w[f"{norm}.weight"], self._w[f"{norm}.bias"], _NORM_EPS)
        rows = self._rows(request.candidates, request.candidate_features["category"])
        item = self._mlp("_item_embedding_mlp", np.concatenate(rows, axis=1))
        return self._mlp("_multitask_module._prediction_module", user * item)

    def _mlp(self, name: str, x: Array) -> Array:
        """Linear, a gate by its own norm, linear; then a norm, where the model has one."""
        w = self._w
        hidden = x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        gate = layer_norm(hidden, w[f"{name}.1.weight"], w[f"{name}.1.bias"], _NORM_EPS)
        out = hidden / (1 + np.exp(-gate)) @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]
        if f"{name}.3.weight" not in w:
            return out
        return layer_norm(out, w[f"{name}.3.weight"], w[f"{name}.3.bias"], _NORM_EPS)
