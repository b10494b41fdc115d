"""Every policy on the simulated cluster."""

import numpy as np
import pytest

from helmrec.router.cost import RouterCost, TokenShape
from helmrec.router.slices import Fixed, SliceRouter
from helmrec.router.state import ClusterState
from helmrec.sim.cluster import ClusterResult, ClusterSimConfig, NodeLoss, simulate_cluster
from helmrec.sim.node.state import Status
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec_bench.baselines.routers import policies
from tests.router.cases import request
from tests.sim.test_cluster import CONFIG, FLEET

ROUTER_COST = RouterCost.from_calibration(FLEET.cost.model_dump(), TokenShape(6, 1_024, 10_240))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(family("steady", Shape(duration_s=6, rate=1_000, hot_users=400)), 3)


def run(trace: Trace, name: str, *losses: NodeLoss) -> ClusterResult:
    policy = policies(ROUTER_COST, np.random.default_rng(0))[name]()
    geometry = CONFIG.geometry
    fixed = Fixed(slice_s=0.1, alpha=0.2, pool_tokens=CONFIG.num_pages * geometry.page_tokens)
    router = SliceRouter(policy, ClusterState(), lambda user: request(user, 6_700, num_candidates=2_048), fixed)
    result = simulate_cluster(trace, FLEET, router, ClusterSimConfig(num_nodes=4, losses=losses))
    router.state.check()
    return result


def test_ours_reuses_as_much_as_sessions_do_and_queues_no_longer(trace: Trace) -> None:
    ours, sessions, load, chance = (
        run(trace, name).summary() for name in ("emb-kv-aware", "session-hash", "least-loaded", "random")
    )
    assert ours.token_reuse_rate > 0.9 * sessions.token_reuse_rate
    assert ours.token_reuse_rate > 1.3 * max(load.token_reuse_rate, chance.token_reuse_rate)
    assert ours.p99_ms < sessions.p99_ms


def test_a_lost_node_gets_nothing_and_one_that_comes_back_gets_its_share_of_new_users(trace: Trace) -> None:
    result = run(trace, "emb-kv-aware", NodeLoss(node=1, at_s=2.0, back_s=4.0))
    assert (result.outcomes.status == Status.SERVED).all()
    _, first = np.unique(trace.user, return_index=True)
    newcomers = first[trace.time_s[first] > 4.3]
    assert newcomers.size > 200
    assert abs(np.mean(result.node[newcomers] == 1) - 1 / 4) < 4 * np.sqrt(3 / 16 / newcomers.size)
