"""Readiness: how far calm traffic may lead alpha away from where the next burst will want it.

A burst that finds the boundary far off is served badly until the boundary has followed. What that cost was measured in
bursts so far, or, before the first, is reckoned for one that is feared; it is held against what the best split for calm
saves until then. Compiled; sees no burst itself.
"""

from enum import IntEnum

import numpy as np

from helmrec.control.burst import B, BurstTerms
from helmrec.control.compiled import inner
from helmrec.control.outlook import NUM_SPLITS, Floats, O, Outlook, Split, Terms, at_split, keep_of, latency_ms
from helmrec.control.window import Seen

_MIN_WAY = 0.03  # of alpha: a burst that wants less teaches nothing
_NEWEST = 0.5  # weight of the burst that ended last
_HALF_LIFE_S = 4.0  # of where to wait: one window's curves are not enough to move for
_STEP = 0.10  # of alpha, that the boundary may go in a window


class Q(IntEnum):
    """Places among the numbers of readiness."""

    NUM_BURSTS = 0  # that ended and had wanted another split
    LOSS = 1  # latency over all requests that a burst cost until the boundary had followed, beyond what it cost then
    WAY = 2  # of alpha, that it had to follow for this
    ALPHA = 3  # where bursts wanted it
    LOG_CALM_S = 4  # seconds between bursts, a moving mean of the logarithm
    CALM_FROM_S = 5
    WAS_BURST = 6
    FROM_ALPHA = 7  # where this burst found it
    PEAK_ALPHA = 8  # the farthest from there
    LAST_TARGET = 9
    MOVING_SPENT = 10  # latency added up in this burst while alpha was moving
    MOVING_REQUESTS = 11
    THERE_SPENT = 12  # and while it was not
    THERE_REQUESTS = 13
    WAIT_ALPHA = 14  # where to wait for the next burst
    WINDOWS = 15
    WANTED_ALPHA = 16  # where this burst would have had it, the farthest from where it found it
    RECKONED_SPENT = 17  # latency it would have had there, over the requests that came while alpha was moving
    FEARED_ALPHA = 18  # where a burst that is feared would want it


@inner
def note_burst(numbers: Floats, burst: Floats, outlook: Outlook, window: Seen) -> None:
    """Take a window in that the burst layer has watched and the outlook has seen."""
    is_burst = burst[B.IS_BURST] != 0
    if numbers[Q.WINDOWS] == 0:
        numbers[Q.CALM_FROM_S], numbers[Q.WAIT_ALPHA] = window.start_s, np.nan
    numbers[Q.WINDOWS] += 1
    if is_burst and not numbers[Q.WAS_BURST]:
        _begin(numbers, burst, window)
    if is_burst:
        _add(numbers, outlook, window)
    elif numbers[Q.WAS_BURST]:
        if burst[B.ENDED_S] == window.end_s:  # what became the new normal was no burst
            _learn(numbers)
        numbers[Q.CALM_FROM_S], numbers[Q.WAIT_ALPHA] = window.end_s, np.nan
    numbers[Q.WAS_BURST], numbers[Q.LAST_TARGET] = 1.0 if is_burst else 0.0, window.alpha_target


@inner
def _begin(numbers: Floats, burst: Floats, window: Seen) -> None:
    log_calm = np.log(max(1.0, burst[B.ONSET_S] - numbers[Q.CALM_FROM_S]))
    newest = _NEWEST if numbers[Q.LOG_CALM_S] > 0 else 1.0
    numbers[Q.LOG_CALM_S] += newest * (log_calm - numbers[Q.LOG_CALM_S])
    numbers[Q.FROM_ALPHA] = numbers[Q.PEAK_ALPHA] = numbers[Q.WANTED_ALPHA] = window.alpha_target
    numbers[Q.MOVING_SPENT] = numbers[Q.MOVING_REQUESTS] = numbers[Q.RECKONED_SPENT] = 0.0
    numbers[Q.THERE_SPENT] = numbers[Q.THERE_REQUESTS] = 0.0


@inner
def _add(numbers: Floats, outlook: Outlook, window: Seen) -> None:
    best, origin = int(outlook.numbers[O.FRESH_BEST]), numbers[Q.FROM_ALPHA]
    wanted = outlook.splits[Split.ALPHA, best]
    if abs(window.alpha_target - origin) > abs(numbers[Q.PEAK_ALPHA] - origin):
        numbers[Q.PEAK_ALPHA] = window.alpha_target
    if abs(wanted - origin) > abs(numbers[Q.WANTED_ALPHA] - origin):
        numbers[Q.WANTED_ALPHA] = wanted
    is_there = abs(window.alpha_target - numbers[Q.PEAK_ALPHA]) < _MIN_WAY
    is_settled = window.alpha_target == numbers[Q.LAST_TARGET] and abs(window.alpha - window.alpha_target) < _MIN_WAY
    if is_there and is_settled and numbers[Q.PEAK_ALPHA] != origin:
        numbers[Q.THERE_SPENT] += window.num_served * window.mean_ms
        numbers[Q.THERE_REQUESTS] += window.num_served
    else:
        reckoned_ms = outlook.splits[Split.FRESH, best] * outlook.numbers[O.LEVEL]
        numbers[Q.MOVING_SPENT] += window.num_served * window.mean_ms
        numbers[Q.MOVING_REQUESTS] += window.num_served
        numbers[Q.RECKONED_SPENT] += window.num_served * min(window.mean_ms, reckoned_ms)


