"""A real engine and a simulated node serve one queue: what both caches hold is the same, whatever the clock says."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec.calibrate.measure import make_model
from helmrec.costs.calibrated import default_cost
from helmrec.engine.engine import Engine
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import make_outcomes
from helmrec.traffic.requests import rank_requests
from helmrec_bench.measure.cards.fidelity import SMALL, send, serve_at_once

NUM = 160
SETTING = replace(SMALL, warm_up=NUM, scored=1, hot_users=20, item_exponent=1.1, pool_bytes=6 << 20)


@pytest.mark.parametrize("alpha", [0.2, 0.6])
def test_the_engine_and_the_simulated_node_hit_alike(alpha: float) -> None:
    trace, model = SETTING.trace(), SETTING.model()
    with Engine(make_model(model, "cpu"), SETTING.engine_config(alpha)) as engine:
        requests = rank_requests(trace, model)
        serve_at_once(engine, [next(requests) for _ in range(NUM)])
        real, report = engine.stats().pool, engine.report()
    engine_config = SETTING.engine_config(alpha, report.num_pages * report.page_bytes)
    config = NodeConfig(model=model, engine=engine_config, row_sample=1.0)
    node = Node(config, default_cost(), prepare_requests(trace, config), make_outcomes(trace.num_requests))
    send(node, np.arange(NUM), np.zeros(NUM))
    ours = node.stats()
    assert real.kv_evicted_pages > 100
    assert real.row_evictions > 100
    assert (ours.reused_tokens, ours.total_tokens) == (real.reused_tokens, real.total_tokens)
    assert ours.kv_evicted_pages == real.kv_evicted_pages
    assert ours.row_hits == pytest.approx(real.row_hits, rel=0.002)
