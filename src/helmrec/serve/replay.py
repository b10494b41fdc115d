"""Values set by admin calls, kept by the front to set them again on a restarted engine.

The last values of every updated row are kept, up to a bound in bytes; rows beyond it are counted. Rows belong to a
model: each is kept with the number of model swaps before it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from helmrec.control.rebalancer import Mode
from helmrec.types import Ids

_ROW_OVERHEAD_BYTES = 200  # of keeping a row in a dictionary
_NUMBER_BYTES = 9  # of a number on the wire


class AdminCall(NamedTuple):
    """A call of a port's method."""

    name: str
    arguments: dict[str, Any]


class _Table(NamedTuple):
    """A table of a model, identified by the number of swaps before it."""

    num_swaps: int
    name: str


class Replay:
    """Alpha, mode and rows as set last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._alpha: float | None = None
        self._mode: Mode | None = None
        self._num_swaps = 0  # completed swaps of the running engine
        self._rows: dict[_Table, dict[int, NDArray[np.float32]]] = {}
        self._num_bytes = 0
        self.num_lost = 0  # updated rows that a restarted engine would not have
        self.num_noted = 0  # updates so far

    def note_alpha(self, alpha: float) -> None:
        self._alpha = alpha

    def note_mode(self, mode: Mode) -> None:
        self._mode = mode

    def note_rows(self, table: str, ids: Ids, values: ArrayLike, num_swaps: int = 0) -> None:
        """Keep row values set after `num_swaps` swaps. Those of a model that was swapped out since are ignored."""
        if num_swaps < self._num_swaps:
            return
        self.num_noted += 1
        kept = self._rows.get(_Table(num_swaps, table), {})
        for row, new in zip(ids, np.asarray(values, np.float32), strict=True):
            num_bytes = 0 if row in kept else new.nbytes + _ROW_OVERHEAD_BYTES
            if self._num_bytes + num_bytes <= self._max_bytes:
                self._num_bytes += num_bytes
                kept[int(row)] = new.copy()
            else:
                self.num_lost += 1
        if kept:
            self._rows[_Table(num_swaps, table)] = kept

    def note_rows_of_next(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Keep row values for the next engine, which serves the last completely swapped model."""
        self.note_rows(table, ids, values, self._num_swaps)

    def note_swap(self) -> None:
        """Record a completed swap: drop the rows of the old model, and keep those set on the new one."""
        self._num_swaps += 1
        self.num_lost = 0
        self._rows = {table: rows for table, rows in self._rows.items() if table.num_swaps >= self._num_swaps}
        self._count_bytes()

    def note_start(self) -> int:
        """Record the start of an engine, which serves the last completely swapped model and counts swaps from 0.

        Returns the number of rows dropped because they were set on a model whose swap did not complete.
        """
        num_before, last = self._num_rows, self._num_swaps
        self._rows = {_Table(0, table.name): rows for table, rows in self._rows.items() if table.num_swaps == last}
        self._num_swaps = 0
        self._count_bytes()
        return num_before - self._num_rows

    @property
    def _num_rows(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def _count_bytes(self) -> None:
        kept = [row for rows in self._rows.values() for row in rows.values()]
        self._num_bytes = sum(row.nbytes + _ROW_OVERHEAD_BYTES for row in kept)

    def row_calls(self, max_bytes: int) -> Iterator[AdminCall]:
        """Yield the calls that set all kept rows, each of about `max_bytes` at most. Scores depend on them."""
        for (num_swaps, table), rows in list(self._rows.items()):  # more may be noted between two calls
            if num_swaps != self._num_swaps:
                continue
            ids = list(rows)
            step = max(1, max_bytes // (_NUMBER_BYTES * (1 + rows[ids[0]].size)))
            for start in range(0, len(ids), step):
                some = ids[start : start + step]
                values = [rows[row].tolist() for row in some]
                yield AdminCall("update_rows", {"table": table, "ids": some, "values": values})

    def setting_calls(self) -> Iterator[AdminCall]:
        """Yield the calls that set alpha and mode, if they were set. No score depends on them."""
        if self._alpha is not None:
            yield AdminCall("move_alpha", {"alpha": self._alpha})
        if self._mode is not None:
            yield AdminCall("set_mode", {"mode": self._mode})

    def check(self) -> None:
        assert all(self._rows.values()), "a table without rows is kept"
        assert all(table.num_swaps >= self._num_swaps for table in self._rows), "rows of an old model are kept"
        kept = [row for rows in self._rows.values() for row in rows.values()]
        assert self._num_bytes == sum(row.nbytes + _ROW_OVERHEAD_BYTES for row in kept) <= self._max_bytes
