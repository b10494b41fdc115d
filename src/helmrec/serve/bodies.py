"""From the bytes of a request to typed values; what is wrong with them is named by field and value."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from helmrec.errors import RequestError
from helmrec.serve.json_place import value_at

DEADLINE_HEADER = b"deadline-ms"
_AT = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<path>.*)`$")
_NAMED = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>.*?)`")
_EXPECTED = re.compile(r"^Expected (?P<what>.+?)(?:, got (?P<kind>.+))?$")
_MAX_SHOWN = 100
_SMALL_BYTES = 1 << 16
_MOST_FIELDS = 10_000  # of all objects of a body: each takes a hundred times as long to decode as a number
_KEPT_FOR_SMALL = 8  # one part in so many
_HELD = "body_bytes"  # key of a request's state
_STOP_PATIENCE_S = 2.0  # with bodies that are not whole when the server is to stop
T = TypeVar("T")


class Bodies:
    """Reads the bodies of requests, and holds them to bounds: bytes of one, bytes of all in memory, and time.

    A body counts from its first byte until its request is answered (`let_go`). Bodies of up to 64 KiB have an eighth
    of the bytes to themselves, so that a few long ones that come slowly do not keep everybody else out. Lives in one
    event loop.
    """

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, timeout_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_bytes = max_bodies_bytes
        self._timeout_s = timeout_s
        self._reading: set[asyncio.Timeout] = set()
        self._is_stopping = False
        self.held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body. As soon as it is known to be too long (413), too much at once (503) or too slow (408), that
        is raised and the rest is never read."""
        if encoding := header(request.scope, b"content-encoding"):
            raise HTTPException(415, f"content-encoding: bodies must not be compressed, got {encoding[:_MAX_SHOWN]!r}")
        declared = header(request.scope, b"content-length") or ""
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        timeout_s = min(self._timeout_s, _STOP_PATIENCE_S) if self._is_stopping else self._timeout_s
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

    def _hold(self, scope: Scope, num_new: int, num_bytes: int) -> None:
        """Count bytes of a body that has so many by now."""
        kept_back = 0 if num_bytes <= _SMALL_BYTES else self._max_bytes // _KEPT_FOR_SMALL
        if self.held_bytes + num_new > self._max_bytes - kept_back:
            told = f"the bodies of all requests in memory may hold {self._max_bytes} bytes (max_bodies_bytes)"
            raise HTTPException(503, told, {"retry-after": "1"})  # the server drops the rest of it as it comes
        self.held_bytes += num_new
        state = scope.setdefault("state", {})
        state[_HELD] = state.get(_HELD, 0) + num_new

    def let_go(self, scope: Scope) -> None:
        """The request is answered: its body is not in memory any more. May be called again, and without a body."""
        self.held_bytes -= scope.get("state", {}).pop(_HELD, 0)
        assert self.held_bytes >= 0, "a body was let go twice"

    def stop(self) -> None:
        """The server is about to stop: bodies that are not whole in two seconds are not waited for."""
        self._is_stopping = True
        by_s = asyncio.get_running_loop().time() + _STOP_PATIENCE_S
        for reading in self._reading:
            ends_s = reading.when()
            if not reading.expired() and ends_s is not None and ends_s > by_s:
                reading.reschedule(by_s)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"a body may hold at most {self._max_body_bytes} bytes", {"connection": "close"})

    def _too_slow(self) -> HTTPException:
        if self._is_stopping:
            told = "the server is about to stop, and the body had not come"
            return HTTPException(503, told, {"retry-after": "1", "connection": "close"})
        told = f"the body must come within {self._timeout_s:g} s (body_timeout_s)"
        return HTTPException(408, told, {"connection": "close"})


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name. Looked for where it lies: a mapping made for one look costs more."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def decode(decoder: msgspec.json.Decoder[T], body: bytes | memoryview) -> T:
    """The body as the decoder's type, decoded once; RequestError names the field and the value seen."""
    if len(body) > _SMALL_BYTES and (num_fields := bytes(body).count(b":")) > _MOST_FIELDS:
        raise RequestError("body", num_fields, f"at most {_MOST_FIELDS} fields are allowed in a body")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = repr(bytes(body[:_MAX_SHOWN]))[:_MAX_SHOWN]
        raise RequestError("body", shown, f"JSON is needed ({error})") from None


def deadline_ms(request: Request) -> float | None:
    """What the client's header allows, in milliseconds."""
    text = header(request.scope, DEADLINE_HEADER)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise RequestError(DEADLINE_HEADER.decode(), text[:_MAX_SHOWN], "a positive number of milliseconds is needed")
    return value


def _explained(message: str, body: bytes | memoryview) -> RequestError:
    if named := _NAMED.match(message):
        is_unknown = named["problem"] == "contains unknown"
        return RequestError(named["name"][:_MAX_SHOWN], None, "not a known field" if is_unknown else "is required")
    at = _AT.match(message)
    problem, path = (at["problem"], at["path"]) if at else (message, "")
    problem = _EXPECTED.sub(_needed, problem).replace("`", "")
    return RequestError(path or "body", value_at(path, bytes(body), _MAX_SHOWN), problem)


def _needed(expected: re.Match[str]) -> str:
    """In the words all our messages have, which end in the value that was got."""
    return f"{expected['what']} is needed" + (f", not {expected['kind']}" if expected["kind"] else "")
