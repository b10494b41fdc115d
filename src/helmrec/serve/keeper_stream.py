"""The keeper of shared tables as the one consumer of a stream of row deltas on its host.

A thread reads, checks and converts deltas; another has the keeper write each slice once, which all engines then see.
The position is in the journal of the tables, so a keeper that starts after another was killed goes on from there.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from helmrec.deltas.consumer import ConsumerLimits, RowConsumer, StreamStart
from helmrec.deltas.delta import NamedModel
from helmrec.deltas.source import open_source
from helmrec.engine.intake import RowUpdate
from helmrec.engine.row_stage import SentRows
from helmrec.engine.row_stream import RowStreamStats
from helmrec.engine.row_values import new_values
from helmrec.engine.runner import StagedRows
from helmrec.memory.row_journal import RowBytes
from helmrec.model.config import ModelConfig
from helmrec.model.shared_tables import SharedTables, row_bytes_of
from helmrec.model.table_memory import TableFiles, TableMemory
from helmrec.serve.keeper_process import AskSwap, Keeper, StreamBegin
from helmrec.types import RowPosition

log = logging.getLogger("helmrec.serve")
_IDLE_WAIT_S = 0.05  # for the next delta; the lag is looked at as often
_BUDGET_WAIT_S = 0.005  # while `row_rate` allows no further slice
_FAILED = 70  # exit code of a keeper that could not write an update


class KeptRows:
    """Shared tables as a consumer writes them: through the keeper, in agreement with all engines."""

    def __init__(
        self, config: ModelConfig, tables: SharedTables, keeper: Keeper, stream: Callable[[], str | None]
    ) -> None:
        """Made in the event loop of the keeper; used in other threads. `stream` returns the one that rows are from."""
        self.model_config = config
        self._journal, self._master = tables.journal, tables.master
        self._stream = stream
        self._keeper, self._loop = keeper, asyncio.get_running_loop()

    def stage_rows(self, update: RowUpdate) -> StagedRows:
        """Convert rows to the type of the tables. Differences wait for the rows that they are added to.

        Tables in eight bits refuse differences when they are applied: the stream stops there.
        """
        if update.is_added is not None:
            return StagedRows(update.rows, sent=None, differences=update)
        return StagedRows(update.rows, SentRows(update.rows, new_values(self._master, update)))

    def apply_rows(self, update: StagedRows, position: RowPosition | None = None) -> None:
        """Write rows when all engines let them rest; return when it is done."""
        if (stream := self._stream()) is not None:
            self._journal.note_stream(stream)
        written = self._keeper.update(update.rows, partial(self._final_values, update), position)
        asyncio.run_coroutine_threadsafe(written, self._loop).result()

    def start_at(self, position: RowPosition) -> None:
        """The journal has the position."""

    def _final_values(self, update: StagedRows) -> RowBytes:
        """Return the values to write; called when no other update can come before."""
        if update.differences is not None:
            return row_bytes_of(new_values(self._master, update.differences))
        assert update.sent is not None, "only differences are not converted ahead"
        first = update.sent.first
        return row_bytes_of(update.sent.values[first : first + update.rows.size])


class KeeperStream:
    """Follows a stream for shared tables."""

    def __init__(
        self,
        begin: StreamBegin,
        tables: SharedTables,
        config: ModelConfig,
        keeper: Keeper,
        notify: Callable[[bytes], None],
    ) -> None:
        """`notify` sends a notice to the front; called in the event loop."""
        self._loop, self._notify = asyncio.get_running_loop(), notify
        rows, journal = KeptRows(config, tables, keeper, lambda: self._consumer.stream), tables.journal
        limits = ConsumerLimits(slice_rows=min(begin.slice_rows, journal.max_rows), rows_per_s=begin.rows_per_s)
        start = StreamStart(journal.stream, journal.position.sequence, journal.position.offset)
        self._consumer = RowConsumer(open_source(begin.place), rows, start, limits)
        self._consumer.follow_models(self._ask_for_swap)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._apply, name="helmrec-keeper-rows", daemon=True)

    def start(self) -> None:
        """Read ahead. Blocks while the checks of deltas are compiled."""
        self._consumer.start()

    def catch_up(self) -> None:
        """Apply what the stream holds, before any engine reads the tables."""
        self._consumer.catch_up()

    def apply(self) -> None:
        """Apply deltas from now on: the keeper knows all engines."""
        self._thread.start()

    def stats(self) -> RowStreamStats:
        return self._consumer.stats()

    def reject_model(self, reason: str) -> None:
        self._consumer.reject_model(reason)

    def close(self) -> None:
        """Read and apply no more. A slice that is being written waits for engines, and is not waited for."""
        self._over.set()
        self._consumer.close()

    def _ask_for_swap(self, model: NamedModel, start: StreamStart) -> None:
        asked = AskSwap(model.folder, model.version, start.stream or "", start.sequence)
        self._loop.call_soon_threadsafe(self._notify, msgspec.msgpack.encode(asked))

    def _apply(self) -> None:
        try:
            while not self._over.is_set():
                if not self._consumer.apply(time.monotonic()):
                    self._consumer.wait(_IDLE_WAIT_S)
                    self._over.wait(_BUDGET_WAIT_S)
        except Exception:  # engines serve on, and the front starts another keeper, which goes on from the journal
            if self._over.is_set():
                return
            log.exception("a slice of row deltas could not be written; this keeper ends")
            logging.shutdown()
            os._exit(_FAILED)


def follow(
    begin: StreamBegin, files: TableFiles, loaded: TableMemory, keeper: Keeper, notify: Callable[[bytes], None]
) -> KeeperStream:
    """Make the stream of a keeper whose tables are loaded."""
    config = loaded.config
    return KeeperStream(begin, SharedTables(config, files, loaded.row_dtype), config, keeper, notify)
