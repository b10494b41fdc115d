"""A process that serves: it listens, and when told to stop it lets running requests end first."""

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

_TURN_S = 0.001  # of a thread, where others wait: the event loop must not wait for long behind an engine's thread
log = logging.getLogger("helmrec.serve")


def listen(config: ServeConfig) -> socket.socket:
    """A socket bound as the settings say; its port is a real one even if they leave it open."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"host, port: cannot listen ({error.strerror}), got {config.host}:{config.port}") from None


class _Server(uvicorn.Server):
    """Says when it begins to stop."""

    def __init__(self, settings: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(settings)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def serve_until_told(
    app: ASGIApp, config: ServeConfig, listener: socket.socket, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT: then no connection is accepted, running requests end, and this returns.

    `on_stop` is called in the event loop when that begins.
    """
    sys.setswitchinterval(_TURN_S)
    PROCESS.take_over()
    if config.engine_process:  # else what stays is complete when the engine is ready, and its port sees to that
        PROCESS.settle()
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody here asks who a client is
        lifespan="on",
        timeout_graceful_shutdown=config.drain_s,
    )
    server = _Server(settings, on_stop)

    def stop(*_: object) -> None:  # before the server listens to signals itself, and when it raises them again
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = listener.getsockname()[:2]
    log.info("listening", extra={"address": f"http://{f'[{host}]' if ':' in host else host}:{port}"})
    server.run(sockets=[listener])
    log.info("stopped")
