"""The process at the other end of a link: takes the front's frames, and answers each call with a value or an error."""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import msgspec

from helmrec.errors import EngineClosed, HelmRecError, QueueFull
from helmrec.serve.ring import Frame, Link, open_ring
from helmrec.serve.wire import FrameKind, pack_error, pack_results

log = logging.getLogger("helmrec.serve")


class FrameServer:
    """Answers the front's frames, in one event loop. Ends when the front says so or has ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()

    def _handle(self, frame: Frame) -> None:
        """Start the work a frame asks for. The frame must not be read after this returns."""
        raise NotImplementedError

    async def _close(self) -> None:
        """Close what the process has opened."""

    async def run(self) -> None:
        self._link.attach(asyncio.get_running_loop(), self._receive)
        await self._is_over.wait()
        self._link.detach()
        await self._close()

    def _receive(self) -> None:
        try:
            for frame in self._link.receive():
                try:
                    self._handle(frame)
                except Exception as error:  # a frame that is refused or unreadable must not affect those behind it
                    self._fail(frame.call, error)
                self._link.done(frame)
        except EngineClosed:
            self._is_over.set()
        except Exception as error:  # invalid positions: no later frame can be trusted
            self._give_up(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._conclude)

    def _conclude(self, task: asyncio.Task[None]) -> None:
        """End the process if a task failed, so that the front fails its call and restarts the process."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._give_up(error)

    async def _reply(self, kind: FrameKind, call: int, result: Awaitable[Any]) -> None:
        """Answer a call with its result, or with the error it raises."""
        try:
            value = await result
            parts = pack_results(value) if kind == FrameKind.RESULTS else [msgspec.msgpack.encode(value)]
            self._answer(kind, call, parts)
        except Exception as error:
            self._fail(call, error)

    def _fail(self, call: int, error: Exception) -> None:
        if not isinstance(error, HelmRecError):
            log.error("a call failed", exc_info=error)
        self._answer(FrameKind.ERROR, call, pack_error(error))

    def _answer(self, kind: FrameKind, call: int, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._link.send(kind, call, parts)
        except QueueFull as error:  # the front does not read; an error without payload still fits
            log.warning("an answer did not fit", extra={"reason": str(error)})
            self._answer_without_payload(call)
        except EngineClosed:
            self._is_over.set()

    def _answer_without_payload(self, call: int) -> None:
        try:
            self._link.send(FrameKind.ERROR, call)
        except (QueueFull, EngineClosed) as error:  # it has not read for very long, or has ended
            log.error("the front does not read answers", extra={"reason": str(error)})
            self._is_over.set()

    def _give_up(self, error: BaseException) -> None:
        """Report the failure to the front and end the process."""
        log.error("the process failed", exc_info=error)
        self._is_over.set()
        self._answer(FrameKind.FAILED, 0, pack_error(error))


def ignore_signals() -> None:
    """Leave signals to the front."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def take_link(end: int, outgoing: int, incoming: int) -> Link:
    """Make this side's end of a link from descriptors, and close those of the rings."""
    with open(outgoing, "rb", buffering=0), open(incoming, "rb", buffering=0):
        return Link(socket.socket(fileno=end), open_ring(outgoing), open_ring(incoming))
