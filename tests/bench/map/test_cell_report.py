import numpy as np
import pytest

from helmrec_bench.map.cell_report import best_alpha, constant_rate_limit, following_rate_limit, regime_figures
from helmrec_bench.map.load_curve import LoadCurve, RegimeSweep

ALPHAS = np.array((0.1, 0.5, 0.9))
RATE = np.linspace(10, 1_000, 100)


def sweep(*capacities: float, is_full: tuple[bool, ...] = (True, True, True)) -> RegimeSweep:
    """Splits whose P99 reaches 80 ms at these loads, with a tenth of that as mean; latency grows with load."""
    p99_ms = [80 * np.exp((RATE - capacity) / 100) for capacity in capacities]
    curves = tuple(LoadCurve(RATE, one / 10, one) for one in p99_ms)
    return RegimeSweep(ALPHAS, curves, np.array(is_full), np.zeros(3), np.zeros(3))


def test_figures_tell_the_best_split_and_what_others_cost() -> None:
    found = regime_figures(sweep(300, 500, 400), other_alpha=0.9)
    assert found.capacity == pytest.approx(500, rel=0.01)
    assert found.alpha_by_capacity == 0.5
    assert set(found.alpha_by_mean) == {0.5}
    penalty = found.penalties["of the other regime"]
    assert penalty.alpha == 0.9
    assert penalty.capacity == pytest.approx(0.2, abs=0.01)
    assert penalty.mean == pytest.approx([np.e - 1] * 2, rel=0.02)
    assert found.penalties["untuned 0.5"].capacity == pytest.approx(0)
    assert 0.1 < found.band[0] < 0.5 < found.band[1] < 0.9


def test_splits_that_a_cache_did_not_fill_cannot_win() -> None:
    assert best_alpha(sweep(300, 500, 400, is_full=(True, False, True))) == 0.9
    assert regime_figures(sweep(300, 500, 400, is_full=(True, False, True)), 0.1).capacity == pytest.approx(400, abs=5)


def test_a_split_of_its_own_for_each_regime_gains_what_the_best_constant_loses_in_the_worse_one() -> None:
    pair = sweep(500, 450, 300), sweep(400, 700, 800)
    constant = constant_rate_limit(pair)
    assert constant.static_alpha == 0.5
    assert constant.static == pytest.approx(450, rel=0.01)
    assert constant.gain == pytest.approx(500 / 450 - 1, abs=0.01)
    following = following_rate_limit(pair)
    assert following.static_alpha == 0.5
    assert following.static == pytest.approx(0.875, abs=0.01)
    assert following.gain == pytest.approx(1 / 0.875 - 1, abs=0.02)
