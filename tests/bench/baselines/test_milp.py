"""Plans of the integer programme against trying all of them."""

import sys
from itertools import pairwise, product

import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec_bench.baselines.milp import Floats, MILPPlanner, MILPSettings, Problem, solve
from tests.bench.baselines.drift import bottoms, bowls, follow
from tests.control.bowl import COST, Bowl


def price(path: Floats, problem: Problem) -> float:
    """Of a path, or infinite if a step is too long."""
    changes = np.diff(np.concatenate(([problem.start], path)))
    if np.any(np.abs(changes) > problem.settings.slew + 1e-9):
        return float("inf")
    moved = problem.settings.grow_ms * np.maximum(0, changes) + problem.settings.shrink_ms * np.maximum(0, -changes)
    at = np.searchsorted(problem.alphas, path - 1e-9)
    return float(moved.sum() + problem.costs[np.arange(len(path)), at].sum())


@pytest.mark.parametrize("seed", range(12))
def test_the_plan_is_the_cheapest_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    alphas = np.linspace(0.1, 0.9, 5)
    grow, shrink = rng.choice([0.0, 0.5, 5.0], 2)
    settings = MILPSettings(grow_ms=grow, shrink_ms=shrink, slew=float(rng.choice([0.2001, 0.45, 1.0])))
    problem = Problem(rng.random((4, 5)), alphas, float(rng.uniform(0.1, 0.9)), settings)
    path = solve(problem)
    assert path is not None
    best = min(price(alphas[list(at)], problem) for at in product(range(5), repeat=4))
    assert price(path, problem) == pytest.approx(best, rel=1e-3)


def test_no_way_within_the_slew_is_no_plan() -> None:
    far = Problem(np.ones((2, 2)), np.array([0.1, 0.9]), 0.5, MILPSettings(slew=0.1))
    assert solve(far) is None


def test_the_planner_walks_to_the_bottom_and_rests() -> None:
    nodes = [Bowl()] * 30
    path = follow(MILPPlanner(COST, MILPSettings(grow_ms=0.5, shrink_ms=0.5)), nodes, start=0.9)
    assert abs(path[-1] - nodes[0].bottom()) < 0.06
    assert path[-1] == path[-8]
    assert max(abs(b - a) for a, b in pairwise(path)) <= 0.1 + 1e-9


def test_dear_moves_are_not_made() -> None:
    free, dear = (MILPSettings(grow_ms=ms, shrink_ms=ms) for ms in (0.1, 1_000.0))
    assert np.ptp(follow(MILPPlanner(COST, free), [Bowl()] * 10, start=0.8)) > 0.1
    assert np.ptp(follow(MILPPlanner(COST, dear), [Bowl()] * 10, start=0.8)) == 0


def test_a_trend_is_carried_on() -> None:
    """With traffic that drifts, believing the trend keeps closer to the moving bottom."""
    nodes = bowls(5)[:70]
    best = bottoms(nodes)
    gaps = {}
    for trend in (0.0, 1.0):
        policy = MILPPlanner(COST, MILPSettings(trend=trend, grow_ms=0.1, shrink_ms=0.1, horizon=3, window_lag=6))
        gaps[trend] = float(np.abs(follow(policy, nodes) - best)[10:].mean())
    assert gaps[1.0] < gaps[0.0] < 0.1


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"needs scipy: pip install 'helmrec\[bench\]'"):
        MILPPlanner(COST).decide(Bowl().window(0.5))
