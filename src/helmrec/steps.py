"""What each step did and how long its stages took: a ring of numbers that an engine fills and a controller reads.

A step has three stages: the host lays it out, the bus brings the rows that missed and the pages that come back, and the
device computes. Knows no engine and no controller; a simulated node fills the same columns.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float64]  # (steps, columns of `Step`), in order of their ends
CAPACITY = 4_096  # steps between two looks; what is beyond that pushes out the oldest


class Step(IntEnum):
    """Columns of a step. Times are of one clock; a stage that cannot be timed is NaN, never 0."""

    BEGIN_S = 0  # its requests were chosen
    END_S = 1  # its scores were there
    REQUESTS = 2
    TOKENS = 3  # computed: of histories, contexts and candidates
    PAIRS = 4  # of tokens that attention looked at, in one layer
    ROWS_READ = 5
    ROWS_MISSED = 6
    PAGES_RELOADED = 7
    HOST_MS = 8  # at work on it before the device could start
    ROWS_MS = 9  # reading rows and pages
    COMPUTE_MS = 10  # on the device, once its rows were there


class StepLog:
    """The last steps. One thread writes; the one that reads may be another."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring = np.zeros((capacity, len(Step)))
        self._num_added = 0
        self._num_taken = 0

    def add(self, values: "tuple[float, ...]") -> None:
        """A step ended; one value per column."""
        self._ring[self._num_added % len(self._ring)] = values
        self._num_added += 1

    def take(self) -> Steps:
        """Steps that ended since the last call, the oldest first; of more than fit, the latest."""
        end, capacity = self._num_added, len(self._ring)
        begin = max(self._num_taken, end - capacity)
        self._num_taken = end
        return self._ring[np.arange(begin, end) % capacity]
