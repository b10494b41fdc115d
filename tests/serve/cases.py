"""Requests for the tiny model as clients write them."""

from typing import Any

import numpy as np

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


def rank_requests(num: int) -> list[RankRequest]:
    rng = np.random.default_rng(0)
    return [random_request(rng, tiny_config(), user, 3 + user % 9, 1 + user % 5) for user in range(num)]


def as_request(body: dict[str, Any]) -> RankRequest:
    return RankRequest(**body)
