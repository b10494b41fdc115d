"""The layers of the controller. Each looks at a window and proposes a split, or has nothing to say.

*Base* wants the split where the prediction of the last seconds is least; it learns nothing. *Residual* corrects the
prediction by what was measured. *Burst recovery* answers a burst at once; later it wants the split where calm and
recent bursts cost least. *Payback* limits how far alpha moves toward that split at once.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numba
import numpy as np

from helmrec.control.latency import ALPHAS, RECENT_S, Bias, Fading, LatencyModel, Prediction, value_at
from helmrec.control.policy import WindowStats
from helmrec.types import FloatArray

CHOICE_HALF_LIFE_S = 4.0  # half-life of predictions that layers choose on: shorter follows noise, longer trails drift
JUDGED_S = 15.0  # half-life of what was predicted and measured
EQUAL_SHARE = 0.015  # share of the latency within which splits are equals
_SPENT_SHARE = 1 / 2  # of the cost of staying that a move may cost: more follows noise, less trails drift
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
        alpha = nearest_middle(mean_ms, window.alpha_min, window.alpha_max, window.alpha_target, EQUAL_SHARE)
        if view.is_burst and value_at(mean_ms, alpha) >= value_at(mean_ms, window.alpha_target):
            return window.alpha_target
        return alpha


@numba.njit(cache=True)
def nearest_middle(mean_ms: FloatArray, alpha_min: float, alpha_max: float, start: float, equal: float) -> float:
    """As `Rule` says; `start`, if it is such a split itself or about as near to the middle and no worse."""
    least_ms, best = np.inf, -1
    for at in range(ALPHAS.size):
        if alpha_min <= ALPHAS[at] <= alpha_max:
            least_ms = min(least_ms, mean_ms[at])
    for at in range(ALPHAS.size):
        is_equal = alpha_min <= ALPHAS[at] <= alpha_max and mean_ms[at] <= least_ms * (1 + equal)
        if is_equal and (best < 0 or abs(ALPHAS[at] - 1 / 2) < abs(ALPHAS[best] - 1 / 2)):
            best = at
    if best < 0:
        return start
    is_worse = np.interp(start, ALPHAS, mean_ms) >= mean_ms[best]
    is_nearer = abs(start - 1 / 2) - abs(ALPHAS[best] - 1 / 2) >= 2 * SETTLED
    return ALPHAS[best] if is_worse or is_nearer else start


def propose(layer: str, chooser: Chooser, mean_ms: FloatArray, view: View) -> Proposal:
    """What a chooser makes of the curve a layer predicts."""
    start = view.window.alpha_target
    alpha = chooser.choose(mean_ms, view)
    here_ms, there_ms = value_at(mean_ms, start), value_at(mean_ms, alpha)
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


class Payback:
    """Limit a move to what the cost of staying has paid for: large gains move alpha at once, small ones slowly.

    A move costs misses until the pages that change owner are filled again. Staying costs the predicted gain of every
    request. Half of this cost is spent on the move, so no forecast of how long the gain lasts is needed; for convex
    costs the total is at most three times that of the best path (Bansal et al., 2015). While more requests wait than a
    step takes, a move has no limit, since late requests cost more than misses. In a burst it has: the burst may end
    before the pages are filled.
    """

    def __init__(self) -> None:
        self._lost_ms = 0.0  # cost of staying since the last move, over all requests
        self._direction = 0.0  # of the wanted split: -1, 0 or 1

    def propose(self, view: View, wanted: Proposal, model: LatencyModel) -> Proposal | None:
        """Propose a split on the way to the wanted one; None: the move has no limit."""
        window, newest, start = view.window, view.newest, view.window.alpha_target
        traffic, distance = window.traffic, abs(wanted.alpha - start)
        direction = math.copysign(1.0, wanted.alpha - start) if distance else 0.0
        if direction != self._direction:
            self._lost_ms, self._direction = 0.0, direction
        if not distance or (traffic.num_queued > model.most_requests and not view.is_burst):
            self._lost_ms = 0.0
            return None
        here_ms = newest.at(start)
        gain_ms = max(wanted.gain_ms, EQUAL_SHARE / 2 * here_ms)  # an equal split nearer the middle has no gain now
        self._lost_ms += gain_ms * traffic.arrival_rate * (traffic.end_s - traffic.start_s)
        slowdown = max(1.0, here_ms / value_at(newest.stages_ms, start))  # a miss delays requests that wait, too
        price_ms = slowdown * model.fill_ms(window)  # of a move across the whole pool
        reach = _SPENT_SHARE * self._lost_ms / price_ms if price_ms else distance
        if reach >= distance:
            self._lost_ms = 0.0
            return None
        reason = f"staying has cost {self._lost_ms:.0f} ms, all of the move costs {price_ms * distance:.0f} ms"
        if reach < max(SETTLED, window.half_page):
            return Proposal("payback", start, reason, 0.0)
        self._lost_ms = 0.0
        alpha = start + direction * reach
        return Proposal("payback", alpha, reason, here_ms - newest.at(alpha))
