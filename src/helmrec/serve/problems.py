"""Errors as answers: one table from class to status, one description (RFC 9457)."""

from http import HTTPStatus

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.responses import Response

from helmrec import errors
from helmrec.errors import HelmRecError, HistoryError, RequestError, StaleVersion
from helmrec.redaction import redact
from helmrec.serve.schema import Problem

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:helmrec:error:"
_MAX_DETAIL = 500
_MAX_VALUE = 100
_RETRY_AFTER = {"retry-after": "1"}
_STATUS: dict[type[HelmRecError], int] = {
    RequestError: 400,
    errors.TooLarge: 413,
    errors.ModelError: 400,  # caused by an admin call
    errors.ConfigError: 400,  # caused by an admin call
    errors.QueueFull: 429,
    errors.DeadlineExceeded: 503,
    errors.RowsUnreadable: 503,
    errors.RowLogError: 507,
    errors.EngineClosed: 503,
    StaleVersion: 409,
    errors.Forgotten: 409,
    errors.HistoryFull: 507,
    errors.HistoryUnavailable: 503,
    errors.TablesTooSmall: 503,
    errors.NonFiniteScores: 500,
}
_HISTORY_DETAILS: dict[type[HistoryError], str] = {  # the first match is used: subclasses come first
    errors.DiskFull: "the disk of the history store is full; nothing of this call was kept",
    errors.HistoryFull: "the history store has no room for more events",
    errors.HistoryUnavailable: "the history store does not answer; requests that carry their history are served",
    errors.TablesTooSmall: "stored events may have ids that this node's model lacks: "
    "a larger model has written to the store",
}
_DISK_DETAILS: dict[type[HelmRecError], str] = {
    errors.RowsUnreadable: "rows of the request cannot be read from the server's disk; the server's log says why",
    errors.RowLogError: "the update cannot be written to the server's disk; no row was changed",
    errors.RowsNotSynced: "the update is served, but the server cannot sync its log to the disk: it may be lost if the "
    "machine loses power; restart the server, then send the update again",
}
SHOWN_HISTORY_ERRORS = tuple(_HISTORY_DETAILS)  # clients see these; other errors of a store go to the log only


def of_error(error: HelmRecError | HTTPException, request_id: str) -> Problem:
    """Describe an error that the client can act on."""
    if isinstance(error, HTTPException):
        return Problem(_title(error.status_code), error.status_code, _cut(error.detail), request_id)
    status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    problem = Problem(_title(status), status, _cut(str(error)), request_id, TYPE_PREFIX + type(error).__name__)
    if isinstance(error, RequestError):
        problem = msgspec.structs.replace(problem, field=error.field, value=_plain(error.value))
    elif isinstance(error, StaleVersion):
        problem = msgspec.structs.replace(problem, current_version=error.current)
    elif isinstance(error, errors.RowsUnreadable | errors.RowLogError):  # their messages contain file names
        problem = msgspec.structs.replace(problem, detail=_DISK_DETAILS[type(error)])
    elif isinstance(error, HistoryError):  # its message contains file names
        problem = msgspec.structs.replace(problem, detail=_of_history(error))
    return problem


def _of_history(error: HistoryError) -> str:
    return next(text for kind, text in _HISTORY_DETAILS.items() if isinstance(error, kind))


def of_failure(request_id: str) -> Problem:
    """Describe an internal failure. It contains only the id under which the log has the details."""
    return Problem(_title(500), 500, "the server failed; its log has the reason", request_id)


def answer(problem: Problem, path: str, error: Exception) -> Response:
    """Return the answer for an error that `problem` describes."""
    if path.startswith("/v2"):
        problem = msgspec.structs.replace(problem, error=problem.detail)
    headers = _RETRY_AFTER if problem.status in {429, 503} else None
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
    return Response(msgspec.json.encode(problem), problem.status, headers, MEDIA_TYPE)


def _title(status: int) -> str:
    return HTTPStatus(status).phrase


def _cut(text: str) -> str:
    text = redact(text[: 4 * _MAX_DETAIL])
    return text if len(text) <= _MAX_DETAIL else f"{text[:_MAX_DETAIL]}…"


def _plain(value: object) -> str | int | float | bool | None:
    """Convert a value for JSON: numbers of up to 64 bits as they are, everything else as short text."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    return (value if isinstance(value, str) else repr(value))[:_MAX_VALUE]
