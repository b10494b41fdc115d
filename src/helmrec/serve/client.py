"""A client of one server. It raises the same errors as an engine in the same process.

Uses the connection of the standard library, so that programs that only call a server need no HTTP package.
"""

import http.client
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from helmrec import errors
from helmrec.engine.row_stream import RowStreamStats
from helmrec.errors import ConfigError, HelmRecError, RequestError, ServerError, StaleVersion
from helmrec.history.values import Appended, UserState
from helmrec.redaction import redact
from helmrec.serve.prefill import PrefillAnswer
from helmrec.serve.schema import (
    AppendOutcome,
    BulkAnswer,
    BulkBody,
    EventsAnswer,
    EventsBody,
    ForgetAnswer,
    Problem,
    RankAnswer,
    UserAnswer,
)
from helmrec.types import Ids, PrefillRequest, RankRequest, RankResult, UserId
from helmrec.user_ids import check_user_id, path_text

_REFUSALS = (
    *(errors.DeadlineExceeded, errors.DiskTooSlow, errors.EngineClosed, errors.Forgotten, errors.NonFiniteScores),
    *(errors.QueueFull, errors.RowsUnreadable, errors.RowLogError, errors.RowsNotSynced),
)
_STORE_ERRORS = (errors.DiskFull, errors.HistoryFull, errors.HistoryUnavailable, errors.TablesTooSmall)
_ERRORS: dict[str, type[HelmRecError]] = {kind.__name__: kind for kind in (*_REFUSALS, *_STORE_ERRORS)}


class _Pool(msgspec.Struct):
    """What is read of an engine's counters."""

    row_stream: RowStreamStats | None = None


