"""Bayesian optimisation of the split on measured latency, forgetting as traffic changes.

The Gaussian process has one input and a dozen lines; a library for it would be a heavy dependency, and the
forgetting would still be ours.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Move, WindowStats

Floats = NDArray[np.float64]

GRID = np.linspace(0.05, 0.95, 46)


class BayesSettings(Frozen):
    """How long a split is tried, and what is believed about splits that were not."""

    signal: Literal["mean", "p99"] = Field("mean", description="latency that is to fall")
    settle_windows: int = Field(3, ge=0, description="windows after a move that are not counted: caches refill")
    trial_windows: int = Field(5, ge=1, description="windows averaged for one trial")
    length_scale: float = Field(0.2, gt=0, description="distance of alpha over which latency changes")
    memory_s: float = Field(400.0, gt=0, description="age at which a trial says little about now")
    spread: float = Field(0.2, gt=0, description="deviation of log latency over splits and time, before any trial")
    noise: float = Field(0.02, gt=0, description="deviation of a trial's log latency")
    caution: float = Field(1.0, ge=0, description="deviations below the mean that an untried split is credited with")
    max_trials: int = Field(200, ge=2, description="trials remembered")


class BayesTrial(NamedTuple):
    alpha: float
    latency_ms: float
    end_s: float


class Belief(NamedTuple):
    """About the log of latency in ms at the given splits: queues make its upper end wild, logs tame it."""

    mean: Floats
    deviation: Floats


def believe(trials: list[BayesTrial], alphas: Floats, now_s: float, settings: BayesSettings) -> Belief:
    """A Gaussian process: squared-exponential in alpha, exponential in age."""
    tried, latency_ms, end_s = (np.array(column) for column in zip(*trials, strict=True))
    log_ms = np.log(latency_ms)
    # Not the mean: most trials are near the best, and untried splits would all look as good.
    centre = (log_ms.min() + log_ms.max()) / 2

    def alike(a: Floats, b: Floats) -> Floats:
        return np.exp(-0.5 * ((a[:, None] - b[None, :]) / settings.length_scale) ** 2)

    among = alike(tried, tried) * np.exp(-np.abs(end_s[:, None] - end_s[None, :]) / settings.memory_s)
    across = alike(alphas, tried) * np.exp(-(now_s - end_s) / settings.memory_s)
    among[np.diag_indices_from(among)] += (settings.noise / settings.spread) ** 2
    weights = np.linalg.solve(among, across.T)  # (trials, alphas)
    mean = centre + weights.T @ (log_ms - centre)
    variance = np.maximum(0, 1 - np.einsum("at,ta->a", across, weights))
    return Belief(mean, settings.spread * np.sqrt(variance))


class BayesianOptimiser:
    """Tries the split with the lowest plausible latency, over and over."""

    def __init__(self, settings: BayesSettings | None = None) -> None:
        self.settings = settings or BayesSettings()
        self.reset()

    def reset(self) -> None:
        self._trials: list[BayesTrial] = []
        self._windows: list[tuple[int, float]] = []  # requests and latency of each window at the present split

    def decide(self, stats: WindowStats) -> Move | None:
        settings, traffic = self.settings, stats.traffic
        if not traffic.num_requests:
            return None
        latency_ms = traffic.mean_ms if settings.signal == "mean" else traffic.p99_ms
        self._windows.append((traffic.num_requests, latency_ms))
        if len(self._windows) < settings.settle_windows + settings.trial_windows:
            return None
        counted = np.array(self._windows[settings.settle_windows :])
        self._windows = []
        mean_ms = float(np.average(counted[:, 1], weights=counted[:, 0]))
        self._trials = [*self._trials, BayesTrial(stats.alpha, mean_ms, traffic.end_s)][-settings.max_trials :]
        belief = believe(self._trials, GRID, traffic.end_s, settings)
        best = int(np.argmin(belief.mean - settings.caution * belief.deviation))
        if abs(GRID[best] - stats.alpha_target) < 0.01:  # half the grid's distance: the next trial is here again
            return None
        return Move(
            float(GRID[best]), f"believed {np.exp(belief.mean[best]):.2f} ms, give or take {belief.deviation[best]:.0%}"
        )
