"""Which rows stand for all rows: a fixed hash keeps the same few everywhere. Knows nothing of caches or traces.

A row is in the sample at every touch or at none, so reuse inside the sample is reuse as it was. A sample at a lower
rate is part of any sample at a higher one.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError

Rows = NDArray[np.int64]


@numba.njit(cache=True, inline="always")
def row_hash(row: int) -> np.uint64:
    """64 well-mixed bits of a row id (the finaliser of SplitMix64)."""
    mixed = np.uint64(row) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@numba.njit(cache=True, inline="always")
def is_sampled(row: int, threshold: np.uint64) -> np.bool_:
    """Whether a row is in the sample that `sampling_threshold` gave the threshold of."""
    return row_hash(row) <= threshold


def sampling_threshold(rate: float) -> np.uint64:
    """The hash value up to which rows are sampled: `rate` of all hashes, all of them at 1."""
    if not 0 < rate <= 1:
        raise ConfigError(f"sampling rate must be above 0 and at most 1, got {rate}")
    return np.uint64(max(1, min(round(rate * 2**64), 2**64)) - 1)


def sampled(rows: Rows, rate: float) -> Rows:
    """The rows of the sample, in order, repeats included."""
    return _sampled(rows, sampling_threshold(rate))


@numba.njit(cache=True)
def _sampled(rows: Rows, threshold: np.uint64) -> Rows:
    kept = np.empty(rows.size, np.int64)
    num_kept = 0
    for row in rows:
        if is_sampled(row, threshold):
            kept[num_kept] = row
            num_kept += 1
    return kept[:num_kept].copy()
