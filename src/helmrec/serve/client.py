"""A client of one server: what it raises is what an engine in the same process would have raised.

The standard library's connection is enough for requests with one body and one answer, and leaves programs that
only call a server free of an HTTP package.
"""

import http.client
from urllib.parse import urlsplit

import msgspec
import numpy as np

from helmrec.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    HelmRecError,
    QueueFull,
    RequestError,
    ServerError,
)
from helmrec.serve.schema import Problem, RankAnswer
from helmrec.types import RankRequest, RankResult

_BY_NAME: dict[str, type[HelmRecError]] = {kind.__name__: kind for kind in (DeadlineExceeded, EngineClosed, QueueFull)}


class Client:
    """Ranks on the server at `url`. Keeps one connection open, so it serves one thread; close it when done."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"url must look like http://127.0.0.1:8000, got {url!r}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._encoder = msgspec.json.Encoder(enc_hook=_as_plain)
        self._answer = msgspec.json.Decoder(RankAnswer)

    def rank(self, request: RankRequest) -> RankResult:
        """Raise RequestError, QueueFull or DeadlineExceeded as an engine would; ServerError if there is no answer."""
        answer = self._send("POST", "/v1/rank", self._encoder.encode(request))
        if answer.status != 200:
            raise _told(answer)
        return self._answer.decode(answer.body).result()

    def is_ready(self) -> bool:
        """Whether requests may be sent: False while the server warms up or cannot be reached."""
        try:
            return self._send("GET", "/readyz").status == 200
        except ServerError:
            return False

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: str, path: str, body: bytes | None = None) -> "_Answer":
        may_be_stale = self._connection.sock is not None  # a server closes connections that are idle for long
        try:
            return self._try(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            if not may_be_stale or isinstance(error, TimeoutError):
                raise ServerError(f"no answer ({error}), from {self._url}") from None
        return self._send(method, path, body)  # on a new connection; ranking twice does no harm

    def _try(self, method: str, path: str, body: bytes | None) -> "_Answer":
        try:
            self._connection.request(method, path, body, {"content-type": "application/json"} if body else {})
            answer = self._connection.getresponse()
            return _Answer(answer.status, answer.read())
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise


class _Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes


def _told(answer: _Answer) -> HelmRecError:
    """The error the server told of."""
    try:
        problem = msgspec.json.decode(answer.body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ServerError(f"status {answer.status} without a reason, got {answer.body[:100]!r}")
    if problem.field is not None:
        seen = problem.detail.removeprefix(f"{problem.field}: ").rsplit(", got ", 1)[0]
        return RequestError(problem.field, problem.value, seen)
    known = _BY_NAME.get(problem.type.rsplit(":", 1)[-1], ServerError)
    return known(f"{problem.detail} (request {problem.request_id})")


def _as_plain(value: object) -> object:
    """NumPy's arrays and numbers, as JSON has them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise RequestError("request", value, "numbers, sequences and arrays are needed")
