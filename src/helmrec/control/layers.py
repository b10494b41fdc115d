"""The layers of the controller. Each looks at a window and proposes a split, or has nothing to say.

*Base* goes where the prediction of the last seconds is least; it learns nothing. *Residual* corrects the prediction by
what was measured at the present split. *Burst recovery* adds the bursts of the last minutes, so that the node stands
where calm and bursts together cost least.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from helmrec.control.costs import Floats
from helmrec.control.latency import ALPHAS, Bias, Fading, LatencyModel, Prediction
from helmrec.control.policy import WindowStats

JUDGED_S = 15.0  # half-life of what was predicted and measured: shorter follows noise, longer trails drift
MIN_GAIN = 0.005  # share of the latency that a move must promise; half of it tells two splits apart
SETTLED = 0.02  # distance of alpha from its target within which caches are what their shadows stand for
_MOST_BIAS = 2.0  # factor, either way: what errs by more is another pool or traffic, and not believed
_BURSTS_S = 300.0  # half-life of bursts: some periods of the usual ones
_BURST_FACTOR = 1.25  # times the calm rate from which arrivals are a burst


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one layer would do."""

    layer: str
    alpha: float
    reason: str
    gain_ms: float  # predicted, per request, against staying


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that a chooser sees beside the curve it chooses on."""

    window: WindowStats
    newest: Prediction  # of the newest seconds alone, corrected
    idle_s: float  # since the last move
    predicted_ms: float | None = None  # latency of this window, as it was predicted a window ago
    realised: float | None = None  # over predicted gain of late moves; None: none is known


class Chooser(Protocol):
    """Picks a split on a curve of predicted latency. Frozen: it learns nothing while serving."""

    def choose(self, mean_ms: Floats, view: View) -> float:
        """`mean_ms` at ALPHAS; the present target stands for staying."""


class Rule:
    """The split of least latency, if it promises enough; among equals the nearest."""

    def choose(self, mean_ms: Floats, view: View) -> float:
        window = view.window
        start = window.alpha_target
        is_open = (window.alpha_min <= ALPHAS) & (window.alpha_max >= ALPHAS)
        if not is_open.any():
            return start
        alphas, mean_ms = ALPHAS[is_open], mean_ms[is_open]
        here_ms, least_ms = np.interp(start, alphas, mean_ms), mean_ms.min()
        if here_ms - least_ms < MIN_GAIN * here_ms:
            return start
        equals = alphas[mean_ms <= least_ms * (1 + MIN_GAIN / 2)]
        return float(equals[np.abs(equals - start).argmin()])


def propose(layer: str, chooser: Chooser, mean_ms: Floats, view: View) -> Proposal:
    """What a chooser makes of the curve a layer predicts."""
    start = view.window.alpha_target
    alpha = chooser.choose(mean_ms, view)
    here_ms, there_ms = np.interp((start, alpha), ALPHAS, mean_ms).tolist()
    return Proposal(layer, alpha, f"predicts {there_ms:.2f} ms there, {here_ms:.2f} ms here", here_ms - there_ms)


class Residual:
    """What is measured at the present split over what was predicted: tokens, rows, and latency."""

    def __init__(self) -> None:
        self._seen = Fading(JUDGED_S)
        self._pace = 1.0

    def bias(self, window: WindowStats, model: LatencyModel, predicted_ms: float | None) -> Bias:
        """Take a window in. `predicted_ms`: its latency, as it was predicted a window ago."""
        self._note_pace(window, predicted_ms)
        traffic, work = window.traffic, model.work
        if work is not None and abs(window.alpha - window.alpha_target) <= SETTLED:
            promised = [np.interp(window.alpha, ALPHAS, one) for one in (work.computed_tokens, work.missed_rows)]
            measured = (window.new_tokens_per_request, window.missed_rows_per_request)
            self._seen.add(np.array((measured, promised)), traffic.num_served, traffic.end_s - traffic.start_s)
        if self._seen.value is None:
            return Bias(pace=self._pace)
        measured, promised = self._seen.value
        ratio = measured / np.maximum(promised, 1 / ALPHAS.size)
        tokens, rows = np.clip(ratio, 1 / _MOST_BIAS, _MOST_BIAS).tolist()
        return Bias(tokens, rows, self._pace)

    def _note_pace(self, window: WindowStats, predicted_ms: float | None) -> None:
        """Change the pace until what is measured is what is predicted; slowly, as latency is noise in short windows."""
        traffic = window.traffic
        if predicted_ms is not None and predicted_ms > 0 and traffic.mean_ms > 0:
            ratio = min(max(traffic.mean_ms / predicted_ms, 1 / _MOST_BIAS), _MOST_BIAS)
            pace = self._pace * ratio ** ((traffic.end_s - traffic.start_s) / JUDGED_S)
            self._pace = min(max(pace, 1 / _MOST_BIAS), _MOST_BIAS)

    @property
    def learned(self) -> list[float]:
        """All that was learned, for `relearn`; nothing, if nothing was."""
        seen = self._seen
        return [] if seen.value is None else [self._pace, seen.weight, *seen.value.ravel().tolist()]

    def relearn(self, learned: list[float]) -> None:
        if learned:
            self._pace, self._seen.weight, *seen = learned
            self._seen.value = np.array(seen).reshape(2, 2)


class Bursts:
    """Remembers what bursts of the last minutes would have cost at every split, and how many requests they had."""

    def __init__(self) -> None:
        self._calm_rate: float | None = None
        self._burst = Fading(_BURSTS_S)
        self._num_calm = 0.0  # requests outside bursts, older ones fading as those of bursts do
        self.is_burst = False

    @property
    def share(self) -> float:
        """Of recent requests that came in bursts."""
        return self._burst.weight / max(1.0, self._burst.weight + self._num_calm)

    def mix(self, window: WindowStats, newest: Prediction, calm_ms: Floats) -> Floats:
        """Take a window in; returns `calm_ms` with the bursts that were seen mixed in."""
        traffic = window.traffic
        dt_s, num = traffic.end_s - traffic.start_s, traffic.num_served
        self._num_calm *= 2.0 ** (-dt_s / _BURSTS_S)
        self.is_burst = self._stands_out(traffic.arrival_rate, dt_s)
        if self.is_burst:
            self._burst.add(newest.mean_ms, num, dt_s)
        else:
            self._burst.fade(dt_s)
            self._num_calm += num
        return calm_ms if self._burst.value is None else calm_ms + self.share * (self._burst.value - calm_ms)

    def _stands_out(self, rate: float, dt_s: float) -> bool:
        """Whether so many came that it is no chance. The calm rate follows slowly, and more slowly in a burst."""
        calm = self._calm_rate
        if calm is None:
            self._calm_rate = rate
            return False
        chance = (1 + 2) * float(np.sqrt(calm / dt_s))  # three deviations of a Poisson count
        is_burst = rate > _BURST_FACTOR * calm + chance
        half_life_s = 2 * JUDGED_S * (2 * 2 if is_burst else 1)
        self._calm_rate = rate + (calm - rate) * 2.0 ** (-dt_s / half_life_s)
        return is_burst

    @property
    def learned(self) -> list[float]:
        if self._burst.value is None or self._calm_rate is None:
            return []
        return [self._calm_rate, self._num_calm, self._burst.weight, *self._burst.value.tolist()]

    def relearn(self, learned: list[float]) -> None:
        if learned:
            self._calm_rate, self._num_calm, self._burst.weight, *of_burst = learned
            self._burst.value = np.array(of_burst).reshape(ALPHAS.shape)
