"""Oracles against trying everything."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec_bench.baselines.oracle import SwitchPrices, best_static, cheapest_path, switching_costs
from helmrec_bench.judging.quasi_static import Floats, quasi_static

PRICES = SwitchPrices(pool_bytes=80e9, rewarm_ms_per_byte=0.8 / 67e6, refill_ms_per_byte=1e3 / 50e9)
ALPHAS = np.array([0.1, 0.3, 0.5, 0.9])


def by_trying_all(costs: Floats, prices: Floats, start: int | None) -> float:
    """The least total over every path there is; `prices` is (windows, from, to)."""
    totals = []
    for path in product(range(costs.shape[1]), repeat=costs.shape[0]):
        total = sum(costs[window, at] for window, at in enumerate(path))
        total += sum(prices[window + 1, a, b] for window, (a, b) in enumerate(pairwise(path)))
        totals.append(total + (0 if start is None else prices[0, start, path[0]]))
    return float(min(totals))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_windows=st.integers(1, 5),
    num_alphas=st.integers(1, 4),
    price=st.sampled_from([0.0, 0.1, 1.0, 100.0]),
    is_timed=st.booleans(),
    has_start=st.booleans(),
)
def test_the_cheapest_path_is_that_of_trying_all(
    seed: int, num_windows: int, num_alphas: int, price: float, is_timed: bool, has_start: bool
) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.random((num_windows, num_alphas))
    shape = (num_windows, num_alphas, num_alphas) if is_timed else (num_alphas, num_alphas)
    switching = price * rng.random(shape)
    start = int(rng.integers(num_alphas)) if has_start else None
    plan = cheapest_path(costs, np.linspace(0.1, 0.9, num_alphas), switching, start)
    prices = np.broadcast_to(switching, (num_windows, num_alphas, num_alphas))
    assert plan.running + plan.switching == pytest.approx(by_trying_all(costs, prices, start))
    before = plan.index[0] if start is None else start
    paid = [prices[window, a, b] for window, (a, b) in enumerate(pairwise([before, *plan.index]))]
    assert plan.switching == pytest.approx(sum(paid) - (paid[0] if start is None else 0))
    assert plan.running == pytest.approx(costs[np.arange(num_windows), plan.index].sum())


def test_free_moves_give_the_quasi_static_path_and_dear_ones_the_best_static() -> None:
    costs = np.random.default_rng(1).random((200, 9))
    alphas = np.linspace(0.1, 0.9, 9)
    free, dear = (cheapest_path(costs, alphas, np.full((9, 9), p) * (1 - np.eye(9))) for p in (0.0, 1e6))
    exact = quasi_static(costs, alphas)
    np.testing.assert_array_equal(free.alpha, exact.alpha)
    assert free.running + free.switching == pytest.approx(exact.cost.sum())
    assert dear.running + dear.switching == pytest.approx(best_static(costs, alphas).running)
    assert np.ptp(dear.alpha) == 0


def test_a_burst_shorter_than_its_price_is_not_chased() -> None:
    """Calm windows want 0.1, a burst wants 0.9 and gains 1 a window there; going and coming back costs 6."""
    alphas = np.array([0.1, 0.9])
    move = np.array([[0.0, 4.0], [2.0, 0.0]])
    chased = {}
    for length in (5, 6, 7):
        calm, burst = [[0.0, 1.0]] * 20, [[1.0, 0.0]] * length
        plan = cheapest_path(np.array([*calm, *burst, *calm]), alphas, move)
        chased[length] = bool(plan.index.any())
        assert plan.running + plan.switching == min(length, 6)
    assert not chased[5]
    assert chased[7]


def test_winning_memory_is_what_costs() -> None:
    costs = switching_costs(ALPHAS, PRICES)
    prefixes = 0.2 * 80e9 / 67e6
    assert costs[1, 0] == pytest.approx(prefixes * 0.8)  # KV wins: that many prefixes to compute again
    assert costs[0, 1] == pytest.approx(0.2 * 80e9 / 50e9 * 1e3)  # EMB wins: that many bytes over the bus
    assert np.all(np.diag(costs) == 0)
    busy = switching_costs(ALPHAS, PRICES.model_copy(update={"load": 0.75}))
    np.testing.assert_allclose(busy, 4 * costs)


def test_going_in_steps_costs_as_much_as_going_at_once() -> None:
    costs = switching_costs(ALPHAS, PRICES)
    assert costs[0, 1] + costs[1, 3] == pytest.approx(costs[0, 3])
    assert costs[3, 2] + costs[2, 0] == pytest.approx(costs[3, 0])


def test_best_static_is_the_column_of_least_sum() -> None:
    costs = np.array([[1.0, 2.0, 9.0], [9.0, 2.5, 1.0]])
    plan = best_static(costs, np.array([0.2, 0.5, 0.8]))
    assert (plan.running + plan.switching, plan.switching) == (4.5, 0.0)
    assert plan.alpha.tolist() == [0.5, 0.5]
