"""Stands in for an engine's process, so that tests can have it answer what no engine should."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec

from helmrec.engine.intake import Intake
from helmrec.errors import EngineClosed
from helmrec.serve.prepared_wire import pack_recipe
from helmrec.serve.process_port import ProcessMemory, ProcessPort
from helmrec.serve.ring import _MESSAGE, Link, open_ring, shared_file
from helmrec.serve.wire import Begin, FrameKind, pack_error, unpack_call
from tests.helpers import tiny_config, tiny_engine

SILENCE = object()  # the answer of an engine that hangs
GARBAGE = object()  # the answer of an engine that writes into the ring what nobody can read


class FakeEngine:
    """Says that it is ready, and answers every call with what `answer` returns or raises. Lives in the port's loop."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], Any]) -> None:
        self._answer = answer
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.calls: list[str] = []  # since the last start, without looks

    def spawn(self) -> "tuple[Link, subprocess.Popen[bytes]]":
        """As `ProcessPort._spawn`; the process only waits to be killed."""
        self.num_starts += 1
        self.calls.clear()
        if self._link is not None:
            self._link.close()
        ours, theirs = socket.socketpair()
        there, back = shared_file(1 << 20), shared_file(1 << 20)
        front = Link(ours, open_ring(there), open_ring(back))
        self._link = Link(theirs, open_ring(back), open_ring(there))
        os.close(there)
        os.close(back)
        self._link.attach(asyncio.get_running_loop(), self._receive)
        self._process = subprocess.Popen(["sleep", "100"])
        return front, self._process

    def crash(self) -> None:
        assert self._link is not None
        assert self._process is not None
        self._process.kill()
        self._link.close()

    def give_up(self, error: Exception) -> None:
        """Say why, and end."""
        assert self._link is not None
        self._link.send(FrameKind.FAILED, 0, pack_error(error))
        self.crash()

    def _receive(self) -> None:
        link = self._link
        assert link is not None
        try:
            for frame in link.receive():
                if frame.kind == FrameKind.BEGIN:
                    link.send(FrameKind.READY, 0)
                elif frame.kind == FrameKind.RANK:
                    link.send(FrameKind.RESULTS, frame.call, [b"\xff" * 16])  # scores that nobody can read
                elif frame.kind == FrameKind.CALL:
                    self._call(link, frame.call, *unpack_call(frame.payload))
                elif frame.kind == FrameKind.END:
                    self.crash()
                    return
                link.done(frame)
        except EngineClosed:
            link.close()

    def _call(self, link: Link, call: int, name: str, arguments: dict[str, Any]) -> None:
        if name == "stats":
            link.send(FrameKind.VALUE, call, [msgspec.msgpack.encode(tiny_engine().stats())])
            return
        if name == "intake_recipe":
            link.send(FrameKind.VALUE, call, pack_recipe(Intake(tiny_config(), 1, 100).recipe))
            return
        self.calls.append(name)
        try:
            value = self._answer(name, arguments)
        except Exception as error:
            link.send(FrameKind.ERROR, call, pack_error(error))
            return
        if value is GARBAGE:
            link.socket.send(b"\xff" * _MESSAGE.size)  # a message whose positions make no sense
        elif value is not SILENCE:
            link.send(FrameKind.VALUE, call, [msgspec.msgpack.encode(value)])


def port_before(engine: FakeEngine, replay_bytes: int = 1 << 20) -> ProcessPort:
    """A front whose engines are fakes, one after the other."""
    port = ProcessPort(Begin("model", {}, {}), tiny_config(), 100, ProcessMemory(1 << 20, replay_bytes), {})
    port._spawn = engine.spawn  # type: ignore[method-assign]
    return port
