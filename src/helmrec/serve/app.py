"""The HTTP application: routes in front of an engine's port.

Knows requests, answers and statuses; how the engine runs is behind the port. Only the admin call that swaps models
reads files.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from helmrec.serve.api_page import HEADERS as API_PAGE_HEADERS
from helmrec.serve.api_page import api_page
from helmrec.serve.bodies import Bodies
from helmrec.serve.edge import Edge
from helmrec.serve.front import Front
from helmrec.serve.histories import StoredHistories
from helmrec.serve.live import LiveRoutes, dashboard
from helmrec.serve.models import ModelRoutes
from helmrec.serve.port import EnginePort
from helmrec.serve.prefill import PrefillRoutes
from helmrec.serve.routes import Endpoint, Handler, openapi
from helmrec.serve.schema import Problem
from helmrec.serve.server import grpc_server
from helmrec.serve.settings import ServeConfig
from helmrec.serve.users import UserRoutes
from helmrec.serve.v1 import JsonRoutes
from helmrec.serve.v2 import InferenceRoutes

API_VERSION = "1"
_MAX_SHOWN = 100
_PARTS = (JsonRoutes, PrefillRoutes, UserRoutes, ModelRoutes, LiveRoutes, InferenceRoutes)


def make_app(port: EnginePort, config: ServeConfig, histories: StoredHistories | None = None) -> Starlette:
    """Make the application. It starts `port`, `histories` and gRPC, if asked for, and closes them when it ends."""
    front = Front(port, config, histories)
    over_grpc = None if config.grpc_port is None else grpc_server(front)
    endpoints = [endpoint for part in _PARTS for endpoint in part(front).endpoints()]
    described = openapi(endpoints, Problem, API_VERSION, port.model.name)
    document, page = msgspec.json.encode(described), api_page(described)

    async def show_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def show_page(_: Request) -> Response:
        return Response(page, headers=API_PAGE_HEADERS, media_type="text/html; charset=utf-8")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        port.start()
        if histories is not None:
            histories.start()
        watch = asyncio.create_task(front.watch())
        try:
            if over_grpc is not None:
                await over_grpc.start()
            yield
        finally:
            watch.cancel()
            if over_grpc is not None:
                await over_grpc.stop()
            await port.close()
            if histories is not None:
                await histories.close()

    def begin_to_stop() -> None:
        front.bodies.stop()
        if over_grpc is not None:
            over_grpc.begin_to_stop()

    app = Starlette(
        routes=[
            *(_route(path, endpoints, front.bodies) for path in dict.fromkeys(each.path for each in endpoints)),
            Route("/openapi.json", show_document, methods=["GET"]),
            Route("/docs", show_page, methods=["GET"]),
            Route("/", dashboard(), methods=["GET"]),
        ],
        lifespan=lifespan,
    )
    app.state.front, app.state.grpc = front, over_grpc
    app.state.begin_to_stop = begin_to_stop
    app.router.redirect_slashes = False
    app.router.default = _no_such_path
    # Starlette's own middleware is left out: Edge handles all errors.
    app.middleware_stack = Edge(_ByPath(app.router), front.calls)
    return app


async def _no_such_path(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise HTTPException(404, f"there is no such path, got {scope['path'][:_MAX_SHOWN]!r}; /docs lists all")


def _route(path: str, endpoints: Sequence[Endpoint], bodies: Bodies) -> Route:
    """Make one route of all methods of a path, so that the answer to a wrong method lists all allowed ones."""
    handlers = {each.method: each.handler for each in endpoints if each.path == path}
    return Route(path, _Path(handlers, bodies), methods=list(handlers))


class _Path:
    """The handlers of a path, by method.

    An ASGI application, because Starlette would wrap a plain function in another layer of error handling.
    """

    def __init__(self, handlers: Mapping[str, Handler], bodies: Bodies) -> None:
        self._handlers = handlers
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            response = await self._handlers[method](Request(scope, receive))
        finally:
            self._bodies.release(scope)
        await response(scope, receive, send)


class _ByPath:
    """Finds routes without path parameters in a dictionary; Starlette's router matches the others one by one."""

    def __init__(self, router: Router) -> None:
        self._router = router
        routes = [route for route in router.routes if isinstance(route, Route)]
        self._routes = {route.path: route for route in routes if not route.param_convertors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_plain = scope["type"] == "http" and not scope.get("root_path")
        if is_plain and (route := self._routes.get(scope["path"])):
            scope["route"] = route
            await route.handle(scope, receive, send)
        else:
            await self._router(scope, receive, send)
