"""Calls an application in this process, without sockets; and a running one on loopback, for what needs them."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | list[bytes] = b"",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request; a list of bodies arrives in as many pieces."""
    chunks = [body] if isinstance(body, bytes) else body
    inbox = [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1} for i, chunk in enumerate(chunks)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return inbox.pop(0) if inbox else {"type": "http.disconnect"}

    async def collect(message: Message) -> None:
        sent.append(message)

    raw = [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "headers": raw,
        "query_string": query.encode(),
        "root_path": "",
    }
    await app(scope, receive, collect)
    start = sent[0]
    reply_headers = {k.decode(): v.decode() for k, v in start["headers"]}
    return Reply(start["status"], reply_headers, b"".join(m.get("body", b"") for m in sent[1:]))


class Caller:
    """An application with its lifespan running in an event loop of a thread of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Caller":
        self._thread.start()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.run(self._lifespan.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._lifespan.__aexit__(None, None, None))
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    def get(self, path: str, **headers: str) -> Reply:
        reply: Reply = self.run(send(self.app, "GET", path, headers=headers))
        return reply

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None, method: str = "POST") -> Reply:
        """A value that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes) or _is_pieces(body) else json.dumps(body).encode()
        reply: Reply = self.run(send(self.app, method, path, raw, headers))
        return reply

    def delete(self, path: str) -> Reply:
        reply: Reply = self.run(send(self.app, "DELETE", path))
        return reply

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.get("/readyz").status == 200)


def _is_pieces(body: Any) -> bool:
    return isinstance(body, list) and all(isinstance(piece, bytes) for piece in body)


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.005)


@contextmanager
def on_loopback(app: Any) -> Iterator[int]:
    """The application behind a real socket; yields its port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
