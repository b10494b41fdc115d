"""The best split of each window, and the band around it."""

import numpy as np
import pytest

from helmrec_bench.judging.quasi_static import quasi_static

ALPHAS = np.array([0.1, 0.3, 0.5, 0.9])


def test_the_band_ends_where_one_percent_is_lost() -> None:
    """A parabola of which the crossing is known; the sweep is coarse, the ends are interpolated."""
    alphas = np.linspace(0, 1, 51)
    costs = 100 + 400 * (alphas - 0.4) ** 2
    exact = quasi_static(costs[None], alphas)
    assert exact.alpha[0] == pytest.approx(0.4)
    assert exact.low[0] == pytest.approx(0.35, abs=0.002)
    assert exact.high[0] == pytest.approx(0.45, abs=0.002)


def test_the_band_is_unbroken_and_stops_at_the_ends_of_the_sweep() -> None:
    alphas = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    exact = quasi_static(np.array([[100, 120, 100.5, 100.2, 100.0], [50, 50, 50, 50, 50]]), alphas, regret=0.01)
    assert (exact.low[0], exact.alpha[0]) == (0.1, 0.1)
    assert exact.high[0] == pytest.approx(0.1 + 0.2 / 20)
    assert (exact.low[1], exact.high[1]) == (0.1, 0.9)


def test_gap_and_time_inside_judge_a_path() -> None:
    alphas = np.linspace(0, 1, 51)
    costs = 100 + 400 * (alphas[None] - np.array([[0.4], [0.6]])) ** 2
    exact = quasi_static(costs, alphas)
    assert exact.gap(np.array([0.4, 0.4])) == pytest.approx(0.1)
    assert exact.share_inside(np.array([0.44, 0.44])) == 0.5
    assert exact.share_inside(exact.alpha) == 1.0
