"""Cascades over simulated nodes: what signals, affinity and bounds do to ranks."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec.config import RelayConfig
from helmrec_bench.cascade import CascadeConfig, Relaying, simulate_cascade
from tests.sim.node.test_conformance import SLOW, node_config
from tests.traffic.cases import small_trace

CASCADE = CascadeConfig(retrieval_ms=400, preprocessing_ms=200)
RELAY = RelayConfig(risk=0.0, budget_ms=150, hold_ms=1_500, chunk_tokens=21, max_held=0.6, max_compute=0.9)


def test_stages_take_their_time_give_or_take() -> None:
    rank_s = CASCADE.rank_times(np.zeros(1_000), np.random.default_rng(0))
    assert rank_s.mean() == pytest.approx(0.6, rel=0.02)
    assert rank_s.min() >= 0.6 * 0.6
    assert rank_s.max() <= 0.6 * 1.4
    exact = CascadeConfig(retrieval_ms=30, preprocessing_ms=5, spread=0)
    np.testing.assert_allclose(exact.rank_times(np.array([1.0, 2.0]), np.random.default_rng(0)), [1.035, 2.035])


def test_signals_make_ranks_quicker_and_only_on_the_node_that_got_them() -> None:
    trace, config = small_trace(0, repeat=1), node_config(relay=RELAY)
    together = Relaying(cascade=CASCADE, num_nodes=4)
    inline = simulate_cascade(trace, config, SLOW, replace(together, has_signals=False))
    ahead = simulate_cascade(trace, config, SLOW, together)
    apart = simulate_cascade(trace, config, SLOW, replace(together, has_affinity=False))
    assert ahead.percentile(50) < 0.9 * inline.percentile(50)
    assert ahead.token_reuse_rate > apart.token_reuse_rate + 0.2
    assert ahead.leases_used > 4 * ahead.leases_expired
    assert apart.leases_expired > apart.leases_used
    assert inline.ahead_busy == 0
    assert ahead.share_within(np.inf) == 1


def test_strangers_signals_stay_within_the_bounds() -> None:
    trace = small_trace(1, repeat=1)
    config = node_config(relay=RELAY.model_copy(update={"max_held": 0.2, "max_compute": 0.2}))
    crowded = simulate_cascade(trace, config, SLOW, Relaying(cascade=CASCADE, num_new_users=9))
    assert crowded.most_held <= 0.2
    assert crowded.most_compute <= 0.2 + 1e-9
    assert crowded.verdicts["no room"] + crowded.verdicts["too busy"] > 500
