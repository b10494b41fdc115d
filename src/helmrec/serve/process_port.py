"""A port to an engine in a process of its own. When that process ends, the front reports why and restarts it."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from numpy.typing import ArrayLike

from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake, IntakeRecipe
from helmrec.engine.warm_up import made_up_request
from helmrec.errors import EngineClosed, HelmRecError
from helmrec.model.config import ModelConfig
from helmrec.model.folder import read_manifest
from helmrec.router.sketch import PackedSketch, RowSketch
from helmrec.serve.child_process import ChildProcess, size_of, too_large
from helmrec.serve.port import EngineView
from helmrec.serve.prepared_wire import PrepareAgain, pack_prepared, unpack_recipe
from helmrec.serve.replay import AdminCall, Replay
from helmrec.serve.ring import Link
from helmrec.serve.swap import check_fits
from helmrec.serve.wire import (
    Begin,
    FrameKind,
    NotForTheWire,
    pack_call,
    pack_prefill,
    results_bytes,
)
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult, UserId

log = logging.getLogger("helmrec.serve")
# Memory of large requests stays with the process: given back and taken anew, each costs a hundred page faults.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
_MOST_TRIES = 4  # to send requests, each to another model than the one before


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


class ProcessPort(ChildProcess):
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
        super().__init__(memory.ring_bytes, {**_unset(_KEEP_FREED_MEMORY), **environment})
        self.model = model
        self._begin = begin
        self.intake = Intake(model, version=0, max_history=max_history)  # until the engine gives the recipe of its own
        self._replay = Replay(memory.replay_bytes)
        self.tables: HostTables | None = None  # None: the engine has tables of its own
        self._door: socket.socket | None = None  # to the process, for descriptors
        self._their_door: socket.socket | None = None

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        link, came_s = self._need_link(), time.monotonic() - spent_ms / 1e3
        for _ in range(_MOST_TRIES):
            intake = self.intake
            parts = pack_prepared(intake.tag, intake.prepare_all(requests), came_s)
            num_bytes = max(results_bytes(requests, self.model.num_tasks), size_of(parts))
            if num_bytes > link.max_frame_bytes:
                raise too_large("requests", num_bytes, link)
            try:
                results: list[RankResult] = await self._ask(link, FrameKind.RANK, parts)
            except PrepareAgain as again:  # another model was swapped in meanwhile
                self._use(again.recipe)
                continue
            return results
        raise EngineClosed(f"the model was replaced {_MOST_TRIES} times while a request was on its way")

    def _use(self, recipe: IntakeRecipe) -> None:
        """Prepare requests from this recipe from now on."""
        if recipe != self.intake.recipe:
            self.intake = Intake.of(recipe)

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        link = self._need_link()
        try:
            parts = pack_prefill(request)
        except NotForTheWire as unfit:
            self.intake.prepare_ahead(request)  # raises what an engine would raise
            raise AssertionError("an engine would accept what cannot be packed") from unfit
        if size_of(parts) > link.max_frame_bytes:
            self.intake.prepare_ahead(request)
            raise too_large("request", size_of(parts), link)
        value: bytes = await self._ask(link, FrameKind.PREFILL, parts)
        return msgspec.msgpack.decode(value, type=PrefillResult)

    async def stats(self) -> EngineStats:
        return await self._call("stats", EngineStats)

    async def look(self) -> EngineView:
        return await self._call("look", EngineView)

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

    async def row_sketch(self, num_bits: int) -> RowSketch:
        packed = await self._call("row_sketch", PackedSketch, num_bits=num_bits)
        return packed.unpacked()

    async def forget(self, user_id: UserId) -> None:
        await self._call("forget", None, user_id=user_id)

    async def swap(self, model: str, tables: HostTables | None = None) -> None:
        """Serve another model. `tables`: those of that model, if this engine shares them."""
        manifest = await asyncio.to_thread(read_manifest, Path(model))
        check_fits(manifest.model, self.model)
        await self._swap_process(model, tables)
        self._begin = msgspec.structs.replace(self._begin, model=model)
        self.model = manifest.model
        self._use(await self._call("intake_recipe", IntakeRecipe))
        self._replay.note_swap()

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
            num_noted = -1
            while num_noted != self._replay.num_noted:  # more updates may arrive while these are applied
                num_noted = self._replay.num_noted
                for call in self._replay.row_calls(link.max_frame_bytes // 2):
                    await self._ask_in_time(link, call)
            for call in self._replay.setting_calls():
                try:
                    await self._ask_in_time(link, call)
                except HelmRecError as error:
                    if isinstance(error, EngineClosed):
                        raise
                    log.error("a setting was not restored", extra={"call": call.name, "reason": str(error)})
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

    async def _take_recipe(self, link: Link) -> None:
        """Get ready to prepare requests for the engine, whose hash has a new key."""
        packed = await self._ask_in_time(link, AdminCall("intake_recipe", {}))
        self._use(unpack_recipe(memoryview(packed)))
        await asyncio.to_thread(self.intake.prepare, made_up_request(self.model, 2))  # loads compiled functions

    async def _ask_in_time(self, link: Link, call: AdminCall) -> bytes:
        answer = self._ask(link, FrameKind.CALL, pack_call(call.name, call.arguments))
        try:
            value: bytes = await asyncio.wait_for(answer, self.hang_s)
            return value
        except TimeoutError:
            raise EngineClosed(f"{call.name} was not answered for {self.hang_s:g} s") from None


def _unset(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables that the environment does not set."""
    return {name: value for name, value in variables.items() if name not in os.environ}
