"""When updated rows make KV stale: at once, or later for tables whose KV may lag behind."""

from collections import deque
from typing import NamedTuple

import numpy as np

from helmrec.config import EngineConfig
from helmrec.errors import ConfigError
from helmrec.memory.prefix_hash import RowEpochs
from helmrec.model.config import ModelConfig
from helmrec.types import IntArray


class _Late(NamedTuple):
    """Rows whose change counts from `due_s` on."""

    due_s: float
    rows: IntArray


class RowMarks:
    """Marks changed rows in the epochs. Every update begins an epoch, so that no old value is admitted after it."""

    def __init__(self, epochs: RowEpochs, model: ModelConfig, config: EngineConfig) -> None:
        """ConfigError if `kv_freshness` names a table that the model does not have."""
        given = config.kv_freshness if isinstance(config.kv_freshness, dict) else {}
        sizes = {table.name: table.num_rows for table in model.tables}
        if unknown := given.keys() - sizes.keys():
            name = min(unknown)
            raise ConfigError(f"kv_freshness.{name}: the model has no such table, only {', '.join(sizes)}")
        self._epochs = epochs
        self._late: dict[float, deque[_Late]] = {}  # by lag: each in the order of time
        self._tables = [
            (lag, model.offsets[name], model.offsets[name] + sizes[name])
            for name, lag in given.items()
            if isinstance(lag, float)
        ]

    def mark(self, rows: IntArray, now: float) -> None:
        """Count these rows as changed: those of lagging tables after their lag, all others at once."""
        if not self._tables:
            self._epochs.mark(rows)
            return
        at_once = np.ones(rows.size, np.bool_)
        for lag, first, end in self._tables:
            of_table = (rows >= first) & (rows < end)
            if of_table.any():
                self._late.setdefault(lag, deque()).append(_Late(now + lag, rows[of_table]))
                at_once &= ~of_table
        self._epochs.mark(rows[at_once])

    def mark_due(self, now: float) -> None:
        """Count the rows as changed whose lag is over."""
        for late in self._late.values():
            due: list[IntArray] = []
            while late and late[0].due_s <= now:
                due.append(late.popleft().rows)
            if due:
                self._epochs.mark(np.concatenate(due))
