"""Simple nodes that are steered at once."""

from collections.abc import Callable

import numpy as np
import pytest

from helmrec.control.latency import ALPHAS
from helmrec.errors import ConfigError
from helmrec.ppo.observation import Signal
from helmrec.types import FloatArray
from helmrec_bench.train.designs import DESIGNS, design
from helmrec_bench.train.fleet import Fleet


def lost_by(fleet: Fleet, targets_of: Callable[[Fleet], FloatArray], num_seconds: int = 60) -> float:
    """Mean logarithm of expected latency over the least one."""
    return float(np.mean([fleet.step(targets_of(fleet)).expected.mean() for _ in range(num_seconds)]))


def hold(fleet: Fleet) -> FloatArray:
    return fleet.signals[:, Signal.ALPHA].copy()


def follow(fleet: Fleet) -> FloatArray:
    """To the least of the predicted curve, in steps of at most 0.1."""
    start, best = hold(fleet), ALPHAS[fleet.mean_ms.argmin(axis=1)]
    return np.clip(best, start - 0.1, start + 0.1)


def wander(fleet: Fleet) -> FloatArray:
    return np.clip(hold(fleet) + fleet.rng.choice([-0.1, 0.1], len(fleet.nodes)), ALPHAS[0], ALPHAS[-1])


def test_a_seed_gives_the_same_seconds() -> None:
    one, two, other = Fleet(4, 3), Fleet(4, 3), Fleet(4, 4)
    for _ in range(20):
        outcomes = [fleet.step(follow(fleet)) for fleet in (one, two, other)]
    assert all((a == b).all() for a, b in zip(outcomes[0], outcomes[1], strict=True))
    assert (one.mean_ms == two.mean_ms).all()
    assert not (one.mean_ms == other.mean_ms).all()


def test_curves_and_signals_have_one_line_per_node() -> None:
    fleet = Fleet(5, 0)
    assert fleet.mean_ms.shape == fleet.newest_ms.shape == (5, ALPHAS.size)
    assert fleet.signals.shape == (5, len(Signal))
    assert (fleet.mean_ms > 0).all()
    assert np.isfinite(np.delete(fleet.signals, Signal.IDLE, axis=1)).all()


def test_following_predictions_beats_holding_which_beats_wandering() -> None:
    followed, held, wandered = (lost_by(Fleet(64, 5), one) for one in (follow, hold, wander))
    assert followed < held / 2
    assert held < wandered


def test_a_cache_loses_at_once_and_fills_slowly() -> None:
    fleet = Fleet(8, 1)
    fleet.nodes["left_s"] = 100.0
    start = fleet.nodes["kv"].copy()
    fleet.step(np.full(8, 0.9))
    assert (fleet.nodes["kv"] <= 0.1 + 1e-12).all()
    fleet.step(np.full(8, 0.1))
    assert (fleet.nodes["kv"] < 0.9 - 0.1).all(), start
    for _ in range(150):
        fleet.nodes["left_s"] = 100.0
        fleet.step(np.full(8, 0.1))
    assert fleet.nodes["kv"] == pytest.approx(0.9, abs=1e-2)


def test_a_node_that_ended_is_followed_by_another_one() -> None:
    fleet = Fleet(3, 2)
    fleet.nodes["left_s"] = (1.0, 50.0, 50.0)
    before = fleet.nodes["rate"].copy()
    outcome = fleet.step(hold(fleet))
    assert outcome.is_over.tolist() == [1.0, 0.0, 0.0]
    assert (fleet.nodes["rate"] != before).tolist() == [True, False, False]


def test_predictions_become_right_where_the_node_stands() -> None:
    fleet, surprises = Fleet(64, 6), []
    for _ in range(60):
        fleet.step(hold(fleet))
        surprises.append(fleet.signals[:, Signal.SURPRISE].copy())
    assert np.median(np.abs(np.mean(surprises[30:], axis=0))) < 0.1


@pytest.mark.parametrize("name", DESIGNS)
def test_rewards_are_less_for_who_loses_more_or_travels(name: str) -> None:
    fleet, chosen = Fleet(64, 7), design(name)
    for _ in range(30):
        outcome = fleet.step(follow(fleet))
    worse = outcome._replace(expected=outcome.expected + 0.1, measured=outcome.measured + 0.1, tail=outcome.tail + 0.1)
    still = np.zeros(64)
    assert chosen.rewards(worse, still).sum() < chosen.rewards(outcome, still).sum() <= 0.5
    assert chosen.rewards(outcome, still + 0.1).sum() <= chosen.rewards(outcome, still).sum()


def test_an_unknown_design_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"design must be one of curves, .*got 'none'"):
        design("none")
