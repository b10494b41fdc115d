"""A policy that steers by what it measures: the costs of its own steps, recent miss curves, and bursts it has seen.

Three layers look at every window. *Base* goes where the forecast of the last seconds is least. *Residual* corrects the
forecast by what was measured at the present split. *Burst memory* adds the bursts of the last minutes to what base
looks at, so that the node stands where calm and bursts together cost least. Plain NumPy; knows windows, not nodes.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.costs import Estimator, Floats
from helmrec.control.latency import ALPHAS, Bias, Forecast, RecentWork, forecast
from helmrec.control.policy import Move, WindowStats
from helmrec.control.service_cost import smooth
from helmrec.memory.miss_curves import JointCurves

_SETTLED = 0.02  # distance of alpha from its target within which caches are what their shadows stand for
_MOST_BIAS = 2.0  # factor, either way: what errs by more is another pool or traffic, and not believed


class AdaptiveSettings(Frozen):
    """Which layers take part, and how long each remembers."""

    has_residual: bool = Field(True, description="correct forecasts by what was measured at the present split")
    has_burst_memory: bool = Field(True, description="weigh bursts of the last minutes in calm")
    curves_half_life_s: float = Field(5.0, gt=0, description="of miss curves: shorter is noise, longer misses bursts")
    rate_half_life_s: float = Field(5.0, gt=0, description="of the arrival rate that forecasts assume")
    forecast_half_life_s: float = Field(15.0, gt=0, description="of forecasts in the base: shorter follows noise")
    residual_half_life_s: float = Field(20.0, gt=0, description="of what was measured over what was promised")
    burst_half_life_s: float = Field(300.0, gt=0, description="of bursts: some periods of the usual ones")
    calm_half_life_s: float = Field(30.0, gt=0, description="of the arrival rate that bursts stand out from")
    burst_factor: float = Field(1.25, gt=1, description="times the calm rate from which arrivals are a burst")
    burst_deviations: float = Field(3.0, gt=0, description="of a Poisson count that a burst is above that, too")
    min_gain: float = Field(0.005, ge=0, description="share of the latency that a move must promise")
    flat: float = Field(0.002, ge=0, description="share above the least within which the nearest split will do")


@dataclass(slots=True, eq=False)
class _Average:
    """A mean over requests, older ones fading with time."""

    half_life_s: float
    weight: float = 0.0
    value: Floats | None = None

    def add(self, value: Floats, weight: float, dt_s: float) -> Floats:
        self.fade(dt_s)
        self.weight += weight
        if self.value is None:
            self.value = value
        elif weight > 0:
            self.value = self.value + (value - self.value) * (weight / self.weight)
        return self.value

    def fade(self, dt_s: float) -> None:
        self.weight *= 0.5 ** (dt_s / self.half_life_s)


class Adaptive:
    """Held to `Limits` from outside, as every policy."""

    def __init__(self, settings: AdaptiveSettings | None = None) -> None:
        self.settings = settings or AdaptiveSettings()
        self.reset()

    def reset(self) -> None:
        settings = self.settings
        self.estimator = Estimator()
        self.forecast: Forecast | None = None  # of the last window that could be judged
        self._curves: JointCurves | None = None
        self._recent = _Average(settings.curves_half_life_s)
        self._rate = _Average(settings.rate_half_life_s)
        self._promised = _Average(settings.residual_half_life_s)
        self._base = _Average(settings.forecast_half_life_s)
        self._bursts = Bursts(settings)

    def decide(self, window: WindowStats) -> Move | None:
        traffic, dt_s = window.traffic, window.traffic.end_s - window.traffic.start_s
        self.estimator.update(window.steps)
        costs, recent = self.estimator.costs, self._recent_work(window.curves, dt_s)
        if costs is None or recent is None or not traffic.num_served or not len(window.steps):
            return None
        rate = float(self._rate.add(np.array([traffic.arrival_rate]), dt_s, dt_s)[0])
        self.forecast = forecast(window, recent, costs, self._bias(window, recent, dt_s), rate)
        calm_ms = self._base.add(self.forecast.mean_ms, traffic.num_served, dt_s)
        mean_ms = self._bursts.add(self.forecast, traffic.num_served, (traffic.arrival_rate, dt_s), calm_ms)
        return self._choose(window, mean_ms)

    def _recent_work(self, curves: JointCurves | None, dt_s: float) -> RecentWork | None:
        """Take in the miss curves of the requests since the last window; returns the average over recent windows."""
        if curves is None:
            return None
        before, self._curves = self._curves, curves
        newest = curves if before is None else curves.since(before)
        if newest is not None:
            known = (newest.computed_tokens_per_request, newest.missed_rows_per_request, newest.rows_per_request)
            at = np.clip(ALPHAS, curves.alphas[0], curves.alphas[-1])
            values = np.maximum(0.0, [smooth(at, curves.alphas, one) for one in known])
            self._recent.add(values, newest.num_requests, dt_s)
        return None if self._recent.value is None else RecentWork(*self._recent.value)

    def _bias(self, window: WindowStats, recent: RecentWork, dt_s: float) -> Bias:
        """Tokens and rows measured at the present split over what its shadows promised."""
        if not self.settings.has_residual:
            return Bias()
        if abs(window.alpha - window.alpha_target) <= _SETTLED:
            promised = [np.interp(window.alpha, ALPHAS, one) for one in (recent.computed_tokens, recent.missed_rows)]
            measured = [window.new_tokens_per_request, window.missed_rows_per_request]
            self._promised.add(np.array([measured, promised]), window.traffic.num_served, dt_s)
        if self._promised.value is None:
            return Bias()
        measured, promised = self._promised.value
        ratio = np.clip(measured / np.maximum(promised, 1e-9), 1 / _MOST_BIAS, _MOST_BIAS)
        return Bias(float(ratio[0]), float(ratio[1]))

    def _choose(self, window: WindowStats, mean_ms: Floats) -> Move | None:
        """The split of least latency, or none if it promises too little; among equals the nearest."""
        settings, start = self.settings, window.alpha_target
        is_open = (window.alpha_min <= ALPHAS) & (window.alpha_max >= ALPHAS)
        if not is_open.any():
            return None
        alphas, mean_ms = ALPHAS[is_open], mean_ms[is_open]
        here_ms, least_ms = float(np.interp(start, alphas, mean_ms)), float(mean_ms.min())
        if here_ms - least_ms < settings.min_gain * here_ms:
            return None
        equals = np.flatnonzero(mean_ms <= least_ms * (1 + settings.flat))
        best = equals[np.abs(alphas[equals] - start).argmin()]
        gain_ms = here_ms - float(mean_ms[best])
        return Move(float(alphas[best]), f"forecast {here_ms:.2f} ms here, {mean_ms[best]:.2f} ms there", gain_ms)


class Bursts:
    """Remembers what bursts of the last minutes would have cost at every split, and how many requests they had."""

    def __init__(self, settings: AdaptiveSettings) -> None:
        self._settings = settings
        self._calm_rate: float | None = None
        self._burst = _Average(settings.burst_half_life_s)
        self._num_calm = 0.0  # requests outside bursts, older ones fading as those of bursts do

    def add(self, seen: Forecast, num: int, arrived: tuple[float, float], calm_ms: Floats) -> Floats:
        """Take a window in; returns `calm_ms` with the bursts that were seen mixed in. `arrived`: rate and length."""
        rate, dt_s = arrived
        is_burst = self._stands_out(rate, dt_s)
        self._num_calm *= 0.5 ** (dt_s / self._settings.burst_half_life_s)
        if is_burst:
            self._burst.add(seen.mean_ms, num, dt_s)
        else:
            self._burst.fade(dt_s)
            self._num_calm += num
        if self._burst.value is None or not self._settings.has_burst_memory:
            return calm_ms
        share = self._burst.weight / (self._burst.weight + self._num_calm)
        return calm_ms + share * (self._burst.value - calm_ms)

    def _stands_out(self, rate: float, dt_s: float) -> bool:
        """Whether so many came that it is no chance. The calm rate follows slowly, and more slowly in a burst."""
        settings, calm = self._settings, self._calm_rate
        if calm is None:
            self._calm_rate = rate
            return False
        is_burst = rate > settings.burst_factor * calm + settings.burst_deviations * np.sqrt(calm / dt_s)
        half_life_s = settings.calm_half_life_s * (4 if is_burst else 1)
        self._calm_rate = rate + (calm - rate) * 0.5 ** (dt_s / half_life_s)
        return bool(is_burst)
