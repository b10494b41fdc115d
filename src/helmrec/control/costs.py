"""What a node's steps cost, learned from the steps themselves: milliseconds per unit of work, stage by stage.

Least squares of the relative error over the steps that ended, older ones fading. No figure of another device is ever
assumed: before the first steps nothing is known, and `Estimator.costs` is None.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helmrec.steps import MS_PER_S, Step, Steps

Floats = NDArray[np.float64]

_HOST_SHOWN = 1 / 2  # share of the host time that other stages do not hide; fitted to simulated nodes
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
    overlap: float  # 0: each step waits for the one before; 1: its rows are read while that one computes
    spread: float  # of what requests take beside the fixed parts: mean square over squared mean, at least 1

    @property
    def step_ms(self) -> float:
        """The fixed parts of a step."""
        return self.host_step_ms + self.rows_step_ms + self.compute_step_ms

    def interval_ms(self, host_ms: Floats, rows_ms: Floats, compute_ms: Floats) -> Floats:
        """What these stages add to the time between the ends of two steps that follow each other without a pause."""
        apart_ms = host_ms + rows_ms + compute_ms
        return apart_ms + self.overlap * (_beside_ms(host_ms, rows_ms, compute_ms) - apart_ms)


def _beside_ms(host_ms: Floats, rows_ms: Floats, compute_ms: Floats) -> Floats:
    """The same where stages overlap: the longer one, and a little more where both are about as long."""
    lead_ms = rows_ms + _HOST_SHOWN * host_ms
    return np.cbrt(lead_ms * lead_ms * lead_ms + compute_ms * compute_ms * compute_ms)


class Estimator:
    """Takes in the steps of each window."""

    def __init__(self) -> None:
        self._fits = {stage: _Fit(1 + len(work)) for stage, work in _WORK.items()}
        self._sums = np.zeros(2)  # ms that overlap hid, and that it could have hidden
        self._spread = np.zeros(len(_SpreadSum))
        self._num_steps = 0.0
        self.costs: StageCosts | None = None  # None: too few steps were seen

    def update(self, steps: Steps) -> None:
        """Steps in the order of their ends; those with a stage that was not timed are left out."""
        timed = steps[np.isfinite(steps[:, _STAGES]).all(axis=1)]
        if not len(timed):
            return
        keep = 2.0 ** (-len(timed) / _HALF_LIFE_STEPS)
        for stage, work in _WORK.items():
            self._fits[stage].update(timed[:, work], timed[:, stage], keep)
        self._note_overlap(timed, keep)
        self._num_steps += len(timed)
        if self._num_steps >= _FEWEST_STEPS:
            terms = [self._fits[stage].terms() for stage in _WORK]
            self._note_spread(timed, sum(stage[0] for stage in terms), keep)
            self.costs = self._costs(terms)

    def _costs(self, terms: list[Floats]) -> StageCosts:
        hidden_ms, hideable_ms = self._sums
        overlap = min(1.0, max(0.0, hidden_ms / hideable_ms)) if hideable_ms > 0 else 0.0
        return StageCosts(*np.concatenate((*terms, [overlap, _spread(self._spread)])).tolist())

    def _note_overlap(self, steps: Steps, keep: float) -> None:
        """Of steps that followed each other without a pause: how much less than the sum of their stages they took."""
        host_ms, rows_ms, compute_ms = steps[1:, _STAGES].T
        apart_ms, took_ms = host_ms + rows_ms + compute_ms, np.diff(steps[:, Step.END_S]) * MS_PER_S
        follows = (steps[1:, Step.BEGIN_S] <= steps[:-1, Step.END_S]) & (took_ms > 0)
        hideable_ms = apart_ms - _beside_ms(host_ms, rows_ms, compute_ms)
        self._sums *= keep
        self._sums += (follows @ (apart_ms - took_ms), follows @ hideable_ms)

    def _note_spread(self, steps: Steps, step_ms: float, keep: float) -> None:
        """What each step took beside its fixed parts, against what as many mean requests would."""
        served = steps[steps[:, Step.REQUESTS] > 0]
        num, took_ms = served[:, Step.REQUESTS], served[:, _STAGES].sum(axis=1) - step_ms
        sums = self._spread
        sums *= keep
        sums[:2] += num.sum(), took_ms.sum()
        if sums[0] > 0 and sums[1] > 0:
            off_ms = took_ms - num * (sums[1] / sums[0])
            sums[2:] += len(num), (off_ms * off_ms / num).sum()

    @property
    def learned(self) -> list[float]:
        """All that was learned, for `relearn`."""
        fits = [part for fit in self._fits.values() for part in (fit.moments.ravel(), fit.target)]
        return np.concatenate([*fits, self._sums, self._spread, [self._num_steps]]).tolist()

    def relearn(self, learned: list[float]) -> None:
        """Go on from what another estimator had learned on the same device and model."""
        values = np.array(learned)
        places = [fit.moments.reshape(-1) for fit in self._fits.values()]
        targets = [fit.target for fit in self._fits.values()]
        parts = [part for pair in zip(places, targets, strict=True) for part in pair] + [self._sums, self._spread]
        assert values.size == sum(part.size for part in parts) + 1
        at = 0
        for part in parts:
            part[:] = values[at : at + part.size]
            at += part.size
        self._num_steps = float(values[-1])
        self.costs = None
        if self._num_steps >= _FEWEST_STEPS:
            self.costs = self._costs([self._fits[stage].terms() for stage in _WORK])


_SpreadSum = ("requests", "ms they took", "steps", "squared deviation per request")


def _spread(sums: Floats) -> float:
    num_requests, took_ms, num_steps, squared = sums.tolist()
    if not num_steps or not took_ms > 0:
        return 1.0
    mean_ms = took_ms / num_requests
    return float(1 + squared / num_steps / (mean_ms * mean_ms))


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
