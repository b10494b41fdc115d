"""What whole steps of an engine cost, learned from the steps that have ended, as `learned` learns the stages."""

import numba
import numpy as np

from helmrec.costs.least_squares import add_one, fit
from helmrec.types import FloatArray

_KEEP = 0.99  # of the weight of earlier steps, at each step
_RIDGE = 1e-6  # of the moments
_LEAST_S = 1e-6  # below which clocks say nothing


class StepCosts:
    """Predicts the seconds of a whole step from its tokens and token pairs, as soon as one has ended.

    The engine decides with it at once, while the stages of a step are timed some steps later. A step that something
    else delayed has little weight, since its error is relative to its own time.
    """

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._floor_s = self._token_s = self._pair_s = 0.0

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Update the fit with a step that has ended."""
        least_s = max(_LEAST_S, self.seconds(num_tokens, num_pairs, is_whole_step=True))
        scale_s = max(seconds, least_s)
        terms = _refit(self._moments, self._target, float(num_tokens), float(num_pairs), seconds, scale_s)
        self._floor_s, self._token_s, self._pair_s = terms

    def seconds(self, num_tokens: int, num_pairs: float, *, is_whole_step: bool = False) -> float:
        """Predict the seconds that these tokens and pairs add to a step, or the seconds of a step of only these."""
        return is_whole_step * self._floor_s + num_tokens * self._token_s + num_pairs * self._pair_s


@numba.njit(cache=True, nogil=True)
def _refit(
    moments: FloatArray, target: FloatArray, num_tokens: float, num_pairs: float, took: float, scale: float
) -> tuple[float, float, float]:
    """Fade the moments, add one step, and solve for all terms."""
    moments *= _KEEP
    target *= _KEEP
    add_one(moments, target, np.array([1.0, num_tokens, num_pairs]), took, scale)
    terms = fit(moments, target, _RIDGE)
    return terms[0], terms[1], terms[2]
