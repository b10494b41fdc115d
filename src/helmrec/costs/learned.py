"""What a node's steps cost, learned from the steps themselves: milliseconds per unit of work, stage by stage.

Least squares of the relative error over the steps that ended, older ones fading. No figure of another device is ever
assumed: before the first steps nothing is known, and `Estimator.costs` is None.
"""

from typing import NamedTuple

import numba
import numpy as np

from helmrec.costs.least_squares import add_one, fit
from helmrec.steps import Step, Steps
from helmrec.types import FloatArray, IntArray

_HALF_LIFE_STEPS = 2_000.0  # after which a step counts half: half a minute of a busy card, minutes of a CPU
_FEWEST_STEPS = 30  # that tell a slope from noise
_RIDGE = 1e-6  # of the moments: terms that steps do not tell apart share what they explain
_LEAST_MS = 1e-3  # below which clocks say nothing

_WORK_OF = {  # columns that each stage's time is linear in, beside a fixed part
    Step.HOST_MS: (Step.REQUESTS, Step.TOKENS, Step.ROWS_MISSED),  # a host that keeps the index admits missed rows
    Step.ROWS_MS: (Step.ROWS_READ, Step.ROWS_MISSED, Step.PAGES_RELOADED),
    Step.COMPUTE_MS: (Step.TOKENS, Step.PAIRS, -1),  # -1: none
}
_STAGES = tuple(int(stage) for stage in _WORK_OF)
_COLUMNS = np.array([[int(column) for column in columns] for columns in _WORK_OF.values()])
_NUM_TERMS = 1 + _COLUMNS.shape[1]
_BEGIN_S, _END_S = int(Step.BEGIN_S), int(Step.END_S)


class StageCosts(NamedTuple):
    """Milliseconds per unit of work. The `step` terms are of a step whatever it holds."""

    host_step_ms: float
    host_request_ms: float
    host_token_ms: float
    host_missed_row_ms: float
    rows_step_ms: float
    read_row_ms: float
    missed_row_ms: float
    reloaded_page_ms: float
    compute_step_ms: float
    token_ms: float
    pair_ms: float
    overlap: float  # share of steps that were launched while another one was under way


class Estimator:
    """Takes in the steps of each window."""

    def __init__(self) -> None:
        self._moments = np.zeros((len(_STAGES), _NUM_TERMS, _NUM_TERMS))  # of a one and the work of each stage
        self._targets = np.zeros((len(_STAGES), _NUM_TERMS))  # of the work with what the stage took
        self._terms = np.zeros((len(_STAGES), _NUM_TERMS))  # as fitted last; all 0: too few steps were seen
        self._seen = np.zeros(1 + 2)  # steps in all; with older ones fading; those of them that overlapped
        self.costs: StageCosts | None = None  # None: too few steps were seen

    def update(self, steps: Steps) -> None:
        """Steps in the order of their ends; those with a stage that was not timed are left out."""
        num, num_overlapped, keep = add_steps(steps, _HALF_LIFE_STEPS, self._terms, self._moments, self._targets)
        if num:
            num_steps, weight, overlapped = self._seen.tolist()
            self._seen[:] = num_steps + num, keep * weight + num, keep * overlapped + num_overlapped
            self._know()

    def _know(self) -> None:
        num_steps, weight, num_overlapped = self._seen.tolist()
        if num_steps >= _FEWEST_STEPS:
            self._terms = fit_stages(self._moments, self._targets)
            host, rows, compute = self._terms.tolist()
            self.costs = StageCosts._make((*host, *rows, *compute[:-1], num_overlapped / weight))

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

    def _parts(self) -> list[FloatArray]:
        return [self._moments, self._targets, self._seen]


@numba.njit(cache=True, nogil=True)
def fit_stages(moments: FloatArray, targets: FloatArray) -> FloatArray:
    """(stages, terms): milliseconds per unit of work; 0 for work that never came."""
    terms = np.empty_like(targets)
    for stage in range(len(targets)):
        terms[stage] = fit(moments[stage], targets[stage], _RIDGE)
    return terms


@numba.njit(cache=True, nogil=True)
def add_steps(
    steps: Steps, half_life_steps: float, terms: FloatArray, moments: FloatArray, targets: FloatArray
) -> tuple[float, float, float]:
    """Fade the moments by as many steps as were timed in all stages, and add theirs.

    Returns how many those are, how many of them were launched while the one before was under way, and the share of the
    earlier moments that was kept. Errors are relative to what a stage takes by the `terms` so far. Relative to what it
    took, short ones would count more than long ones of as much work, and all terms would come out too small. Only where
    it took more than twice as long as expected is it weighted by that: something else delayed it.
    """
    is_timed = np.ones(len(steps), np.bool_)
    for stage in _STAGES:
        is_timed &= np.isfinite(steps[:, stage])
    timed = np.flatnonzero(is_timed)
    keep = 2.0 ** (-timed.size / half_life_steps)
    moments *= keep
    targets *= keep
    ended_s, num_overlapped = -np.inf, 0.0
    for at in timed:
        num_overlapped += steps[at, _BEGIN_S] < ended_s
        ended_s = steps[at, _END_S]
    for place, stage in enumerate(_STAGES):
        _add_stage(steps, timed, (stage, _COLUMNS[place]), terms[place], moments[place], targets[place])
    return float(timed.size), num_overlapped, keep


@numba.njit(cache=True, nogil=True)
def _add_stage(
    steps: Steps,
    timed: IntArray,
    stage: tuple[int, IntArray],
    terms: FloatArray,
    moments: FloatArray,
    target: FloatArray,
) -> None:
    """Add what the `timed` of these steps did and took in one stage: its column, and those of its work."""
    took_in, columns = stage
    work = np.ones(_NUM_TERMS)
    for at in timed:
        expected_ms = terms[0]
        for term, column in enumerate(columns):
            work[1 + term] = steps[at, column] if column >= 0 else 0.0
            expected_ms += terms[1 + term] * work[1 + term]
        took_ms = steps[at, took_in]
        scale_ms = max(expected_ms, took_ms / 2, _LEAST_MS) if expected_ms > 0 else max(took_ms, _LEAST_MS)
        add_one(moments, target, work, took_ms, scale_ms)
