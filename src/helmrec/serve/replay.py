"""What admin calls have set, kept by the front so that an engine that is started again can be told.

Of every row that was replaced, the last values are kept, up to a bound; what is beyond it is counted, and told of.
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


class Replay:
    """Alpha, mode and rows as they were set last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._alpha: float | None = None
        self._mode: Mode | None = None
        self._rows: dict[str, dict[int, NDArray[np.float32]]] = {}
        self._num_bytes = 0
        self.num_lost = 0  # rows set that an engine started again would not have

    def note_alpha(self, alpha: float) -> None:
        self._alpha = alpha

    def note_mode(self, mode: Mode) -> None:
        self._mode = mode

    def note_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Values that an engine has taken."""
        kept = self._rows.setdefault(table, {})
        for row, new in zip(ids, np.asarray(values, np.float32), strict=True):
            if row in kept or self._num_bytes + new.nbytes + _ROW_OVERHEAD_BYTES <= self._max_bytes:
                self._num_bytes += 0 if row in kept else new.nbytes + _ROW_OVERHEAD_BYTES
                kept[int(row)] = new.copy()
            else:
                self.num_lost += 1

    def forget_rows(self) -> None:
        """They were of a model that is not served any more."""
        self._rows.clear()
        self._num_bytes = self.num_lost = 0

    def calls(self, max_bytes: int) -> Iterator[AdminCall]:
        """What to tell an engine, in an order that works, no call much longer than so many bytes."""
        if self._alpha is not None:
            yield AdminCall("move_alpha", {"alpha": self._alpha})
        if self._mode is not None:
            yield AdminCall("set_mode", {"mode": self._mode})
        for table, rows in self._rows.items():
            ids = list(rows)
            step = max(1, max_bytes // (_NUMBER_BYTES * (1 + rows[ids[0]].size)))
            for start in range(0, len(ids), step):
                some = ids[start : start + step]
                values = [rows[row].tolist() for row in some]
                yield AdminCall("update_rows", {"table": table, "ids": some, "values": values})
