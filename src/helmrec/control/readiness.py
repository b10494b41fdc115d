"""Readiness: how far calm traffic may lead alpha away from where the next burst will want it.

A burst that finds the boundary far off is served badly until the boundary has followed. What that cost was measured in
bursts so far; it is held against what the best split for calm saves until the next one. Compiled; sees no burst itself.
"""

from enum import IntEnum

import numpy as np

from helmrec.control.burst import B
from helmrec.control.compiled import inner
from helmrec.control.outlook import NUM_SPLITS, Floats, O, Outlook, Split, at_split, keep_of
from helmrec.control.window import Seen

_MIN_WAY = 0.03  # of alpha: a burst that wants less teaches nothing
_NEWEST = 0.5  # weight of the burst that ended last
_HALF_LIFE_S = 4.0  # of where to wait: one window's curves are not enough to move for


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


@inner
def note_burst(numbers: Floats, burst: Floats, window: Seen) -> None:
    """Take a window in that the burst layer has watched."""
    is_burst = burst[B.IS_BURST] != 0
    if numbers[Q.WINDOWS] == 0:
        numbers[Q.CALM_FROM_S], numbers[Q.WAIT_ALPHA] = window.start_s, np.nan
    numbers[Q.WINDOWS] += 1
    if is_burst and not numbers[Q.WAS_BURST]:
        _begin(numbers, burst, window)
    if is_burst:
        _add(numbers, window)
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
    numbers[Q.FROM_ALPHA] = numbers[Q.PEAK_ALPHA] = window.alpha_target
    numbers[Q.MOVING_SPENT] = numbers[Q.MOVING_REQUESTS] = 0.0
    numbers[Q.THERE_SPENT] = numbers[Q.THERE_REQUESTS] = 0.0


@inner
def _add(numbers: Floats, window: Seen) -> None:
    if abs(window.alpha_target - numbers[Q.FROM_ALPHA]) > abs(numbers[Q.PEAK_ALPHA] - numbers[Q.FROM_ALPHA]):
        numbers[Q.PEAK_ALPHA] = window.alpha_target
    is_there = abs(window.alpha_target - numbers[Q.PEAK_ALPHA]) < _MIN_WAY
    is_settled = window.alpha_target == numbers[Q.LAST_TARGET] and abs(window.alpha - window.alpha_target) < _MIN_WAY
    if is_there and is_settled and numbers[Q.PEAK_ALPHA] != numbers[Q.FROM_ALPHA]:
        numbers[Q.THERE_SPENT] += window.num_served * window.mean_ms
        numbers[Q.THERE_REQUESTS] += window.num_served
    else:
        numbers[Q.MOVING_SPENT] += window.num_served * window.mean_ms
        numbers[Q.MOVING_REQUESTS] += window.num_served


@inner
def _learn(numbers: Floats) -> None:
    """What the burst that has just ended cost while the boundary followed."""
    way = abs(numbers[Q.PEAK_ALPHA] - numbers[Q.FROM_ALPHA])
    if way < _MIN_WAY or numbers[Q.THERE_REQUESTS] == 0:
        return
    usual = numbers[Q.THERE_SPENT] / numbers[Q.THERE_REQUESTS]
    loss = max(0.0, numbers[Q.MOVING_SPENT] - usual * numbers[Q.MOVING_REQUESTS])
    newest = _NEWEST if numbers[Q.NUM_BURSTS] else 1.0
    for place, value in ((Q.LOSS, loss), (Q.WAY, way), (Q.ALPHA, numbers[Q.PEAK_ALPHA])):
        numbers[place] += newest * (value - numbers[place])
    numbers[Q.NUM_BURSTS] += 1


@inner
def wait_alpha(numbers: Floats, caution: float, outlook: Outlook, window: Seen, calm_alpha: float) -> float:
    """Where to be in calm: between the split that calm wants and the one of bursts.

    What a burst costs on the way grows with the square of the way: it takes longer, and all of it is worse.
    """
    if numbers[Q.NUM_BURSTS] == 0 or caution == 0:
        return calm_alpha
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
    last = numbers[Q.WAIT_ALPHA]
    keep = 0.0 if np.isnan(last) else keep_of(window.end_s - window.start_s, _HALF_LIFE_S)
    numbers[Q.WAIT_ALPHA] = best if keep == 0 else keep * last + (1 - keep) * best
    return min(max(numbers[Q.WAIT_ALPHA], low), high)
