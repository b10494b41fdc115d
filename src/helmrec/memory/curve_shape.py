"""Interpolation of curves between the splits at which they are known."""

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@numba.njit(cache=True, nogil=True)
def between(known: Floats, known_at: Floats, at: Floats) -> Floats:
    """Interpolate curves (curves, known_at) at the splits `at` by monotone cubics (Fritsch and Butland).

    The curves never overshoot known points, and are constant outside them. Linear interpolation would put every optimum
    on a known point.
    """
    widths = np.diff(known_at)
    pieces = np.minimum(np.maximum(np.searchsorted(known_at, at, side="right") - 1, 0), widths.size - 1)
    found, slopes = np.empty((len(known), at.size)), np.empty(known_at.size)
    for curve in range(len(known)):
        values = known[curve]
        rises = np.diff(values) / widths
        slopes[0], slopes[-1] = rises[0], rises[-1]
        for i in range(1, rises.size):
            before, after, product = widths[i - 1], widths[i], rises[i - 1] * rises[i]
            weighted = (2 * before + after) * rises[i - 1] + (before + 2 * after) * rises[i]
            slopes[i] = 3 * (before + after) * product / weighted if product > 0 else 0.0
        for place, piece in enumerate(pieces):
            width = widths[piece]
            t = min(max((at[place] - known_at[piece]) / width, 0.0), 1.0)
            rest = 1 - t
            of_values = rest * rest * (1 + 2 * t) * values[piece] + t * t * (1 + 2 * rest) * values[piece + 1]
            found[curve, place] = of_values + width * t * rest * (rest * slopes[piece] - t * slopes[piece + 1])
    return found
