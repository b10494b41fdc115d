"""The keeper of tables that all engines of a host share: reads them once, and alone writes their updates.

`python -m helmrec.serve.keeper_process SOCKET OUTGOING INCOMING DOOR ROWS JOURNAL` (descriptors). The memory has no
name and outlives the keeper: one that starts after another was killed finds the tables, and completes what that one had
begun. Ends with the front. Without torch, so that it is small and starts at once, unless it follows a stream of deltas.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from helmrec.collector import PROCESS
from helmrec.config import FixedRowDtype
from helmrec.engine.row_stream import RowStreamStats
from helmrec.memory.row_journal import RowBytes
from helmrec.model.config import ModelConfig
from helmrec.model.folder import VERIFY_BYTES, check_file, find_rows, read_manifest, table_file
from helmrec.model.table_memory import TableFiles, TableMemory
from helmrec.serve.frame_server import FrameServer, ignore_signals, take_link
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.ring import Frame, Link
from helmrec.serve.row_round import (
    CALL_BYTES,
    Action,
    CutOff,
    RoundLimits,
    RowCall,
    RowMessage,
    RowRound,
    Send,
    read_call,
)
from helmrec.serve.wire import FrameKind, unpack_call
from helmrec.types import IntArray, RowPosition

if TYPE_CHECKING:
    from helmrec.serve.keeper_stream import KeeperStream

log = logging.getLogger("helmrec.serve")
_SHORTEST_WAIT_S = 0.005
_LOG_EVERY_S = 5.0


class StreamBegin(msgspec.Struct, frozen=True):
    """The stream of row deltas that a keeper follows."""

    place: str
    slice_rows: int
    rows_per_s: float | None
    stream: str | None  # with `sequence`: the place of the tables in the stream
    sequence: int


class KeeperBegin(msgspec.Struct, frozen=True):
    """First message to a keeper."""

    folder: str  # with the tables
    config: str  # of the model, as JSON
    log_level: str
    secrets: list[str]  # that no log may show
    hold_s: float
    cut_off_s: float
    row_dtype: FixedRowDtype  # of the rows in shared memory
    stream: StreamBegin | None
    has_engines: bool  # whether some may read the tables already


class EndEngine(msgspec.Struct, frozen=True, tag=True):
    """Notice to the front: end an engine that does not let rows be updated."""

    engine: str


class AskSwap(msgspec.Struct, frozen=True, tag=True):
    """Notice to the front: the stream names a model, whose rows have this place in it."""

    folder: str
    version: int
    stream: str
    sequence: int


Notice = EndEngine | AskSwap


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """What a keeper has done since it started."""

    engines: int = 0  # that take part in updates
    updates: int = 0
    rows: int = 0
    turns: int = 0  # of all rounds: more than `updates` if an engine did not hold in time
    cut_off: int = 0  # engines that were ended, since they did not answer
    held_s: float = 0.0  # time in which engines were held, in all
    longest_held_s: float = 0.0
    row_stream: RowStreamStats | None = None  # None: no stream is followed


class Keeper:
    """Writes rows while all engines let them rest. Used in one event loop."""

    def __init__(self, tables: TableMemory, limits: RoundLimits, cut_off: Callable[[str], None]) -> None:
        """`cut_off` is called with an engine that must be ended; it leaves when its connection ends."""
        self._tables = tables
        self._limits = limits
        self._cut_off = cut_off
        self._engines: dict[str, socket.socket] = {}
        self._arriving: dict[str, socket.socket] = {}  # they take part from the next round on
        self._round: RowRound | None = None
        self._answered = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._held_since_s = 0.0
        self.stats = KeeperStats()

    def join(self, engine: str, connection: socket.socket) -> None:
        """Have every later update wait for this engine."""
        connection.setblocking(False)
        self._arriving[engine] = connection
        if self._round is None:
            self._welcome()

    def _welcome(self) -> None:
        loop = asyncio.get_running_loop()
        for engine, connection in self._arriving.items():
            self._engines[engine] = connection
            loop.add_reader(connection, self._receive, engine, connection)
            self._send(engine, RowCall(RowMessage.WELCOME))
        self._arriving = {}
        self.stats = replace(self.stats, engines=len(self._engines))

    async def update(
        self, rows: IntArray, values: RowBytes | Callable[[], RowBytes], position: RowPosition | None = None
    ) -> None:
        """Write rows, which all engines then see. More than the journal takes are written in parts.

        `values` may be a function, which is called when all earlier updates are written.
        """
        async with self._one_at_a_time:
            most, new = self._tables.journal.max_rows, values() if callable(values) else values
            for start in range(0, max(1, rows.size), most):
                some = slice(start, start + most)
                await self._update(rows[some], new[some], position or self._tables.journal.position)

    async def _update(self, rows: IntArray, values: RowBytes, position: RowPosition) -> None:
        number = self._tables.journal.enter(rows, values, position)
        course = self._round = RowRound(self._engines, self._limits, time.monotonic())
        try:
            while not course.is_over:
                self._answered.clear()
                action = course.decide(time.monotonic())
                if action is None:
                    await self._wait(course.next_s() - time.monotonic())
                else:
                    self._act(action, number, course.turn)
        finally:
            self._round = None
            self._welcome()
        done = self.stats
        self.stats = replace(done, updates=done.updates + 1, rows=done.rows + rows.size, turns=done.turns + course.turn)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._answered.wait(), max(_SHORTEST_WAIT_S, seconds))

    def _act(self, action: Action, number: int, turn: int) -> None:
        if isinstance(action, Send):
            if action.message is RowMessage.HOLD:
                self._held_since_s = time.monotonic()
            for engine in action.engines:
                self._send(engine, RowCall(action.message, number, turn))
            if action.message is RowMessage.RELEASED:
                self._count_hold()
        elif isinstance(action, CutOff):
            self.stats = replace(self.stats, cut_off=self.stats.cut_off + len(action.engines))
            for engine in action.engines:
                log.error("an engine does not let rows be updated, and is ended", extra={"engine": engine})
                self._cut_off(engine)
        else:
            self._tables.journal.write(self._tables.write)
            for engine in list(self._engines):
                self._send(engine, RowCall(RowMessage.WRITTEN, number, turn))
            self._count_hold()

    def _count_hold(self) -> None:
        held_s, before = time.monotonic() - self._held_since_s, self.stats
        self.stats = replace(before, held_s=before.held_s + held_s, longest_held_s=max(before.longest_held_s, held_s))

    def _send(self, engine: str, call: RowCall) -> None:
        try:
            self._engines[engine].send(call.packed())
        except BlockingIOError:
            log.warning("an engine does not read what its keeper sends", extra={"engine": engine})
        except OSError:
            self._leave(engine)

    def _receive(self, engine: str, connection: socket.socket) -> None:
        try:
            data = connection.recv(CALL_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave(engine)
        elif self._round is not None:
            call = read_call(data)
            self._round.answer(engine, call.message, call.turn)
            self._answered.set()

    def _leave(self, engine: str) -> None:
        connection = self._engines.pop(engine, None)
        if connection is None:
            return
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        if self._round is not None:
            self._round.leave(engine)
            self._answered.set()
        self.stats = replace(self.stats, engines=len(self._engines))

    def close(self) -> None:
        """Leave all engines; they serve on."""
        self._welcome()
        for engine in list(self._engines):
            self._leave(engine)


class KeeperProcess(FrameServer):
    """Answers the front's frames: engines that join, and updates of rows."""

    def __init__(self, link: Link, door: socket.socket, files: TableFiles) -> None:
        super().__init__(link)
        self._door = door
        self._files = files
        self._keeper: Keeper | None = None
        self._stream: KeeperStream | None = None

    async def _close(self) -> None:
        if self._stream is not None:
            await asyncio.to_thread(self._stream.close)
        if self._keeper is not None:
            self._keeper.close()
        self._door.close()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == FrameKind.BEGIN:
            self._start(self._begin(msgspec.msgpack.decode(bytes(frame.payload), type=KeeperBegin)))
        elif frame.kind == FrameKind.END:
            self._is_over.set()
        else:
            name, arguments = unpack_call(frame.payload)
            calls: dict[str, Callable[..., Awaitable[Any]]] = {
                "join": self._join,
                "write": self._write,
                "stats": self._stats,
                "follow": self._follow,
                "reject_model": self._reject_model,
            }
            value = calls[name](**arguments)
            self._start(self._reply(FrameKind.VALUE, frame.call, value))

    async def _begin(self, begin: KeeperBegin) -> None:
        try:
            log_to_stderr(begin.log_level, begin.secrets)
            tables = await asyncio.to_thread(load_tables, begin, self._files)
            limits = RoundLimits(hold_s=begin.hold_s, cut_off_s=begin.cut_off_s)
            self._keeper = Keeper(tables, limits, self._ask_to_end)
            if begin.stream is not None:
                await self._read_stream(begin.stream, tables, catches_up=not begin.has_engines)
        except Exception as error:
            self._give_up(error)
            return
        self._answer(FrameKind.READY, 0, [])

    async def _read_stream(self, begin: StreamBegin, tables: TableMemory, *, catches_up: bool) -> None:
        """Read the stream ahead. `catches_up`: apply what it holds, since no engine reads the tables yet."""
        from helmrec.serve.keeper_stream import follow  # noqa: PLC0415 - torch, which only a stream needs

        self._stream = follow(begin, self._files, tables, self._ready_keeper(), self._notify)
        await asyncio.to_thread(self._stream.start)
        if catches_up:
            await asyncio.to_thread(self._stream.catch_up)

    def _ask_to_end(self, engine: str) -> None:
        self._notify(msgspec.msgpack.encode(EndEngine(engine)))

    def _notify(self, notice: bytes) -> None:
        self._answer(FrameKind.NOTICE, 0, [notice])

    def _ready_keeper(self) -> Keeper:
        assert self._keeper is not None, "the front sends calls when the keeper is ready"
        return self._keeper

    async def _join(self, engine: str) -> None:
        _, (connection,), _, _ = socket.recv_fds(self._door, 1, 1)
        self._ready_keeper().join(engine, socket.socket(fileno=connection))

    async def _write(self, rows: bytes, values: bytes) -> None:
        """`rows`: ids as 64-bit integers; `values`: as the tables have them."""
        ids = np.frombuffer(rows, np.int64)
        await self._ready_keeper().update(ids, np.frombuffer(values, np.uint8).reshape(ids.size, -1))

    async def _stats(self) -> KeeperStats:
        stream = None if self._stream is None else self._stream.stats()
        return replace(self._ready_keeper().stats, row_stream=stream)

    async def _follow(self) -> None:
        """Apply the stream from now on: the front has sent the list of all engines."""
        if self._stream is not None:
            self._stream.apply()

    async def _reject_model(self, reason: str) -> None:
        assert self._stream is not None, "only a stream names models"
        self._stream.reject_model(reason)


