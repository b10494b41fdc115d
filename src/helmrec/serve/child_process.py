"""A process that the front runs, with rings of its own and calls to it. When it ends, it is started again.

Knows frames and the life of a process, not what the process does.
"""

import asyncio
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, TypeVar

import msgspec

from helmrec.errors import EngineClosed, ModelError, QueueFull, TooLarge
from helmrec.failures import FailureLog
from helmrec.serve.port import Health
from helmrec.serve.prepared_wire import PrepareAgain, unpack_recipe
from helmrec.serve.ring import Frame, Link, open_ring, shared_file
from helmrec.serve.wire import FrameKind, pack_call, unpack_error, unpack_results

log = logging.getLogger("helmrec.serve")
_FIRST_PAUSE_S = 0.2  # before a restart; doubles with every start that fails
_MOST_DOUBLINGS = 20  # of the pause: beyond the longest one
_END_TIMEOUT_S = 30.0
_EXIT_CODE_TIMEOUT_S = 0.5  # for the exit code, before pending calls fail
_LOOK_EVERY_S = 1.0
T = TypeVar("T")
Parts = Sequence[bytes | memoryview]


class ChildProcess:
    """Runs one process at a time. Used in one event loop. Gives up if one that served ends with ModelError."""

    kind: ClassVar[str]  # in logs and errors
    module: ClassVar[str]  # that the process runs
    hang_s = 60.0  # after which a process that does not answer is killed
    longest_pause_s: ClassVar = 30.0  # before a restart
    most_failed_starts: ClassVar[int | None] = 3  # if no start succeeded before, the port gives up; None: it never does

    def __init__(self, ring_bytes: int, environment: Mapping[str, str]) -> None:
        """`environment` is added to that of this process."""
        self.health = Health.STARTING
        self.reason: str | None = None
        self._ring_bytes = ring_bytes
        self._environment = dict(environment)
        self._failures = FailureLog(log)
        self._resuming: asyncio.Task[None] | None = None  # referenced here: the event loop keeps weak references
        self._failure: str | None = None  # reason that the process gave before it ended
        self._is_model_corrupt = False  # found beside serving: another process would serve the same files
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._calls = itertools.count(1)
        self._is_over = False
        self._ended = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._passed: Sequence[int] = ()  # more descriptors for the process
        self._was_ready = False  # of the current process, or the last one
        self.num_restarts = 0

    # What a kind of process adds.

    def _first_frame(self) -> bytes:
        """Return the first message to a new process."""
        raise NotImplementedError

    async def _resume(self, link: Link) -> None:
        """Bring a process that is ready to the state of the one before; then call `_serve`."""
        raise NotImplementedError

    async def _sign_of_life(self) -> object:
        """Ask the process for something that it always answers."""
        raise NotImplementedError

    def _starting(self) -> Sequence[int]:
        """Prepare the start of a process; return more descriptors for it."""
        return ()

    def _started(self) -> None:
        """A process has been started; it is not ready yet."""

    def _stopped(self) -> None:
        """The process has ended."""

    def _notice(self, frame: Frame) -> None:
        """Take a frame that answers no call."""

    # Calls.

    async def _call(self, name: str, kind: type[T] | None, **arguments: Any) -> T:
        return await self._call_by(self._need_link(), name, kind, **arguments)

    async def _call_by(self, link: Link, name: str, kind: type[T] | None, **arguments: Any) -> T:
        parts = pack_call(name, arguments)
        if size_of(parts) > link.max_frame_bytes:
            raise too_large("body", size_of(parts), link)
        value: bytes = await self._ask(link, FrameKind.CALL, parts)
        return msgspec.msgpack.decode(value, type=kind)

    async def _ask(self, link: Link, kind: FrameKind, parts: Parts, arrays: Parts = ()) -> Any:
        """Send a frame and wait for its answer; EngineClosed if the process ends before it."""
        call = next(self._calls)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = answer
        try:
            link.send(kind, call, parts, arrays)
            return await answer
        finally:
            self._pending.pop(call, None)

    def _need_link(self) -> Link:
        if self._link is None or self.health is not Health.READY:
            raise EngineClosed(f"the {self.kind} is {self.health.value}" + (f": {self.reason}" if self.reason else ""))
        return self._link

    # Life.

    @property
    def pid(self) -> int | None:
        """Of the current process, or the last one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

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

    def end(self, reason: str) -> None:
        """Kill the process; another one is started."""
        self._failure = reason
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._ended.set()

    async def _supervise(self) -> None:
        """Restart the process whenever it ends, until the port is closed or the process never gets ready."""
        num_failed, was_ever_ready = 0, False
        while not self._is_over:
            try:
                await self._run_one()
            except Exception as error:  # too many open files, too little memory, no more threads
                log.exception("the %s could not be run", self.kind)
                self.reason = f"it cannot be run ({type(error).__name__}: {error})"
                self._link = None
                self._kill()
                self._lose_calls()
            self._stopped()
            if self._is_over:
                return
            was_ever_ready |= self._was_ready
            num_failed = 0 if self._was_ready else num_failed + 1
            is_hopeless = not was_ever_ready and num_failed >= (self.most_failed_starts or math.inf)
            is_hopeless |= self._is_model_corrupt
            self.health = Health.FAILED if is_hopeless else Health.RESTARTING
            log.error("the %s ended", self.kind, extra={"reason": self.reason, "gives_up": is_hopeless})
            if is_hopeless:
                return
            self.num_restarts += 1
            await self._pause(min(self.longest_pause_s, _FIRST_PAUSE_S * 2 ** min(num_failed, _MOST_DOUBLINGS)))

    async def _pause(self, seconds: float) -> None:
        """Sleep; return early if the port is closed."""
        while seconds > 0 and not self._is_over:
            await asyncio.sleep(min(0.1, seconds))
            seconds -= 0.1

    async def _run_one(self) -> None:
        """Run one process from start to end, then set `reason` to why it ended."""
        self._ended.clear()
        self._failure, self._was_ready = None, False
        self._passed = self._starting()
        link, process = self._spawn()
        self._link, self._process = link, process
        link.attach(asyncio.get_running_loop(), self._receive)
        self._started()
        watch = asyncio.create_task(self._watch())
        try:
            link.send(FrameKind.BEGIN, 0, [self._first_frame()])
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
            self._lose_calls()
            if code is None:
                await asyncio.to_thread(_end, process)
            link.close()

    async def _watch(self) -> None:
        """Kill a process that was ready and does not answer; log a warning while one does not get ready."""
        waited_s = 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self.health is not Health.READY:
                waited_s += _LOOK_EVERY_S
                if waited_s % self.hang_s < _LOOK_EVERY_S:
                    log.warning("the %s is not ready yet", self.kind, extra={"seconds": round(waited_s)})
                continue
            try:
                await asyncio.wait_for(self._sign_of_life(), self.hang_s)
            except TimeoutError:
                self.end(f"it did not answer for {self.hang_s:g} s")
                return
            except (EngineClosed, QueueFull):
                continue
            except Exception as error:  # the process answers, if only with an error
                self._failures.note(f"watching the {self.kind}", error)

    def _spawn(self) -> "tuple[Link, subprocess.Popen[bytes]]":
        """Start a process and return this side's end of the link to it."""
        with ExitStack() as opened, ExitStack() as kept:
            ours, theirs = socket.socketpair()
            opened.callback(theirs.close)
            kept.callback(ours.close)
            to_process = shared_file(self._ring_bytes)
            opened.callback(os.close, to_process)
            to_front = shared_file(self._ring_bytes)
            opened.callback(os.close, to_front)
            passed = (theirs.fileno(), to_front, to_process, *self._passed)
            command = [sys.executable, "-m", self.module, *map(str, passed)]
            link = Link(ours, open_ring(to_process), open_ring(to_front))
            environment = os.environ | self._environment
            process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=environment)
            kept.pop_all()
        return link, process

    # Frames.

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
            log.exception("the %s sent data that cannot be read", self.kind)
            link.detach()
            self.end("it sent data that cannot be read")

    def _handle(self, frame: Frame) -> None:
        if frame.kind == FrameKind.READY:
            assert self._link is not None
            self._resuming = asyncio.create_task(self._resume(self._link))
        elif frame.kind == FrameKind.FAILED:
            error = unpack_error(frame.payload)
            self._failure, self._is_model_corrupt = str(error), self._was_ready and isinstance(error, ModelError)
            self._ended.set()
        elif frame.kind == FrameKind.NOTICE:
            self._notice(frame)
        else:
            self._settle(frame)

    def _serve(self, link: Link) -> None:
        """Take calls from now on, unless that process has ended."""
        if self._link is link:
            self.health, self.reason, self._was_ready = Health.READY, None, True

    def _settle(self, frame: Frame) -> None:
        answer = self._pending.get(frame.call)
        if answer is None or answer.done():
            return  # the caller has been cancelled
        if frame.kind == FrameKind.ERROR:
            answer.set_exception(unpack_error(frame.payload))
        elif frame.kind == FrameKind.RESULTS:
            answer.set_result(unpack_results(frame.payload))
        elif frame.kind == FrameKind.PREPARE_AGAIN:
            answer.set_exception(PrepareAgain(unpack_recipe(frame.payload)))
        else:
            answer.set_result(bytes(frame.payload))

    def _fail_call(self, call: int, error: Exception) -> None:
        answer = self._pending.get(call)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _lose_calls(self) -> None:
        """Fail all calls that have no answer yet: the process has ended."""
        error = EngineClosed(f"the {self.kind} ended: {self.reason}")
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)


def size_of(parts: Parts) -> int:
    return sum(len(part) for part in parts)


def too_large(field: str, num_bytes: int, link: Link) -> TooLarge:
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
