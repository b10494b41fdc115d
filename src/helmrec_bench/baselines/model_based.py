"""Policies that read the joint miss curves through a cost model. Stateless: each window is predicted anew."""

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Move, WindowStats
from helmrec_bench.baselines.service_cost import ServiceCost, predict


class ArgminSettings(Frozen):
    """When a predicted gain is worth a move, and how fast to go."""

    min_gain: float = Field(0.01, ge=0, lt=1, description="deadband: predicted share of latency to be gained")
    min_distance: float = Field(0.02, ge=0, le=1, description="deadband: distance of alpha below which to stay")
    slew: float = Field(0.05, gt=0, le=1, description="largest change of alpha per window")
    hedge: float = Field(1.0, gt=0, le=1, description="share of the way to the predicted best that is aimed at")


class MissCurveArgmin:
    """Heads for the split of least predicted latency, if that is far enough and better enough."""

    def __init__(self, cost: ServiceCost, settings: ArgminSettings | None = None) -> None:
        self.cost = cost
        self.settings = settings or ArgminSettings()

    def decide(self, stats: WindowStats) -> Move | None:
        settings, predicted = self.settings, predict(stats, self.cost)
        if predicted is None:
            return None
        best = int(np.argmin(predicted.latency_ms))
        now, distance = stats.alpha_target, float(predicted.alphas[best]) - stats.alpha_target
        now_ms = predicted.latency_at(now)
        gain_ms = now_ms - float(predicted.latency_ms[best])
        if abs(distance) < settings.min_distance or gain_ms < settings.min_gain * now_ms:
            return None
        aimed = distance * settings.hedge
        alpha = now + float(np.clip(aimed, -settings.slew, settings.slew))
        return Move(alpha, f"least predicted at {predicted.alphas[best]:.3f}", now_ms - predicted.latency_at(alpha))

    def reset(self) -> None:
        """There is nothing to forget."""


class MarginalSettings(Frozen):
    """How the slope of predicted latency is read."""

    reach: float = Field(0.05, gt=0, le=0.5, description="distance of alpha over which the slope is taken, each side")
    step: float = Field(0.02, gt=0, le=1, description="change of alpha per window")
    min_gain: float = Field(0.002, ge=0, lt=1, description="predicted share of latency a step must gain")


class MarginalUtility:
    """Gives a little of the pool to the cache that would save more with it: looks near, never for the far best."""

    def __init__(self, cost: ServiceCost, settings: MarginalSettings | None = None) -> None:
        self.cost = cost
        self.settings = settings or MarginalSettings()

    def decide(self, stats: WindowStats) -> Move | None:
        settings, predicted = self.settings, predict(stats, self.cost)
        if predicted is None:
            return None
        now = stats.alpha_target
        low, high = max(now - settings.reach, predicted.alphas[0]), min(now + settings.reach, predicted.alphas[-1])
        if high <= low:  # beyond the curves: towards them
            return Move(now + (settings.step if now < low else -settings.step), "outside the miss curves")
        slope_ms = (predicted.latency_at(high) - predicted.latency_at(low)) / (high - low)
        gain_ms = abs(slope_ms) * settings.step
        if gain_ms < settings.min_gain * predicted.latency_at(now):
            return None
        alpha = float(np.clip(now - np.copysign(settings.step, slope_ms), predicted.alphas[0], predicted.alphas[-1]))
        if alpha == now:  # the curves end here: what lies beyond is unknown, and may leave a cache no room
            return None
        return Move(alpha, f"{'rows' if slope_ms < 0 else 'prefixes'} save more per page", gain_ms)

    def reset(self) -> None:
        """There is nothing to forget."""
