"""Spatial sampling of rows by a fixed hash. It does not know caches or traces.

A row is in the sample at every access or at none, so reuse distances inside the sample are preserved. A sample at a
lower rate is a subset of any sample at a higher rate.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError

Rows = NDArray[np.int64]


@numba.njit(cache=True, inline="always")
def row_hash(row: int) -> np.uint64:
    """Return 64 well-mixed bits of a row id (the finaliser of SplitMix64)."""
    mixed = np.uint64(row) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@numba.njit(cache=True, inline="always")
def is_sampled(row: int, threshold: np.uint64) -> np.bool_:
    """Whether a row is in the sample of this threshold, from `sampling_threshold`."""
    return row_hash(row) <= threshold


def sampling_threshold(rate: float) -> np.uint64:
    """Return the largest hash value of sampled rows, for a share of `rate` of all hashes."""
    if not 0 < rate <= 1:
        raise ConfigError(f"sampling rate must be above 0 and at most 1, got {rate}")
    return np.uint64(max(1, min(round(rate * 2**64), 2**64)) - 1)


@numba.njit(cache=True)
def keep_sampled(rows: Rows, threshold: np.uint64) -> int:
    """Move the sampled rows to the front, in order, with repeats; return how many they are."""
    num_kept = 0
    for row in rows:
        if is_sampled(row, threshold):
            rows[num_kept] = row
            num_kept += 1
    return num_kept
