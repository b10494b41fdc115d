"""The server process: listens, serves, and answers running requests before it stops."""

import importlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from helmrec.collector import PROCESS
from helmrec.errors import ConfigError
from helmrec.serve.allocator import keep_freed_memory
from helmrec.serve.front import Front
from helmrec.serve.settings import ServeConfig

if TYPE_CHECKING:
    from helmrec.serve.grpc_server import GrpcServer

SWITCH_INTERVAL_S = 0.001  # of threads: the event loop must not wait long for the interpreter lock
log = logging.getLogger("helmrec.serve")


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket bound as the settings say; port 0 is replaced by a free port."""
    return _bind(config.host, config.port, "port")


def _bind(host: str, port: int, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"host, {name}: cannot listen ({error.strerror}), got {host}:{port}") from None


def check_grpc(config: ServeConfig) -> None:
    """Raise ConfigError if gRPC is asked for and its packages are missing or its port is taken.

    gRPC binds its port itself, when the server starts; this tells before a model is loaded.
    """
    if config.grpc_port is None:
        return
    _grpc_module()
    _bind(config.host, config.grpc_port, "grpc_port").close()


def grpc_server(front: Front) -> "GrpcServer":
    """Make the server of the Open Inference Protocol over gRPC; ConfigError if its packages are missing."""
    made: GrpcServer = _grpc_module().GrpcServer(front)
    return made


def _grpc_module() -> ModuleType:
    try:
        return importlib.import_module("helmrec.serve.grpc_server")
    except ModuleNotFoundError as error:
        raise ConfigError(f"grpc_port needs pip install 'helmrec[grpc]' ({error})") from None


class _Server(uvicorn.Server):
    """Calls `on_stop` when it begins to stop."""

    def __init__(self, settings: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(settings)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def serve_until_stopped(
    app: ASGIApp, config: ServeConfig, listener: socket.socket, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT. Then accept no connections, answer running requests, and return.

    `on_stop` is called in the event loop when the server begins to stop.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    PROCESS.take_over()
    keep_freed_memory()
    if config.engine_process or config.joined_engine is not None:  # else the port does this, once its engine is ready
        PROCESS.settle()
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the address of a client is not used
        lifespan="on",
        timeout_graceful_shutdown=config.drain_s,
    )
    server = _Server(settings, on_stop)

    def stop(*_: object) -> None:  # for signals before uvicorn handles them, and when uvicorn raises them again
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = listener.getsockname()[:2]
    log.info("listening", extra={"address": f"http://{f'[{host}]' if ':' in host else host}:{port}"})
    server.run(sockets=[listener])
    log.info("stopped")
