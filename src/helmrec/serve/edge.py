"""The outermost ASGI layer: gives each request an id, logs and counts it, and turns errors into answers."""

import time
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helmrec.serve import problems
from helmrec.serve.bodies import header
from helmrec.serve.calls import CLIENT_GONE, ID_HEADER, CallLog, explain

_RAW_PATHS = "/v1/users/"  # routed as they were sent: a user id may have an encoded slash, which is part of it


class Edge:
    """Wraps the routes. Sets `scope["state"]["started_s"]` for them."""

    def __init__(self, app: ASGIApp, calls: CallLog) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        request_id = self._calls.request_id(header(scope, ID_HEADER.encode()) or "")
        scope.setdefault("state", {})["started_s"] = started_s
        if scope["path"].startswith(_RAW_PATHS):
            raw = scope.get("raw_path")  # optional in ASGI
            scope["path"] = quote(scope["path"]) if raw is None else raw.decode("latin-1")
        status, problem = 0, None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER.encode(), request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            problem = explain(error, request_id, scope["path"])
            if status:  # the answer has begun: the server can only close the connection
                raise
            await problems.answer(problem, scope["path"], error)(scope, receive, send_with_id)
        finally:
            # Not the path: clients could create any number of labels.
            route = getattr(scope.get("route"), "path", "other")
            self._calls.conclude(request_id, scope["method"], route, status, time.perf_counter() - started_s, problem)
