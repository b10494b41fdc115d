"""The application: routes behind one edge, in front of an engine's port.

It knows requests, answers and statuses; how an engine runs is behind the port. No route reads files or runs code.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helmrec.errors import HelmRecError, HistoryError, HistoryFull
from helmrec.serve import problems
from helmrec.serve.edge import Edge
from helmrec.serve.front import Front
from helmrec.serve.histories import Histories
from helmrec.serve.live import LiveRoutes, dashboard
from helmrec.serve.models import ModelRoutes
from helmrec.serve.port import EnginePort
from helmrec.serve.prefill import PrefillRoutes
from helmrec.serve.routes import Endpoint, openapi
from helmrec.serve.schema import Problem
from helmrec.serve.settings import ServeConfig
from helmrec.serve.users import UserRoutes
from helmrec.serve.v1 import FriendlyRoutes
from helmrec.serve.v2 import InferenceRoutes

API_VERSION = "1"
_PARTS = (FriendlyRoutes, PrefillRoutes, UserRoutes, ModelRoutes, LiveRoutes, InferenceRoutes)


def make_app(port: EnginePort, config: ServeConfig, histories: Histories | None = None) -> Starlette:
    """The application in front of `port`, which it starts; it closes both when it ends."""
    front = Front(port, config, histories)
    endpoints = [endpoint for part in _PARTS for endpoint in part(front).endpoints()]
    document = msgspec.json.encode(openapi(endpoints, Problem, API_VERSION, port.model.name))

    async def show_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        port.start()
        watch = asyncio.create_task(front.watch())
        try:
            yield
        finally:
            watch.cancel()
            await port.close()
            if histories is not None:
                await histories.close()

    app = Starlette(
        routes=[
            *(_route(path, endpoints) for path in dict.fromkeys(each.path for each in endpoints)),
            Route("/openapi.json", show_document, methods=["GET"]),
            Route("/", dashboard(), methods=["GET"]),
        ],
        middleware=[Middleware(_edge(front))],
        exception_handlers={HelmRecError: _tell, HTTPException: _tell},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _route(path: str, endpoints: Sequence[Endpoint]) -> Route:
    """All methods of a path as one route, so that a wrong one is told of all the right ones."""
    handlers = {each.method: each.handler for each in endpoints if each.path == path}

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, handle, methods=list(handlers))


def _edge(front: Front) -> Callable[[ASGIApp], Edge]:
    return lambda app: Edge(app, front.count_request)


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, HelmRecError | HTTPException)
    if isinstance(error, HistoryError) and not isinstance(error, HistoryFull):  # ours to mend; it names our files
        raise error
    return problems.of_error(error, request.state.request_id, request.url.path)