def load_tables(begin: KeeperBegin, files: TableFiles) -> TableMemory:
    """Map the tables, and fill them from their folder if no earlier keeper has: it may be gone by then."""
    config, started_s = ModelConfig.model_validate_json(begin.config), time.monotonic()
    tables = TableMemory(config, files, begin.row_dtype)
    if was_loaded := tables.journal.is_loaded:
        tables.load({}, tables.journal.position, _log_progress())
    else:
        folder, stream = Path(begin.folder), begin.stream
        manifest = read_manifest(folder)
        for table in config.tables:
            name, record = table_file(table.name), manifest.files[table_file(table.name)]
            check_file(folder / name, record, verify=record.bytes <= VERIFY_BYTES, progress=lambda _: None)
        spans = {table.name: find_rows(folder, table, config) for table in config.tables}
        if stream is not None and stream.stream is not None:
            tables.journal.note_stream(stream.stream)
        tables.load(spans, RowPosition(0 if stream is None else stream.sequence), _log_progress())
    fields = {"bytes": tables.num_bytes, "seconds": round(time.monotonic() - started_s, 3)}
    log.info("tables found" if was_loaded else "tables loaded", extra=fields)
    return tables


def _log_progress() -> Callable[[int, int], None]:
    """Return a function that logs how far the tables are, now and then."""
    logged_s = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - logged_s[0] >= _LOG_EVERY_S:
            logged_s[0] = time.monotonic()
            log.info("loading tables", extra={"share": f"{done / total:.0%}", "bytes": total})

    return progress


def main(arguments: list[str]) -> None:
    ignore_signals()
    PROCESS.take_over()
    end, outgoing, incoming, door, rows, journal = map(int, arguments)
    for descriptor in (door, rows, journal):
        os.set_inheritable(descriptor, False)
    link = take_link(end, outgoing, incoming)
    asyncio.run(KeeperProcess(link, socket.socket(fileno=door), TableFiles(rows, journal)).run())


if __name__ == "__main__":
    main(sys.argv[1:])