class Client:
    """Calls the server at `url`. Keeps one connection open, so it is for one thread; close it when done."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"url must look like http://127.0.0.1:8000, got {redact(url)!r}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = redact(url)
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._encoder = msgspec.json.Encoder(enc_hook=_as_plain)
        self._answer = msgspec.json.Decoder(RankAnswer)

    def rank(self, request: RankRequest) -> RankResult:
        """Rank. Raise RequestError, QueueFull or DeadlineExceeded as an engine does; ServerError without an answer."""
        return self._rank(request)

    def rank_stored(
        self,
        user_id: UserId,
        candidates: Ids,
        candidate_features: Mapping[str, Ids] | None = None,
        context: Mapping[str, int] | None = None,
        request_time: int | None = None,
        deadline_ms: float | None = None,
    ) -> RankResult:
        """Rank with the history that the server stores for the user. An unknown user has no events."""
        fields = {
            "candidate_features": candidate_features,
            "context": context,
            "request_time": request_time,
            "deadline_ms": deadline_ms,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return self._rank({"user_id": user_id, "candidates": candidates, **given})

    def _rank(self, body: object) -> RankResult:
        return self._answer.decode(self._done("POST", "/v1/rank", body)).result()

    def prefill(self, request: PrefillRequest) -> PrefillAnswer:
        """Have a history computed before its rank. The answer says whether it is, or why not."""
        return self._prefill(request)

    def prefill_stored(
        self,
        user_id: UserId,
        context: Mapping[str, int] | None = None,
        num_candidates: int = 0,
        budget_ms: float | None = None,
        hold_ms: float | None = None,
    ) -> PrefillAnswer:
        """Prefill with the history that the server stores for the user."""
        fields = {"num_candidates": num_candidates, "budget_ms": budget_ms, "hold_ms": hold_ms}
        return self._prefill({"user_id": user_id, "context": context or {}, **fields})

    def _prefill(self, body: object) -> PrefillAnswer:
        return msgspec.json.decode(self._done("POST", "/v1/prefill", body), type=PrefillAnswer)

    def append(
        self,
        user_id: UserId,
        base_version: int | None,
        items: Ids,
        actions: Ids,
        timestamps: Ids,
        features: Mapping[str, Ids] | None = None,
    ) -> Appended:
        """Append events to a history of `base_version` events. They are stored when this returns.

        None appends to the current version: for one writer, and without the protection against repeats.

        Raise StaleVersion, with the current version, if the user has another one. An append may be repeated after a
        lost answer: the same events with the same base are stored once.
        """
        body = {
            "user_id": user_id,
            **({} if base_version is None else {"base_version": base_version}),
            "items": items,
            "actions": actions,
            "timestamps": timestamps,
            "features": features or {},
        }
        answer = self._send("POST", "/v1/events", self._encoder.encode(body))
        if answer.status == 409:
            raise _stale(answer, user_id, base_version)
        done = msgspec.json.decode(_body_of(answer), type=EventsAnswer)
        return Appended(done.first_event, done.version, done.is_repeat)

    def append_many(self, appends: Sequence[EventsBody]) -> list[AppendOutcome]:
        """Append for many users in one call, at most `schema.MAX_APPENDS`. Each is done whether or not others fail."""
        answer = self._done("POST", "/v1/events/bulk", BulkBody(list(appends)))
        return msgspec.json.decode(answer, type=BulkAnswer).outcomes

    def user(self, user_id: UserId) -> UserState | None:
        """Return length and hash of a user's stored history; None if nothing is stored."""
        answer = self._send("GET", _user_path(user_id))
        if answer.status == 404:
            return None
        found = msgspec.json.decode(_body_of(answer), type=UserAnswer)
        return UserState(found.version, found.first_event, int(found.seal, 16), found.last_timestamp)

    def forget(self, user_id: UserId) -> bool:
        """Delete a user from history store and caches. False if no events were stored."""
        return msgspec.json.decode(self._done("DELETE", _user_path(user_id)), type=ForgetAnswer).had_events

    def row_stream(self) -> RowStreamStats | None:
        """Return how far the server has followed its stream of row deltas; None if it follows none."""
        return msgspec.json.decode(self._done("GET", "/v1/pool"), type=_Pool).row_stream

    def is_ready(self) -> bool:
        """Return whether requests may be sent: False while the server warms up or cannot be reached."""
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

    def _done(self, method: str, path: str, body: object = None) -> bytes:
        """Send a request and return the body of its answer. Raises the error that the answer contains."""
        return _body_of(self._send(method, path, None if body is None else self._encoder.encode(body)))

    def _send(self, method: str, path: str, body: bytes | None = None) -> "_Answer":
        may_be_stale = self._connection.sock is not None  # a server closes connections that were idle for long
        try:
            return self._try(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            if not may_be_stale or isinstance(error, TimeoutError):
                raise ServerError(f"no answer ({error}), from {self._url}") from None
        return self._send(method, path, body)  # on a new connection: all calls may be repeated

    def _try(self, method: str, path: str, body: bytes | None) -> "_Answer":
        try:
            self._connection.request(method, path, body, {"content-type": "application/json"} if body else {})
            answer = self._connection.getresponse()
            return _Answer(answer.status, answer.read())
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise


def _user_path(user_id: UserId) -> str:
    return f"/v1/users/{quote(path_text(check_user_id(user_id)), safe='')}"


class _Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes


def _body_of(answer: _Answer) -> bytes:
    if answer.status != 200:
        raise _error(answer)
    return answer.body


def _stale(answer: _Answer, user_id: UserId, base_version: int | None) -> HelmRecError:
    problem = _problem(answer)
    if problem is None or problem.current_version is None or base_version is None:
        return _error(answer)
    return StaleVersion(user_id, base_version, problem.current_version)


def _problem(answer: _Answer) -> Problem | None:
    try:
        return msgspec.json.decode(answer.body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _error(answer: _Answer) -> HelmRecError:
    """Return the error that an answer contains."""
    problem = _problem(answer)
    if problem is None:
        return ServerError(f"status {answer.status} without a reason, got {answer.body[:100]!r}")
    if problem.field is not None:
        seen = problem.detail.removeprefix(f"{problem.field}: ").rsplit(", got ", 1)[0]
        return RequestError(problem.field, problem.value, seen)
    kind = _ERRORS.get(problem.type.rsplit(":", 1)[-1], ServerError)
    return kind(f"{problem.detail} (request {problem.request_id})")


def _as_plain(value: object) -> object:
    """Convert NumPy arrays and numbers for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise RequestError("request", value, "numbers, sequences and arrays are needed")
