"""Where requests enter and leave: one id each, one log line, one count; a failure of ours ends here as a plain 500."""

import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helmrec.serve import problems

log = logging.getLogger("helmrec.serve")
_ID_HEADER = b"x-request-id"
_PROBES = frozenset({"/readyz", "/healthz", "/v2/health/ready", "/v2/health/live"})  # asked every second, ready or not
CLIENT_GONE = 499  # for logs and metrics: nobody is there to read a status
_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Edge:
    """Wraps the routes. `scope["state"]` has `request_id` and `started_s` for everything inside."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int, float], None]) -> None:
        """`count` is told the route, status and seconds of every request."""
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
        scope.setdefault("state", {}).update(request_id=request_id, started_s=started_s)
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
        except Exception:
            log.exception("request failed", extra={"id": request_id, "path": scope["path"]})
            if status:  # the answer has begun: the server can only hang up
                raise
            await problems.of_failure(request_id, scope["path"])(scope, receive, send_with_id)
        finally:
            self._conclude(scope, request_id, status, time.perf_counter() - started_s)

    def _request_id(self, scope: Scope) -> str:
        """The client's own id if it gave a sane one; else one that no other request has."""
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == _ID_HEADER), "")
        return given if _VALID_ID.fullmatch(given) else f"{self._prefix}-{next(self._numbers)}"

    def _conclude(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")  # never the path: clients could make up any number
        self._count(route, status, seconds)
        is_told = status >= 400 and route not in _PROBES
        level = logging.DEBUG if not is_told else logging.INFO if status < 500 else logging.WARNING
        if log.isEnabledFor(level):
            fields = {"id": request_id, "method": scope["method"], "route": route, "status": status}
            log.log(level, "request", extra={**fields, "ms": round(seconds * 1e3, 3)})
