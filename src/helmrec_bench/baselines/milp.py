"""A mixed-integer programme over forecast windows: the plan of least latency with moves paid, first step taken."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Move, WindowStats
from helmrec.errors import ConfigError
from helmrec_bench.baselines.service_cost import ServiceCost, predict

Floats = NDArray[np.float64]

NUM_ALPHAS = 17


class MILPSettings(Frozen):
    """How far ahead is planned and what moves are taken to cost."""

    horizon: int = Field(6, ge=1, description="windows planned")
    window_lag: int = Field(10, ge=2, description="windows a trend is fitted to")
    trend: float = Field(0.5, ge=0, le=1, description="share of the fitted trend believed")
    grow_ms: float = Field(5.0, ge=0, description="ms per request and window that EMB winning the whole pool costs")
    shrink_ms: float = Field(20.0, ge=0, description="as much for KV winning it")
    slew: float = Field(0.1, ge=0.05, le=1, description="largest change of alpha per window; not below the grid's")


class Problem(NamedTuple):
    """What a plan is made over."""

    costs: Floats  # (windows, splits), ms per request
    alphas: Floats  # (splits,), ascending
    start: float  # split before the first window
    settings: MILPSettings


def solve(problem: Problem) -> Floats | None:
    """The split of each window; None if the solver found nothing in time.

    Variables: one binary per window and split, then growth and shrinkage per window. Travel is continuous, so the
    relaxation alone would mix splits: costs are not convex.
    """
    optimize = _scipy_optimize()
    costs, alphas, start, settings = problem
    windows, splits = costs.shape
    one_each = np.kron(np.eye(windows), np.ones(splits))
    change = np.kron(np.eye(windows) - np.eye(windows, k=-1), alphas)  # alpha now minus alpha before
    before = np.zeros(windows)
    before[0] = start
    nothing, travel = np.zeros((windows, windows)), np.eye(windows)
    constraints = [
        optimize.LinearConstraint(np.hstack((one_each, nothing, nothing)), 1, 1),
        optimize.LinearConstraint(np.hstack((change, -travel, travel)), before, before),  # change = grown - shrunk
    ]
    solution = optimize.milp(
        np.concatenate((costs.ravel(), np.full(windows, settings.grow_ms), np.full(windows, settings.shrink_ms))),
        constraints=constraints,
        integrality=np.concatenate((np.ones(windows * splits), np.zeros(2 * windows))),
        bounds=optimize.Bounds(0, np.concatenate((np.ones(windows * splits), np.full(2 * windows, settings.slew)))),
        options={"time_limit": 1.0, "mip_rel_gap": 1e-4},
    )
    if solution.x is None:
        return None
    return alphas[solution.x[: windows * splits].reshape(windows, splits).argmax(axis=1)]


class MILPPlanner:
    """Forecasts latency over splits by a line through the last windows, plans, takes the first step, plans again."""

    def __init__(self, cost: ServiceCost, settings: MILPSettings | None = None) -> None:
        self.cost = cost
        self.settings = settings or MILPSettings()
        self._latency_ms: deque[Floats] = deque(maxlen=self.settings.window_lag)

    def decide(self, stats: WindowStats) -> Move | None:
        predicted = predict(stats, self.cost, NUM_ALPHAS)
        if predicted is None:
            return None
        self._latency_ms.append(predicted.latency_ms)
        alphas, costs = predicted.alphas, self._forecast()
        start = float(np.clip(stats.alpha_target, alphas[0], alphas[-1]))
        path = solve(Problem(costs, alphas, start, self.settings))
        if path is None or abs(path[0] - stats.alpha_target) < 1e-9:
            return None
        stay_ms, go_ms = (float(np.interp(alpha, alphas, costs[0])) for alpha in (start, path[0]))
        return Move(float(path[0]), f"plan ends at {path[-1]:.2f}", stay_ms - go_ms)

    def reset(self) -> None:
        self._latency_ms.clear()

    def _forecast(self) -> Floats:
        """(windows, splits): the present line carried on, damped, never below a tenth of the present."""
        seen = np.array(self._latency_ms)
        age = np.arange(len(seen)) - len(seen) + 1.0
        spread = ((age - age.mean()) ** 2).sum()
        slope = (age - age.mean()) @ seen / spread if len(seen) > 1 else np.zeros(seen.shape[1])
        ahead = np.arange(1, self.settings.horizon + 1)[:, None]
        return np.maximum(seen[-1] + self.settings.trend * slope * ahead, 0.1 * seen[-1])


def _scipy_optimize() -> Any:
    try:
        from scipy import optimize  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("this baseline needs scipy: pip install 'helmrec[bench]'") from None
    return optimize
