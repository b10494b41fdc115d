"""The latency model against simulated nodes and against what must hold of any queue."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helmrec.control.adaptive import Adaptive

from helmrec.control.latency import ALPHAS, Bias, RecentWork, forecast
from helmrec.control.policy import Move, WindowStats
from helmrec.sim.drawn import OPENING_S, draw
from helmrec.sim.simulate import Options, simulate
from tests.control.bowl import ROWS, TOKENS, Bowl
from tests.control.made_up_steps import COSTS
from tests.control.test_adaptive import Served

BOWL = Bowl()
RECENT = RecentWork(
    computed_tokens=np.array([BOWL.computed(alpha) for alpha in ALPHAS]),
    missed_rows=np.array([BOWL.missed(alpha) for alpha in ALPHAS]),
    read_rows=np.full(ALPHAS.size, ROWS),
)
WINDOW = Served(BOWL).window(0.5, 0.0)


class Watched:
    """Looks and forecasts, and never moves."""

    def __init__(self) -> None:
        self.policy = Adaptive()
        self.errors: list[float] = []  # of a window's latency, forecast in the one before

    def decide(self, stats: WindowStats) -> Move | None:
        before = self.policy.forecast
        if before is not None and stats.traffic.num_served and stats.traffic.start_s >= OPENING_S:
            self.errors.append(abs(before.at(stats.alpha) / stats.traffic.mean_ms - 1))
        self.policy.decide(stats)
        return None

    def reset(self) -> None:
        self.policy.reset()


@pytest.mark.parametrize("number", [10, 12])
def test_a_steady_node_is_forecast_a_window_ahead(number: int) -> None:
    drawn, watched = draw("train", number, load=0.7), Watched()
    simulate(drawn.make_trace(0), drawn.node_at(0.4), drawn.cost, watched, options=Options(has_curves=True))
    assert np.median(watched.errors) < 0.25


def test_latency_grows_with_arrivals_and_stays_finite_in_overload() -> None:
    means = [forecast(WINDOW, RECENT, COSTS, Bias(), rate).mean_ms for rate in (1, 50, 200, 1_000, 10_000)]
    for less, more in itertools.pairwise(means):
        assert (more > less).all()
    assert np.isfinite(means[-1]).all()


def test_a_lone_request_takes_the_sum_of_its_stages() -> None:
    alone = forecast(WINDOW, RECENT, COSTS, Bias(), rate=1e-6)
    stages_ms = alone.host_ms + alone.rows_ms + alone.compute_ms
    waited_ms = 0.5 * COSTS.step_ms  # the formula knows no idle node: steps follow each other, if empty
    np.testing.assert_allclose(alone.mean_ms, stages_ms + COSTS.step_ms + waited_ms, rtol=1e-4)


def test_overlap_and_equal_requests_shorten_waits() -> None:
    plain = forecast(WINDOW, RECENT, COSTS, Bias(), rate=100).mean_ms
    assert (forecast(WINDOW, RECENT, replace(COSTS, overlap=1.0), Bias(), rate=100).mean_ms < plain).all()
    assert (forecast(WINDOW, RECENT, replace(COSTS, spread=2.0), Bias(), rate=100).mean_ms > plain).all()


def test_what_was_measured_scales_what_shadows_promise() -> None:
    plain, corrected = (forecast(WINDOW, RECENT, COSTS, bias, rate=20) for bias in (Bias(), Bias(tokens=2, rows=0.5)))
    history = WINDOW.new_tokens_per_request + WINDOW.resident_tokens_per_request
    assert history == pytest.approx(TOKENS)
    more = RECENT.computed_tokens * (COSTS.token_ms + COSTS.pair_ms * history / 2)
    np.testing.assert_allclose(corrected.compute_ms - plain.compute_ms, more)
    np.testing.assert_allclose(plain.rows_ms - corrected.rows_ms, RECENT.missed_rows * COSTS.missed_row_ms / 2)
