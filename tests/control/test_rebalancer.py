"""The one that acts: when it looks, what it shows, and that only it moves the boundary."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from helmrec.control.policy import Limited, Limits, Move, WindowStats
from helmrec.control.rebalancer import Rebalancer
from helmrec.errors import ConfigError
from helmrec.memory.miss_curves import JointCurves
from helmrec.memory.stats import PoolStats
from helmrec.steps import Step, Steps
from tests.helpers import tiny_engine


@dataclass
class Looked:
    pool: PoolStats
    queue_length: int = 3


@dataclass
class Pool:
    """A boundary that goes where it is told at once."""

    looked: Looked = field(default_factory=lambda: Looked(tiny_engine().stats().pool))
    moves: list[float] = field(default_factory=list)
    steps: list[dict[Step, float]] = field(default_factory=list)

    @property
    def queue_length(self) -> int:
        return self.looked.queue_length

    def stats(self) -> Looked:
        return replace(self.looked)

    def curves(self) -> JointCurves | None:
        return None

    def take_steps(self) -> Steps:
        taken, self.steps = self.steps, []
        return np.array([[step.get(column, 0.0) for column in Step] for step in taken]).reshape(-1, len(Step))

    def move_alpha(self, alpha: float) -> None:
        self.moves.append(alpha)
        self.looked.pool = replace(self.looked.pool, alpha=alpha, alpha_target=alpha)


@dataclass
class Says:
    """A policy that always wants the same."""

    alpha: float
    seen: list[WindowStats] = field(default_factory=list)

    def decide(self, stats: WindowStats) -> Move | None:
        self.seen.append(stats)
        return Move(self.alpha, "because")

    def reset(self) -> None: ...


def step(begin_s: float, end_s: float, rows_ms: float = 0.0, compute_ms: float = 0.0) -> dict[Step, float]:
    return {Step.BEGIN_S: begin_s, Step.END_S: end_s, Step.ROWS_MS: rows_ms, Step.COMPUTE_MS: compute_ms}


def test_it_looks_once_per_tick_and_never_before() -> None:
    policy = Says(0.5)
    rebalancer = Rebalancer(Pool(), policy, slo_ms=80, tick_s=1.0)
    looks = [rebalancer.tick(now_s) is not None for now_s in (10.0, 10.5, 11.0, 11.2, 13.0)]
    assert looks == [False, False, True, False, True]
    assert [(w.traffic.start_s, w.traffic.end_s) for w in policy.seen] == [(10.0, 11.0), (11.0, 13.0)]


def test_a_window_tells_of_its_answers_and_of_no_others() -> None:
    pool, policy = Pool(), Says(0.5)
    rebalancer = Rebalancer(pool, policy, slo_ms=80)
    rebalancer.tick(0.0)
    for user, latency_ms in ((1, 10.0), (2, 20.0), (1, 90.0), (3, None)):
        rebalancer.record(user, latency_ms)
    pool.steps = [step(0.1, 0.4, rows_ms=50, compute_ms=250), step(0.3, 0.6, rows_ms=np.nan, compute_ms=150)]
    rebalancer.tick(1.0)
    rebalancer.tick(2.0)
    first, second = (window.traffic for window in policy.seen)
    assert (first.num_requests, first.num_queued, first.arrival_rate) == (4, 3, 4.0)
    assert first.mean_ms == pytest.approx(40)
    assert (first.p50_ms, first.p99_ms) == pytest.approx(np.percentile([10, 20, 90], (50, 99)))
    assert first.slo_satisfaction == 0.5, "one was late and one refused"
    assert first.hot_user_share == 0.25
    assert first.compute_busy == pytest.approx(0.4)
    assert first.bus_busy == pytest.approx(0.05), "a stage that was not timed is left out"
    assert first.idle_share == pytest.approx(0.5), "from 0.1 to 0.6 there was a step under way"
    assert policy.seen[0].steps[:, Step.END_S].tolist() == [0.4, 0.6]
    assert (second.num_requests, second.compute_busy, second.idle_share) == (0, 0.0, 1.0)
    assert policy.seen[1].steps.shape == (0, len(Step))


def test_answers_recorded_together_tell_what_they_tell_one_by_one() -> None:
    users, latency_ms = np.array([4, 5, 4, 4, 6]), np.array([10.0, np.nan, 30.0, 90.0, 20.0])
    together, apart = Says(0.5), Says(0.5)
    rebalancers = [Rebalancer(Pool(), policy, slo_ms=80) for policy in (together, apart)]
    for rebalancer in rebalancers:
        rebalancer.tick(0.0)
    rebalancers[0].record_all(users, latency_ms)
    for user, ms in zip(users.tolist(), latency_ms.tolist(), strict=True):
        rebalancers[1].record(user, None if np.isnan(ms) else ms)
    for rebalancer in rebalancers:
        rebalancer.tick(1.0)
    assert together.seen[0].traffic == apart.seen[0].traffic
    traffic = together.seen[0].traffic
    assert (traffic.num_requests, traffic.num_served) == (5, 4)
    assert traffic.hot_user_share == pytest.approx(0.4)
    assert traffic.slo_satisfaction == pytest.approx(0.6)


def test_users_who_came_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmrec.control.rebalancer._REMEMBERED_USERS", 4)
    policy = Says(0.5)
    rebalancer = Rebalancer(Pool(), policy, slo_ms=80)
    rebalancer.tick(0.0)
    for second, users in enumerate([[1, 2], [1, 3, 4], [5, 6, 1], [2, 7, 8], [1]], start=1):
        rebalancer.record_all(np.array(users), np.full(len(users), 5.0))
        rebalancer.tick(float(second))
    shares = [window.traffic.hot_user_share for window in policy.seen]
    assert shares == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 1]), "user 1 came in every other window or so"
    for second, users in enumerate([[10, 11, 12, 13], [20, 21, 22, 23], [1, 20]], start=6):
        rebalancer.record_all(np.array(users), np.full(len(users), 5.0))
        rebalancer.tick(float(second))
    assert policy.seen[-1].traffic.hot_user_share == 0.5, "user 1 has been away for two windows full of others"


def test_steps_that_ended_before_the_first_window_belong_to_none() -> None:
    pool, policy = Pool(), Says(0.5)
    pool.steps = [step(-3.0, -2.0, compute_ms=1_000)]
    rebalancer = Rebalancer(pool, policy, slo_ms=80)
    rebalancer.tick(0.0)
    rebalancer.tick(1.0)
    assert policy.seen[0].traffic.compute_busy == 0


def test_after_an_early_tick_windows_end_with_ticks_again() -> None:
    policy = Says(0.5)
    rebalancer = Rebalancer(Pool(), policy, slo_ms=80, tick_s=0.1)
    for look in range(21):
        requests = 100 if look == 9 else 10
        rebalancer.record_all(np.arange(requests), np.full(requests, 5.0))
        rebalancer.tick(look * 0.025)
    ends = [window.traffic.end_s for window in policy.seen]
    assert ends == pytest.approx([0.1, 0.2, 0.225, 0.3, 0.4, 0.5])


def test_a_late_tick_is_not_followed_by_a_tiny_window() -> None:
    policy = Says(0.5)
    rebalancer = Rebalancer(Pool(), policy, slo_ms=80)
    for now_s in (0.0, 1.9, 2.0, 2.5, 3.0, 3.7, 4.0):
        rebalancer.tick(now_s)
    assert [window.traffic.end_s for window in policy.seen] == [1.9, 3.0, 4.0]


def test_it_moves_where_the_policy_says_within_what_the_pool_can() -> None:
    pool = Pool()
    for wanted in (0.5, 0.99):
        rebalancer = Rebalancer(pool, Says(wanted), slo_ms=80)
        rebalancer.tick(0.0)
        rebalancer.tick(1.0)
    assert pool.moves == [0.5, pool.looked.pool.alpha_max]


def test_a_split_between_two_pages_is_asked_for_once() -> None:
    """The boundary goes to the nearest page; what is nearer to that page than to another is no move."""
    pool = Pool()
    num_pages = pool.looked.pool.num_pages
    wanted = (num_pages // 2 + 0.3) / num_pages
    rebalancer, decisions = Rebalancer(pool, Says(wanted), slo_ms=80), []
    for second in range(5):
        decisions.append(rebalancer.tick(float(second)))
        pool.looked.pool = replace(pool.looked.pool, alpha_target=round(wanted * num_pages) / num_pages)
    assert len(pool.moves) <= 1
    assert [decision.move for decision in decisions[2:] if decision is not None] == [None] * 3


def test_frozen_it_looks_and_does_not_act() -> None:
    pool, policy = Pool(), Says(0.7)
    rebalancer = Rebalancer(pool, policy, slo_ms=80)
    rebalancer.tick(0.0)
    rebalancer.mode = "freeze"
    decision = rebalancer.tick(1.0)
    assert decision is not None
    assert decision.move is None
    assert pool.moves == []
    assert len(policy.seen) == 1, "it goes on looking"
    rebalancer.mode = "adaptive"
    rebalancer.tick(2.0)
    assert pool.moves == [0.7]


def test_on_its_way_to_a_constant_the_policys_own_limits_hold() -> None:
    pool, limits = Pool(), Limits(min_alpha=0.3, max_alpha=0.6, max_step=0.02)
    pool.move_alpha(0.4)
    rebalancer = Rebalancer(pool, Limited(Says(0.6), limits), slo_ms=80, static_alpha=0.1)
    rebalancer.mode = "static"
    for second in range(20):
        rebalancer.tick(float(second))
    assert pool.moves == pytest.approx([0.4, 0.38, 0.36, 0.34, 0.32, 0.3])


def test_limits_hold_on_a_real_engine() -> None:
    engine = tiny_engine(alpha=0.2)
    rebalancer = Rebalancer(engine, Limited(Says(0.8), Limits(max_step=0.1, max_alpha=0.5)), slo_ms=80)
    for second in range(8):
        rebalancer.tick(float(second))
        engine.settle()
    assert engine.stats().pool.alpha == pytest.approx(0.5, abs=0.02)
    engine.check()


def test_a_tick_of_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="tick_s must be more than 0, got 0"):
        Rebalancer(Pool(), Says(0.5), slo_ms=80, tick_s=0)
