"""The residual: a small correction of alpha learned online, where stages take longer or shorter than reckoned.

Zero until it has learned, never beyond its bound. It follows the slope, over alpha, of the latency that shadow caches
promise, corrected by the latency measured at splits the node has been at. Compiled; its weights are all it keeps.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.compiled import inner
from helmrec.control.outlook import Floats, O, Outlook, Split, at_split, keep_of
from helmrec.control.window import Seen

_REACH = 0.04  # of alpha, each side, over which the slope is taken
_MAX_SLOPE = 2.0


class ResidualSettings(Frozen):
    """How far the correction may go and how fast it learns."""

    bound: float = Field(0.05, ge=0, le=0.5, description="largest change of alpha, either way")
    learning_rate: float = Field(0.001, ge=0, description="alpha per second and unit of relative slope")
    half_life_s: float = Field(300.0, gt=0, description="seconds after which what was learned counts half")


class ResidualTerms(NamedTuple):
    bound: float
    learning_rate: float
    half_life_s: float


def residual_terms(settings: ResidualSettings) -> ResidualTerms:
    return ResidualTerms(settings.bound, settings.learning_rate, settings.half_life_s)


class R(IntEnum):
    """Weights, by what they weigh."""

    ALWAYS = 0
    LOAD = 1
    HOT_USERS = 2


@inner
def _inputs(outlook: Outlook, window: Seen) -> tuple[float, float, float]:
    best = int(outlook.numbers[O.LASTING_BEST])
    busy = outlook.numbers[O.LASTING_RATE] / 1e3 * outlook.splits[Split.COMPUTE, best]
    return 1.0, min(busy, 1.5) - 0.6, window.hot_user_share - 0.5


@inner
def correction(weights: Floats, terms: ResidualTerms, outlook: Outlook, window: Seen) -> float:
    """What to add to alpha; within the bound whatever the weights are."""
    total, inputs = 0.0, _inputs(outlook, window)
    for i in range(weights.size):
        total += weights[i] * inputs[i]
    if terms.bound == 0 or not np.isfinite(total):
        return 0.0
    return terms.bound * np.tanh(total / terms.bound)


@inner
def learn(weights: Floats, terms: ResidualTerms, outlook: Outlook, window: Seen, alpha: float) -> None:
    """Go down the slope at `alpha`, where the base and the correction so far would be."""
    dt_s = min(10.0, window.end_s - window.start_s)
    low = at_split(outlook.splits, Split.CORRECTED, alpha - _REACH)
    high = at_split(outlook.splits, Split.CORRECTED, alpha + _REACH)
    slope = (high - low) / (2 * _REACH) / max(1e-9, at_split(outlook.splits, Split.CORRECTED, alpha))
    slope = min(max(slope, -_MAX_SLOPE), _MAX_SLOPE)
    keep, inputs = keep_of(dt_s, terms.half_life_s), _inputs(outlook, window)
    for i in range(weights.size):
        weights[i] = weights[i] * keep - terms.learning_rate * dt_s * slope * inputs[i]
        weights[i] = min(max(weights[i], -2 * terms.bound), 2 * terms.bound)  # no further than it can show
