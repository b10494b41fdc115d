"""The one that acts: when it looks, what it shows, and that only it moves the boundary."""

from dataclasses import dataclass, field, replace

import pytest

from helmrec.control.policy import Limited, Limits, Move, WindowStats
from helmrec.control.rebalancer import Rebalancer
from helmrec.errors import ConfigError
from helmrec.memory.miss_curves import JointCurves
from helmrec.memory.stats import PoolStats
from tests.helpers import tiny_engine


@dataclass
class Looked:
    pool: PoolStats
    queue_length: int = 3
    busy_s: float = 0.0


@dataclass
class Pool:
    """A boundary that goes where it is told at once."""

    looked: Looked = field(default_factory=lambda: Looked(tiny_engine().stats().pool))
    moves: list[float] = field(default_factory=list)

    def stats(self) -> Looked:
        return replace(self.looked)

    def curves(self) -> JointCurves | None:
        return None

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
    pool.looked.busy_s = 0.25
    rebalancer.tick(1.0)
    rebalancer.tick(2.0)
    first, second = (window.traffic for window in policy.seen)
    assert (first.num_requests, first.num_queued, first.arrival_rate) == (4, 3, 4.0)
    assert first.mean_ms == pytest.approx(40)
    assert first.slo_satisfaction == 0.5, "one was late and one refused"
    assert first.hot_user_share == 0.25
    assert first.compute_busy == 0.25
    assert (second.num_requests, second.compute_busy) == (0, 0.0)


def test_it_moves_where_the_policy_says_within_what_the_pool_can() -> None:
    pool = Pool()
    for wanted in (0.5, 0.99):
        rebalancer = Rebalancer(pool, Says(wanted), slo_ms=80)
        rebalancer.tick(0.0)
        rebalancer.tick(1.0)
    assert pool.moves == [0.5, pool.looked.pool.alpha_max]


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
    pool, limits = Pool(), Limits(min_alpha=0.3, max_alpha=0.6, max_step=0.02, travel_per_minute=0.05)
    pool.move_alpha(0.4)
    rebalancer = Rebalancer(pool, Limited(Says(0.6), limits), slo_ms=80, static_alpha=0.1)
    rebalancer.mode = "static"
    for second in range(20):
        rebalancer.tick(float(second))
    assert pool.moves == pytest.approx([0.4, 0.38, 0.36, 0.35])


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
