"""The process of an engine: `python -m helmrec.serve.engine_process SOCKET OUTGOING INCOMING [DOOR]` (descriptors).

Ends when the front says so or has ended; ignores signals, which the front handles. A frame has the same effect as the
corresponding call of a port in the front's process. Through the door come tables that engines share.
"""

import asyncio
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.redaction import is_secret_name
from helmrec.serve.allocator import keep_freed_memory
from helmrec.serve.engine_server import EngineServer, FrontDoor
from helmrec.serve.frame_server import ignore_signals, take_link
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.node import swapping
from helmrec.serve.port import Health
from helmrec.serve.ring import Frame, Link
from helmrec.serve.settings import ServeConfig
from helmrec.serve.shared_rows import TableDoor
from helmrec.serve.swap import SwappingPort
from helmrec.serve.wire import Begin, FrameKind, unpack_call

_LOOK_EVERY_S = 0.01


class EngineProcess(EngineServer):
    """Answers the front's frames through an engine's port."""

    def __init__(self, link: Link, door: TableDoor | None = None) -> None:
        super().__init__(link)
        self._door = door
        self._port: SwappingPort | None = None
        self._socket_path: str | None = None
        self._fronts: FrontDoor | None = None

    async def _close(self) -> None:
        if self._fronts is not None:
            self._fronts.close()
        if self._port is not None:
            await self._port.close()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == FrameKind.BEGIN:
            self._start(self._begin(bytes(frame.payload)))
        elif frame.kind == FrameKind.END:
            self._is_over.set()
        elif frame.kind == FrameKind.CALL and unpack_call(frame.payload).name == "admit_fronts":
            self._start(self._reply(FrameKind.VALUE, frame.call, self._admit_fronts()))
        else:
            self._serve_frame(frame)

    def _ready_port(self) -> SwappingPort:
        assert self._port is not None, "the front sends calls when the engine is ready"
        return self._port

    async def _admit_fronts(self) -> None:
        assert self._socket_path is not None, "the front asks only if there is a socket"
        self._fronts = FrontDoor(self._socket_path, self._ready_port)

    async def _begin(self, packed: bytes) -> None:
        try:
            begin = msgspec.msgpack.decode(packed, type=Begin)
            settings = {**begin.engine, **begin.serve}
            secrets = [value for name, value in settings.items() if is_secret_name(name) and isinstance(value, str)]
            log_to_stderr(begin.serve["log_level"], secrets)
            engine, serve = EngineConfig(**begin.engine), ServeConfig(**begin.serve)
            self._socket_path = serve.engine_socket
            model, follows_log = Path(begin.model), begin.follows_log
            port = await asyncio.to_thread(swapping, model, engine, serve, door=self._door, follows_log=follows_log)
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
            self._give_up(port.current.engine.file_problem or RuntimeError(port.reason))


def main(arguments: list[str]) -> None:
    ignore_signals()
    PROCESS.take_over()
    keep_freed_memory()
    end, outgoing, incoming, *door = map(int, arguments)
    tables = TableDoor(socket.socket(fileno=door[0])) if door else None
    uvloop.run(EngineProcess(take_link(end, outgoing, incoming), tables).run())


if __name__ == "__main__":
    main(sys.argv[1:])
