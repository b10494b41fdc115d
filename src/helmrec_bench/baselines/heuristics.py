"""Simple baselines: each cache tuned for itself, a PID controller on the cost of misses, a hill climber on latency."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Move, WindowStats
from helmrec_bench.baselines.service_cost import ServiceCost, compute_ms


class OneCacheSettings(Frozen):
    """When a cache has enough."""

    tolerance: float = Field(0.02, ge=0, lt=1, description="hit rate given up against the most the cache could have")
    min_distance: float = Field(0.02, ge=0, le=1, description="distance of alpha below which to stay")
    slew: float = Field(0.05, gt=0, le=1, description="largest change of alpha per window")


class OneCache:
    """Gives one cache the least memory that nearly reaches its best hit rate, and the other what is left."""

    def __init__(self, cache: Literal["kv", "emb"], settings: OneCacheSettings | None = None) -> None:
        self.cache = cache
        self.settings = settings or OneCacheSettings()

    def decide(self, stats: WindowStats) -> Move | None:
        curves, settings = stats.curves, self.settings
        if curves is None:
            return None
        hit_rate = curves.kv_token_hit_rate if self.cache == "kv" else curves.emb_hit_rate
        enough = np.flatnonzero(hit_rate >= hit_rate.max() - settings.tolerance)
        wanted = float(curves.alphas[enough[-1] if self.cache == "kv" else enough[0]])
        distance = wanted - stats.alpha_target
        if abs(distance) < settings.min_distance:
            return None
        alpha = stats.alpha_target + float(np.clip(distance, -settings.slew, settings.slew))
        return Move(alpha, f"{self.cache} has enough at {wanted:.2f}")

    def reset(self) -> None:
        """There is nothing to forget."""


class PIDSettings(Frozen):
    """Gains are changes of alpha per window per unit of imbalance, which runs from -1 to 1."""

    setpoint: float = Field(0.0, gt=-1, lt=1, description="imbalance aimed at: above 0 rows may cost more than tokens")
    proportional: float = Field(0.05, ge=0, description="alpha per unit of change of imbalance")
    integral: float = Field(0.03, gt=0, description="alpha per window and unit of imbalance")
    derivative: float = Field(0.0, ge=0, description="alpha per unit of change of the change of imbalance")
    smoothing: float = Field(0.3, gt=0, le=1, description="weight of the newest window in the moving average")
    deadband: float = Field(0.02, ge=0, lt=1, description="imbalance below which to stay")


class PID:
    """Holds what missed rows cost and what computed tokens cost in a set proportion.

    In the velocity form: each window's answer is a change, so limits of alpha cannot wind the integral up.
    """

    def __init__(self, cost: ServiceCost, settings: PIDSettings | None = None) -> None:
        self.cost = cost
        self.settings = settings or PIDSettings()
        self._errors: tuple[float, ...] = ()  # smoothed, the two newest, newest last

    def decide(self, stats: WindowStats) -> Move | None:
        if not stats.traffic.num_requests:
            return None
        settings, imbalance = self.settings, self._imbalance(stats)
        last = self._errors[-1] if self._errors else imbalance
        error = last + settings.smoothing * (imbalance - last)
        two, one = (last, last, *self._errors)[-2:]
        self._errors = (*self._errors, error)[-2:]
        if abs(error) < settings.deadband:
            return None
        change = (
            settings.integral * error
            + settings.proportional * (error - one)
            + settings.derivative * (error - 2 * one + two)
        )
        return Move(stats.alpha_target + change, f"imbalance {error:+.2f}")

    def reset(self) -> None:
        self._errors = ()

    def _imbalance(self, stats: WindowStats) -> float:
        """Above 0: missed rows cost too much, EMB should grow."""
        total = stats.new_tokens_per_request + stats.resident_tokens_per_request
        tokens_ms = float(compute_ms(self.cost, stats.new_tokens_per_request, total)) - self.cost.floor_ms
        rows_ms = stats.missed_rows_per_request * self.cost.missed_row_ms
        return (rows_ms - tokens_ms) / max(rows_ms + tokens_ms, 1e-9) - self.settings.setpoint


class HillSettings(Frozen):
    """How long a split is tried and how far the next one is."""

    signal: Literal["mean", "p99"] = Field("mean", description="latency that is to fall")
    settle_windows: int = Field(3, ge=0, description="windows after a move that are not counted: caches refill")
    trial_windows: int = Field(5, ge=1, description="windows averaged for one judgement")
    first_step: float = Field(0.08, gt=0, le=1, description="change of alpha at the start, and the most ever")
    min_step: float = Field(0.02, gt=0, le=1, description="change of alpha it never goes below")
    shrink: float = Field(0.6, gt=0, lt=1, description="factor on the step after a step that did not help")
    grow: float = Field(1.2, ge=1, description="factor on the step after one that did")


@dataclass(slots=True)
class _Climb:
    step: float  # signed: where the next trial is
    judged_ms: float | None = None  # at the split before
    windows: int = 0
    sum_ms: float = 0.0
    num_requests: int = 0


class HillClimber:
    """Moves on as long as measured latency falls, turns round when it does not. Knows no model."""

    def __init__(self, settings: HillSettings | None = None) -> None:
        self.settings = settings or HillSettings()
        self._climb = _Climb(self.settings.first_step)

    def decide(self, stats: WindowStats) -> Move | None:
        settings, climb, traffic = self.settings, self._climb, stats.traffic
        if not traffic.num_requests:
            return None
        climb.windows += 1
        if climb.windows > settings.settle_windows:
            climb.sum_ms += traffic.num_requests * (traffic.mean_ms if settings.signal == "mean" else traffic.p99_ms)
            climb.num_requests += traffic.num_requests
        if climb.windows < settings.settle_windows + settings.trial_windows:
            return None
        now_ms = climb.sum_ms / climb.num_requests
        step = self._next_step(stats, now_ms)
        self._climb = _Climb(step, now_ms)
        return Move(stats.alpha_target + step, f"{settings.signal} {now_ms:.2f} ms, trying {step:+.3f}")

    def reset(self) -> None:
        self._climb = _Climb(self.settings.first_step)

    def _next_step(self, stats: WindowStats, now_ms: float) -> float:
        settings, climb = self.settings, self._climb
        step = climb.step
        if climb.judged_ms is not None and now_ms >= climb.judged_ms:
            step *= -settings.shrink
        elif climb.judged_ms is not None:
            step *= settings.grow
        size = min(max(abs(step), settings.min_step), max(settings.first_step, settings.min_step))
        if not stats.alpha_min < stats.alpha_target + np.copysign(size, step) < stats.alpha_max:
            step = -step  # a wall: what lies beyond cannot be tried
        return float(np.copysign(size, step))