@inner
def _learn(numbers: Floats) -> None:
    """What the burst that has just ended cost while the boundary followed; one too short to be followed, in all."""
    goal, usual_spent = numbers[Q.WANTED_ALPHA], numbers[Q.RECKONED_SPENT]
    if numbers[Q.THERE_REQUESTS]:
        goal = numbers[Q.PEAK_ALPHA]
        usual_spent = numbers[Q.THERE_SPENT] / numbers[Q.THERE_REQUESTS] * numbers[Q.MOVING_REQUESTS]
    way = abs(goal - numbers[Q.FROM_ALPHA])
    if way < _MIN_WAY:
        return
    loss = max(0.0, numbers[Q.MOVING_SPENT] - usual_spent)
    newest = _NEWEST if numbers[Q.NUM_BURSTS] else 1.0
    for place, value in ((Q.LOSS, loss), (Q.WAY, way), (Q.ALPHA, goal)):
        numbers[place] += newest * (value - numbers[place])
    numbers[Q.NUM_BURSTS] += 1


@inner
def wait_alpha(
    numbers: Floats, burst: BurstTerms, terms: Terms, outlook: Outlook, window: Seen, calm_alpha: float
) -> float:
    """Where to be in calm: between the split that calm wants and the one of bursts."""
    if burst.caution == 0:
        return calm_alpha
    if numbers[Q.NUM_BURSTS] == 0:
        best = _before_the_first(numbers, burst, terms, outlook, window, calm_alpha)
        there = numbers[Q.FEARED_ALPHA]
    else:
        best = _before_the_next(numbers, burst.caution, outlook, window, calm_alpha)
        there = numbers[Q.ALPHA]
    last = numbers[Q.WAIT_ALPHA]
    keep = 0.0 if np.isnan(last) else keep_of(window.end_s - window.start_s, _HALF_LIFE_S)
    numbers[Q.WAIT_ALPHA] = best if keep == 0 else keep * last + (1 - keep) * best
    return min(max(numbers[Q.WAIT_ALPHA], min(calm_alpha, there)), max(calm_alpha, there))


@inner
def _before_the_next(numbers: Floats, caution: float, outlook: Outlook, window: Seen, calm_alpha: float) -> float:
    """What a burst costs on the way grows with the square of the way: it takes longer, and all of it is worse."""
    splits, there = outlook.splits, numbers[Q.ALPHA]
    calm_s = max(np.exp(numbers[Q.LOG_CALM_S]), window.end_s - numbers[Q.CALM_FROM_S])
    per_ms = outlook.numbers[O.FRESH_RATE] * calm_s
    per_way = caution * numbers[Q.LOSS] / (numbers[Q.WAY] * numbers[Q.WAY])
    low, high = min(calm_alpha, there), max(calm_alpha, there)
    best, least = calm_alpha, per_ms * at_split(splits, Split.FRESH, calm_alpha) + per_way * (high - low) ** 2
    for split in range(NUM_SPLITS):
        alpha = splits[Split.ALPHA, split]
        if low < alpha < high:
            cost = per_ms * splits[Split.FRESH, split] + per_way * (alpha - there) ** 2
            if cost < least:
                best, least = alpha, cost
    return best


@inner
def _reckon_feared(burst: BurstTerms, terms: Terms, outlook: Outlook) -> None:
    """Latency at every split in a burst that is feared: more requests, fewer of them by users who were here before."""
    numbers, splits, whole = outlook.numbers, outlook.splits, outlook.numbers[O.TOKENS]
    strangers = (1 - burst.feared_reuse) * (terms.floor_ms + whole * (terms.token_ms + terms.pair_ms * whole / 2))
    computes, leads, feared = splits[Split.FRESH_COMPUTE], splits[Split.FRESH_LEAD], splits[Split.FEARED]
    reuse, rate = burst.feared_reuse, burst.feared_rate * numbers[O.FRESH_RATE]
    for split in range(feared.size):
        more = max(1.0, reuse + strangers / max(1e-9, computes[split]))
        feared[split] = latency_ms(terms, computes[split] * more, leads[split] * more, rate)


@inner
def _before_the_first(
    numbers: Floats, burst: BurstTerms, terms: Terms, outlook: Outlook, window: Seen, calm_alpha: float
) -> float:
    """A burst that is feared is added up from the split it would want back to each, as the boundary would follow it."""
    _reckon_feared(burst, terms, outlook)
    splits, feared = outlook.splits, outlook.splits[Split.FEARED]
    there = int(feared.argmin())
    least_ms = feared[there]
    numbers[Q.FEARED_ALPHA] = splits[Split.ALPHA, there]
    step = 1 if splits[Split.ALPHA, there] < calm_alpha else -1
    per_split = (splits[Split.ALPHA, 1] - splits[Split.ALPHA, 0]) / _STEP  # windows that the boundary takes for one
    calm_s = max(burst.feared_calm_s, window.end_s - numbers[Q.CALM_FROM_S])
    onset = burst.caution * burst.feared_rate * (window.end_s - window.start_s)
    calm_ms = at_split(splits, Split.FRESH, calm_alpha)
    best, least, split, on_the_way_ms, is_between = calm_alpha, np.inf, there, 0.0, True
    while is_between and 0 <= split < NUM_SPLITS:
        is_between = (calm_alpha - splits[Split.ALPHA, split]) * step > 0
        alpha = splits[Split.ALPHA, split] if is_between else calm_alpha
        excess_ms = feared[split] - least_ms
        cost = calm_s * max(calm_ms, at_split(splits, Split.FRESH, alpha)) + onset * (on_the_way_ms + excess_ms)
        if cost <= least:
            best, least = alpha, cost
        on_the_way_ms += excess_ms * per_split
        split += step
    return best
