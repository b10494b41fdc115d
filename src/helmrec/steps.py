"""What each step did and how long its stages took: a ring of numbers that an engine fills and a controller reads.

A step has three stages: the host lays it out, the bus brings the rows that missed and the pages that come back, and the
device computes. Knows no engine and no controller; a simulated node fills the same columns.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float64]  # (steps, columns of `Step`), in order of their ends
MS_PER_S = 1e3
CAPACITY = 4_096  # steps between two looks; what is beyond that pushes out the oldest


class Step(IntEnum):
    """Columns of a step. Times are of one clock; a stage that cannot be timed is NaN, never 0."""

    BEGIN_S = 0  # its requests were chosen
    END_S = 1  # its scores were there
    REQUESTS = 2  # that it answered; 0: it computed ahead of requests
    TOKENS = 3  # computed: of histories, contexts and candidates
    PAIRS = 4  # of tokens that attention looked at, in one layer
    ROWS_READ = 5
    ROWS_MISSED = 6
    PAGES_RELOADED = 7
    HOST_MS = 8  # at work on it before and after the device, without waits for other steps
    ROWS_MS = 9  # reading rows and pages; while both were read, time counts once
    COMPUTE_MS = 10  # on the device, once its rows were there, without the wait for its pages


class StepLog:
    """The last steps. One thread writes; the one that reads may be another."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring = np.zeros((capacity, len(Step)))
        self._num_added = 0
        self._num_taken = 0

    def add(self, values: tuple[float, ...]) -> None:
        """A step ended; one value per column."""
        self._ring[self._num_added % len(self._ring)] = values
        self._num_added += 1

    def add_host_ms(self, took_ms: float) -> None:
        """The host did so much more for the step that ended last."""
        self._ring[(self._num_added - 1) % len(self._ring), Step.HOST_MS] += took_ms

    def take(self) -> Steps:
        """Steps that ended since the last call, the oldest first; of more than fit, the latest."""
        begin, self._num_taken = self._num_taken, self._num_added
        return latest(self._ring, begin, self._num_taken)


def no_steps() -> Steps:
    """A stretch of time in which no step ended."""
    return np.empty((0, len(Step)))


def latest(ring: Steps, begin: int, end: int) -> Steps:
    """Steps number `begin` to `end` of a ring, the oldest first; of more than fit, the latest."""
    begin = max(begin, end - len(ring))
    return ring[np.arange(begin, end) % len(ring)]


def busy_share(steps: Steps, stage: Step, span_s: float) -> float:
    """Share of `span_s` that went into a stage of these steps, at most 1; stages that were not timed add nothing."""
    return min(1.0, float(np.nansum(steps[:, stage])) / (span_s * MS_PER_S))


def idle_share(steps: Steps, start_s: float, end_s: float) -> float:
    """Share of a stretch of time in which none of these steps was under way."""
    begins = np.clip(steps[:, Step.BEGIN_S], start_s, end_s)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.clip(steps[order, Step.END_S], start_s, end_s)
    free_from = np.maximum.accumulate(np.concatenate(([start_s], ends)))  # before each step, and at the end
    idle_s = np.maximum(0.0, begins - free_from[:-1]).sum() + end_s - free_from[-1]
    return float(idle_s / (end_s - start_s))
