"""A port to an engine in a process of its own. When that process ends, the front reports why and restarts it."""

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from numpy.typing import ArrayLike

from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake, IntakeRecipe
from helmrec.errors import EngineClosed, HelmRecError, QueueFull
from helmrec.model.config import ModelConfig
from helmrec.model.folder import read_manifest
from helmrec.router.sketch import PackedSketch, RowSketch
from helmrec.serve.engine_calls import EngineCalls
from helmrec.serve.replay import AdminCall, Replay
from helmrec.serve.ring import Link
from helmrec.serve.swap import check_fits
from helmrec.serve.wire import Begin
from helmrec.types import Ids

log = logging.getLogger("helmrec.serve")


class ProcessMemory(NamedTuple):
    """Bytes that a port to a process may take."""

    ring_bytes: int  # shared with the process, in each direction
    replay_bytes: int  # of row updates, for a restarted engine


class HostTables(Protocol):
    """Gives engine processes the tables that they share."""

    def enter(self, engine: "ProcessPort", door: socket.socket) -> None:
        """Give the tables to a new process of this engine, through this socket, when they are there."""

    def leave(self, engine: "ProcessPort") -> None:
        """The process of this engine has ended."""


class WrittenLog(Protocol):
    """The log of row updates that the front writes and engine processes read."""

    @property
    def num_bytes(self) -> int: ...


class ProcessPort(EngineCalls):
    """Runs one engine process at a time."""

    kind = "engine"
    module = "helmrec.serve.engine_process"

    def __init__(
        self,
        begin: Begin,
        model: ModelConfig,
        max_history: int,
        memory: ProcessMemory,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(memory.ring_bytes, environment, model, max_history)
        self._begin = begin
        self._replay = Replay(memory.replay_bytes)
        self.tables: HostTables | None = None  # None: the engine has tables of its own
        self.log: WrittenLog | None = None  # of row updates, if this process writes it
        self._door: socket.socket | None = None  # to the process, for descriptors
        self._their_door: socket.socket | None = None

    async def move_alpha(self, alpha: float) -> None:
        await self._call("move_alpha", None, alpha=alpha)
        self._replay.note_alpha(alpha)

    async def set_mode(self, mode: Mode) -> None:
        await self._call("set_mode", None, mode=mode)
        self._replay.note_mode(mode)

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        num_swaps = await self._call("place_rows", int, table=table, ids=list(ids), values=values)
        num_lost = self._replay.num_lost
        self._replay.note_rows(table, ids, values, num_swaps)
        if num_lost == 0 and self._replay.num_lost:
            log.warning("row updates exceed replay_bytes: a restarted engine will not have all of them")

    async def update_rows_now_or_later(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Update rows; an engine that is not running gets them when it has started, before it serves."""
        try:
            await self.update_rows(table, ids, values)
        except EngineClosed:
            self._replay.note_rows_of_next(table, ids, values)

    async def follow_log_now_or_later(self) -> None:
        """Have the engine apply what is new in the log; one that is not running does it before it serves."""
        with suppress(EngineClosed):
            await self._call("follow_log", None)

    async def row_sketch(self, num_bits: int) -> RowSketch:
        packed = await self._call("row_sketch", PackedSketch, num_bits=num_bits)
        return packed.unpacked()

    async def swap(self, model: str, tables: HostTables | None = None, row_log: WrittenLog | None = None) -> None:
        """Serve another model. `tables` and `row_log`: those of that model, if this engine shares them."""
        manifest = await asyncio.to_thread(read_manifest, Path(model))
        check_fits(manifest.model, self.model)
        await self._swap_process(model, tables)
        self.log = row_log
        self._begin = msgspec.structs.replace(self._begin, model=model)
        self.model = manifest.model
        self._replay.note_swap()
        # The engine serves the new model from here on, whatever happens; without its recipe it asks for another try.
        self.intake = Intake(self.model, version=0, max_history=self.intake.recipe.max_history)
        with suppress(EngineClosed, QueueFull):
            self._use(await self._call("intake_recipe", IntakeRecipe))

    async def _swap_process(self, model: str, tables: HostTables | None) -> None:
        old = self.tables
        if tables is None or self._door is None or old is None:
            await self._call("swap", None, model=model)
            return
        tables.enter(self, self._door)
        try:
            await self._call("swap", None, model=model)
        except BaseException:
            tables.leave(self)
            raise
        self.tables = tables
        old.leave(self)

    async def _sign_of_life(self) -> EngineStats:
        return await self.stats()

    def _first_frame(self) -> bytes:
        return msgspec.msgpack.encode(self._begin)

    def _starting(self) -> Sequence[int]:
        if num_lost := self._replay.note_start():
            log.error("row updates of a model whose swap did not complete are lost", extra={"rows": num_lost})
        if self.tables is None:
            return ()
        self._door, self._their_door = socket.socketpair()
        return (self._their_door.fileno(),)

    def _started(self) -> None:
        if self.tables is not None and self._door is not None and self._their_door is not None:
            self._their_door.close()
            self.tables.enter(self, self._door)

    def _stopped(self) -> None:
        if self.tables is not None and self._door is not None:
            self.tables.leave(self)
            self._door.close()
            self._door = None

    async def _resume(self, link: Link) -> None:
        """Apply the admin calls made to the engine before, then start serving.

        Without the row updates scores would be wrong, so an engine that does not take them all is killed and the
        supervisor starts another. Alpha and mode change no score: if one is refused, that is logged.
        """
        try:
            await self._take_recipe(link)
            await self._repeat_rows(link)
            for call in self._replay.setting_calls():
                try:
                    await self._ask_in_time(link, call)
                except HelmRecError as error:
                    if isinstance(error, EngineClosed):
                        raise
                    log.error("a setting was not restored", extra={"call": call.name, "reason": str(error)})
            await self._admit_fronts(link)
        except Exception as error:
            if self._link is link:  # else the process has ended, and the supervisor logs why
                log.exception("the engine could not be resumed")
                self.end(f"the admin calls could not be repeated ({type(error).__name__}: {error})")
            return
        if self._replay.num_lost:
            log.error("row updates are lost: send them again", extra={"rows": self._replay.num_lost})
        self._serve(link)
        if self._link is link:
            log.info("serving", extra={"model": self.model.name})

    async def _repeat_rows(self, link: Link) -> None:
        """Apply all row updates that are kept here or in the log. More may arrive while these are applied."""
        num_noted = num_bytes = -1
        while num_noted != self._replay.num_noted:
            num_noted = self._replay.num_noted
            for call in self._replay.row_calls(link.max_frame_bytes // 2):
                await self._ask_in_time(link, call)
        while self.log is not None and num_bytes != self.log.num_bytes:
            num_bytes = self.log.num_bytes
            await self._ask_in_time(link, AdminCall("follow_log", {}))

    async def _admit_fronts(self, link: Link) -> None:
        """Let other fronts join, now that the engine has all row updates."""
        if self._begin.serve.get("engine_socket") is not None:
            await self._ask_in_time(link, AdminCall("admit_fronts", {}))
