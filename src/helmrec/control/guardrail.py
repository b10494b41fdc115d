"""The guardrail: what every constant split would have cost lately, beside the path that was taken.

Both are reckoned by shadow caches and held against latency measured while the node was at that split: what chance did
to a window cancels, and an error of the reckoning that adapting follows shows once the node has been somewhere else.
Adapting that loses to the best constant beyond a bound is put aside for it until it would win again; a residual that
loses to the base alone is forgotten.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.compiled import inner
from helmrec.control.outlook import Floats, Outlook, Split, at_split, keep_of
from helmrec.control.window import Seen


class GuardSettings(Frozen):
    """What counts as losing."""

    bound: float = Field(0.03, ge=0, description="share by which adapting may cost more than the best constant")
    half_life_s: float = Field(45.0, gt=0, description="seconds after which a window counts half")
    patience_s: float = Field(20.0, gt=0, description="seconds in a row before adapting is put aside, or taken back")


class GuardTerms(NamedTuple):
    bound: float
    half_life_s: float
    patience_s: float


def guard_terms(settings: GuardSettings) -> GuardTerms:
    return GuardTerms(settings.bound, settings.half_life_s, settings.patience_s)


class G(IntEnum):
    """Places among the numbers of the guardrail; costs are latencies added up, old ones faded."""

    ADAPTIVE = 0  # what adapting cost, moves included: where the boundary was, or would have been if it is put aside
    BASE = 1  # the base alone, moves left out, as the next
    WITH_RESIDUAL = 2
    LOSING = 3  # seconds in a row, as the next
    WINNING = 4
    IS_ASIDE = 5
    WANTED = 6  # alpha that base and residual wanted last
    RESIDUAL_LOSING = 7  # seconds in a row
    STATIC_ALPHA = 8
    SEEN_S = 9  # seconds in all
    SIZE = 10


class Paths(NamedTuple):
    """Where alpha would be in this window."""

    base: float
    adaptive: float  # base and residual
    move_cost: float  # of the adaptive path into this window
    is_elsewhere: bool  # the boundary is not on it, for a reason that is not to be judged here


def begin_guard(numbers: Floats) -> None:
    """Set an array of zeros up."""
    numbers[G.WANTED] = numbers[G.STATIC_ALPHA] = np.nan


@inner
def judge(numbers: Floats, constants: Floats, terms: GuardTerms, outlook: Outlook, window: Seen, paths: Paths) -> None:
    """Take a window in. `constants`: cost of each split of the table so far."""
    splits, requests, dt_s = outlook.splits, window.num_served, window.end_s - window.start_s
    keep = keep_of(dt_s, terms.half_life_s)
    for split in range(constants.size):
        constants[split] = keep * constants[split] + requests * splits[Split.CORRECTED, split]
    adaptive_ms = at_split(splits, Split.CORRECTED, paths.adaptive)
    base_ms = at_split(splits, Split.CORRECTED, paths.base)
    is_elsewhere = paths.is_elsewhere or numbers[G.IS_ASIDE] != 0
    done_ms = adaptive_ms if is_elsewhere else at_split(splits, Split.CORRECTED, window.alpha)
    numbers[G.ADAPTIVE] = keep * numbers[G.ADAPTIVE] + requests * done_ms + paths.move_cost
    numbers[G.BASE] = keep * numbers[G.BASE] + requests * base_ms
    numbers[G.WITH_RESIDUAL] = keep * numbers[G.WITH_RESIDUAL] + requests * adaptive_ms
    best = _best_within(constants, splits, window)
    numbers[G.SEEN_S] += dt_s
    if numbers[G.SEEN_S] <= terms.patience_s:  # on its way from wherever it was put
        numbers[G.ADAPTIVE] = constants[best]
    numbers[G.STATIC_ALPHA] = splits[Split.ALPHA, best]
    is_losing = numbers[G.ADAPTIVE] > (1 + terms.bound) * constants[best]
    numbers[G.LOSING] = numbers[G.LOSING] + dt_s if is_losing else 0.0
    is_winning = numbers[G.ADAPTIVE] <= constants[best] * (1 + terms.bound / 3)
    numbers[G.WINNING] = numbers[G.WINNING] + dt_s if is_winning else 0.0
    if numbers[G.LOSING] >= terms.patience_s and not numbers[G.IS_ASIDE]:
        numbers[G.IS_ASIDE], numbers[G.WINNING] = 1.0, 0.0
        numbers[G.ADAPTIVE] = (1 + terms.bound) * constants[best]  # how badly it lost must not keep it out for ever
    elif numbers[G.WINNING] >= terms.patience_s:
        numbers[G.IS_ASIDE] = 0.0
    is_worse = numbers[G.WITH_RESIDUAL] > (1 + terms.bound / 3) * numbers[G.BASE]
    numbers[G.RESIDUAL_LOSING] = numbers[G.RESIDUAL_LOSING] + dt_s if is_worse else 0.0


@inner
def _best_within(constants: Floats, splits: Floats, window: Seen) -> int:
    """The cheapest constant among those the pool can be at."""
    best = -1
    for split in range(constants.size):
        is_open = window.alpha_min <= splits[Split.ALPHA, split] <= window.alpha_max
        if is_open and (best < 0 or constants[split] < constants[best]):
            best = split
    return max(best, 0)
