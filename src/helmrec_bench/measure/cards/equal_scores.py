"""Scores with and without caches, alone and in batches, in one precision, over a pool that is too small.

Pages are evicted, kept in host memory and loaded again, and the boundary moves, as requests of users who return are
served. It does not know which precisions are of interest.
"""

import time
from typing import Any

import numpy as np

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.precision import audit_tolerance
from helmrec.engine.setup import page_geometry
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.precision import Precision
from helmrec.model.weights import LoadedModel
from helmrec.types import RankRequest

NUM_USERS, MOST_IN_BATCH = 40, 8
POOL_REQUESTS, HOST_REQUESTS = 10, 24  # of the longest kind, that the pool and the host tier hold
MOVES = 0.1  # of batches have a move of the boundary before them


class GrowingUsers:
    """Users who come again with more events, in random order."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        self._model, self._rng = model, np.random.default_rng(seed)
        num_items, longest = model.features[0].num_rows, 3 * model.window // 2
        self._items = self._rng.integers(num_items, size=(NUM_USERS, longest))
        self._lengths = self._rng.integers(1, longest // 2, NUM_USERS)

    def next_requests(self, num: int) -> list[RankRequest]:
        requests = []
        for user in self._rng.integers(NUM_USERS, size=num).tolist():
            grown = self._lengths[user] + int(self._rng.integers(0, max(2, self._model.window // 16)))
            self._lengths[user] = min(grown, self._items.shape[1])
            candidates = self._rng.integers(self._model.features[0].num_rows, size=min(16, self._model.max_candidates))
            requests.append(make_request(self._model, user, self._items[user, : self._lengths[user]], candidates))
        return requests


def compare_scores(model: LoadedModel, precision: Precision, num: int, device: str) -> dict[str, Any]:
    """Score `num` random requests or a few more in batches of 1 to 8 with caches, and each again without.

    Every request is also ranked alone by a second engine.
    """
    config = _config(model.config, precision, device)
    users, rng, started = GrowingUsers(model.config), np.random.default_rng(1), time.monotonic()
    worst_alone, num_moves, served = 0.0, 0, 0
    with Engine(model, config) as engine, Engine(model, config.model_copy(update={"audit_every": 0})) as alone:
        while served < num:
            if rng.random() < MOVES:
                engine.move_alpha(float(rng.uniform(0, engine.stats().pool.alpha_max)))
                num_moves += 1
            requests = users.next_requests(int(rng.integers(1, MOST_IN_BATCH + 1)))
            served += len(requests)
            for request, result in zip(requests, engine.rank(requests), strict=True):
                difference = np.abs(alone.rank([request])[0].scores - result.scores).max()
                worst_alone = max(worst_alone, float(difference))
        engine.check()
        stats = engine.stats()
    return {
        "requests": stats.audits,
        "tolerance": audit_tolerance(model.config.dtype, config),
        "worst_cached_and_uncached": stats.audit_max_error,
        "worst_alone_and_in_a_batch": worst_alone,
        "beyond_tolerance": stats.audit_mismatches,
        "moves": num_moves,
        "tokens_reused": stats.pool.reused_tokens,
        "pages_reloaded": stats.pool.host_reloaded_pages,
        "pages_evicted": stats.pool.kv_evicted_pages,
        "seconds": round(time.monotonic() - started, 1),
    }


def _config(model: ModelConfig, precision: Precision, device: str) -> EngineConfig:
    """An engine that audits every request."""
    settings: dict[str, Any] = {"device": device, **precision._asdict(), "kv_admission": "always"}
    page = page_geometry(model, EngineConfig(**settings))
    request_bytes = (1 + page.pages_for(model.max_prefix_tokens)) * page.page_bytes
    sizes = {"pool_bytes": POOL_REQUESTS * request_bytes, "host_kv_bytes": HOST_REQUESTS * request_bytes}
    limits = {"max_batch_requests": MOST_IN_BATCH, "audit_every": 1, "kv_reload": "always"}
    return EngineConfig(**settings, **sizes, **limits)
