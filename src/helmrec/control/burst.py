"""Bursts: when one begins and ends, how long it is likely to stay, and whether chasing it pays.

Traffic is watched by its arrival rate, the share of users who came lately and the length of histories. Compiled;
decides nothing about splits outside bursts.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.compiled import inner
from helmrec.control.outlook import Floats, O, Outlook, Split, Terms, at_split, keep_of
from helmrec.control.window import Seen

_CALM_HALF_LIFE_S = 20.0
_NUM_SIGNALS = 3
_MIN_SPREAD = (0.06, 0.03, 0.03)  # of log rate, hot share, log history: what chance alone brings in a second
_BACK = 1.5  # deviations from calm within which traffic counts as back
_BACK_WINDOWS = 2
_MAX_LOAD = 0.95


class BurstSettings(Frozen):
    """When a burst is one, and what is done about it."""

    threshold: float = Field(6.0, gt=0, description="sum of deviations beyond `slack` at which a burst is called")
    slack: float = Field(1.5, ge=0, description="standard deviations a window may lie off before it counts")
    max_s: float = Field(90.0, gt=0, description="seconds after which a burst is the new normal")
    first_guess_s: float = Field(15.0, gt=0, description="length expected of the first burst")
    chase_from: float = Field(2.0, gt=0, description="expected gain over cost from which to go all the way")
    hedge_from: float = Field(1.0, gt=0, description="expected gain over cost from which to go part of it")
    hedge: float = Field(0.6, gt=0, le=1, description="part of the way that a hedge goes")
    return_step: float = Field(0.05, gt=0, le=1, description="largest change of alpha per window on the way back")
    return_s: float = Field(10.0, ge=0, description="seconds after a burst in which alpha is led back")
    caution: float = Field(
        2.0, ge=0, description="what a ms at the onset of the next burst counts against one of calm; 0: wait nowhere"
    )
    feared_rate: float = Field(1.5, ge=1, description="arrivals of a burst over calm's, before one was seen")
    feared_reuse: float = Field(0.6, ge=0, le=1, description="share of the reuse that is left in it")
    feared_calm_s: float = Field(60.0, gt=0, description="seconds of calm that are expected before it")


class BurstTerms(NamedTuple):
    """The settings as compiled code takes them."""

    threshold: float
    slack: float
    max_s: float
    chase_from: float
    hedge_from: float
    hedge: float
    return_step: float
    return_s: float
    caution: float
    feared_rate: float
    feared_reuse: float
    feared_calm_s: float


def burst_terms(settings: BurstSettings) -> BurstTerms:
    return BurstTerms(*(getattr(settings, name) for name in BurstTerms._fields))


# What the layer says, as a number among its numbers; `Explanation.burst` has the words.
CALM, HOLD, HEDGE, CHASE, RETURN = 0.0, 1.0, 2.0, 3.0, 4.0  # to hold is to think a burst too short to be worth it
WAIT = 5.0  # calm, but not so far from where the next burst will want it


class B(IntEnum):
    """Places among the numbers of the burst layer."""

    WINDOWS = 0
    SCORE = 1  # how far beyond the slack traffic has been, added up
    IS_BURST = 2
    ONSET_S = 3
    SAVED_ALPHA = 4  # where the boundary was aimed before
    LOG_LENGTH = 5  # of bursts so far, a moving mean of the logarithm
    BACK_WINDOWS = 6
    ENDED_S = 7
    VERDICT = 8
    GAIN = 9  # expected of going to the fresh best, ms of latency over all requests of the burst
    COST = 10  # of going on there, and of the longer way back
    LEFT_S = 11  # the burst is expected to stay so long
    MEAN = 12  # of each signal in calm
    VARIANCE = MEAN + _NUM_SIGNALS
    SIZE = VARIANCE + _NUM_SIGNALS


def begin_burst(numbers: Floats, settings: BurstSettings) -> None:
    """Set an array of zeros up."""
    numbers[B.LOG_LENGTH] = np.log(settings.first_guess_s)
    numbers[B.ENDED_S] = -np.inf


@inner
def watch(numbers: Floats, terms: BurstTerms, window: Seen, rate: float) -> None:
    """Take a window in: does a burst begin, go on or end? `rate`: of its arrivals."""
    dt_s = max(1e-6, window.end_s - window.start_s)
    signals = (np.log(rate + 1.0), window.hot_user_share, np.log(window.new_tokens + window.resident_tokens + 1.0))
    deviation = 0.0
    for i in range(_NUM_SIGNALS):
        spread = max(np.sqrt(numbers[B.VARIANCE + i]), _MIN_SPREAD[i])
        deviation = max(deviation, abs(signals[i] - numbers[B.MEAN + i]) / spread)
    is_known = numbers[B.WINDOWS] >= 5
    numbers[B.WINDOWS] += 1
    if numbers[B.IS_BURST]:
        _go_on(numbers, terms, window, deviation)
    elif is_known:
        numbers[B.SCORE] = max(0.0, numbers[B.SCORE] + min(deviation, 2 * terms.threshold) - terms.slack)
        if numbers[B.SCORE] >= terms.threshold:
            numbers[B.IS_BURST], numbers[B.ONSET_S], numbers[B.BACK_WINDOWS] = 1.0, window.start_s, 0.0
            if window.end_s - numbers[B.ENDED_S] > terms.return_s:  # else it is still on its way back
                numbers[B.SAVED_ALPHA] = window.alpha_target
    if not numbers[B.IS_BURST]:
        keep = keep_of(dt_s, _CALM_HALF_LIFE_S) if is_known else 1 - 1 / numbers[B.WINDOWS]
        for i in range(_NUM_SIGNALS):
            off = signals[i] - numbers[B.MEAN + i]
            numbers[B.MEAN + i] += (1 - keep) * off
            numbers[B.VARIANCE + i] = keep * (numbers[B.VARIANCE + i] + (1 - keep) * off * off)
    numbers[B.LEFT_S] = _left_s(numbers, window.end_s)


@inner
def _go_on(numbers: Floats, terms: BurstTerms, window: Seen, deviation: float) -> None:
    elapsed_s = window.end_s - numbers[B.ONSET_S]
    numbers[B.BACK_WINDOWS] = numbers[B.BACK_WINDOWS] + 1 if deviation < _BACK else 0.0
    is_over = numbers[B.BACK_WINDOWS] >= _BACK_WINDOWS
    if not is_over and elapsed_s < terms.max_s:
        return
    numbers[B.IS_BURST], numbers[B.SCORE] = 0.0, 0.0
    if is_over:
        numbers[B.LOG_LENGTH] += 0.4 * (np.log(elapsed_s) - numbers[B.LOG_LENGTH])
        numbers[B.ENDED_S] = window.end_s
    else:
        numbers[B.WINDOWS] = 0.0  # what lasts is no burst: learn anew what calm is


@inner
def _left_s(numbers: Floats, now_s: float) -> float:
    """How long the burst is expected to stay: what bursts so far had left, or half of what it has lasted."""
    if not numbers[B.IS_BURST]:
        return 0.0
    elapsed_s = now_s - numbers[B.ONSET_S]
    return max(np.exp(numbers[B.LOG_LENGTH]) - elapsed_s, elapsed_s / 2)


@inner
def move_cost(terms: Terms, outlook: Outlook, pool_bytes: float, change: float) -> float:
    """What a change of alpha costs, in ms over all requests: filling the cache that wins, and the wait for that."""
    numbers, num_bytes = outlook.numbers, abs(change) * pool_bytes
    per_token = terms.token_ms + terms.pair_ms * numbers[O.TOKENS] / 2
    if terms.host_bytes > 0:
        per_token = min(per_token, terms.reload_ms)
    refill, rewarm = num_bytes / terms.row_bytes * terms.row_ms, num_bytes / terms.kv_token_bytes * per_token
    best, splits = int(numbers[O.FRESH_BEST]), outlook.splits
    busy = numbers[O.FRESH_RATE] / 1e3 * max(splits[Split.FRESH_COMPUTE, best], splits[Split.FRESH_LEAD, best])
    return (refill if change > 0 else rewarm) / (1 - min(busy, _MAX_LOAD))


@inner
def _chase_cost(terms: Terms, outlook: Outlook, pool_bytes: float, places: tuple[float, float, float]) -> float:
    """What going on from here costs: the way there, and how much longer the way back gets. What is behind is paid."""
    here, best, saved = places
    there = move_cost(terms, outlook, pool_bytes, best - here)
    longer = move_cost(terms, outlook, pool_bytes, saved - best) - move_cost(terms, outlook, pool_bytes, saved - here)
    return max(0.0, there + longer)


@inner
def answer(numbers: Floats, settings: BurstTerms, terms: Terms, outlook: Outlook, window: Seen) -> float:
    """Where the burst layer wants alpha; meaningless while its verdict is CALM."""
    here, saved = window.alpha_target, numbers[B.SAVED_ALPHA]
    best = outlook.splits[Split.ALPHA, int(outlook.numbers[O.FRESH_BEST])]
    if numbers[B.IS_BURST]:
        gained = at_split(outlook.splits, Split.FRESH, here) - at_split(outlook.splits, Split.FRESH, best)
        numbers[B.GAIN] = gained * outlook.numbers[O.FRESH_RATE] * numbers[B.LEFT_S]
        numbers[B.COST] = _chase_cost(terms, outlook, window.pool_bytes, (here, best, saved))
        share = numbers[B.GAIN] / max(numbers[B.COST], 1e-9)
        if share >= settings.chase_from:
            numbers[B.VERDICT] = CHASE
            return best
        if share >= settings.hedge_from:
            numbers[B.VERDICT] = HEDGE
            return here + settings.hedge * (best - here)
        numbers[B.VERDICT] = HOLD
        return here
    numbers[B.GAIN], numbers[B.COST] = 0.0, 0.0
    is_late = window.end_s - numbers[B.ENDED_S] > settings.return_s
    is_better = at_split(outlook.splits, Split.FRESH, saved) <= at_split(outlook.splits, Split.FRESH, here)
    if is_late or not is_better or abs(saved - here) < 0.01:
        numbers[B.VERDICT] = CALM
        return here
    numbers[B.VERDICT] = RETURN
    return here + min(max(saved - here, -settings.return_step), settings.return_step)
