"""Rows that were evicted lately, the hottest of them on top: what a cache that has grown should take back first."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class GhostRows:
    """A bounded stack of row ids. Evictions take the coldest first, so the latest evicted are the hottest absent."""

    def __init__(self, capacity: int) -> None:
        self._rows = np.empty(max(1, capacity), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, rows: Rows) -> None:
        """These rows were evicted, the hottest last; the oldest ghosts make room."""
        rows = rows[-self._rows.size :]
        kept = min(self._size, self._rows.size - rows.size)
        self._rows[:kept] = self._rows[self._size - kept : self._size]
        self._rows[kept : kept + rows.size] = rows
        self._size = kept + rows.size

    def pop(self, num: int) -> Rows:
        """Up to `num` ghosts, the hottest first; they are forgotten."""
        taken = self._rows[max(0, self._size - num) : self._size][::-1].copy()
        self._size -= taken.size
        return taken
