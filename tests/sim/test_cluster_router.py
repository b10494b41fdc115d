"""A routing policy over simulated nodes, with and without their reports."""

import numpy as np
import pytest

from helmrec.costs.routing import RouterCost
from helmrec.sim.cluster import ClusterResult, ClusterSimConfig, NodeLoss, simulate_cluster
from helmrec.sim.cluster_router import Reporting, ReportingRouter
from helmrec.sim.node.config import prepare_requests
from helmrec.sim.node.state import Status
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec_bench.baselines.routers import policies
from tests.sim.test_cluster import CONFIG, FLEET

COST = RouterCost.from_calibration(FLEET.cost.terms(), 6, 1_024)
NUM_NODES = 4


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(family("steady", Shape(duration_s=5, rate=1_200, hot_users=300)), 3)


def make_router(trace: Trace, name: str, reporting: Reporting) -> ReportingRouter:
    policy = policies(COST, np.random.default_rng(0))[name]()
    return ReportingRouter(policy, prepare_requests(trace, CONFIG), CONFIG, reporting)


def run(trace: Trace, name: str, reporting: Reporting | None = None, *losses: NodeLoss) -> ClusterResult:
    router = make_router(trace, name, reporting or Reporting())
    result = simulate_cluster(trace, FLEET, router, ClusterSimConfig(num_nodes=NUM_NODES, losses=losses))
    router.state.check()
    return result


def test_ours_reuses_what_sessions_reuse_and_answers_sooner(trace: Trace) -> None:
    ours, sessions, chance = (run(trace, name).summary(1.0) for name in ("emb-kv-aware", "session-hash", "random"))
    assert ours.token_reuse_rate > 0.95 * sessions.token_reuse_rate
    assert ours.token_reuse_rate > 1.3 * chance.token_reuse_rate
    assert ours.p99_ms < min(sessions.p99_ms, chance.p99_ms)


@pytest.mark.parametrize("reporting", [Reporting(age_s=5.0), Reporting(is_absent=True)], ids=["5 s old", "absent"])
def test_old_or_missing_reports_cost_little_and_lose_nothing(trace: Trace, reporting: Reporting) -> None:
    fresh, without = run(trace, "emb-kv-aware"), run(trace, "emb-kv-aware", reporting)
    assert (without.outcomes.status == Status.SERVED).all()
    assert without.summary(1.0).p99_ms <= 1.15 * fresh.summary(1.0).p99_ms


def test_a_node_that_returns_empty_gets_its_share_of_new_users(trace: Trace) -> None:
    result = run(trace, "emb-kv-aware", None, NodeLoss(node=1, at_s=1.5, back_s=3.0))
    assert (result.outcomes.status == Status.SERVED).all()
    _, first = np.unique(trace.user, return_index=True)
    newcomers = first[trace.time_s[first] > 3.5]
    assert newcomers.size > 200
    share = np.mean(result.node[newcomers] == 1)
    assert share > 1 / NUM_NODES - 4 * np.sqrt(3 / 16 / newcomers.size)


def test_a_request_is_described_as_its_rows_are(trace: Trace) -> None:
    """Sampled rows stand for all rows: their number, scaled up by the rate, is that of the request in the mean."""
    router = make_router(trace, "random", Reporting())
    described = [router.describe(request) for request in range(300)]
    scaled = [each.sample.hashes.size / ((float(each.sample.threshold) + 1) / 2**64) for each in described]
    wanted = [(each.num_tokens + each.num_candidates) * each.rows_per_token for each in described]
    assert sum(scaled) == pytest.approx(sum(wanted), rel=0.1)
    for each in described:
        assert (each.sample.hashes <= each.sample.threshold).all()
        assert (each.sample.position <= each.num_tokens).all()
