"""The step log: the work of each step and the times of its stages, written by an engine and read by a controller.

A step has three stages: the host lays it out, the bus transfers missed rows and reloaded pages, and the device
computes. It knows neither engines nor controllers; a simulated node fills the same columns.
"""

from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float64]  # (steps, columns of `Step`), in order of their ends
MS_PER_S = 1e3
CAPACITY = 4_096  # steps kept between two reads; more overwrite the oldest


class Step(IntEnum):
    """Columns of a step. Times are of one clock; a stage that cannot be timed is NaN, never 0."""

    BEGIN_S = 0  # time at which its requests were chosen
    END_S = 1  # time at which its scores were ready
    REQUESTS = 2  # answered by it; 0: it computed ahead of requests
    TOKENS = 3  # computed: of histories, contexts and candidates
    PAIRS = 4  # of tokens that attention looked at, in one layer
    ROWS_READ = 5
    ROWS_MISSED = 6
    PAGES_RELOADED = 7
    HOST_MS = 8  # work of the host before and after the device, without waits for other steps
    ROWS_MS = 9  # reading rows and pages; time in which both are read counts once
    COMPUTE_MS = 10  # on the device after its rows were read, without the wait for its pages


_REQUESTS, _TOKENS = int(Step.REQUESTS), int(Step.TOKENS)
_STAGES = tuple(int(stage) for stage in (Step.HOST_MS, Step.ROWS_MS, Step.COMPUTE_MS))


class StepSums(NamedTuple):
    """Sums over steps."""

    requests: float
    most_requests: float  # of one step
    tokens: float
    stages_ms: float  # of all stages that were timed


class StepLog:
    """A ring of the latest steps. One thread writes; another may read."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring = np.zeros((capacity, len(Step)))
        self._num_added = 0
        self._num_taken = 0

    def add(self, values: tuple[float, ...]) -> None:
        """Add a step that has ended; one value per column."""
        self._ring[self._num_added % len(self._ring)] = values
        self._num_added += 1

    def add_host_ms(self, took_ms: float) -> None:
        """Add host time to the latest step."""
        self._ring[(self._num_added - 1) % len(self._ring), Step.HOST_MS] += took_ms

    def take(self) -> Steps:
        """Return the steps that ended since the last call, oldest first; the latest if more ended than fit."""
        begin, self._num_taken = self._num_taken, self._num_added
        return latest(self._ring, begin, self._num_taken)


def no_steps() -> Steps:
    """Return an empty array of steps."""
    return np.empty((0, len(Step)))


def latest(ring: Steps, begin: int, end: int) -> Steps:
    """Return steps number `begin` to `end` of a ring, oldest first; the latest if they are more than fit."""
    begin = max(begin, end - len(ring))
    return ring[np.arange(begin, end) % len(ring)]


def busy_share(steps: Steps, stage: Step, span_s: float) -> float:
    """Return the share of `span_s` spent in a stage of these steps, at most 1; untimed stages add nothing."""
    return min(1.0, float(np.nansum(steps[:, stage])) / (span_s * MS_PER_S))


def idle_share(steps: Steps, start_s: float, end_s: float) -> float:
    """Return the share of a time interval in which none of these steps ran."""
    begins = np.clip(steps[:, Step.BEGIN_S], start_s, end_s)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.clip(steps[order, Step.END_S], start_s, end_s)
    free_from = np.maximum.accumulate(np.concatenate(([start_s], ends)))  # before each step, and at the end
    idle_s = np.maximum(0.0, begins - free_from[:-1]).sum() + end_s - free_from[-1]
    return float(idle_s / (end_s - start_s))


@numba.njit(cache=True, nogil=True)
def sum_steps(steps: Steps) -> StepSums:
    """Sum up steps, in one pass: a decision of the controller has microseconds for it."""
    requests = most_requests = tokens = stages_ms = 0.0
    for step in steps:
        requests += step[_REQUESTS]
        most_requests = max(most_requests, step[_REQUESTS])
        tokens += step[_TOKENS]
        for stage in _STAGES:
            if np.isfinite(step[stage]):
                stages_ms += step[stage]
    return StepSums(requests, most_requests, tokens, stages_ms)
