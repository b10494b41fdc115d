"""The layers of the controller. Each looks at a window and proposes a split, or has nothing to say.

*Base* goes where the prediction of the last seconds is least; it learns nothing. *Residual* corrects the prediction by
what was measured. *Burst recovery* answers a burst at once; later it stands where calm and recent bursts cost least.
The *net* goes back to the last split that served as predicted, when requests take much longer than that.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numba
import numpy as np

from helmrec.control.latency import ALPHAS, RECENT_S, Bias, Fading, LatencyModel, Prediction, value_at
from helmrec.control.policy import WindowStats
from helmrec.types import FloatArray

JUDGED_S = 15.0  # half-life of what was predicted and measured: shorter follows noise, longer trails drift
MIN_GAIN = 0.0075  # share of the latency that a move must promise; splits within twice as much are equals
_LATELY_S = 2.0  # half-life of the newest predictions
_CLEAR_GAIN = 0.1  # share of the latency that they must promise to count alone
SETTLED = 0.02  # distance of alpha from its target within which caches are what their shadows stand for
_MOST_BIAS = 2.0  # factor, either way: what errs by more is another pool or traffic, and not believed
_BURSTS_S = 300.0  # half-life of bursts: some periods of the usual ones
_BURST_FACTOR = 1.25  # times the work of calm traffic from which it is a burst
_BURST_DEVIATIONS = 3.0  # of a Poisson count, by which it must be more than that
_BURST_WEIGHT = 0.25  # of a burst in what counts as calm: one that lasts becomes that


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
    is_burst: bool = False


class Chooser(Protocol):
    """Picks a split on a curve of predicted latency. Frozen: it learns nothing while serving."""

    def choose(self, mean_ms: FloatArray, view: View) -> float:
        """`mean_ms` at ALPHAS; the present target stands for staying."""


class Rule:
    """Of the splits that are equals of the one with the least latency, the one nearest the middle of the pool.

    Traffic that changes may want either cache next; the middle is never far from that. In a burst, only a gain counts.
    """

    def choose(self, mean_ms: FloatArray, view: View) -> float:
        window = view.window
        alpha = nearest_middle(mean_ms, window.alpha_min, window.alpha_max, window.alpha_target)
        if view.is_burst and value_at(mean_ms, alpha) >= value_at(mean_ms, window.alpha_target):
            return window.alpha_target
        return alpha


@numba.njit(cache=True)
def nearest_middle(mean_ms: FloatArray, alpha_min: float, alpha_max: float, start: float) -> float:
    """As `Rule` says; `start`, if another split neither gains enough nor is nearer the middle by enough."""
    least_ms, best = np.inf, -1
    for at in range(ALPHAS.size):
        if alpha_min <= ALPHAS[at] <= alpha_max:
            least_ms = min(least_ms, mean_ms[at])
    for at in range(ALPHAS.size):
        is_equal = alpha_min <= ALPHAS[at] <= alpha_max and mean_ms[at] <= least_ms * (1 + 2 * MIN_GAIN)
        if is_equal and (best < 0 or abs(ALPHAS[at] - 1 / 2) < abs(ALPHAS[best] - 1 / 2)):
            best = at
    if best < 0:
        return start
    here_ms = np.interp(start, ALPHAS, mean_ms)
    is_gain = here_ms - mean_ms[best] >= MIN_GAIN * here_ms
    is_nearer = abs(start - 1 / 2) - abs(ALPHAS[best] - 1 / 2) >= 2 * SETTLED
    return ALPHAS[best] if is_gain or is_nearer else start


def propose(layer: str, chooser: Chooser, mean_ms: FloatArray, view: View) -> Proposal:
    """What a chooser makes of the curve a layer predicts."""
    start = view.window.alpha_target
    alpha = chooser.choose(mean_ms, view)
    here_ms, there_ms = value_at(mean_ms, start), value_at(mean_ms, alpha)
    return Proposal(layer, alpha, f"predicts {there_ms:.2f} ms there, {here_ms:.2f} ms here", here_ms - there_ms)


class Judged:
    """Predicted latency at ALPHAS, averaged over `JUDGED_S`: what layers choose on.

    Small gains need long averages. When the last seconds promise a large gain, the traffic has changed, and what was
    predicted before no longer counts.
    """

    def __init__(self) -> None:
        self._long, self._short = Fading(JUDGED_S), Fading(_LATELY_S)

    def add(self, mean_ms: FloatArray, window: WindowStats) -> FloatArray:
        """Take in what is predicted after a window; the average."""
        num, dt_s = window.traffic.num_served, window.traffic.end_s - window.traffic.start_s
        long, short = self._long.add(mean_ms, num, dt_s), self._short.add(mean_ms, num, dt_s)
        if is_clear_gain(short, window.alpha_target):
            self._long.value, self._long.weight = short, self._short.weight
            return short
        return long


@numba.njit(cache=True)
def is_clear_gain(mean_ms: FloatArray, start: float) -> bool:
    """Whether another split promises a large gain."""
    return mean_ms.min() < (1 - _CLEAR_GAIN) * np.interp(start, ALPHAS, mean_ms)


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
            promised = [value_at(one, window.alpha) for one in (work.computed_tokens, work.missed_rows)]
            measured = (window.new_tokens_per_request, window.missed_rows_per_request)
            self._seen.add(np.array((measured, promised)), traffic.num_served, traffic.end_s - traffic.start_s)
        if self._seen.value is None:
            return Bias(pace=self._pace)
        ratios = (measured / max(promised, 1 / ALPHAS.size) for measured, promised in self._seen.value.T.tolist())
        tokens, rows = (min(max(ratio, 1 / _MOST_BIAS), _MOST_BIAS) for ratio in ratios)
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
    """In a burst, goes where the burst alone would cost least; in calm, weighs the beginnings of the last bursts.

    A burst is work that stands out: arrivals, times what each of them takes at the split where the node stood.
    """

    def __init__(self) -> None:
        self._calm = Fading(2 * JUDGED_S)  # work per second outside bursts, at ALPHAS
        self._stood_at = 0.0  # alpha when the burst began
        self._lasted_s = 0.0  # so long the burst has been on
        self._present = Fading(JUDGED_S)  # prediction for the burst that is on
        self._past = Fading(_BURSTS_S)  # for all bursts
        self._num_calm = 0.0  # requests outside bursts, older ones fading as those of bursts do
        self.is_burst = False

    @property
    def share(self) -> float:
        """Of recent requests that came in bursts."""
        return self._past.weight / max(1.0, self._past.weight + self._num_calm)

    def note(self, window: WindowStats, offered_ms: FloatArray, predicted_ms: float | None) -> bool:
        """Take a window in, with the work per second that came in it. True: a burst has begun or ended.

        What chance alone may bring is no burst, unless requests took much longer than predicted: then they queue.
        """
        traffic, was_burst = window.traffic, self.is_burst
        dt_s = traffic.end_s - traffic.start_s
        if not was_burst:
            self._stood_at = window.alpha
        calm_ms = offered_ms if self._calm.value is None else self._calm.value
        now, calm = (value_at(one, self._stood_at) for one in (offered_ms, calm_ms))
        least = _BURST_FACTOR * calm
        if not was_burst and (predicted_ms is None or traffic.mean_ms <= _MOST_BIAS * predicted_ms):
            num = traffic.arrival_rate * dt_s
            least += _BURST_DEVIATIONS * math.sqrt(calm * now / max(1.0, num))
        self.is_burst = now > least and self._calm.weight > RECENT_S  # before, it is not known what calm is
        self._calm.add(offered_ms, dt_s * (_BURST_WEIGHT if self.is_burst else 1.0), dt_s)
        return self.is_burst != was_burst

    def mix(self, window: WindowStats, newest: Prediction, calm_ms: FloatArray) -> FloatArray:
        """What to choose on: the prediction for the present burst, or `calm_ms` with earlier bursts mixed in."""
        traffic = window.traffic
        dt_s, num = traffic.end_s - traffic.start_s, traffic.num_served
        self._num_calm *= 2.0 ** (-dt_s / _BURSTS_S)
        self._past.fade(dt_s)
        if self.is_burst:
            self._lasted_s += dt_s
            if self._lasted_s <= JUDGED_S:  # later ones need no memory: the boundary has followed by then
                self._past.add(newest.mean_ms, num, dt_s=0.0)
            return self._present.add(newest.mean_ms, num, dt_s)
        self._present.weight = self._lasted_s = 0.0
        self._num_calm += num
        return calm_ms if self._past.value is None else calm_ms + self.share * (self._past.value - calm_ms)

    @property
    def learned(self) -> list[float]:
        if self._past.value is None or self._calm.value is None:
            return []
        weights = (self._num_calm, self._past.weight, self._calm.weight)
        return [*weights, *self._past.value.tolist(), *self._calm.value.tolist()]

    def relearn(self, learned: list[float]) -> None:
        if learned:
            self._num_calm, self._past.weight, self._calm.weight, *curves = learned
            self._past.value, self._calm.value = np.array(curves).reshape(2, ALPHAS.size)


class Net:
    """Goes back to the split that last served as predicted, when requests have taken much longer in two windows.

    Predictions may leave out what limits an engine. It acts only where the layers above would stay, since a move that
    is under way needs its time, and once, until requests are served as predicted again: in an overload, or in a burst,
    they are late at any split.
    """

    def __init__(self) -> None:
        self._sound: float | None = None  # the last split that served as predicted; None: not since it acted
        self._num_late = 0  # windows in a row
        self._held = 0.0  # the split it went back to, and
        self._until_s = -math.inf  # stays at for so long

    def propose(self, view: View, wanted: float) -> Proposal | None:
        """`wanted`: by the layers above. None: nothing is wrong, or going back would not help."""
        traffic, sound, target = view.window.traffic, self._sound, view.window.alpha_target
        late = traffic.mean_ms / view.predicted_ms if view.predicted_ms else 1.0
        is_staying = wanted == target and abs(view.window.alpha - target) <= SETTLED
        self._num_late = self._num_late + 1 if late > _MOST_BIAS and is_staying and not view.is_burst else 0
        if traffic.end_s >= self._until_s:
            if late <= _MOST_BIAS:
                self._sound = view.window.alpha
            if self._num_late < 2 or sound is None or abs(sound - target) <= SETTLED:
                return None
            self._held, self._sound, self._until_s = sound, None, traffic.end_s + JUDGED_S
        return Proposal("net", self._held, f"requests took {late:.1f} times as long as predicted", 0.0)
