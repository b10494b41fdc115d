"""The front's side of the keeper: owns the memory of the tables, runs the keeper, and brings engines to it.

While no keeper runs, engines serve on and updates wait.
"""

import asyncio
import itertools
import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from numpy.typing import ArrayLike

from helmrec.config import FixedRowDtype
from helmrec.deltas.consumer import StreamStart, SwapModel
from helmrec.deltas.delta import NamedModel
from helmrec.deltas.snapshot import newest_snapshot, read_start
from helmrec.deltas.source import open_source
from helmrec.engine.intake import prepare_rows
from helmrec.engine.row_stream import RowStreamStats
from helmrec.engine.row_values import compile_updates, stored
from helmrec.errors import EngineClosed, QueueFull
from helmrec.model.folder import DENSE, read_manifest
from helmrec.model.shared_tables import row_bytes_of, row_codec
from helmrec.model.table_memory import TableFiles
from helmrec.redaction import secrets_in_url
from helmrec.serve.child_process import ChildProcess
from helmrec.serve.keeper_process import AskSwap, EndEngine, KeeperBegin, KeeperStats, Notice, StreamBegin
from helmrec.serve.port import Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.ring import Frame, Link
from helmrec.serve.row_round import RoundLimits
from helmrec.serve.settings import ServeConfig
from helmrec.types import Ids

log = logging.getLogger("helmrec.serve")
_LOOK_EVERY_S = 0.02
_ANSWER_S = 1.0  # for its state, which callers can do without


