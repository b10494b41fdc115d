"""What admin calls have set, kept by the front so that an engine that is started again can be given it.

Of every row that was replaced, the last values are kept, up to a bound; rows beyond it are counted. Rows belong to the
model they were set on: each is kept with the number of swaps that came before it.
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
    """A call of an engine's port."""

    name: str
    arguments: dict[str, Any]


class _Table(NamedTuple):
    """A table of one of the models an engine serves one after the other."""

    num_swaps: int  # before the model came
    name: str


class Replay:
    """Alpha, mode and rows as they were set last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._alpha: float | None = None
        self._mode: Mode | None = None
        self._num_swaps = 0  # of the engine that runs, as far as they have ended
        self._rows: dict[_Table, dict[int, NDArray[np.float32]]] = {}
        self._num_bytes = 0
        self.num_lost = 0  # rows set that an engine started again would not have

    def note_alpha(self, alpha: float) -> None:
        self._alpha = alpha

    def note_mode(self, mode: Mode) -> None:
        self._mode = mode

    def note_rows(self, table: str, ids: Ids, values: ArrayLike, num_swaps: int = 0) -> None:
        """Keep values that an engine has taken after so many swaps; not those of a model it has since let go."""
        if num_swaps < self._num_swaps:
            return
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

    def note_swap(self) -> None:
        """A swap has ended: rows of the model before it are not served any more. Those set since on the new one are."""
        self._num_swaps += 1
        self.num_lost = 0
        self._rows = {table: rows for table, rows in self._rows.items() if table.num_swaps >= self._num_swaps}
        self._count_bytes()

    def note_start(self) -> int:
        """An engine starts with the model swapped in last, and counts swaps anew.

        Returns how many rows were set on a model whose swap did not end: they are gone with it.
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
        """Rows to set on the model swapped in last, no call much longer than so many bytes. Scores depend on them."""
        for (num_swaps, table), rows in self._rows.items():
            if num_swaps != self._num_swaps:
                continue
            ids = list(rows)
            step = max(1, max_bytes // (_NUMBER_BYTES * (1 + rows[ids[0]].size)))
            for start in range(0, len(ids), step):
                some = ids[start : start + step]
                values = [rows[row].tolist() for row in some]
                yield AdminCall("update_rows", {"table": table, "ids": some, "values": values})

    def setting_calls(self) -> Iterator[AdminCall]:
        """Alpha and mode, where they were set. No score depends on them."""
        if self._alpha is not None:
            yield AdminCall("move_alpha", {"alpha": self._alpha})
        if self._mode is not None:
            yield AdminCall("set_mode", {"mode": self._mode})

    def check(self) -> None:
        assert all(self._rows.values()), "a table without rows is kept"
        assert all(table.num_swaps >= self._num_swaps for table in self._rows), "rows of a model that is gone are kept"
        kept = [row for rows in self._rows.values() for row in rows.values()]
        assert self._num_bytes == sum(row.nbytes + _ROW_OVERHEAD_BYTES for row in kept) <= self._max_bytes
