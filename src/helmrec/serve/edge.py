"""The outermost ASGI layer: gives each request an id, logs and counts it, and turns errors into answers."""

import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helmrec.errors import HelmRecError, HistoryError, HistoryUnavailable
from helmrec.serve import problems
from helmrec.serve.bodies import header

log = logging.getLogger("helmrec.serve")
_ID_HEADER = b"x-request-id"
_PROBES = frozenset({"/readyz", "/healthz", "/v2/health/ready", "/v2/health/live"})  # called every second: not logged
CLIENT_GONE = 499  # for logs and metrics only: the client has disconnected
_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Edge:
    """Wraps the routes. Sets `scope["state"]["started_s"]` for them."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int, float], None]) -> None:
        """`count` is called with the route, status and seconds of every request."""
        self._app = app
        self._count = count
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        request_id = self._request_id(scope)
        scope.setdefault("state", {})["started_s"] = started_s
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_ID_HEADER, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            answer = _error_answer(error, request_id, scope["path"])
            if status:  # the answer has begun: the server can only close the connection
                raise
            await answer(scope, receive, send_with_id)
        finally:
            self._conclude(scope, request_id, status, time.perf_counter() - started_s)

    def _request_id(self, scope: Scope) -> str:
        """Return the client's own id if it is valid; else a unique one."""
        given = header(scope, _ID_HEADER) or ""
        return given if _VALID_ID.fullmatch(given) else f"{self._prefix}-{next(self._numbers)}"

    def _conclude(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")  # not the path: clients could create any number of labels
        self._count(route, status, seconds)
        is_error = status >= 400 and route not in _PROBES
        level = logging.DEBUG if not is_error else logging.INFO if status < 500 else logging.WARNING
        if log.isEnabledFor(level):
            fields = {"id": request_id, "method": scope["method"], "route": route, "status": status}
            log.log(level, "request", extra={**fields, "ms": round(seconds * 1e3, 3)})


def _error_answer(error: Exception, request_id: str, path: str) -> Response:
    """Return the answer for an error. Details of internal failures go to the log, not to the client."""
    is_internal = isinstance(error, HistoryError) and not isinstance(error, problems.SHOWN_HISTORY_ERRORS)
    if isinstance(error, HistoryError) and not is_internal and not isinstance(error, HistoryUnavailable):
        log.warning("the history store refused", extra={"id": request_id, "path": path, "reason": str(error)})
    if isinstance(error, HelmRecError | HTTPException) and not is_internal:
        return problems.of_error(error, request_id, path)
    log.error("request failed", exc_info=error, extra={"id": request_id, "path": path})
    return problems.of_failure(request_id, path)
