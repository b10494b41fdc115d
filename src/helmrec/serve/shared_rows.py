"""The engine's side of tables that all engines of a host share: it lets its rows rest while the keeper writes them.

Tables come through a door, a socket for descriptors; messages of the keeper through a socket of their own. If the
keeper ends while it writes, the engine completes the write from the journal and serves on; the front starts another
keeper, which comes through the door.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from helmrec.config import FixedRowDtype
from helmrec.deltas.consumer import SwapModel
from helmrec.engine.engine import Engine
from helmrec.engine.row_stream import RowStreamStats
from helmrec.engine.runner import StagedRows
from helmrec.errors import EngineClosed
from helmrec.memory.row_journal import JournalEntry
from helmrec.model.config import ModelConfig
from helmrec.model.folder import read_manifest
from helmrec.model.shared_tables import SharedTables, rows_of_bytes
from helmrec.model.table_memory import TableFiles
from helmrec.serve.row_round import CALL_BYTES, RowCall, RowMessage, read_call
from helmrec.types import IntArray

log = logging.getLogger("helmrec.serve")
_PAYLOAD_BYTES = 16_384
_NUM_FILES = 3  # rows, journal, connection
_FEW_ROWS = 1 << 20
_FAILED = 70  # exit code of an engine that could not take an update


class SharedRows:
    """Follows the updates of one model's shared tables for one engine. Its thread alone talks to the keeper."""

    def __init__(self, config: ModelConfig, files: TableFiles, row_dtype: FixedRowDtype = "model") -> None:
        """row_dtype: of the rows in these tables."""
        self.tables = SharedTables(config, files, row_dtype)
        self._engine: Engine | None = None
        self._made: Engine | None = None
        self._missed = _RowSet()  # that changed before the engine served
        self._is_at_rest = threading.Lock()  # held while the keeper may write, and while an engine is attached
        self._is_known = threading.Event()  # to the keeper: from then on it waits for this engine
        self._connection: socket.socket | None = None
        self.is_over = False

    def connect(self, connection: socket.socket) -> None:
        """Listen to a keeper, the first one or one that comes after the last has ended."""
        self._connection = connection
        threading.Thread(target=self._listen, args=(connection,), name="helmrec-shared-rows", daemon=True).start()

    def wait(self) -> None:
        """Wait until the keeper knows this engine: only then may rows be read."""
        self._is_known.wait()

    def follow_with(self, engine: Engine) -> None:
        """Name the engine that `start` attaches."""
        self._made = engine

    def start(self) -> None:
        """Let the engine take part in updates from now on; give it the rows that changed while it started."""
        assert self._made is not None
        with self._is_at_rest:
            self._made.reread_rows(self._missed.rows())
            self._made.start_at(self.tables.journal.position)
            self._engine, self._missed = self._made, _RowSet()

    def catch_up(self) -> None:
        """The tables are always up to date."""

    def apply(self, now: float) -> bool:
        """Return False: updates are made visible by the thread that listens to the keeper."""
        return False

    def stats(self) -> RowStreamStats | None:
        """Return None: the keeper follows the stream."""
        return None

    def follow_models(self, swap: SwapModel) -> None:
        """The keeper follows the stream, and the front swaps."""

    def reject_model(self, reason: str) -> None:
        """See `follow_models`."""

    def close(self) -> None:
        """Take part no more. The engine must launch no more steps."""
        self.is_over = True
        with self._rest():  # running steps have read their rows
            if self._connection is not None:
                with suppress(OSError):  # the keeper has ended
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._obey(connection)
        except Exception:  # its rows may be old now, so it must not serve on: the front starts another engine
            log.exception("an update of shared rows failed; this engine ends")
            logging.shutdown()
            os._exit(_FAILED)
        if not self.is_over:
            log.warning("the keeper of the tables ended; serving goes on")

    def _obey(self, connection: socket.socket) -> None:
        """Do what the keeper says until it ends."""
        new: _NewRows | None = None
        while (call := _receive(connection)) is not None:
            if call.message is RowMessage.WELCOME:
                self._is_known.set()
            elif call.message is RowMessage.ASK:
                new = self._take(call.number, new)
                with self._rest():
                    pass  # the engine comes between two steps: it does not hang
                _send(connection, RowCall(RowMessage.HAS, call.number, call.turn))
            elif call.message is RowMessage.HOLD:
                assert new is not None, "an engine is held for an update that it does not have"
                self._hold(connection, call, new)

    def _take(self, number: int, before: "_NewRows | None") -> "_NewRows":
        """Copy the update in the journal to where it is made visible at once, beside running steps."""
        if before is not None and before.entry.number == number:  # asked again
            return before
        entry, engine = self.tables.journal.entry(), self._engine
        return _NewRows(entry, None if engine is None else self._stage(entry, engine))

    def _stage(self, entry: JournalEntry, engine: Engine) -> StagedRows:
        return engine.stage_stored(entry.rows, rows_of_bytes(entry.values, self.tables.master.codec.stored_dtype))

    def _hold(self, connection: socket.socket, call: RowCall, new: "_NewRows") -> None:
        """Read no row until the update is written or given up; then make it visible if it is written."""
        with self._is_at_rest, self._rest() as engine:
            _send(connection, RowCall(RowMessage.HELD, call.number, call.turn))
            answer, journal = _receive(connection), self.tables.journal
            if answer is None:  # the keeper has ended, perhaps while it wrote
                self.tables.redo()
            if journal.done >= new.entry.number if answer is None else answer.message is RowMessage.WRITTEN:
                self._make_visible(new, engine)

    def _make_visible(self, new: "_NewRows", engine: Engine | None) -> None:
        if engine is None:
            self._missed.add(new.entry.rows)
            return
        engine.apply_rows(new.staged or self._stage(new.entry, engine), new.entry.position)

    @contextmanager
    def _rest(self) -> Iterator[Engine | None]:
        """Let the engine's rows rest; None if there is no engine that reads rows."""
        with ExitStack() as resting:
            engine = self._engine
            if engine is not None:
                try:
                    resting.enter_context(engine.rows_at_rest())
                except EngineClosed:
                    engine = None
            yield engine


