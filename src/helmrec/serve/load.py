"""Open-loop load over HTTP: requests are sent when they are due, over as many connections as needed.

Requests are binary tensors, which are cheap to make; latency counts from the time a request was due.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from helmrec.engine.engine import EngineStats
from helmrec.errors import ConfigError, ServerError
from helmrec.load import LoadSnapshot, LoadTally
from helmrec.memory.stats import PoolStats
from helmrec.model.config import ModelConfig
from helmrec.serve.schema import Problem
from helmrec.serve.tensors import TensorNames, encode_request
from helmrec.types import RankRequest

_MAX_CONNECTIONS = 1_024
_REFUSED = {429: "queue full", 503: "deadline, or not ready", 409: "forgotten"}


def _detail(body: bytes) -> str:
    """The message of an error answer."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(body, type=Problem).detail
    return repr(body[:100])


class HttpReply(NamedTuple):
    status: int
    body: bytes


class HttpOutcome(NamedTuple):
    """How a request ended."""

    due_s: float
    status: int  # of HTTP; 0: no answer
    latency_ms: float


class Connection(NamedTuple):
    """A connection with one request at a time. Parses only the HTTP that HelmRec's server writes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, request: bytes) -> HttpReply:
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if line)
        return HttpReply(status, await self.reader.readexactly(int(fields.get(b"content-length", b"0"))))


class HttpLoad:
    """Sends requests to the server at `url` at given times."""

    def __init__(self, url: str, deadline_ms: float | None = None, max_connections: int = _MAX_CONNECTIONS) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"url must look like http://127.0.0.1:8000, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._deadline = "" if deadline_ms is None else f"deadline-ms: {deadline_ms:g}\r\n"
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(max_connections)
        self.tally = LoadTally()
        self._pool: PoolStats | None = None
        self._started_s = 0.0
        self.outcomes: list[HttpOutcome] = []

    def model(self) -> ModelConfig:
        """Return the shape of the served model."""
        reply = asyncio.run(self._once("/v1/model"))
        if reply.status != 200:
            raise ServerError(f"no model at {self._host}:{self._port}, got status {reply.status}")
        return ModelConfig(**msgspec.json.decode(reply.body))

    def run(
        self,
        requests: Iterator[RankRequest],
        model: ModelConfig,
        times_s: NDArray[np.float64],
        watch: Callable[[LoadSnapshot], None] = lambda snapshot: None,
        watch_every_s: float = 0.5,
    ) -> LoadSnapshot:
        """Send a request at each of the times. Returns when all are answered, refused or failed."""
        return asyncio.run(self._run(requests, model, times_s, watch, watch_every_s))

    async def _run(
        self,
        requests: Iterator[RankRequest],
        model: ModelConfig,
        times_s: NDArray[np.float64],
        watch: Callable[[LoadSnapshot], None],
        watch_every_s: float,
    ) -> LoadSnapshot:
        names, path = TensorNames(model), f"/v2/models/{model.name}/infer"
        await self._pool_stats()
        self._started_s = time.perf_counter()
        watcher = asyncio.create_task(self._watch(watch, watch_every_s))
        offers: set[asyncio.Task[None]] = set()
        for due_s, request in zip(times_s.tolist(), requests, strict=False):
            encoded = encode_request(request, names)
            head = f"inference-header-content-length: {encoded.json_bytes}\r\n{self._deadline}"
            message = self._message("POST", path, head, encoded.body)
            if (left_s := due_s - self._elapsed_s()) > 0:
                await asyncio.sleep(left_s)
            self.tally.lags_ms.append((self._elapsed_s() - due_s) * 1e3)
            offer = asyncio.create_task(self._offer(message, due_s))
            offers.add(offer)
            offer.add_done_callback(offers.discard)
        await asyncio.gather(*offers)
        watcher.cancel()
        end = self.tally.snapshot(self._elapsed_s(), await self._pool_stats())
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()
        return end

    async def _watch(self, watch: Callable[[LoadSnapshot], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            watch(self.tally.snapshot(self._elapsed_s(), await self._pool_stats()))

    async def _pool_stats(self) -> PoolStats:
        """Return the pool's counters; the last known ones if the server does not answer, so that the run goes on."""
        with suppress(OSError, EOFError, ValueError):  # undecodable bodies raise ValueError
            reply = await self._send(self._message("GET", "/v1/pool"))
            if reply.status == 200:
                self._pool = msgspec.json.decode(reply.body, type=EngineStats).pool
        if self._pool is None:
            raise ServerError(f"{self._host}:{self._port} does not answer /v1/pool")
        return self._pool

    async def _offer(self, message: bytes, due_s: float) -> None:
        status, cause = 0, ""
        try:
            async with self._room:
                reply = await self._send(message)
            status, cause = reply.status, f"status {reply.status}: {_detail(reply.body)}"
        except (OSError, EOFError, ValueError) as error:
            cause = f"no answer: {error}"
        latency_ms = (self._elapsed_s() - due_s) * 1e3
        self.outcomes.append(HttpOutcome(due_s, status, latency_ms))
        if status == 200:
            self.tally.answer(due_s, latency_ms)
        elif status in _REFUSED:
            self.tally.refuse(_REFUSED[status], latency_ms)
        else:
            self.tally.failures[cause] += 1

    async def _send(self, message: bytes) -> HttpReply:
        """Send over an idle connection, or a new one. A server closes connections that were idle for long."""
        while self._idle:
            connection = self._idle.pop()
            with suppress(OSError, EOFError):
                return await self._send_over(connection, message)
        connection = Connection(*await asyncio.open_connection(self._host, self._port, limit=1 << 20))
        return await self._send_over(connection, message)

    async def _send_over(self, connection: Connection, message: bytes) -> HttpReply:
        try:
            reply = await connection.send(message)
        except BaseException:
            connection.writer.close()
            raise
        self._idle.append(connection)
        return reply

    async def _once(self, path: str) -> HttpReply:
        try:
            reply = await self._send(self._message("GET", path))
        except (OSError, EOFError, ValueError) as error:
            raise ServerError(f"no answer ({error}), from {self._host}:{self._port}") from None
        self._idle.pop().writer.close()
        return reply

    def _message(self, method: str, path: str, head: str = "", body: bytes = b"") -> bytes:
        lines = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n{head}\r\n"
        return lines.encode() + body

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s
