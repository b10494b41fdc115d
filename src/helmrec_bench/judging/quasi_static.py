"""The best split of each window in hindsight, if moving the boundary cost nothing.

The input is a sweep: one cost per window and split, each from a run with that split throughout. Average sweeps over
seeds first: the minimum of noisy costs is too low.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class QuasiStatic:
    """The best split of each window, if moving the boundary cost nothing."""

    alpha: Floats  # (windows,) alpha*
    cost: Floats  # (windows,)
    low: Floats  # (windows,) lower end of the contiguous band around alpha* whose regret is within bounds
    high: Floats  # (windows,) upper end

    def gap(self, alphas: Floats) -> float:
        """Mean distance between the splits of a run and alpha*."""
        return float(np.abs(alphas - self.alpha).mean())

    def share_inside(self, alphas: Floats) -> float:
        """Share of windows in which the split of a run lies in the band."""
        return float(((alphas >= self.low - 1e-12) & (alphas <= self.high + 1e-12)).mean())


def quasi_static(costs: Floats, alphas: Floats, regret: float = 0.01) -> QuasiStatic:
    """Find alpha* and its band, whose ends are interpolated. `costs` is (windows, splits); `alphas` ascend."""
    best = costs.argmin(axis=1)
    least = costs.min(axis=1)
    bound = least * (1 + regret)
    ends = [_band(row, alphas, at, limit) for row, at, limit in zip(costs, best, bound, strict=True)]
    low, high = np.array(ends).reshape(-1, 2).T
    return QuasiStatic(alpha=alphas[best], cost=least, low=low, high=high)


def _band(costs: Floats, alphas: Floats, best: int, limit: float) -> tuple[float, float]:
    def end(step: int) -> float:
        at = best
        while 0 <= at + step < costs.size and costs[at + step] <= limit:
            at += step
        if not 0 <= at + step < costs.size:
            return float(alphas[at])
        share = (limit - costs[at]) / (costs[at + step] - costs[at])
        return float(alphas[at] + share * (alphas[at + step] - alphas[at]))

    return end(-1), end(1)
