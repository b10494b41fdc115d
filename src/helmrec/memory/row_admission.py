"""Admission policies for missed rows. Half of all rows are read once and must not evict warm rows."""

from typing import Protocol

import numba
import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class RowAdmission(Protocol):
    """Decides which missed rows are given a slot; called with every missed row, off the request path."""

    def worthy(self, rows: Rows) -> NDArray[np.bool_]: ...


class AdmitEveryRow:
    """Admits every missed row."""

    def worthy(self, rows: Rows) -> NDArray[np.bool_]:
        return np.ones(rows.size, np.bool_)


class SecondTouch:
    """Admits a row at its second miss, counted by a two-hash sketch whose counters are halved from time to time."""

    def __init__(self, num_slots: int) -> None:
        size = num_counters(num_slots)
        self._counts = np.zeros((2, size), np.uint8)
        self._seen = 0
        self._age_after = size // 4  # few counters in use, so that collisions of both counters of a row are rare

    def worthy(self, rows: Rows) -> NDArray[np.bool_]:
        self._seen += rows.size
        if self._seen >= self._age_after:
            halve(self._counts)
            self._seen //= 2
        return _count(self._counts, rows) >= 2


def num_counters(num_slots: int) -> int:
    """The number of counters for a cache of `num_slots` rows."""
    return 1 << max(10, (8 * num_slots - 1).bit_length())


@numba.njit(cache=True)
def halve(counts: NDArray[np.uint8]) -> None:
    """Halve all counters."""
    for line in range(counts.shape[0]):
        for i in range(counts.shape[1]):
            counts[line, i] >>= 1


@numba.njit(cache=True, inline="always")
def count_touch(counts: NDArray[np.uint8], row: int) -> int:
    """Add one to both counters of a row; return its estimated number of touches. counts: (2, power of two)."""
    mask = np.uint64(counts.shape[1] - 1)
    mixed = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    a, b = mixed & mask, (mixed >> np.uint64(32)) & mask
    first, second = min(counts[0, a] + 1, 255), min(counts[1, b] + 1, 255)
    counts[0, a], counts[1, b] = first, second
    return min(first, second)


@numba.njit(cache=True)
def _count(counts: NDArray[np.uint8], rows: Rows) -> NDArray[np.uint8]:
    out = np.empty(rows.size, np.uint8)
    for i in range(rows.size):
        out[i] = count_touch(counts, rows[i])
    return out


def make_row_admission(name: str, num_slots: int) -> RowAdmission:
    return AdmitEveryRow() if name == "always" else SecondTouch(num_slots)
