"""What could have been gained in hindsight, on made-up latencies."""

from itertools import product

import numpy as np
import pytest

from helmrec_bench.judging.first_times import OPENING_S
from helmrec_bench.measure.controller.hindsight import (
    PRICES,
    WINDOWS_S,
    ServedByConstants,
    gains,
    least_p99,
    paths,
    per_window,
)


def test_the_least_p99_is_that_of_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(0)
    windows = np.repeat(np.arange(4), (150, 90, 60, 100))
    latency_ms = rng.lognormal(size=(3, windows.size)) * rng.uniform(0.5, 2.0, size=(3, 4))[:, windows]
    allowed = windows.size // 100
    chosen = [np.array(choice)[windows] for choice in product(range(3), repeat=4)]
    exact = min(np.sort(latency_ms[each, np.arange(windows.size)])[-1 - allowed] for each in chosen)
    assert least_p99(windows, latency_ms) == pytest.approx(exact, rel=2e-3)


def test_costs_of_windows_are_sums_over_their_requests() -> None:
    found = per_window(np.array([0, 1, 1]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert found.tolist() == [[1.0, 4.0], [5.0, 11.0]]


def test_paths_follow_what_is_best_and_stay_where_moves_are_dear() -> None:
    """The first minute suits one constant, the second one the other, by a little."""
    arrived_s = OPENING_S + np.arange(0.0, 120.0, 0.1)
    is_late = arrived_s >= OPENING_S + 60
    latency_ms = np.where(np.array([[True], [False]]) == is_late, 10.2, 10.0)
    planned = list(paths(ServedByConstants(np.array([0.3, 0.7]), latency_ms, arrived_s)))
    free, dear = planned[len(PRICES)], planned[2 * len(PRICES) - 1]
    assert free.alphas.tolist() == [0.3, 0.3, 0.7, 0.7]
    assert len(planned) == len(PRICES) * len(WINDOWS_S)
    assert len(set(dear.alphas.tolist())) == 1


def test_gains_are_over_the_best_constant_of_each_seed() -> None:
    def seed(mean_ms: float, assembled_ms: float) -> dict[str, float]:
        others = {"p99_ms": 50.0, "assembled_p99_ms": 40.0, "replayed_mean_ms": mean_ms, "replayed_p99_ms": 55.0}
        return {"mean_ms": mean_ms, "assembled_mean_ms": assembled_ms, **others}

    found = gains([seed(10.0, 9.0), seed(20.0, 16.0)])
    assert found == pytest.approx(
        {"assembled mean": -0.15, "assembled P99": -0.2, "replayed mean": 0.0, "replayed P99": 0.1}
    )
