"""Errors as HTTP tells them: one table from class to status, one shape of body (RFC 9457)."""

from http import HTTPStatus

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.responses import Response

from helmrec.errors import (
    ConfigError,
    DeadlineExceeded,
    DiskFull,
    EngineClosed,
    Forgotten,
    HelmRecError,
    HistoryError,
    HistoryFull,
    HistoryUnavailable,
    ModelError,
    NonFiniteScores,
    QueueFull,
    RequestError,
    StaleVersion,
    TablesTooSmall,
    TooLarge,
)
from helmrec.redaction import redact
from helmrec.serve.schema import Problem

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:helmrec:error:"
_MAX_DETAIL = 500
_MAX_VALUE = 100
_RETRY_AFTER = {"retry-after": "1"}
_STATUS: dict[type[HelmRecError], int] = {
    RequestError: 400,
    TooLarge: 413,
    ModelError: 400,  # asked for by an admin call
    ConfigError: 400,  # asked for by an admin call
    QueueFull: 429,
    DeadlineExceeded: 503,
    EngineClosed: 503,
    StaleVersion: 409,
    Forgotten: 409,
    HistoryFull: 507,
    HistoryUnavailable: 503,
    TablesTooSmall: 503,
    NonFiniteScores: 500,
}
_HISTORY_DETAILS: dict[type[HistoryError], str] = {  # the first that fits
    DiskFull: "the disk of the history store is full; nothing of this call was kept",
    HistoryFull: "the history store has no room for more events",
    HistoryUnavailable: "the history store does not answer; requests that carry their history are served",
    TablesTooSmall: "stored events may have ids that this node's model lacks: a larger model has written to the store",
}
TOLD_OF_HISTORIES = tuple(_HISTORY_DETAILS)  # other errors of a store are ours to mend, and stay in the log


def of_error(error: HelmRecError | HTTPException, request_id: str, path: str) -> Response:
    """The answer to a request that failed in a way its client can understand."""
    if isinstance(error, HTTPException):
        return _answer(
            Problem(_title(error.status_code), error.status_code, _cut(error.detail), request_id), path, error
        )
    status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    problem = Problem(_title(status), status, _cut(str(error)), request_id, TYPE_PREFIX + type(error).__name__)
    if isinstance(error, RequestError):
        problem = msgspec.structs.replace(problem, field=error.field, value=_plain(error.value))
    elif isinstance(error, StaleVersion):
        problem = msgspec.structs.replace(problem, current_version=error.current)
    elif isinstance(error, HistoryError):  # its own words name our files
        problem = msgspec.structs.replace(problem, detail=_of_history(error))
    return _answer(problem, path)


def _of_history(error: HistoryError) -> str:
    return next(text for kind, text in _HISTORY_DETAILS.items() if isinstance(error, kind))


def of_failure(request_id: str, path: str) -> Response:
    """The answer when we are at fault: nothing of the inside, only the id under which the log has it all."""
    return _answer(Problem(_title(500), 500, "the server failed; its log has the reason", request_id), path)


def _answer(problem: Problem, path: str, error: HTTPException | None = None) -> Response:
    if path.startswith("/v2"):
        problem = msgspec.structs.replace(problem, error=problem.detail)
    headers = dict(error.headers or {}) if error else _RETRY_AFTER if problem.status in {429, 503} else None
    return Response(msgspec.json.encode(problem), problem.status, headers, MEDIA_TYPE)


def _title(status: int) -> str:
    return HTTPStatus(status).phrase


def _cut(text: str) -> str:
    text = redact(text[: 4 * _MAX_DETAIL])
    return text if len(text) <= _MAX_DETAIL else f"{text[:_MAX_DETAIL]}…"


def _plain(value: object) -> str | int | float | bool | None:
    """A value as JSON can show it: numbers that fit, everything else as short text."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    return (value if isinstance(value, str) else repr(value))[:_MAX_VALUE]
