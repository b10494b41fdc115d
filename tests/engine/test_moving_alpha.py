"""Moving the boundary while requests run: nothing lost, nothing wrong."""

from typing import Any

import numpy as np
import pytest

from helmrec.engine.engine import Engine
from tests.helpers import random_request, tiny_engine, tiny_model
from tests.reference import Reference


def test_alpha_goes_up_and_down_under_load_and_every_score_stays_right() -> None:
    model = tiny_model()
    engine = tiny_engine(model, pool_bytes="96KiB", move_bytes_per_step=2_048)
    reference = Reference(model.config, model.dense, model.tables)
    rng = np.random.default_rng(5)
    pages = engine.stats().pool.num_pages
    reached = []
    for target in (0.1, 0.9, 0.1):
        engine.move_alpha(target)
        steps = 0
        while abs(engine.stats().pool.alpha - engine.stats().pool.alpha_target) > 1e-9 or steps < 20:
            request = random_request(rng, model.config, int(rng.integers(6)), int(rng.integers(0, 20)))
            [result] = engine.rank([request])
            assert np.abs(result.scores - reference.scores(request)).max() <= 1e-5
            engine.check()
            steps += 1
        stats = engine.stats().pool
        assert stats.free_pages + stats.emb_pages + stats.kv_pages + stats.draining_pages == pages
        reached.append(round(stats.alpha, 1))
        assert steps > 5, "the move was not incremental"
    assert reached == [0.1, 0.9, 0.1]


def _hit_rate(engine: Engine, rng: np.random.Generator, num_requests: int) -> float:
    before = engine.stats().pool
    for i in range(num_requests):
        items = np.minimum(rng.zipf(1.3, 60) - 1, 2_999)
        candidates = np.minimum(rng.zipf(1.3, 8) - 1, 2_999)
        request = random_request(rng, engine.model_config, user_id=10_000 + i, num_events=60, num_candidates=8)
        fields = {"items": items, "candidates": candidates, "timestamps": request.timestamps}
        extra = {"actions": request.actions, "features": request.features, "context": request.context}
        engine.rank([random_request(rng, engine.model_config, 10_000 + i, 60, 8, **fields, **extra)])
    after = engine.stats().pool
    hits = after.row_hits - before.row_hits
    return hits / (hits + after.row_misses - before.row_misses)


@pytest.mark.parametrize("row_admission", ["always", "second-touch"])
@pytest.mark.parametrize("row_order", ["lru", "frequency"])
def test_after_a_shrink_the_hit_rate_is_that_of_a_cache_born_at_that_size(row_order: str, row_admission: str) -> None:
    tables = ({"name": "item", "num_rows": 3_000}, {"name": "category", "num_rows": 20})
    model = tiny_model(features=tables, window=64, normaliser=64)
    settings: dict[str, Any] = {"pool_bytes": "256KiB", "row_order": row_order, "row_admission": row_admission}
    shrunk = tiny_engine(model, alpha=0.8, **settings)
    born = tiny_engine(model, alpha=0.2, **settings)
    for engine in (shrunk, born):
        _hit_rate(engine, np.random.default_rng(0), 100)
    shrunk.move_alpha(0.2)
    shrunk.settle()
    assert shrunk.stats().pool.row_capacity == born.stats().pool.row_capacity
    rates = [_hit_rate(engine, np.random.default_rng(1), 100) for engine in (shrunk, born)]
    assert born.stats().pool.row_evictions > 0
    assert abs(rates[0] - rates[1]) <= 0.01, rates
