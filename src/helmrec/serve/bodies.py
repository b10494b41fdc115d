"""From the bytes of a request to typed values; what is wrong with them is told by field and value."""

import re
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from helmrec.errors import RequestError

DEADLINE_HEADER = b"deadline-ms"
_AT = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<path>.*)`$")
_NAMED = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>.*?)`")
_EXPECTED = re.compile(r"^Expected (?P<what>.+?)(?:, got (?P<kind>.+))?$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_MAX_SHOWN = 100
T = TypeVar("T")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body, or 413 as soon as it is known to be too long: the rest is never read."""
    if encoding := header(request.scope, b"content-encoding"):
        raise HTTPException(415, f"content-encoding: bodies must not be compressed, got {encoding[:_MAX_SHOWN]!r}")
    declared = header(request.scope, b"content-length") or ""
    if declared.isdecimal() and int(declared[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks, num_bytes, has_more = [], 0, True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, has_more = message.get("body", b""), message.get("more_body", False)
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name. Looked for where it lies: a mapping made for one look costs more."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(413, f"a body may hold at most {limit_bytes} bytes", {"connection": "close"})


def decode(decoder: msgspec.json.Decoder[T], body: bytes | memoryview) -> T:
    """The body as the decoder's type; RequestError names the field and the value seen."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("body", _shown(bytes(body)), f"JSON is needed ({error})") from None


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
    return RequestError(path or "body", _value_at(path, body), problem)


def _needed(expected: re.Match[str]) -> str:
    """In the words all our messages have, which end in the value that was got."""
    return f"{expected['what']} is needed" + (f", not {expected['kind']}" if expected["kind"] else "")


def _value_at(path: str, body: bytes | memoryview) -> object:
    """What the client sent there; None where the path does not lead to one value."""
    try:
        value = msgspec.json.decode(body)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return None  # `[...]` stands for some key of an object
    return value if isinstance(value, int | float | None) else _shown(value)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value[:_MAX_SHOWN] if isinstance(value, bytes) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
