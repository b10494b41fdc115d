"""What a node's steps cost, learned from the steps themselves: milliseconds per unit of work, stage by stage.

Least squares of the relative error over the steps that ended, older ones fading. No figure of another device is ever
assumed: before the first steps nothing is known, and `Estimator.costs` is None.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helmrec.steps import Step, Steps

Floats = NDArray[np.float64]

HOST_SHOWN = 0.5  # share of the host time that other stages do not hide; fitted to simulated nodes
_HALF_LIFE_STEPS = 2_000.0  # after which a step counts half: half a minute of a busy card, minutes of a CPU
_FEWEST_STEPS = 30  # that tell a slope from noise
_RIDGE = 1e-6  # of the moments: terms that steps do not tell apart share what they explain
_LEAST_MS = 1e-3  # below which clocks say nothing
_TINY = 1e-12  # of work that was never seen

_WORK = {  # columns that each stage's time is linear in, beside a fixed part
    Step.HOST_MS: (Step.REQUESTS, Step.TOKENS),
    Step.ROWS_MS: (Step.ROWS_READ, Step.ROWS_MISSED, Step.PAGES_RELOADED),
    Step.COMPUTE_MS: (Step.TOKENS, Step.PAIRS),
}


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
    overlap: float  # 0: each step waits for the one before; 1: its rows are read while that one computes
    spread: float  # of what requests take beside the fixed parts: mean square over squared mean, at least 1

    @property
    def step_ms(self) -> float:
        """The fixed parts of a step."""
        return self.host_step_ms + self.rows_step_ms + self.compute_step_ms

    def interval_ms(self, host_ms: Floats, rows_ms: Floats, compute_ms: Floats) -> Floats:
        """What these stages add to the time between the ends of two steps that follow each other without a pause."""
        apart_ms = host_ms + rows_ms + compute_ms
        return apart_ms + self.overlap * (beside_ms(host_ms, rows_ms, compute_ms) - apart_ms)


def beside_ms(host_ms: Floats, rows_ms: Floats, compute_ms: Floats) -> Floats:
    """The same where stages overlap: the longer one, and a little more where both are about as long."""
    lead_ms = rows_ms + HOST_SHOWN * host_ms
    return np.cbrt(lead_ms**3 + compute_ms**3)


class Estimator:
    """Takes in the steps of each window."""

    def __init__(self) -> None:
        self._stages = {stage: _Fit(1 + len(work)) for stage, work in _WORK.items()}
        self._hidden_ms = self._hideable_ms = 0.0
        self._spread = _Spread()
        self._num_steps = 0
        self.costs: StageCosts | None = None  # None: too few steps were seen

    def update(self, steps: Steps) -> None:
        """Steps in the order of their ends; those with a stage that was not timed are left out."""
        timed = steps[np.isfinite(steps).all(axis=1)]
        if not len(timed):
            return
        keep = 0.5 ** (len(timed) / _HALF_LIFE_STEPS)
        for stage, work in _WORK.items():
            self._stages[stage].update(timed[:, work], timed[:, stage], keep)
        self._note_overlap(timed, keep)
        self._num_steps += len(timed)
        if self._num_steps >= _FEWEST_STEPS:
            overlap = self._hidden_ms / self._hideable_ms if self._hideable_ms > 0 else 0.0
            terms = [self._stages[stage].terms() for stage in _WORK]
            step_ms = sum(stage[0] for stage in terms)
            spread = self._spread.update(timed[:, Step.REQUESTS], timed[:, list(_WORK)].sum(axis=1) - step_ms, keep)
            self.costs = StageCosts(*np.concatenate((*terms, [min(1.0, max(0.0, overlap)), spread])).tolist())

    def _note_overlap(self, steps: Steps, keep: float) -> None:
        """Of steps that followed each other without a pause: how much less than the sum of their stages they took."""
        host_ms, rows_ms, compute_ms = (steps[1:, stage] for stage in _WORK)
        apart_ms, took_ms = host_ms + rows_ms + compute_ms, np.diff(steps[:, Step.END_S]) * 1e3
        follows = (steps[1:, Step.BEGIN_S] <= steps[:-1, Step.END_S]) & (took_ms > 0)
        hideable_ms = apart_ms - beside_ms(host_ms, rows_ms, compute_ms)
        self._hidden_ms = keep * self._hidden_ms + float((apart_ms - took_ms)[follows].sum())
        self._hideable_ms = keep * self._hideable_ms + float(hideable_ms[follows].sum())


class _Spread:
    """How unequal requests are, from steps of several: what a step took, against what as many mean ones would."""

    def __init__(self) -> None:
        self._num_requests = self._took_ms = self._num_steps = self._variance = 0.0

    def update(self, num: Floats, took_ms: Floats, keep: float) -> float:
        """`took_ms`: of steps of `num` requests, without their fixed parts. Returns `StageCosts.spread`."""
        num, took_ms = num[num > 0], took_ms[num > 0]
        self._num_requests = keep * self._num_requests + float(num.sum())
        self._took_ms = keep * self._took_ms + float(took_ms.sum())
        if not self._num_requests or not self._took_ms > 0:
            return 1.0
        mean_ms = self._took_ms / self._num_requests
        self._num_steps = keep * self._num_steps + len(num)
        self._variance = keep * self._variance + float(np.square(took_ms - num * mean_ms) @ (1 / num))
        return 1 + self._variance / self._num_steps / mean_ms**2


class _Fit:
    """Least squares of one stage; no term is ever negative."""

    def __init__(self, num_terms: int) -> None:
        self._moments = np.zeros((num_terms, num_terms))
        self._target = np.zeros(num_terms)

    def update(self, work: Floats, took_ms: Floats, keep: float) -> None:
        weight = 1 / np.maximum(took_ms, _LEAST_MS)
        x = np.column_stack((np.ones(len(work)), work)) * weight[:, None]
        self._moments = keep * self._moments + x.T @ x
        self._target = keep * self._target + x.T @ (took_ms * weight)

    def terms(self) -> Floats:
        """Terms that come out negative are left out, and the others fitted again."""
        scale = np.sqrt(np.diag(self._moments))
        is_used = scale > _TINY
        scale[~is_used] = 1.0
        moments = self._moments / np.outer(scale, scale) + _RIDGE * np.eye(scale.size)
        terms = np.zeros(scale.size)
        while is_used.any():
            fitted = np.linalg.solve(moments[np.ix_(is_used, is_used)], (self._target / scale)[is_used])
            if (fitted >= 0).all():
                terms[is_used] = fitted
                break
            is_used[np.flatnonzero(is_used)[fitted < 0]] = False
        return terms / scale
