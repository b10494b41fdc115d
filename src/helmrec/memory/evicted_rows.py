"""Recently evicted rows, the hottest on top: a cache that has grown reads these back first."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class GhostRows:
    """A bounded stack of row ids. The coldest rows are evicted first, so the latest are the hottest absent rows."""

    def __init__(self, capacity: int) -> None:
        self._rows = np.empty(max(1, capacity), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, rows: Rows) -> None:
        """Add evicted rows, the hottest last; the oldest entries are dropped when the stack is full."""
        rows = rows[-self._rows.size :]
        kept = min(self._size, self._rows.size - rows.size)
        self._rows[:kept] = self._rows[self._size - kept : self._size]
        self._rows[kept : kept + rows.size] = rows
        self._size = kept + rows.size

    def pop(self, num: int) -> Rows:
        """Remove and return up to `num` rows, the hottest first."""
        taken = self._rows[max(0, self._size - num) : self._size][::-1].copy()
        self._size -= taken.size
        return taken