class _NewRows(NamedTuple):
    """An update that the keeper is about to write."""

    entry: JournalEntry
    staged: StagedRows | None  # None: no engine served when it came


class _RowSet:
    """Rows, each once: a stream changes the same ones again and again."""

    def __init__(self) -> None:
        self._distinct = np.zeros(0, np.int64)
        self._others: list[IntArray] = []
        self._num_others = 0

    def add(self, rows: IntArray) -> None:
        self._others.append(rows)
        self._num_others += rows.size
        if self._num_others > max(_FEW_ROWS, self._distinct.size):
            self.rows()

    def rows(self) -> IntArray:
        """Return the rows in ascending order."""
        self._distinct = np.unique(np.concatenate([self._distinct, *self._others]))
        self._others, self._num_others = [], 0
        return self._distinct


def _receive(connection: socket.socket) -> RowCall | None:
    """Return the next message; None at the end of the keeper."""
    try:
        data = connection.recv(CALL_BYTES)
    except OSError:
        return None
    return read_call(data) if data else None


def _send(connection: socket.socket, call: RowCall) -> None:
    try:
        connection.send(call.packed())
    except OSError:
        log.debug("the keeper has ended")  # as the next receive finds


class TableDoor:
    """Takes shared tables as the front sends them."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._changed = threading.Condition()
        self._rows: dict[str, SharedRows] = {}  # by the name of the tables
        self._unused: dict[Path, SharedRows] = {}  # by the folder of the model
        self._is_closed = False
        threading.Thread(target=self._take, name="helmrec-table-door", daemon=True).start()

    def wait_for(self, model: Path) -> SharedRows:
        """Return new tables of a model, once they are there and their keeper knows this engine."""
        with self._changed:
            self._changed.wait_for(lambda: model in self._unused or self._is_closed)
            if model not in self._unused:
                raise EngineClosed("the front has ended")
            rows = self._unused.pop(model)
        rows.wait()
        return rows

    def _take(self) -> None:
        while True:
            try:
                payload, files, _, _ = socket.recv_fds(self._door, _PAYLOAD_BYTES, _NUM_FILES)
            except OSError:
                break
            if not payload:
                break
            rows, journal, connection = files
            name, row_dtype, model = payload.decode().split(" ", 2)
            with self._changed:
                tables = self._enter(name, Path(model), TableFiles(rows, journal), cast("FixedRowDtype", row_dtype))
                tables.connect(socket.socket(fileno=connection))
                self._changed.notify_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _enter(self, name: str, model: Path, files: TableFiles, row_dtype: FixedRowDtype) -> SharedRows:
        """Return the tables of this name; they may be known from an earlier keeper."""
        self._rows = {known: rows for known, rows in self._rows.items() if not rows.is_over}
        if name not in self._rows:
            self._rows[name] = self._unused[model] = SharedRows(read_manifest(model).model, files, row_dtype)
        files.close()
        return self._rows[name]
