"""What a trained network sees: points of two curves of predicted latency, and signals. Shared with training."""

from enum import IntEnum, auto
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.control.costs import Floats
from helmrec.control.latency import ALPHAS
from helmrec.control.layers import View


class Signal(IntEnum):
    """What a network may see beside curves. The first two bound its steps; the last four are read off the curves."""

    LOW = 0  # least split that may be asked for
    HIGH = auto()
    ALPHA = auto()  # aimed at so far
    BEHIND = auto()  # of the target
    BUSY = auto()  # share of time with a step under way
    COMPUTE_BUSY = auto()
    BUS_BUSY = auto()
    QUEUED = auto()  # log of 1 + requests that wait, over those that came in the window
    IDLE = auto()  # log of 1 + seconds since the last move
    SURPRISE = auto()  # log of measured over predicted latency
    TAIL = auto()  # log of P99 over mean latency
    REALISED = auto()  # realised over predicted gain of late moves; 1 while none is known
    GAIN = auto()  # log of the latency here over the least one of the averaged curve,
    DISTANCE = auto()  # how far away that is,
    NEWEST_GAIN = auto()  # and both on the newest curve
    NEWEST_DISTANCE = auto()


class Sight(NamedTuple):
    """Which points of the curves and which signals are inputs, in this order."""

    near: Floats  # distances from the present split, of both curves
    whole: Floats  # splits, of the averaged curve
    signals: NDArray[np.int64]


@numba.njit(cache=True, nogil=True)
def observe(mean_ms: Floats, newest_ms: Floats, signals: Floats, sight: Sight) -> Floats:
    """The inputs, not yet scaled. Fills in the last four signals."""
    start, low, high = signals[Signal.ALPHA], signals[Signal.LOW], signals[Signal.HIGH]
    num, at = sight.near.size, 0
    inputs = np.empty(2 * num + sight.whole.size + sight.signals.size)
    for curve, first in ((mean_ms, Signal.GAIN), (newest_ms, Signal.NEWEST_GAIN)):
        here_ms = np.interp(start, ALPHAS, curve)
        least_ms, best = here_ms, start
        for split in range(ALPHAS.size):
            if low <= ALPHAS[split] <= high and curve[split] < least_ms:
                least_ms, best = curve[split], ALPHAS[split]
        signals[first], signals[first + 1] = np.log(here_ms / least_ms), best - start
        for distance in sight.near:
            inputs[at] = np.log(np.interp(min(max(start + distance, low), high), ALPHAS, curve) / here_ms)
            at += 1
    inputs[at : at + sight.whole.size] = np.log(np.interp(sight.whole, ALPHAS, mean_ms) / mean_ms.min())
    inputs[at + sight.whole.size :] = signals[sight.signals]
    return inputs


def signals_of(view: View) -> Floats:
    """All of them but those that are read off the curves."""
    window, signals = view.window, np.zeros(len(Signal))
    traffic, start = window.traffic, window.alpha_target
    low, high = max(window.alpha_min, ALPHAS[0]), min(window.alpha_max, ALPHAS[-1])
    surprise = 1.0 if not view.predicted_ms or traffic.mean_ms <= 0 else traffic.mean_ms / view.predicted_ms
    tail = 1.0 if traffic.mean_ms <= 0 else traffic.p99_ms / traffic.mean_ms
    queued = traffic.num_queued / max(1, traffic.num_requests)
    known = (low, high, start, window.alpha - start, 1 - traffic.idle_share, traffic.compute_busy, traffic.bus_busy)
    logs = np.log((1 + queued, 1 + view.idle_s, surprise, tail))
    signals[: Signal.GAIN] = (*known, *logs, 1.0 if view.realised is None else view.realised)
    return signals
