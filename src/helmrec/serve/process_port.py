"""An engine in a process of its own: the front outlives it, says why it ended, and starts it again."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from numpy.typing import ArrayLike

from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake
from helmrec.errors import EngineClosed, HelmRecError, QueueFull, RequestError, TooLarge
from helmrec.failures import FailureLog
from helmrec.model.config import ModelConfig
from helmrec.model.weights import read_manifest
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
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult

log = logging.getLogger("helmrec.serve")
_FIRST_PAUSE_S = 0.2  # before it is started again; doubles while it does not get ready
_LONGEST_PAUSE_S = 30.0
_MOST_FAILED_STARTS = 3  # of an engine that was never ready: it never will be
_END_PATIENCE_S = 30.0
_SHORT_PATIENCE_S = 0.5  # with a process that is gone or about to go, before those who wait are told
_HANG_S = 60.0
_LOOK_EVERY_S = 1.0
T = TypeVar("T")


class ProcessMemory(NamedTuple):
    """Memory of the front for the sake of its engine."""

    ring_bytes: int  # shared with it, in each direction
    replay_bytes: int  # for what an engine that is started again must be told


class ProcessPort:
    """One engine process after another, each with rings of its own. Lives in one event loop."""

    def __init__(self, begin: Begin, model: ModelConfig, max_history: int, limits: "ProcessMemory") -> None:
        self._begin = begin
        self._model = model
        self._max_history = max_history
        self._intake = Intake(model, version=0, max_history=max_history)  # to say what is wrong with a request
        self._ring_bytes = limits.ring_bytes
        self._replay = Replay(limits.replay_bytes)
        self._failures = FailureLog(log)
        self._resuming: asyncio.Task[None] | None = None  # kept: the loop itself would let it go
        self._health = Health.STARTING
        self._reason: str | None = None
        self._failure: str | None = None  # what the engine itself said before it ended
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._calls = itertools.count(1)
        self._is_over = False
        self._ended = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._was_ready = False  # the process that runs, or ran last
        self.num_restarts = 0
        self.hang_s = _HANG_S  # after which an engine that does not answer is ended

    @property
    def model(self) -> ModelConfig:
        return self._model

    @property
    def health(self) -> Health:
        return self._health

    @property
    def reason(self) -> str | None:
        return self._reason

    def start(self) -> None:
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        link = self._need_link()
        try:
            parts = pack_requests(requests, spent_ms)
        except NotForTheWire as unfit:
            self._refuse(requests)
            raise AssertionError("an engine would take what the wire does not") from unfit
        answer_bytes = results_bytes(requests, self._model.num_tasks)
        if max(answer_bytes, _size(parts)) > link.max_frame_bytes:
            self._refuse(requests)
            raise _too_large("requests", max(answer_bytes, _size(parts)), link)
        results: list[RankResult] = await self._ask(FrameKind.RANK, parts)
        return results

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        link = self._need_link()
        try:
            parts = pack_prefill(request)
        except NotForTheWire as unfit:
            self._intake.prepare_ahead(request)  # says what is wrong with it, as an engine would
            raise AssertionError("an engine would take what the wire does not") from unfit
        if _size(parts) > link.max_frame_bytes:
            self._intake.prepare_ahead(request)
            raise _too_large("request", _size(parts), link)
        value: bytes = await self._ask(FrameKind.PREFILL, parts)
        return msgspec.msgpack.decode(value, type=PrefillResult)

    def _refuse(self, requests: Sequence[RankRequest]) -> None:
        """Raise what an engine would raise, if it would."""
        for i, request in enumerate(requests):
            try:
                self._intake.prepare(request)
            except RequestError as error:
                if len(requests) == 1:
                    raise
                raise RequestError(f"requests[{i}].{error.field}", error.value, error.problem) from None

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
            log.warning("row updates exceed replay_bytes: an engine that is started again will not have all of them")

    async def forget(self, user_id: int) -> None:
        await self._call("forget", None, user_id=user_id)

    async def swap(self, model: str) -> None:
        manifest = await asyncio.to_thread(read_manifest, Path(model))
        check_fits(manifest.model, self._model)
        await self._call("swap", None, model=model)
        self._begin = msgspec.structs.replace(self._begin, model=model)
        self._model = manifest.model
        self._intake = Intake(manifest.model, version=0, max_history=self._max_history)
        self._replay.note_swap()

    async def _call(self, name: str, kind: type[T] | None, **arguments: Any) -> T:
        try:
            parts = pack_call(name, arguments)
        except OverflowError as error:
            raise RequestError("body", str(error), "numbers of 64 bits are needed") from None
        if _size(parts) > (link := self._need_link()).max_frame_bytes:
            raise _too_large("body", _size(parts), link)
        value: bytes = await self._ask(FrameKind.CALL, parts)
        return msgspec.msgpack.decode(value, type=kind)

    async def _ask(self, kind: FrameKind, parts: Sequence[bytes | memoryview]) -> Any:
        """Send a frame and wait for its answer; EngineClosed if the engine ends before it."""
        return await self._ask_over(self._need_link(), kind, parts)

    async def _ask_over(self, link: Link, kind: FrameKind, parts: Sequence[bytes | memoryview]) -> Any:
        call = next(self._calls)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = answer
        try:
            link.send(kind, call, parts)
            return await answer
        finally:
            self._pending.pop(call, None)

    def _need_link(self) -> Link:
        if self._link is None or self._health is not Health.READY:
            raise EngineClosed(f"the engine is {self._health.value}" + (f": {self._reason}" if self._reason else ""))
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
                await asyncio.wait_for(asyncio.shield(self._supervisor), _END_PATIENCE_S)
            except TimeoutError:
                self._kill()
                await self._supervisor
        if self._health is not Health.FAILED:
            self._health = Health.CLOSED

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._ended.set()

    async def _supervise(self) -> None:
        num_failed, was_ever_ready = 0, False
        while not self._is_over:
            try:
                await self._run_one()
            except Exception as error:  # too many open files, too little memory, no more threads
                log.exception("the engine could not be run")
                self._reason = f"it cannot be run ({type(error).__name__}: {error})"
                self._link = None
                self._kill()
                self._fail_pending(EngineClosed(f"the engine ended: {self._reason}"))
            if self._is_over:
                return
            was_ever_ready |= self._was_ready
            num_failed = 0 if self._was_ready else num_failed + 1
            is_hopeless = num_failed >= _MOST_FAILED_STARTS and not was_ever_ready
            self._health = Health.FAILED if is_hopeless else Health.RESTARTING
            log.error("the engine ended", extra={"reason": self._reason, "gives_up": is_hopeless})
            if is_hopeless:
                return
            self.num_restarts += 1
            await self._pause(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**num_failed))

    async def _pause(self, seconds: float) -> None:
        """Shorter if the port is closed meanwhile."""
        while seconds > 0 and not self._is_over:
            await asyncio.sleep(min(0.1, seconds))
            seconds -= 0.1

    async def _run_one(self) -> None:
        """One engine process from start to end; `_reason` says why it ended."""
        self._ended.clear()
        self._failure, self._was_ready = None, False
        if num_lost := self._replay.note_start():
            log.error("rows are lost that were set on a model whose swap did not end", extra={"rows": num_lost})
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
            if self._health is Health.READY:
                self._health = Health.RESTARTING
            code = await asyncio.to_thread(_wait_for, process, _SHORT_PATIENCE_S)
            self._reason = self._failure or _told(code)
            self._fail_pending(EngineClosed(f"the engine ended: {self._reason}"))
            if code is None:
                await asyncio.to_thread(_end, process)
            link.close()

    async def _watch(self) -> None:
        """End an engine that is ready and does not answer any more; warn of one that does not get ready."""
        waited_s = 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._health is not Health.READY:
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
        """A process, and our end of what connects us."""
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
            process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
            kept.pop_all()
        return link, process

    def _receive(self) -> None:
        assert self._link is not None
        link = self._link
        try:
            for frame in link.receive():
                try:
                    self._handle(frame)
                except Exception as error:  # one that cannot be read must not take along those behind it
                    log.exception("an answer could not be read")
                    self._fail_call(frame.call, error)
                link.done(frame)
        except EngineClosed:
            link.detach()
            self._ended.set()
        except Exception:  # positions that make no sense: nothing that follows can be trusted
            log.exception("the engine sent what cannot be read")
            self._failure = "it sent what cannot be read"
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
        """Set again what admin calls had set on the engine before; then this one serves.

        Without its rows an engine would give wrong scores, so one that does not take them all is ended, and the
        supervisor starts another. Alpha and mode change no score: one that is refused is logged.
        """
        try:
            for call in self._replay.row_calls(link.max_frame_bytes // 2):
                await self._set_again(link, call)
            for call in self._replay.setting_calls():
                try:
                    await self._set_again(link, call)
                except HelmRecError as error:
                    if isinstance(error, EngineClosed):
                        raise
                    log.error("a setting was not set again", extra={"call": call.name, "reason": str(error)})
        except Exception as error:
            if self._link is link:  # else it has ended already, and the supervisor says why
                log.exception("the engine could not be resumed")
                self._failure = f"it could not be given what admin calls had set ({type(error).__name__}: {error})"
                self._kill()
            return
        if self._replay.num_lost:
            log.error("row updates are lost: send them again", extra={"rows": self._replay.num_lost})
        if self._link is link:
            self._health, self._reason, self._was_ready = Health.READY, None, True
            log.info("serving", extra={"model": self._model.name})

    async def _set_again(self, link: Link, call: AdminCall) -> None:
        asked = self._ask_over(link, FrameKind.CALL, pack_call(call.name, call.arguments))
        try:
            await asyncio.wait_for(asked, self.hang_s)
        except TimeoutError:
            raise EngineClosed(f"{call.name} was not answered for {self.hang_s:g} s") from None

    def _settle(self, frame: Frame) -> None:
        answer = self._pending.get(frame.call)
        if answer is None or answer.done():
            return  # whoever asked has gone
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
    told = f"at most {link.max_frame_bytes} bytes fit the ring between front and engine (ring_bytes is four times that)"
    return TooLarge(field, f"{num_bytes} bytes", told)


def _wait_for(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Its exit code, or None if it is still there after so long."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for one that is about to end; if it hangs after it let go of us, it is killed."""
    if _wait_for(process, _END_PATIENCE_S) is None:
        process.kill()
        process.wait()


def _told(code: int | None) -> str:
    if code is None:
        return "its process is about to end"
    if code >= 0:
        return f"it exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
