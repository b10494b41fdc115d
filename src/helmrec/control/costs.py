"""What a node's steps cost, learned from the steps themselves: milliseconds per unit of work, stage by stage.

Least squares of the relative error over the steps that ended, older ones fading. No figure of another device is ever
assumed: before the first steps nothing is known, and `Estimator.costs` is None.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helmrec.steps import Step, Steps

Floats = NDArray[np.float64]

_HALF_LIFE_STEPS = 2_000.0  # after which a step counts half: half a minute of a busy card, minutes of a CPU
_FEWEST_STEPS = 30  # that tell a slope from noise
_RIDGE = 1e-6  # of the moments: terms that steps do not tell apart share what they explain
_LEAST_MS = 1e-3  # below which clocks say nothing

_WORK = {  # columns that each stage's time is linear in, beside a fixed part
    Step.HOST_MS: (Step.REQUESTS, Step.TOKENS),
    Step.ROWS_MS: (Step.ROWS_READ, Step.ROWS_MISSED, Step.PAGES_RELOADED),
    Step.COMPUTE_MS: (Step.TOKENS, Step.PAIRS),
}
_STAGES = list(_WORK)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Milliseconds per unit of work. The `step` terms are of a step whatever it holds."""

    host_step_ms: float
    host_request_ms: float
    host_token_ms: float
    rows_step_ms: float
    read_row_ms: float
    missed_row_ms: float
    reloaded_page_ms: float
    compute_step_ms: float
    token_ms: float
    pair_ms: float
    overlap: float  # share of steps that were launched while another one was under way

    @property
    def step_ms(self) -> float:
        """The fixed parts of a step."""
        return self.host_step_ms + self.rows_step_ms + self.compute_step_ms


class Estimator:
    """Takes in the steps of each window."""

    def __init__(self) -> None:
        self._fits = {stage: _Fit(1 + len(work)) for stage, work in _WORK.items()}
        self._seen = np.zeros(3)  # steps in all; those that count, older ones fading; those of them that overlapped
        self.costs: StageCosts | None = None  # None: too few steps were seen

    def update(self, steps: Steps) -> None:
        """Steps in the order of their ends; those with a stage that was not timed are left out."""
        timed = steps[np.isfinite(steps[:, _STAGES]).all(axis=1)]
        if not len(timed):
            return
        keep = 2.0 ** (-len(timed) / _HALF_LIFE_STEPS)
        for stage, work in _WORK.items():
            self._fits[stage].update(timed[:, work], timed[:, stage], keep)
        num_overlapped = np.count_nonzero(timed[1:, Step.BEGIN_S] < timed[:-1, Step.END_S])
        self._seen *= (1, keep, keep)
        self._seen += (float(len(timed)), float(len(timed)), float(num_overlapped))
        self._know()

    def _know(self) -> None:
        num_steps, weight, num_overlapped = self._seen.tolist()
        if num_steps >= _FEWEST_STEPS:
            terms = [self._fits[stage].terms() for stage in _WORK]
            self.costs = StageCosts(*np.concatenate((*terms, [num_overlapped / weight])).tolist())

    @property
    def learned(self) -> list[float]:
        """All that was learned, for `relearn`."""
        return np.concatenate([part.ravel() for part in self._parts()]).tolist()

    def relearn(self, learned: list[float]) -> None:
        """Go on from what another estimator had learned on the same device and model."""
        values, at = np.array(learned), 0
        assert values.size == sum(part.size for part in self._parts())
        for part in self._parts():
            part.reshape(-1)[:] = values[at : at + part.size]
            at += part.size
        self._know()

    def _parts(self) -> list[Floats]:
        return [*(part for fit in self._fits.values() for part in (fit.moments, fit.target)), self._seen]


class _Fit:
    """Least squares of one stage; no term is ever negative."""

    def __init__(self, num_terms: int) -> None:
        self.moments = np.zeros((num_terms, num_terms))
        self.target = np.zeros(num_terms)

    def update(self, work: Floats, took_ms: Floats, keep: float) -> None:
        weight = 1 / np.maximum(took_ms, _LEAST_MS)
        x = np.empty((len(work), self.target.size))
        x[:, 0], x[:, 1:] = weight, work * weight[:, None]
        self.moments *= keep
        self.moments += x.T @ x
        self.target *= keep
        self.target += (took_ms * weight) @ x

    def terms(self) -> Floats:
        """Terms that come out negative are left out, and the others fitted again."""
        scale = np.sqrt(self.moments.diagonal())
        used = np.flatnonzero(scale > 0)
        terms = np.zeros(scale.size)
        while used.size:
            by = scale[used]
            moments = self.moments[used[:, None], used] / (by[:, None] * by)
            moments.flat[:: used.size + 1] += _RIDGE
            fitted = np.linalg.solve(moments, self.target[used] / by)
            if (fitted >= 0).all():
                terms[used] = fitted / by
                break
            used = used[fitted >= 0]
        return terms
