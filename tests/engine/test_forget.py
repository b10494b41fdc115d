"""Forgetting a user: its KV is gone wherever it was, its waiting requests are refused, nobody else notices."""

import numpy as np
import pytest

from helmrec.engine.engine import Engine
from helmrec.errors import EngineClosed, Forgotten
from helmrec.types import RankRequest
from tests.helpers import random_request, tiny_engine

MANY_BYTES = 1 << 20


def request_of(engine: Engine, user_id: int) -> RankRequest:
    return random_request(np.random.default_rng(user_id), engine.model_config, user_id, num_events=12)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_forgotten_user_computes_everything_again_and_scores_the_same(overlap: bool) -> None:
    engine = tiny_engine(host_kv_bytes=MANY_BYTES, kv_reload="always", overlap=overlap)
    requests = [request_of(engine, user_id) for user_id in (1, 2)]
    for _ in range(3):
        before = engine.rank(requests)
    assert [result.reused_tokens for result in before] == [13, 13]
    held = engine.stats().pool.host_pages
    engine.forget(1)
    engine.check()
    assert engine.stats().pool.host_pages == held // 2
    assert engine.stats().pool.resident_users == 1
    after = engine.rank(requests)
    assert [result.reused_tokens for result in after] == [0, 13]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)
    engine.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_forgotten_user_has_waiting_is_refused_and_others_are_served(overlap: bool) -> None:
    engine = tiny_engine(max_batch_requests=1, overlap=overlap)
    futures = [engine.submit(request_of(engine, user_id)) for user_id in (1, 1, 2, 1)]
    engine.step()  # where steps overlap, it is still running now
    engine.forget(1)
    while engine.step():
        pass
    assert futures[0].result().reused_tokens == 0, "it was running: it ends, and leaves nothing"
    assert futures[2].result().scores.size
    for future in (futures[1], futures[3]):
        with pytest.raises(Forgotten, match="user 1 was forgotten"):
            future.result()
    assert engine.stats().refused == 2
    assert engine.rank([request_of(engine, 1)])[0].reused_tokens == 0
    engine.check()


def test_a_user_nobody_knows_and_a_closed_engine() -> None:
    engine = tiny_engine()
    before = engine.stats()
    engine.forget(99)
    assert engine.stats() == before
    engine.close()
    with pytest.raises(EngineClosed):
        engine.forget(99)
