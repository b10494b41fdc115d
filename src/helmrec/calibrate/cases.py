"""The cases that are timed, as values.

Cases vary the inputs of the cost model, one by one and together: requests of a step, tokens, prefixes, candidates, rows
that miss, pages reloaded from the host; in single steps, and in bursts in which steps overlap.
"""

from dataclasses import dataclass

import numpy as np

from helmrec.model.config import ModelConfig

STEP_REQUESTS = 8  # most requests of a step; bursts always have as many
_TYPICAL = 0.42  # of the window: eight of these with all candidates fill a step
_FEW_NEW = 16  # new events of a returning user


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step. Lengths are means: those of the requests of a step are spread by a third in both directions."""

    name: str
    num_requests: int
    resident: int  # events of each history whose KV is resident
    new: int  # events that must be computed
    candidates: int
    fresh: float  # share of row reads that miss the cache
    is_reloaded: bool = False  # KV of the resident events is in the host tier
    num_steps: int = 1  # more than 1: a burst, all queued at once

    def spread(self, mean: int, window: int) -> list[int]:
        """Return the lengths of the requests of one step, whose mean is `mean`."""
        if self.num_requests == 1 or mean <= 1:
            return [mean] * self.num_requests
        lengths = np.linspace(2 / 3, 4 / 3, self.num_requests) * mean
        return [min(int(length), window) for length in lengths]


def make_cases(model: ModelConfig, *, is_quick: bool) -> list[Case]:
    """Return single steps, then bursts; half of them if `is_quick`."""
    typical, most = max(1, int(model.window * _TYPICAL)), model.max_candidates
    steps = _single_steps(typical, most) + _reloads(typical, most)
    bursts = _bursts(typical, most, num_steps=6 if is_quick else 12)
    return [*steps[::2], *bursts[::2]] if is_quick else steps + bursts


def _single_steps(typical: int, most: int) -> list[Case]:
    few, little = max(1, most // 8), max(1, typical // 4)
    cases = [
        Case(f"{num} first visits, {fresh:.0%} fresh", num, 0, typical, most, fresh)
        for fresh in (0.0, 0.1, 1.0)
        for num in (1, 2, 4, 8)
    ]
    cases += [
        Case(f"{num} returns, {fresh:.0%} fresh", num, typical, _FEW_NEW, most, fresh)
        for fresh in (0.0, 0.3)
        for num in (1, 2, 4, 8)
    ]
    return [
        *cases,
        Case("8 short first visits, few candidates", 8, 0, little, few, 0.1),
        Case("1 long first visit", 1, 0, 2 * typical, most, 0.0),
        Case("4 long returns", 4, 2 * typical, _FEW_NEW, most, 0.0),
        Case("8 returns, few candidates", 8, typical, _FEW_NEW, few, 0.0),
        Case("1 return, few candidates, all fresh", 1, typical, _FEW_NEW, few, 1.0),
        Case("1 short first visit, few candidates, all fresh", 1, 0, little, few, 1.0),
        Case("8 half resident", 8, 2 * little, 2 * little, most, 0.1),
        Case("3 half resident, half fresh", 3, 2 * little, 2 * little, most // 2, 0.5),
    ]


def _reloads(typical: int, most: int) -> list[Case]:
    return [
        Case("1 reload", 1, typical, _FEW_NEW, most, 0.0, is_reloaded=True),
        Case("1 short reload", 1, typical // 3, _FEW_NEW, most, 0.0, is_reloaded=True),
        Case("4 reloads", 4, typical // 2, _FEW_NEW, most, 0.0, is_reloaded=True),
    ]


def _bursts(typical: int, most: int, num_steps: int) -> list[Case]:
    num = STEP_REQUESTS
    return [
        *(
            Case(f"burst of first visits, {fresh:.0%} fresh", num, 0, typical, most, fresh, num_steps=num_steps)
            for fresh in (0.0, 0.1, 0.4, 1.0)
        ),
        *(
            Case(f"burst of returns, {fresh:.0%} fresh", num, typical, _FEW_NEW, most, fresh, num_steps=num_steps)
            for fresh in (0.0, 0.1, 0.4, 1.0)
        ),
        Case("burst, half resident", num, typical // 2, typical // 2, most, 0.1, num_steps=num_steps),
        Case("burst of reloads", num, typical // 2, _FEW_NEW, most, 0.0, is_reloaded=True, num_steps=4),
    ]
