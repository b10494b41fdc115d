"""The inputs of a trained network: points of two curves of predicted latency, and signals. Training uses it too."""

from enum import IntEnum, auto
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.control.latency import ALPHAS
from helmrec.control.layers import View
from helmrec.types import FloatArray


class Signal(IntEnum):
    """Possible inputs besides curves. The first two bound the steps; the last four are computed from the curves."""

    LOW = 0  # smallest allowed split
    HIGH = auto()  # largest allowed split
    ALPHA = auto()  # current target
    BEHIND = auto()  # current split minus target
    BUSY = auto()  # share of time with a running step
    COMPUTE_BUSY = auto()
    BUS_BUSY = auto()
    QUEUED = auto()  # log of 1 + waiting requests over requests of the window
    IDLE = auto()  # log of 1 + seconds since the last move
    SURPRISE = auto()  # log of measured over predicted latency
    TAIL = auto()  # log of P99 over mean latency
    REALISED = auto()  # realised over predicted gain of recent moves; 1 if unknown
    GAIN = auto()  # log of the current over the least latency of the averaged curve
    DISTANCE = auto()  # distance to the split with the least latency
    NEWEST_GAIN = auto()  # the same on the newest curve
    NEWEST_DISTANCE = auto()


class Sight(NamedTuple):
    """The points of the curves and the signals that are inputs, in this order."""

    near: FloatArray  # distances from the current split, on both curves
    whole: FloatArray  # splits, on the averaged curve
    signals: NDArray[np.int64]


@numba.njit(cache=True, nogil=True)
def observe(mean_ms: FloatArray, newest_ms: FloatArray, signals: FloatArray, sight: Sight) -> FloatArray:
    """Compute the inputs before scaling, and fill in the last four signals."""
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


def signals_of(view: View) -> FloatArray:
    """All signals except those computed from the curves."""
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
