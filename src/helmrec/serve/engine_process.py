"""The process an engine runs in: `python -m helmrec.serve.engine_process SOCKET OUTGOING INCOMING` (descriptors).

Ends when the front says so or has ended; ignores signals, which the front handles. A frame has the same effect as the
corresponding call of a port in the front's process.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.errors import EngineClosed, HelmRecError, QueueFull
from helmrec.redaction import is_secret_name
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.node import swapping
from helmrec.serve.port import Health
from helmrec.serve.ring import Frame, Link, open_ring
from helmrec.serve.settings import ServeConfig
from helmrec.serve.swap import SwappingPort
from helmrec.serve.wire import (
    Begin,
    FrameKind,
    pack_error,
    pack_results,
    unpack_call,
    unpack_prefill,
    unpack_requests,
)

log = logging.getLogger("helmrec.serve")
_LOOK_EVERY_S = 0.01


class EngineProcess:
    """Answers the front's frames through an engine's port, in one event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._port: SwappingPort | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        self._link.attach(asyncio.get_running_loop(), self._receive)
        await self._is_over.wait()
        self._link.detach()
        if self._port is not None:
            await self._port.close()

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

    def _handle(self, frame: Frame) -> None:
        """Start the work a frame asks for. The frame must not be read after this returns."""
        if frame.kind == FrameKind.BEGIN:
            self._start(self._begin(bytes(frame.payload)))
        elif frame.kind == FrameKind.END:
            self._is_over.set()
        elif frame.kind == FrameKind.RANK:
            port = self._ready_port().current  # another may take over before this one has answered
            queued = port.enqueue(*unpack_requests(frame.payload))
            self._start(self._reply(FrameKind.RESULTS, frame.call, port.results(queued)))
        elif frame.kind == FrameKind.PREFILL:
            result = self._ready_port().current.signal(unpack_prefill(frame.payload))
            self._start(self._reply(FrameKind.VALUE, frame.call, asyncio.wrap_future(result)))
        else:
            name, arguments = unpack_call(frame.payload)
            value = getattr(self._ready_port(), name)(**arguments)
            self._start(self._reply(FrameKind.VALUE, frame.call, value))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._conclude)

    def _conclude(self, task: asyncio.Task[None]) -> None:
        """End the process if a task failed, so that the front fails its call and restarts the engine."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._give_up(error)

    def _ready_port(self) -> SwappingPort:
        assert self._port is not None, "the front sends calls when the engine is ready"
        return self._port

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

    async def _begin(self, packed: bytes) -> None:
        try:
            begin = msgspec.msgpack.decode(packed, type=Begin)
            settings = {**begin.engine, **begin.serve}
            secrets = [value for name, value in settings.items() if is_secret_name(name) and isinstance(value, str)]
            log_to_stderr(begin.serve["log_level"], secrets)
            engine, serve = EngineConfig(**begin.engine), ServeConfig(**begin.serve)
            port = await asyncio.to_thread(swapping, Path(begin.model), engine, serve)
        except Exception as error:
            self._give_up(error)
            return
        self._port = port
        port.start()
        while port.health is Health.STARTING:
            await asyncio.sleep(_LOOK_EVERY_S)
        if port.health is Health.READY:
            self._answer(FrameKind.READY, 0, [])
        while port.health is Health.READY and not self._is_over.is_set():
            await asyncio.sleep(_LOOK_EVERY_S)
        if port.health is Health.FAILED:
            self._give_up(RuntimeError(port.reason))

    def _give_up(self, error: BaseException) -> None:
        """Report the failure to the front and end the process."""
        log.error("the engine failed", exc_info=error)
        self._is_over.set()
        self._answer(FrameKind.FAILED, 0, pack_error(error))


def main(arguments: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    PROCESS.take_over()
    end, outgoing, incoming = map(int, arguments)
    link = Link(socket.socket(fileno=end), open_ring(outgoing), open_ring(incoming))
    for descriptor in (outgoing, incoming):
        os.close(descriptor)
    asyncio.run(EngineProcess(link).run())


if __name__ == "__main__":
    main(sys.argv[1:])
