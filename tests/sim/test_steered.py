"""The control loop of an engine on a simulated node: what it sees, when it looks, and that it always does the same."""

import numpy as np
import pytest

from helmrec.control.policy import Move, WindowStats
from helmrec.sim.cluster import ClusterSimConfig, Fleet, NodeLoss, simulate_cluster
from helmrec.sim.curves import curves_at, record_curves
from helmrec.sim.node.config import prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import C, N, make_outcomes
from helmrec.sim.simulate import Options, simulate
from helmrec.sim.steered import SteeredNode
from helmrec.steps import Step
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.traffic.workload import Phase, Workload
from tests.sim.routers import ByHash
from tests.sim.test_simulate import COST, dlrmv3, static

CONFIG = dlrmv3(row_sample=1 / 256)


class Follows:
    """Goes where the queue is: a policy whose moves depend on all it sees."""

    def __init__(self) -> None:
        self.seen: list[WindowStats] = []

    def decide(self, stats: WindowStats) -> Move | None:
        self.seen.append(stats)
        return Move(0.1 + 0.3 * stats.traffic.compute_busy + 0.1 * stats.traffic.idle_share, "follow")

    def reset(self) -> None: ...


@pytest.fixture(scope="module")
def burst() -> Trace:
    """Five calm seconds, three with four times the requests, and calm again."""
    calm = Phase(name="calm", duration_s=5, rate=50, hot_users=100)
    phases = (calm, calm.model_copy(update={"name": "burst", "duration_s": 3.0, "rate": (200.0, 200.0)}), calm)
    return generate(Workload(name="burst", phases=phases), 0)


@pytest.fixture
def node(burst: Trace) -> Node:
    node = Node(CONFIG, COST, prepare_requests(burst, CONFIG), make_outcomes(burst.num_requests))
    node.send(np.arange(burst.num_requests), burst.time_s)
    return node


def test_a_burst_brings_a_tick_forward_and_every_tick_still_ends_a_window(burst: Trace) -> None:
    windows = simulate(burst, CONFIG, COST, static(0.2)).windows
    ends_s = [window.stats.traffic.end_s for window in windows]
    assert set(ends_s) > set(range(1, 13)), "a window that is no whole tick"
    early = [end_s for end_s in ends_s if end_s % 1]
    assert 5.25 <= early[0] < 6, "within the first second of the burst"
    assert min(np.diff([0.0, *ends_s])) >= 0.25
    assert [window.stats.traffic.start_s for window in windows] == [0.0, *ends_s[:-1]]


def test_the_same_trace_gives_the_same_decisions(burst: Trace) -> None:
    first, second = (simulate(burst, CONFIG, COST, Follows()) for _ in range(2))
    assert [window.move for window in first.windows] == [window.move for window in second.windows]
    assert [window.stats.traffic for window in first.windows] == [window.stats.traffic for window in second.windows]
    assert len({window.stats.alpha_target for window in first.windows}) > 5, "it moved"


def test_steps_of_the_windows_are_all_that_ended(burst: Trace, node: Node) -> None:
    windows = simulate(burst, CONFIG, COST, static(0.2)).windows
    steps = np.concatenate([window.stats.steps for window in windows])
    node.run_until(float(windows[-1].stats.traffic.end_s))
    assert np.array_equal(steps, node.take_steps())
    assert len(steps) == node.state.counts[N.ENDED]
    assert steps[:, Step.REQUESTS].sum() == node.state.counts[N.SERVED]
    assert (np.diff(steps[:, Step.END_S]) > 0).all()
    assert (steps[:, Step.BEGIN_S] < steps[:, Step.END_S]).all()
    spans_s = [window.stats.traffic.end_s - window.stats.traffic.start_s for window in windows]
    busy_ms = 1e3 * np.dot([window.stats.traffic.compute_busy for window in windows], spans_s)
    assert busy_ms == pytest.approx(node.state.clocks[C.COMPUTE_BUSY_MS], rel=0.01)
    assert all(0 <= window.stats.traffic.idle_share <= 1 for window in windows)


def test_taken_steps_are_not_there_again_and_of_too_many_the_latest_are(
    node: Node, burst: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helmrec.sim.node.node.CAPACITY", 16)
    small = Node(CONFIG, COST, node.requests, make_outcomes(burst.num_requests))
    small.send(np.arange(burst.num_requests), burst.time_s)
    for each in (node, small):
        each.run_until(6.0)
    every = node.take_steps()
    assert np.array_equal(small.take_steps(), every[-16:])
    assert small.take_steps().shape == (0, len(Step))
    for each in (node, small):
        each.run_until(6.05)
    later = node.take_steps()
    assert 0 < len(later) <= 16
    assert np.array_equal(small.take_steps(), later)


def test_a_move_is_kept_within_what_the_node_can(node: Node) -> None:
    steered = SteeredNode(node)
    for asked, given in ((-0.5, 0.0), (0.3, 0.3), (1.0, CONFIG.alpha_max)):
        steered.move_alpha(asked)
        assert node.stats().alpha_target == pytest.approx(given, abs=1e-3)
    assert steered.curves() is None
    assert steered.stats().queue_length == 0


def test_recorded_curves_are_those_a_policy_sees(burst: Trace) -> None:
    policy = Follows()
    simulate(burst, CONFIG, COST, policy, options=Options(has_curves=True))
    recorded = record_curves(burst, CONFIG, COST)
    assert len(recorded) == 13
    for stats in policy.seen:
        found = curves_at(recorded, 1.0, stats.traffic.end_s)
        assert (found is None) == (stats.curves is None)
        if found is not None and stats.curves is not None and stats.traffic.end_s % 1 == 0:
            np.testing.assert_allclose(found.emb_hit_rate, stats.curves.emb_hit_rate, atol=0.02)
    assert curves_at(recorded, 1.0, 0.75) is None
    assert curves_at(recorded, 1.0, 3.75) is recorded[2]
    assert curves_at(recorded, 1.0, 99.0) is recorded[12]


def test_the_window_of_a_time_is_the_one_it_lies_in(burst: Trace) -> None:
    result = simulate(burst, CONFIG, COST, static(0.2))
    times_s = np.array([0.5, 1.0, 1.25, 5.25, 13.0, 99.0])
    for time_s, window in zip(times_s, result.windows_at(times_s), strict=True):
        traffic = window.stats.traffic
        assert traffic.start_s < time_s <= traffic.end_s or window is result.windows[-1]


def test_a_node_that_comes_back_begins_its_windows_anew() -> None:
    trace = generate(family("steady", Shape(duration_s=6, rate=200, hot_users=50)), 3)
    config = ClusterSimConfig(num_nodes=2, losses=(NodeLoss(node=1, at_s=2.05, back_s=3.45),))
    result = simulate_cluster(trace, Fleet(CONFIG, COST, lambda _: static(0.2)), ByHash(trace), config)
    starts_s = [round(window.stats.traffic.start_s, 3) for window in result.windows[1]]
    assert starts_s[:4] == pytest.approx([0, 1, 3.5, 4.5])
    assert all(window.stats.steps.size for window in result.windows[1])
