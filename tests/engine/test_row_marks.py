"""KV may lag behind updates of slow tables only, and by no more than was allowed."""

import numpy as np
import pytest

from helmrec.clock import ManualClock
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError
from tests.helpers import tiny_engine, tiny_model
from tests.serve.cases import as_request, rank_body


def reused(engine: Engine) -> int:
    (result,) = engine.rank([as_request(rank_body())])
    return result.reused_tokens


def test_slow_tables_lag_and_the_others_are_exact() -> None:
    clock, request = ManualClock(), as_request(rank_body())
    freshness = {"category": 5.0, "country": "exact"}
    with tiny_engine(tiny_model(), clock, kv_freshness=freshness, kv_admission="always") as engine:
        reused(engine)
        whole = reused(engine)
        assert whole > 0
        rows, category = np.ones((1, 16)), [int(request.features["category"][0])]
        engine.update_rows("category", category, rows)
        assert reused(engine) == whole, "it may lag"
        clock.advance(4.9)
        assert reused(engine) == whole
        clock.advance(0.2)
        assert reused(engine) < whole, "no longer than allowed"
        assert engine.stats().pool.stale_tokens > 0
        assert reused(engine) == whole
        engine.update_rows("item", [int(request.items[0])], rows)
        assert reused(engine) < whole, "a table that is not named is exact"
        engine.check()


def test_a_row_that_is_read_is_new_at_once() -> None:
    """Only KV lags: scores of candidates see the new row."""
    request = as_request(rank_body())
    with tiny_engine(tiny_model(), ManualClock(), kv_freshness={"item": 5.0}) as engine:
        before = engine.rank([request])[0].scores
        candidate = int(request.candidates[0])
        engine.update_rows("item", [candidate], np.ones((1, 16)))
        after = engine.rank([request])[0].scores
        assert np.abs(before[0] - after[0]).max() > 1e-3


def test_a_table_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kv_freshness\.items: the model has no such table, only item, category"):
        tiny_engine(tiny_model(), kv_freshness={"items": 5.0})
