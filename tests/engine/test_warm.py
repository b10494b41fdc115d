"""Rows that were hot before a restart are resident again before the first request."""

import numpy as np
import pytest

from tests.helpers import random_request, tiny_engine


@pytest.mark.parametrize("row_order", ["lru", "frequency"])
@pytest.mark.parametrize("row_index", ["host", "device"])
def test_a_new_engine_takes_the_hot_rows_of_the_old_one(row_index: str, row_order: str) -> None:
    old, new, cold = (tiny_engine(row_index=row_index, row_order=row_order, alpha=0.4) for _ in range(3))
    rng = np.random.default_rng(1)
    requests = [random_request(rng, old.model_config, user_id, num_events=9) for user_id in range(12)]
    for request in requests:
        old.rank([request])
    hot = old.hot_rows()
    assert np.unique(hot).size == hot.size == old.stats().pool.resident_rows
    new.warm(np.concatenate([[-1, 10**9], hot]))
    new.check()
    assert set(new.hot_rows().tolist()) == set(hot.tolist())
    warm, fresh = (engine.rank(requests[-3:]) for engine in (new, cold))
    assert sum(result.row_misses for result in warm) < 0.35 * sum(result.row_misses for result in fresh)
    for one, other in zip(warm, fresh, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)
    new.check()


@pytest.mark.parametrize("row_index", ["host", "device"])
def test_a_smaller_pool_takes_the_hottest(row_index: str) -> None:
    small = tiny_engine(row_index=row_index, alpha=0.1)
    room = small.stats().pool.row_capacity
    rows = np.arange(200)
    small.warm(rows)
    small.check()
    taken = small.hot_rows()
    assert taken.size == room < rows.size
    assert taken.min() >= rows.size - room - 1, "those that came last are the hottest"


def test_the_heat_of_rows_is_kept_in_order() -> None:
    engine = tiny_engine(alpha=0.5)
    rows = np.random.default_rng(0).permutation(100)
    engine.warm(rows)
    assert engine.hot_rows().tolist() == rows.tolist()
    engine.warm(np.empty(0, np.int64))
    engine.check()
