"""The server process: listens, serves, and answers running requests before it stops."""

import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from helmrec.collector import PROCESS
from helmrec.errors import ConfigError
from helmrec.serve.settings import ServeConfig

_SWITCH_INTERVAL_S = 0.001  # of threads: the event loop must not wait long for the interpreter lock
log = logging.getLogger("helmrec.serve")


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket bound as the settings say; port 0 is replaced by a free port."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"host, port: cannot listen ({error.strerror}), got {config.host}:{config.port}") from None


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
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    PROCESS.take_over()
    if config.engine_process:  # else the port does this, once its engine is ready
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
