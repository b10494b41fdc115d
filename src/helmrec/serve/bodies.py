"""Read and decode the bodies of requests. Errors name the wrong field and its value."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from helmrec.errors import RequestError
from helmrec.serve.json_place import value_at, with_key

DEADLINE_HEADER = "deadline-ms"
_AT = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<path>.*)`$")
_NAMED = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>.*?)`")
_EXPECTED = re.compile(r"^Expected (?P<what>.+?)(?:, got (?P<kind>.+))?$")
_MAX_SHOWN = 100
_SMALL_BYTES = 1 << 16
_MOST_FIELDS = 10_000  # in all objects of a body: a field takes a hundred times as long to decode as a number
_SMALL_SHARE = 8  # 1 / 8 of the bytes is reserved for small bodies
_HELD = "body_bytes"  # key of a request's state
_STOP_TIMEOUT_S = 2.0  # for bodies that are incomplete when the server stops
T = TypeVar("T")


class Bodies:
    """Reads the bodies of requests within bounds: bytes of one body, bytes of all in memory, and time.

    A body counts from its first byte until its request is answered (`release`). An eighth of the bytes is reserved for
    bodies of up to 64 KiB, so that a few large, slow bodies do not block all other requests. Used in one event loop.
    """

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, timeout_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_bytes = max_bodies_bytes
        self._timeout_s = timeout_s
        self._reading: set[asyncio.Timeout] = set()
        self._is_stopping = False
        self.held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Read the whole body. Raise once it is too long (413), exceeds the bytes of all (503) or is too slow (408).

        The rest of such a body is not read.
        """
        if encoding := header(request.scope, b"content-encoding"):
            raise HTTPException(415, f"content-encoding: bodies must not be compressed, got {encoding[:_MAX_SHOWN]!r}")
        declared = header(request.scope, b"content-length") or ""
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        timeout_s = min(self._timeout_s, _STOP_TIMEOUT_S) if self._is_stopping else self._timeout_s
        try:
            async with asyncio.timeout(timeout_s) as reading:
                self._reading.add(reading)
                try:
                    return await self._read(request)
                finally:
                    self._reading.discard(reading)
        except TimeoutError:
            raise self._too_slow() from None

    async def _read(self, request: Request) -> bytes:
        chunks, num_bytes, has_more = [], 0, True
        while has_more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, has_more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(chunk)
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            self._hold(request.scope, len(chunk), num_bytes)
            chunks.append(chunk)
        return b"".join(chunks)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count a body that was read elsewhere while its call runs; 503 if all bodies would exceed their bound."""
        self._count(num_bytes, num_bytes)
        try:
            yield
        finally:
            self.held_bytes -= num_bytes

    def _hold(self, scope: Scope, num_new: int, num_bytes: int) -> None:
        self._count(num_new, num_bytes)
        state = scope.setdefault("state", {})
        state[_HELD] = state.get(_HELD, 0) + num_new

    def _count(self, num_new: int, num_bytes: int) -> None:
        """Count `num_new` bytes of a body that has `num_bytes` so far; 503 if all bodies would exceed their bound."""
        reserved = 0 if num_bytes <= _SMALL_BYTES else self._max_bytes // _SMALL_SHARE
        if self.held_bytes + num_new > self._max_bytes - reserved:
            problem = f"the bodies of all requests in memory may hold {self._max_bytes} bytes (max_bodies_bytes)"
            raise HTTPException(503, problem, {"retry-after": "1"})  # the server discards the rest as it arrives
        self.held_bytes += num_new

    def release(self, scope: Scope) -> None:
        """Stop counting the body of a request that is answered. May be called twice, and without a body."""
        self.held_bytes -= scope.get("state", {}).pop(_HELD, 0)
        assert self.held_bytes >= 0, "a body was released twice"

    def stop(self) -> None:
        """Shorten all timeouts to two seconds, because the server is about to stop."""
        self._is_stopping = True
        by_s = asyncio.get_running_loop().time() + _STOP_TIMEOUT_S
        for reading in self._reading:
            ends_s = reading.when()
            if not reading.expired() and ends_s is not None and ends_s > by_s:
                reading.reschedule(by_s)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"a body may hold at most {self._max_body_bytes} bytes", {"connection": "close"})

    def _too_slow(self) -> HTTPException:
        if self._is_stopping:
            problem = "the server is about to stop, and the body is incomplete"
            return HTTPException(503, problem, {"retry-after": "1", "connection": "close"})
        problem = f"the body must arrive within {self._timeout_s:g} s (body_timeout_s)"
        return HTTPException(408, problem, {"connection": "close"})


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name. A linear search is cheaper than Starlette's mapping for one lookup."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def decode(decoder: msgspec.json.Decoder[T], body: bytes | memoryview) -> T:
    """Decode a body; RequestError names the wrong field and its value."""
    if len(body) > _SMALL_BYTES and (num_fields := bytes(body).count(b":")) > _MOST_FIELDS:
        raise RequestError("body", num_fields, f"at most {_MOST_FIELDS} fields are allowed in a body")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = bytes(body[:_MAX_SHOWN]).decode("utf-8", "backslashreplace")[:_MAX_SHOWN]
        raise RequestError("body", shown, f"not JSON ({str(error).removeprefix('JSON is malformed: ')})") from None


def deadline_ms(request: Request) -> float | None:
    """Return the deadline in the client's header, in milliseconds; None without one."""
    return parse_deadline(header(request.scope, DEADLINE_HEADER.encode()))


def parse_deadline(text: str | None) -> float | None:
    """Parse a header of milliseconds; None without one."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise RequestError(DEADLINE_HEADER, text[:_MAX_SHOWN], "a positive number of milliseconds is needed")
    return value


def _explained(message: str, body: bytes | memoryview) -> RequestError:
    at = _AT.match(message)
    problem, path = (at["problem"], at["path"]) if at else (message, "")
    if named := _NAMED.match(problem):
        field = ".".join(part for part in (path, named["name"][:_MAX_SHOWN]) if part)
        if named["problem"] == "missing required":
            return RequestError(field, None, "is required")
        return RequestError(field, value_at(field, bytes(body), _MAX_SHOWN), "not a known field")
    if expected := _EXPECTED.match(problem):
        path = with_key(path, bytes(body), (expected["kind"] or "").strip("`")) or path
    problem = _EXPECTED.sub(_needed, problem).replace("`", "")
    return RequestError(path or "body", value_at(path, bytes(body), _MAX_SHOWN), problem)


def _needed(expected: re.Match[str]) -> str:
    """Rewrite msgspec's "Expected X, got Y" in the form of all other messages."""
    return f"{expected['what']} is needed" + (f", not {expected['kind']}" if expected["kind"] else "")
