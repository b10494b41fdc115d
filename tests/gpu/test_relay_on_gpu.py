"""Prefixes computed ahead on a card: steps without candidates as graphs, chunks, pages that come back from the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.relay.test_pre_inference import finish, signal_of
from tests.helpers import random_request, tiny_engine, tiny_model

from helmrec.config import RelayConfig
from helmrec.model.config import ITEM, TableConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("context", [{}, {"user_context": (), "request_context": ()}], ids=["context", "bare"])
def test_scores_with_and_without_relay_are_equal(context: dict[str, Any]) -> None:
    model = tiny_model(
        dtype="bfloat16",
        num_layers=3,
        qk_dim=64,
        v_dim=64,
        dim=64,
        hidden_dim=64,
        window=1_024,
        normaliser=1_024,
        row_dim=128,
        features=(TableConfig(name=ITEM, num_rows=20_000), TableConfig(name="category", num_rows=20)),
        **context,
    )
    relay = RelayConfig(risk=0, chunk_tokens=256, max_held=1.0, max_compute=1.0)
    settings: dict[str, Any] = {"device": "cuda", "page_tokens": 128, "pool_bytes": "8MiB", "kv_admission": "always"}
    engine = tiny_engine(model, relay=relay, host_kv_bytes="8MiB", kv_reload="always", **settings)
    plain = tiny_engine(model, **settings)
    rng = np.random.default_rng(0)
    for user, num_events in enumerate((700, 128, 300, 895, 5, 896)):
        rank = random_request(rng, model.config, user, num_events)
        for is_back in (False, True):
            engine._pool.kv.evict(1 << 20)
            signal = signal_of(replace(rank, context={"country": 0, **rank.context}))
            names = {table.name for table in model.config.user_context}
            told = engine.prefill(replace(signal, context={n: rank.context[n] for n in names}))
            assert told.verdict == "admitted"
            finish(engine)
            (result,), (expected,) = engine.rank([rank]), plain.rank([rank])
            assert result.reused_tokens >= (num_events - 1) // 128 * 128
            assert np.abs(result.scores - expected.scores).max() <= 5e-2
            assert not is_back or num_events < 128 or engine.stats().pool.host_reloaded_pages
    engine.check()
    stats = engine.stats().relay
    assert stats.failed == 0
    assert stats.used == 12
    assert engine.stats().background_failures == 0
    for each in (engine, plain):
        each.close()
