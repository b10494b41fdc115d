"""Interpolation of curves between the splits at which they are known."""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def between(known: Floats, known_at: Floats, at: Floats) -> Floats:
    """Interpolate curves (curves, known_at) at the splits `at` by monotone cubics (Fritsch and Butland).

    The curves never overshoot known points, and are constant outside them. Linear interpolation would put every optimum
    on a known point.
    """
    knots = _knots(known_at.tobytes(), at.tobytes())
    rises = (known[:, 1:] - known[:, :-1]) / knots.widths
    before, after = rises[:, :-1], rises[:, 1:]
    product = before * after
    is_turn = product <= 0
    weighted = np.where(is_turn, 1.0, knots.left * before + knots.right * after)
    slopes = np.empty_like(known)
    slopes[:, 0], slopes[:, -1] = rises[:, 0], rises[:, -1]
    slopes[:, 1:-1] = np.where(is_turn, 0.0, product / weighted)
    return known @ knots.of_values + slopes @ knots.of_slopes


class _Knots(NamedTuple):
    """Coefficients that depend on the splits only."""

    widths: Floats
    left: Floats  # weight of the rise before a knot in its slope
    right: Floats  # weight of the rise after it
    of_values: Floats  # (known_at, at)
    of_slopes: Floats


@cache
def _knots(of_known: bytes, of_places: bytes) -> _Knots:
    """Compute the coefficients for known splits and splits to interpolate, both as bytes."""
    known_at, at = np.frombuffer(of_known), np.frombuffer(of_places)
    widths = np.diff(known_at)
    before, after = widths[:-1], widths[1:]
    piece = np.clip(np.searchsorted(known_at, at, side="right") - 1, 0, widths.size - 1)
    t = np.clip((at - known_at[piece]) / widths[piece], 0.0, 1.0)
    rest = 1 - t
    of_values, of_slopes = np.zeros((2, known_at.size, at.size))
    column = np.arange(at.size)
    of_values[piece, column] = (1 + 2 * t) * rest * rest
    of_values[piece + 1, column] += t * t * (1 + 2 * rest)
    of_slopes[piece, column] = widths[piece] * t * rest * rest
    of_slopes[piece + 1, column] -= widths[piece] * t * t * rest
    return _Knots(
        widths=widths,
        left=(2 * before + after) / (3 * (before + after)),
        right=(before + 2 * after) / (3 * (before + after)),
        of_values=of_values,
        of_slopes=of_slopes,
    )
