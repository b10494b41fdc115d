"""An engine's process as fronts see it: the front that started it, and others that join through a Unix socket.

A front that joins brings its own rings. It ranks, and looks at the engine; what an engine must have after a restart
(rows, split, mode, model) changes only through the front that started it, which keeps it.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from helmrec.errors import RequestError
from helmrec.serve.frame_server import FrameServer
from helmrec.serve.port import InProcessPort, Queued
from helmrec.serve.prepared_wire import pack_recipe, unpack_prepared
from helmrec.serve.ring import Frame, Link, open_ring
from helmrec.serve.swap import SwappingPort
from helmrec.serve.wire import FrameKind, pack_results, unpack_call, unpack_prefill
from helmrec.types import RankResult

log = logging.getLogger("helmrec.serve")
_NUM_RINGS = 2
_CALLS_OF_JOINED = frozenset({"stats", "look", "intake_recipe", "forget"})


class _WatchedCall:
    """A call whose requests are in the engine's queue."""

    __slots__ = ("answer", "num_left")

    def __init__(self, num_requests: int, answer: Callable[[], None]) -> None:
        self.num_left = num_requests  # 0 or less: it is answered
        self.answer = answer


class EndedCalls:
    """Has calls answered in the event loop when they have ended, all that a step ends in one go.

    A task and a wake-up for each request cost more than the rest of its way through this process.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[_WatchedCall, Future[RankResult]]] = deque()
        self._is_woken = False

    def watch(self, queued: Queued, answer: Callable[[], None]) -> None:
        """Call `answer` in the running event loop, once, when all requests of a call have ended or one has failed."""
        loop, call = asyncio.get_running_loop(), _WatchedCall(len(queued.futures), answer)

        def note(future: "Future[RankResult]") -> None:  # in the thread that ends the request
            self._ended.append((call, future))
            if not self._is_woken:
                self._is_woken = True
                loop.call_soon_threadsafe(self._answer_ended)

        for future in queued.futures:
            future.add_done_callback(note)

    def _answer_ended(self) -> None:
        self._is_woken = False  # first: a request that ends from now on wakes the loop again
        while self._ended:
            call, future = self._ended.popleft()
            was_answered = call.num_left <= 0
            has_failed = future.cancelled() or future.exception() is not None
            call.num_left = 0 if has_failed else call.num_left - 1
            if call.num_left == 0 and not was_answered:
                call.answer()


class EngineServer(FrameServer):
    """Answers the frames of a front through an engine's port."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._ended_calls = EndedCalls()

    def _ready_port(self) -> SwappingPort:
        """Return the port of the engine, which is ready."""
        raise NotImplementedError

    def _serve_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.RANK:
            self._rank(frame)
        elif frame.kind == FrameKind.PREFILL:
            result = self._ready_port().current.signal(unpack_prefill(frame.payload))
            self._start(self._reply(FrameKind.VALUE, frame.call, asyncio.wrap_future(result)))
        else:
            name, arguments = unpack_call(frame.payload)
            value = getattr(self._ready_port(), name)(**arguments)
            self._start(self._reply(FrameKind.VALUE, frame.call, value))

    def _rank(self, frame: Frame) -> None:
        """Queue requests that the front has prepared; if it did so for an engine before, have it prepare them again."""
        port = self._ready_port().current  # another may take over before this one has answered
        received = unpack_prepared(frame.payload, frame.arrays)
        if not port.engine.is_prepared_by(received.tag):
            self._answer(FrameKind.PREPARE_AGAIN, frame.call, pack_recipe(port.engine.intake_recipe))
            return
        queued = port.enqueue_prepared(received.prepared, received.spent_ms)
        self._ended_calls.watch(queued, partial(self._answer_rank, frame.call, port, queued))

    def _answer_rank(self, call: int, port: InProcessPort, queued: Queued) -> None:
        """Answer a call that has ended."""
        try:
            results = port.take_results(queued)
        except Exception as error:
            self._fail(call, error)
        except BaseException as error:  # an exit inside a step: the front starts another process
            self._give_up(error)
        else:
            self._answer(FrameKind.RESULTS, call, pack_results(results))


class JoinedFront(EngineServer):
    """Answers a front that has joined. Its end, or a failure of its own, ends nothing else."""

    def __init__(self, link: Link, ready_port: Callable[[], SwappingPort]) -> None:
        super().__init__(link)
        self._find_port = ready_port

    def _ready_port(self) -> SwappingPort:
        return self._find_port()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == FrameKind.END:
            self._is_over.set()
            return
        if frame.kind == FrameKind.CALL and (name := unpack_call(frame.payload).name) not in _CALLS_OF_JOINED:
            raise RequestError("call", name, "the front that started the engine takes it")
        self._serve_frame(frame)

    def _answer(self, kind: FrameKind, call: int, parts: Sequence[bytes | memoryview]) -> None:
        if not self._is_over.is_set():  # else the front has left, and the link is closed
            super()._answer(kind, call, parts)

    def _give_up(self, error: BaseException) -> None:
        log.error("a front that had joined is given up", exc_info=error)
        self._is_over.set()

    async def _close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)  # they write to the link
        self._link.close()


class FrontDoor:
    """Listens for fronts that join. Used in one event loop."""

    def __init__(self, path: str, ready_port: Callable[[], SwappingPort]) -> None:
        """Only the user of this process may connect: a front gets the key of the prefix hash."""
        self._path, self._ready_port = path, ready_port
        self._running: set[asyncio.Task[None]] = set()
        with suppress(FileNotFoundError):
            if Path(path).is_socket():  # of an engine that was killed
                Path(path).unlink()
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(before)
        self._listener.listen()
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            front, _ = self._listener.accept()
            front.setblocking(False)
            asyncio.get_running_loop().add_reader(front, self._admit, front)

    def _admit(self, front: socket.socket) -> None:
        """Take the rings of a front that has connected, and serve it."""
        asyncio.get_running_loop().remove_reader(front)
        files: list[int] = []
        try:
            _, files, _, _ = socket.recv_fds(front, 1, _NUM_RINGS)
            if len(files) != _NUM_RINGS:
                raise ValueError(f"a front that joins brings {_NUM_RINGS} rings, got {len(files)}")
            link = Link(front, outgoing=open_ring(files[1]), incoming=open_ring(files[0]))
        except (OSError, ValueError) as error:
            log.warning("a front could not join", extra={"reason": str(error)})
            front.close()
            return
        finally:
            for each in files:
                os.close(each)
        task = asyncio.create_task(JoinedFront(link, self._ready_port).run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        with suppress(FileNotFoundError):
            Path(self._path).unlink()
