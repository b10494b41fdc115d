"""A port to an engine in a process of its own. When that process ends, the front reports why and restarts it."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from numpy.typing import ArrayLike

from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake
from helmrec.errors import EngineClosed, HelmRecError, QueueFull, TooLarge
from helmrec.failures import FailureLog
from helmrec.model.config import ModelConfig
from helmrec.model.weights import read_manifest
from helmrec.router.sketch import PackedSketch, RowSketch
from helmrec.serve.port import EngineView, Health
from helmrec.serve.replay import AdminCall, Replay
from helmrec.serve.ring import Frame, Link, open_ring, shared_file
from helmrec.serve.swap import check_fits
from helmrec.serve.wire import (
    Begin,
    FrameKind,
    NotForTheWire,
    pack_call,
    pack_prefill,
    pack_requests,
    results_bytes,
    unpack_error,
    unpack_results,
)
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult, UserId

log = logging.getLogger("helmrec.serve")
_FIRST_PAUSE_S = 0.2  # before a restart; doubles with every start that fails
_LONGEST_PAUSE_S = 30.0
_MOST_FAILED_STARTS = 3  # if no start succeeded before, the port gives up
_END_TIMEOUT_S = 30.0
_EXIT_CODE_TIMEOUT_S = 0.5  # for the exit code, before pending calls fail
_HANG_S = 60.0
_LOOK_EVERY_S = 1.0
T = TypeVar("T")


class ProcessMemory(NamedTuple):
    """Bytes that a port to a process may take."""

    ring_bytes: int  # shared with the process, in each direction
    replay_bytes: int  # of row updates, for a restarted engine


class ProcessPort:
    """Runs one engine process at a time, each with rings of its own. Used in one event loop."""

    def __init__(
        self,
        begin: Begin,
        model: ModelConfig,
        max_history: int,
        memory: ProcessMemory,
        environment: Mapping[str, str],
    ) -> None:
        """`environment` is added to that of this process."""
        self.model = model
        self.health = Health.STARTING
        self.reason: str | None = None
        self._begin = begin
        self._max_history = max_history
        self.intake = Intake(model, version=0, max_history=max_history)  # names what is wrong with a request
        self._ring_bytes = memory.ring_bytes
        self._environment = dict(environment)
        self._replay = Replay(memory.replay_bytes)
        self._failures = FailureLog(log)
        self._resuming: asyncio.Task[None] | None = None  # referenced here: the event loop keeps weak references
        self._failure: str | None = None  # reason that the engine gave before it ended
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._calls = itertools.count(1)
        self._is_over = False
        self._ended = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._was_ready = False  # of the current process, or the last one
        self.num_restarts = 0
        self.hang_s = _HANG_S  # after which an engine that does not answer is killed

    def start(self) -> None:
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        link = self._need_link()
        try:
            parts = pack_requests(requests, spent_ms)
        except NotForTheWire as unfit:
            self.intake.prepare_all(requests)  # raises what an engine would raise
            raise AssertionError("an engine would accept what cannot be packed") from unfit
        num_bytes = max(results_bytes(requests, self.model.num_tasks), _size(parts))
        if num_bytes > link.max_frame_bytes:
            self.intake.prepare_all(requests)
            raise _too_large("requests", num_bytes, link)
        results: list[RankResult] = await self._ask(link, FrameKind.RANK, parts)
        return results

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        link = self._need_link()
        try:
            parts = pack_prefill(request)
        except NotForTheWire as unfit:
            self.intake.prepare_ahead(request)  # raises what an engine would raise
            raise AssertionError("an engine would accept what cannot be packed") from unfit
        if _size(parts) > link.max_frame_bytes:
            self.intake.prepare_ahead(request)
            raise _too_large("request", _size(parts), link)
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

    async def swap(self, model: str) -> None:
        manifest = await asyncio.to_thread(read_manifest, Path(model))
        check_fits(manifest.model, self.model)
        await self._call("swap", None, model=model)
        self._begin = msgspec.structs.replace(self._begin, model=model)
        self.model = manifest.model
        self.intake = Intake(manifest.model, version=0, max_history=self._max_history)
        self._replay.note_swap()

    async def _call(self, name: str, kind: type[T] | None, **arguments: Any) -> T:
        parts = pack_call(name, arguments)
        if _size(parts) > (link := self._need_link()).max_frame_bytes:
            raise _too_large("body", _size(parts), link)
        value: bytes = await self._ask(link, FrameKind.CALL, parts)
        return msgspec.msgpack.decode(value, type=kind)

    async def _ask(self, link: Link, kind: FrameKind, parts: Sequence[bytes | memoryview]) -> Any:
        """Send a frame and wait for its answer; EngineClosed if the engine ends before it."""
        call = next(self._calls)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = answer
        try:
            link.send(kind, call, parts)
            return await answer
        finally:
            self._pending.pop(call, None)

    def _need_link(self) -> Link:
        if self._link is None or self.health is not Health.READY:
            raise EngineClosed(f"the engine is {self.health.value}" + (f": {self.reason}" if self.reason else ""))
        return self._link

    async def close(self) -> None:
        self._is_over = True
        if self._link is not None:
            try:
                self._link.send(FrameKind.END, 0)
            except (EngineClosed, QueueFull):
                self._ended.set()
        if self._supervisor is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._supervisor), _END_TIMEOUT_S)
            except TimeoutError:
                self._kill()
                await self._supervisor
        if self.health is not Health.FAILED:
            self.health = Health.CLOSED

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._ended.set()

    async def _supervise(self) -> None:
        """Restart the engine whenever it ends, until the port is closed or the engine never gets ready."""
        num_failed, was_ever_ready = 0, False
        while not self._is_over:
            try:
                await self._run_one()
            except Exception as error:  # too many open files, too little memory, no more threads
                log.exception("the engine could not be run")
                self.reason = f"it cannot be run ({type(error).__name__}: {error})"
                self._link = None
                self._kill()
                self._fail_pending(EngineClosed(f"the engine ended: {self.reason}"))
            if self._is_over:
                return
            was_ever_ready |= self._was_ready
            num_failed = 0 if self._was_ready else num_failed + 1
            is_hopeless = num_failed >= _MOST_FAILED_STARTS and not was_ever_ready
            self.health = Health.FAILED if is_hopeless else Health.RESTARTING
            log.error("the engine ended", extra={"reason": self.reason, "gives_up": is_hopeless})
            if is_hopeless:
                return
            self.num_restarts += 1
            await self._pause(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**num_failed))

    async def _pause(self, seconds: float) -> None:
        """Sleep; return early if the port is closed."""
        while seconds > 0 and not self._is_over:
            await asyncio.sleep(min(0.1, seconds))
            seconds -= 0.1

    async def _run_one(self) -> None:
        """Run one engine process from start to end, then set `reason` to why it ended."""
        self._ended.clear()
        self._failure, self._was_ready = None, False
        if num_lost := self._replay.note_start():
            log.error("row updates of a model whose swap did not complete are lost", extra={"rows": num_lost})
        link, process = self._spawn()
        self._link, self._process = link, process
        link.attach(asyncio.get_running_loop(), self._receive)
        watch = asyncio.create_task(self._watch())
        try:
            link.send(FrameKind.BEGIN, 0, [msgspec.msgpack.encode(self._begin)])
            await self._ended.wait()
        except EngineClosed:
            pass
        finally:
            watch.cancel()
            link.detach()
            self._link = None
            if self.health is Health.READY:
                self.health = Health.RESTARTING
            code = await asyncio.to_thread(_wait_for, process, _EXIT_CODE_TIMEOUT_S)
            self.reason = self._failure or _exit_reason(code)
            self._fail_pending(EngineClosed(f"the engine ended: {self.reason}"))
            if code is None:
                await asyncio.to_thread(_end, process)
            link.close()

    async def _watch(self) -> None:
        """Kill an engine that was ready and does not answer; log a warning while one does not get ready."""
        waited_s = 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self.health is not Health.READY:
                waited_s += _LOOK_EVERY_S
                if waited_s % self.hang_s < _LOOK_EVERY_S:
                    log.warning("the engine is not ready yet", extra={"seconds": round(waited_s)})
                continue
            try:
                await asyncio.wait_for(self.stats(), self.hang_s)
            except TimeoutError:
                self._failure = f"it did not answer for {self.hang_s:g} s"
                self._kill()
                return
            except (EngineClosed, QueueFull):
                continue
            except Exception as error:  # the engine answers, if only with an error
                self._failures.note("watching the engine", error)

    def _spawn(self) -> "tuple[Link, subprocess.Popen[bytes]]":
        """Start a process and return this side's end of the link to it."""
        with ExitStack() as opened, ExitStack() as kept:
            ours, theirs = socket.socketpair()
            opened.callback(theirs.close)
            kept.callback(ours.close)
            to_engine = shared_file(self._ring_bytes)
            opened.callback(os.close, to_engine)
            to_front = shared_file(self._ring_bytes)
            opened.callback(os.close, to_front)
            passed = (theirs.fileno(), to_front, to_engine)
            command = [sys.executable, "-m", "helmrec.serve.engine_process", *map(str, passed)]
            link = Link(ours, open_ring(to_engine), open_ring(to_front))
            environment = os.environ | self._environment
            process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=environment)
            kept.pop_all()
        return link, process

    def _receive(self) -> None:
        assert self._link is not None
        link = self._link
        try:
            for frame in link.receive():
                try:
                    self._handle(frame)
                except Exception as error:  # one unreadable frame must not affect the frames behind it
                    log.exception("an answer could not be read")
                    self._fail_call(frame.call, error)
                link.done(frame)
        except EngineClosed:
            link.detach()
            self._ended.set()
        except Exception:  # invalid positions: no later frame can be trusted
            log.exception("the engine sent data that cannot be read")
            self._failure = "it sent data that cannot be read"
            link.detach()
            self._kill()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == FrameKind.READY:
            assert self._link is not None
            self._resuming = asyncio.create_task(self._resume(self._link))
        elif frame.kind == FrameKind.FAILED:
            self._failure = str(unpack_error(frame.payload))
            self._ended.set()
        else:
            self._settle(frame)

    async def _resume(self, link: Link) -> None:
        """Apply the admin calls made to the engine before, then start serving.

        Without the row updates scores would be wrong, so an engine that does not take them all is killed and the
        supervisor starts another. Alpha and mode change no score: if one is refused, that is logged.
        """
        try:
            num_noted = -1
            while num_noted != self._replay.num_noted:  # more updates may arrive while these are applied
                num_noted = self._replay.num_noted
                for call in self._replay.row_calls(link.max_frame_bytes // 2):
                    await self._repeat(link, call)
            for call in self._replay.setting_calls():
                try:
                    await self._repeat(link, call)
                except HelmRecError as error:
                    if isinstance(error, EngineClosed):
                        raise
                    log.error("a setting was not restored", extra={"call": call.name, "reason": str(error)})
        except Exception as error:
            if self._link is link:  # else the process has ended, and the supervisor logs why
                log.exception("the engine could not be resumed")
                self._failure = f"the admin calls could not be repeated ({type(error).__name__}: {error})"
                self._kill()
            return
        if self._replay.num_lost:
            log.error("row updates are lost: send them again", extra={"rows": self._replay.num_lost})
        if self._link is link:
            self.health, self.reason, self._was_ready = Health.READY, None, True
            log.info("serving", extra={"model": self.model.name})

    async def _repeat(self, link: Link, call: AdminCall) -> None:
        answer = self._ask(link, FrameKind.CALL, pack_call(call.name, call.arguments))
        try:
            await asyncio.wait_for(answer, self.hang_s)
        except TimeoutError:
            raise EngineClosed(f"{call.name} was not answered for {self.hang_s:g} s") from None

    def _settle(self, frame: Frame) -> None:
        answer = self._pending.get(frame.call)
        if answer is None or answer.done():
            return  # the caller has been cancelled
        if frame.kind == FrameKind.ERROR:
            answer.set_exception(unpack_error(frame.payload))
        elif frame.kind == FrameKind.RESULTS:
            answer.set_result(unpack_results(frame.payload))
        else:
            answer.set_result(bytes(frame.payload))

    def _fail_call(self, call: int, error: Exception) -> None:
        answer = self._pending.get(call)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _fail_pending(self, error: EngineClosed) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)


def _size(parts: Sequence[bytes | memoryview]) -> int:
    return sum(len(part) for part in parts)


def _too_large(field: str, num_bytes: int, link: Link) -> TooLarge:
    problem = f"at most {link.max_frame_bytes} bytes fit the ring between front and engine (ring_bytes is 4 times that)"
    return TooLarge(field, f"{num_bytes} bytes", problem)


def _wait_for(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Return the exit code, or None if the process still runs after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process that has closed its link to end; kill it if it does not."""
    if _wait_for(process, _END_TIMEOUT_S) is None:
        process.kill()
        process.wait()


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "its process is about to end"
    if code >= 0:
        return f"it exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