class RowKeeper(ChildProcess):
    """The tables of one model, shared by engine processes. Used in one event loop."""

    kind = "keeper"
    module = "helmrec.serve.keeper_process"
    hang_s = 10.0

    def __init__(
        self,
        model: Path,
        serve: ServeConfig,
        limits: RoundLimits | None = None,
        start: StreamStart | None = None,
        row_dtype: FixedRowDtype = "model",
    ) -> None:
        """Keep the tables of a model, or of its newest snapshot, and follow the stream of row deltas if there is one.

        `start`: the tables are those of the model itself, which have this place in the stream. `row_dtype`: of the rows
        in shared memory.
        """
        super().__init__(serve.ring_bytes, {"CUDA_VISIBLE_DEVICES": ""})
        limits, place = limits or RoundLimits(), _find_tables(model, serve, start)
        self.model = place.model  # with the dense weights that engines load
        self.config = read_manifest(self.model).model
        self._begin = KeeperBegin(
            folder=str(place.tables),
            config=self.config.model_dump_json(),
            log_level=serve.log_level,
            secrets=list(secrets_in_url(serve.row_deltas or "")),
            hold_s=limits.hold_s,
            cut_off_s=limits.cut_off_s,
            row_dtype=row_dtype,
            stream=_stream_of(serve, place),
            has_engines=False,
        )
        self._limits = limits
        self.files = TableFiles.create(self.config, row_dtype)
        self._codec = row_codec(self.config, row_dtype)
        self._swap: SwapModel | None = None
        self._name = secrets.token_hex(8)  # of the tables: a model may be loaded twice
        self._engines: dict[ProcessPort, socket.socket] = {}  # with the doors of their processes
        self._names: dict[str, ProcessPort] = {}  # of the engines that this keeper knows
        self._numbers = itertools.count()
        self._introductions: set[asyncio.Task[None]] = set()
        self._door: socket.socket | None = None
        self._their_door: socket.socket | None = None
        self._converting, self._one_at_a_time = asyncio.Lock(), asyncio.Lock()
        self._row_stream: RowStreamStats | None = None

    # Engines.

    def enter(self, engine: ProcessPort, door: socket.socket) -> None:
        """Give the tables to a new process of this engine, through this socket, when they are there."""
        self._engines[engine] = door
        if self.health is Health.READY and self._link is not None:
            task = asyncio.create_task(self._introduce_if_both_live(engine, self._link))
            self._introductions.add(task)
            task.add_done_callback(self._introductions.discard)

    def leave(self, engine: ProcessPort) -> None:
        """The process of this engine has ended, or uses other tables."""
        self._engines.pop(engine, None)
        self._names = {name: other for name, other in self._names.items() if other is not engine}

    async def _introduce_if_both_live(self, engine: ProcessPort, link: Link) -> None:
        try:
            await self._introduce(engine, link)
        except EngineClosed:
            log.debug("a keeper ended while an engine attached")  # the next one gets the list of all engines

    async def _introduce_all(self, link: Link) -> None:
        """Connect all engines that this keeper does not know."""
        while missing := self._engines.keys() - set(self._names.values()):
            await self._introduce(missing.pop(), link)

    async def _introduce(self, engine: ProcessPort, link: Link) -> None:
        """Connect an engine and the keeper. The keeper knows it before it can read a row."""
        name, door = f"{engine.kind} {next(self._numbers)}", self._engines[engine]
        assert self._door is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._begin = msgspec.structs.replace(self._begin, has_engines=True)  # the next keeper must know them first
        with ours, theirs:
            self._names[name] = engine
            try:
                socket.send_fds(self._door, [b"+"], [ours.fileno()])
            except OSError as error:
                raise EngineClosed(f"the keeper is gone ({error.strerror})") from None
            await self._call_by(link, "join", None, engine=name)
            try:
                files = [self.files.rows, self.files.journal, theirs.fileno()]
                socket.send_fds(door, [f"{self._name} {self._begin.row_dtype} {self.model}".encode()], files)
            except OSError:
                log.debug("an engine ended while it was given its tables")

    def _notice(self, frame: Frame) -> None:
        notice: Notice = msgspec.msgpack.decode(bytes(frame.payload), type=EndEngine | AskSwap)
        if isinstance(notice, AskSwap):
            assert self._swap is not None, "a keeper that follows a stream has a callback for models"
            self._swap(NamedModel(notice.folder, notice.version), StreamStart(notice.stream, notice.sequence))
        elif (engine := self._names.get(notice.engine)) is not None:
            engine.end(f"it did not let rows be updated for {self._limits.cut_off_s:g} s")

    # The stream of row deltas.

    def follow_models(self, swap: SwapModel) -> None:
        """Before the start: call `swap` with a model that the stream names, and the place of its rows."""
        self._swap = swap

    async def reject_model(self, reason: str) -> None:
        """Report that a model of the stream was not swapped in; the keeper asks for it again."""
        with suppress(EngineClosed):  # the next keeper asks by itself
            await self._call("reject_model", None, reason=reason)

    async def row_stream(self) -> RowStreamStats | None:
        """Return the state of the stream; while no keeper answers, the last that is known."""
        with suppress(EngineClosed, QueueFull, TimeoutError):
            self._row_stream = (await asyncio.wait_for(self.stats(), _ANSWER_S)).row_stream
        return self._row_stream

    # Rows.

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Write rows that all engines then see. If the keeper ends meanwhile, the next one writes them."""
        async with self._converting:  # one by one, and so is the next lock taken: calls stay in order
            rows, packed = await asyncio.to_thread(self._packed, table, ids, values)
        async with self._one_at_a_time:
            while True:
                await self.until_ready()
                try:
                    return await self._call("write", None, rows=rows, values=packed)
                except EngineClosed:
                    log.warning("the keeper ended during an update of rows, which is made again")

    def _packed(self, table: str, ids: Ids, values: ArrayLike) -> tuple[bytes, bytes]:
        """Check an update; return its rows, and their values as they are stored. Holds up no loop."""
        update = prepare_rows(self.config, table, ids, values)
        return update.rows.tobytes(), row_bytes_of(stored(update.values, self._codec)).tobytes()

    async def until_ready(self) -> None:
        """Wait until the tables are there; EngineClosed if they will not be."""
        while self.health is not Health.READY:
            if self.health in (Health.FAILED, Health.CLOSED) or self._is_over:
                raise EngineClosed(f"the keeper is {self.health.value}: {self.reason}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def stats(self) -> KeeperStats:
        return await self._call("stats", KeeperStats)

    async def close(self) -> None:
        await super().close()
        self.files.close()

    # Life.

    async def _sign_of_life(self) -> KeeperStats:
        return await self.stats()

    def _first_frame(self) -> bytes:
        return msgspec.msgpack.encode(self._begin)

    def _starting(self) -> Sequence[int]:
        self._door, self._their_door = socket.socketpair()
        return (self._their_door.fileno(), *self.files)

    def _started(self) -> None:
        if self._their_door is not None:
            self._their_door.close()

    def _stopped(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    async def _resume(self, link: Link) -> None:
        """Send a new keeper the list of all engines that read the tables, before it may write."""
        try:
            await asyncio.to_thread(compile_updates, self.config, self._codec)
            if self._link is not link:
                return  # that keeper has ended meanwhile
            self._names = {}
            await self._introduce_all(link)
            await self._call_by(link, "follow", None)
            await self._introduce_all(link)  # those that came meanwhile: from here on `enter` introduces them
        except EngineClosed:
            return  # the supervisor logs why
        except Exception as error:
            log.exception("the list of engines could not be sent to a keeper")
            self.end(f"the list of engines could not be sent to it ({type(error).__name__}: {error})")
            return
        self._serve(link)


class _Place(NamedTuple):
    """Where the parts of a model are."""

    model: Path  # dense weights
    tables: Path
    start: StreamStart  # of the tables in the stream of row deltas


def _find_tables(model: Path, serve: ServeConfig, start: StreamStart | None) -> _Place:
    """Return the newest snapshot of the tables, or the model itself.

    Dense weights are read from the model while the snapshot has the same: snapshots are removed while engines that may
    start again still need them.
    """
    if start is not None or serve.row_snapshots is None:
        return _Place(model, model, start or read_start(model))
    tables = newest_snapshot(Path(serve.row_snapshots), model) or model
    first, found = read_manifest(model), read_manifest(tables)
    is_same = first.model == found.model and first.files[DENSE] == found.files[DENSE]
    return _Place(model if is_same else tables, tables, read_start(tables))


def _stream_of(serve: ServeConfig, place: _Place) -> StreamBegin | None:
    if serve.row_deltas is None:
        return None
    open_source(serve.row_deltas).close()  # raises for a place that is none, before anything starts
    return StreamBegin(serve.row_deltas, serve.row_slice, serve.row_rate, place.start.stream, place.start.sequence)
