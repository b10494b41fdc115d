import numpy as np
import pytest

from helmrec.control.static import Static, StaticSettings
from helmrec.errors import ConfigError
from helmrec.sim.cluster import ClusterResult, ClusterSimConfig, Fleet, NodeLoss, simulate_cluster
from helmrec.sim.node.state import Status, no_faults
from helmrec.sim.simulate import simulate
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.types import FloatArray, IntArray
from helmrec_bench.cascade import highest_hash
from tests.sim.routers import ByHash, LeastLoaded
from tests.sim.test_simulate import COST, dlrmv3

CONFIG = dlrmv3(row_sample=1 / 256, deadline_ms=200.0, queue_limit=64)


def static(node: int) -> Static:
    return Static(StaticSettings(alpha=0.2))


FLEET = Fleet(CONFIG, COST, static)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(family("steady", Shape(duration_s=12, rate=1_200, hot_users=500)), 3)


def run(trace: Trace, *losses: NodeLoss, num_nodes: int = 4, fleet: Fleet = FLEET) -> ClusterResult:
    return simulate_cluster(trace, fleet, ByHash(trace), ClusterSimConfig(num_nodes=num_nodes, losses=losses))


def test_a_cluster_of_one_node_is_that_node(trace: Trace) -> None:
    alone, cluster = simulate(trace, CONFIG, COST, static(0)), run(trace, num_nodes=1)
    for name, column in alone.outcomes._asdict().items():
        np.testing.assert_array_equal(column, getattr(cluster.outcomes, name), err_msg=name)
    assert [w.stats.traffic for w in alone.windows] == [
        w.stats.traffic for w in cluster.windows[0][: len(alone.windows)]
    ]


def test_users_stay_with_their_node_and_the_load_is_spread(trace: Trace) -> None:
    result = run(trace)
    order = np.argsort(trace.user, kind="stable")
    same_user = np.diff(trace.user[order]) == 0
    assert (np.diff(result.node[order])[same_user] == 0).all()
    assert np.bincount(result.node).min() > 0.15 * trace.num_requests


def test_affinity_keeps_kv_and_the_least_loaded_node_keeps_the_queue_short(trace: Trace) -> None:
    by_hash = run(trace).summary()
    by_load = simulate_cluster(trace, FLEET, LeastLoaded(), ClusterSimConfig(num_nodes=4)).summary()
    assert by_hash.token_reuse_rate > 1.5 * by_load.token_reuse_rate
    assert by_load.p99_ms < 2 * by_hash.p99_ms


def test_a_hash_router_avoids_a_failed_node_and_moves_only_its_users() -> None:
    users = np.arange(1_000)
    before, after = highest_hash(users, np.arange(5)), highest_hash(users, np.array([0, 1, 3, 4]))
    assert (after != 2).all()
    assert (after[before != 2] == before[before != 2]).all()


def test_a_lost_nodes_requests_are_answered_elsewhere_and_later(trace: Trace) -> None:
    calm, result = run(trace), run(trace, NodeLoss(node=1, at_s=5.0))
    assert (result.outcomes.status == Status.SERVED).all()
    assert result.num_retried > 0
    assert (result.node[trace.time_s > 5.0] != 1).all()
    moved = (calm.node == 1) & (result.node != 1) & (trace.time_s < 5.0)
    assert np.count_nonzero(moved) == result.num_retried
    assert (result.outcomes.latency_ms[moved] > 1_000).all(), "it took a second to notice"
    before = trace.time_s < 4.9
    np.testing.assert_array_equal(result.outcomes.latency_ms[before], calm.outcomes.latency_ms[before])


def test_a_node_that_comes_back_is_empty_and_gets_its_users_back(trace: Trace) -> None:
    calm, result = run(trace), run(trace, NodeLoss(node=1, at_s=4.0, back_s=6.0))
    late = trace.time_s > 6.2
    np.testing.assert_array_equal(result.node[late], calm.node[late])
    mine = late & (calm.node == 1)
    assert result.outcomes.reused_tokens[mine].sum() < calm.outcomes.reused_tokens[mine].sum()


def test_requests_lost_twice_or_without_any_node_are_counted_as_lost(trace: Trace) -> None:
    """Every request has one outcome, whichever nodes fail."""
    losses = [NodeLoss(node=i, at_s=4.0 + 1.02 * i) for i in range(4)]
    result = run(trace, *losses)
    outcomes = np.bincount(result.outcomes.status, minlength=6)
    assert outcomes.sum() == trace.num_requests
    assert outcomes[Status.WAITING] == 0
    assert outcomes[Status.LOST] > 0.3 * trace.num_requests
    assert np.isnan(result.outcomes.latency_ms[result.outcomes.status != Status.SERVED]).all()


def test_the_same_faults_give_the_same_bytes(trace: Trace) -> None:
    stall = {2: no_faults()._replace(stall=np.array([[3.0, 5.0]]))}
    fleet = FLEET._replace(faults=stall)
    first, second = (run(trace, NodeLoss(node=0, at_s=6.0, back_s=8.0), fleet=fleet) for _ in range(2))
    for name, column in first.outcomes._asdict().items():
        assert column.tobytes() == getattr(second.outcomes, name).tobytes(), name
    assert np.count_nonzero(first.outcomes.status != Status.SERVED) > 0, "a stalled node refuses what it cannot serve"
    assert (first.outcomes.status != Status.WAITING).all()


def test_a_router_that_sends_to_a_failed_node_is_our_bug(trace: Trace) -> None:
    class Stubborn(ByHash):
        def route_requests(self, requests: IntArray, when_s: FloatArray) -> IntArray:
            return np.zeros(requests.size, np.int64)

    config = ClusterSimConfig(num_nodes=2, losses=(NodeLoss(node=0, at_s=1.0),))
    with pytest.raises(AssertionError, match="failed node"):
        simulate_cluster(trace, FLEET, Stubborn(trace), config)


def test_a_loss_must_name_a_node_there_is(trace: Trace) -> None:
    with pytest.raises(ConfigError, match="below 4, got 9"):
        run(trace, NodeLoss(node=9, at_s=1.0))
