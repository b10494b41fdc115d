"""Requests for the tiny model as clients write them."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.types import RankRequest
from tests.helpers import random_request, tiny_config


def rank_body(**overrides: Any) -> dict[str, Any]:
    """A valid body of /v1/rank; `overrides` replace whole fields."""
    body: dict[str, Any] = {
        "user_id": 7,
        "items": [1, 2, 3],
        "actions": [0, 1, 2],
        "timestamps": [10, 20, 30],
        "features": {"category": [1, 1, 2]},
        "candidates": [4, 5],
        "candidate_features": {"category": [1, 2]},
        "context": {"country": 3, "hour": 12},
    }
    return body | overrides


def events_body(base_version: int, **overrides: Any) -> dict[str, Any]:
    """Three events of /v1/events for the user of `rank_body`, whose history they are at base 0."""
    history = {name: rank_body()[name] for name in ("items", "actions", "timestamps", "features")}
    return {"user_id": 7, "base_version": base_version, **history} | overrides


def stored_body(**overrides: Any) -> dict[str, Any]:
    """`rank_body` without its history."""
    sent = ("user_id", "candidates", "candidate_features", "context")
    return {name: rank_body()[name] for name in sent} | overrides


def rank_requests(num: int) -> list[RankRequest]:
    rng = np.random.default_rng(0)
    return [random_request(rng, tiny_config(), user, 3 + user % 9, 1 + user % 5) for user in range(num)]


def as_request(body: dict[str, Any]) -> RankRequest:
    return RankRequest(**body)


def tensors_of(requests: list[RankRequest]) -> dict[str, NDArray[np.int64]]:
    """The requests as the Open Inference Protocol takes them."""

    def flat(parts: list[Any]) -> NDArray[np.int64]:
        return np.concatenate([np.asarray(part, np.int64) for part in parts])

    first = requests[0]
    return {
        "USER_IDS": np.array([r.user_id for r in requests]),
        "LENGTHS": np.array([len(r.items) for r in requests]),
        "NUM_CANDIDATES": np.array([len(r.candidates) for r in requests]),
        "ITEMS": flat([r.items for r in requests]),
        "ACTIONS": flat([r.actions for r in requests]),
        "TIMESTAMPS": flat([r.timestamps for r in requests]),
        "CANDIDATES": flat([r.candidates for r in requests]),
        **{f"features.{name}": flat([r.features[name] for r in requests]) for name in first.features},
        **{
            f"candidate_features.{name}": flat([r.candidate_features[name] for r in requests])
            for name in first.candidate_features
        },
        **{f"context.{name}": np.array([r.context[name] for r in requests]) for name in first.context},
    }


def infer_json(tensors: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A body of /v2/models/NAME/infer that is JSON all through."""
    inputs = [
        {"name": name, "shape": [len(values)], "datatype": "INT64", "data": np.asarray(values).tolist()}
        for name, values in tensors.items()
    ]
    return {"inputs": inputs, **overrides}


@dataclass(frozen=True)
class BinaryBody:
    body: bytes
    headers: dict[str, str]


def infer_binary(tensors: dict[str, Any], datatype: str = "INT64", **overrides: Any) -> BinaryBody:
    """The same with its tensors as bytes behind the JSON."""
    dtype = datatype.lower()
    blobs = [np.asarray(values).astype(dtype).tobytes() for values in tensors.values()]
    inputs = [
        {"name": name, "shape": [len(values)], "datatype": datatype, "parameters": {"binary_data_size": len(blob)}}
        for (name, values), blob in zip(tensors.items(), blobs, strict=True)
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}, **overrides}).encode()
    return BinaryBody(header + b"".join(blobs), {"inference-header-content-length": str(len(header))})
