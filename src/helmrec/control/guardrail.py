"""The guardrail: what every constant split would have cost lately beside what was done, by the same shadow caches.

Adapting that loses to the best constant beyond a bound is put aside for it until it would win again; a residual that
loses to the base alone is forgotten. Compiled; judges by corrected shadow latencies and the price of moves.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.compiled import inner
from helmrec.control.outlook import Floats, Outlook, Split, at_split, keep_of


class GuardSettings(Frozen):
    """What counts as losing."""

    bound: float = Field(0.03, ge=0, description="share by which adapting may cost more than the best constant")
    half_life_s: float = Field(45.0, gt=0, description="seconds after which a window counts half")
    num_windows: int = Field(20, ge=1, description="windows in a row before adapting is put aside, or taken back")


class GuardTerms(NamedTuple):
    bound: float
    half_life_s: float
    num_windows: float


def guard_terms(settings: GuardSettings) -> GuardTerms:
    return GuardTerms(settings.bound, settings.half_life_s, float(settings.num_windows))


class G(IntEnum):
    """Places among the numbers of the guardrail; costs are latencies added up, old ones faded."""

    ADAPTIVE = 0  # what base and residual would have cost, moves included
    BASE = 1  # the base alone, moves left out, as the next
    WITH_RESIDUAL = 2
    LOSING = 3  # windows in a row
    WINNING = 4
    IS_ASIDE = 5
    WANTED = 6  # alpha that base and residual wanted last
    RESIDUAL_LOSING = 7
    STATIC_ALPHA = 8
    WINDOWS = 9
    SIZE = 10


class Paths(NamedTuple):
    """Where alpha would be in this window."""

    base: float
    adaptive: float  # base and residual
    requests: float
    move_cost: float  # of the adaptive path into this window
    dt_s: float


def begin_guard(numbers: Floats) -> None:
    """Set an array of zeros up."""
    numbers[G.WANTED] = numbers[G.STATIC_ALPHA] = np.nan


@inner
def judge(numbers: Floats, constants: Floats, terms: GuardTerms, outlook: Outlook, paths: Paths) -> None:
    """Take a window in. `constants`: cost of each split of the table so far."""
    keep, splits = keep_of(paths.dt_s, terms.half_life_s), outlook.splits
    for split in range(constants.size):
        constants[split] = keep * constants[split] + paths.requests * splits[Split.FRESH, split]
    adaptive_ms = at_split(splits, Split.FRESH, paths.adaptive)
    base_ms = at_split(splits, Split.FRESH, paths.base)
    numbers[G.ADAPTIVE] = keep * numbers[G.ADAPTIVE] + paths.requests * adaptive_ms + paths.move_cost
    numbers[G.BASE] = keep * numbers[G.BASE] + paths.requests * base_ms
    numbers[G.WITH_RESIDUAL] = keep * numbers[G.WITH_RESIDUAL] + paths.requests * adaptive_ms
    best = constants.argmin()
    numbers[G.WINDOWS] += 1
    if numbers[G.WINDOWS] <= terms.num_windows:  # on its way from wherever it was put
        numbers[G.ADAPTIVE] = constants[best]
    numbers[G.STATIC_ALPHA] = splits[Split.ALPHA, best]
    is_losing = numbers[G.ADAPTIVE] > (1 + terms.bound) * constants[best]
    numbers[G.LOSING] = numbers[G.LOSING] + 1 if is_losing else 0.0
    is_winning = numbers[G.ADAPTIVE] <= constants[best] * (1 + terms.bound / 3)
    numbers[G.WINNING] = numbers[G.WINNING] + 1 if is_winning else 0.0
    if numbers[G.LOSING] >= terms.num_windows and not numbers[G.IS_ASIDE]:
        numbers[G.IS_ASIDE], numbers[G.WINNING] = 1.0, 0.0
        numbers[G.ADAPTIVE] = (1 + terms.bound) * constants[best]  # how badly it lost must not keep it out for ever
    elif numbers[G.WINNING] >= terms.num_windows:
        numbers[G.IS_ASIDE] = 0.0
    is_worse = numbers[G.WITH_RESIDUAL] > (1 + terms.bound / 3) * numbers[G.BASE]
    numbers[G.RESIDUAL_LOSING] = numbers[G.RESIDUAL_LOSING] + 1 if is_worse else 0.0
