"""The application: routes behind one edge, in front of an engine's port.

It knows requests, answers and statuses; how an engine runs is behind the port. No route reads files or runs code.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helmrec.errors import HelmRecError
from helmrec.serve import problems
from helmrec.serve.edge import Edge
from helmrec.serve.front import Front
from helmrec.serve.metrics import Metrics
from helmrec.serve.port import EnginePort
from helmrec.serve.routes import openapi
from helmrec.serve.schema import Problem
from helmrec.serve.settings import ServeConfig
from helmrec.serve.v1 import FriendlyRoutes
from helmrec.serve.v2 import InferenceRoutes

API_VERSION = "1"


def make_app(port: EnginePort, config: ServeConfig) -> Starlette:
    """The application in front of `port`, which it starts and closes."""
    front = Front(port, config)
    endpoints = [*FriendlyRoutes(front).endpoints(), *InferenceRoutes(front).endpoints()]
    document = msgspec.json.encode(openapi(endpoints, Problem, API_VERSION))

    async def show_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        port.start()
        try:
            yield
        finally:
            await port.close()

    app = Starlette(
        routes=[
            *(Route(each.path, each.handler, methods=[each.method]) for each in endpoints),
            Route("/openapi.json", show_document, methods=["GET"]),
        ],
        middleware=[Middleware(_edge(front.metrics))],
        exception_handlers={HelmRecError: _tell, HTTPException: _tell},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _edge(metrics: Metrics) -> Callable[[ASGIApp], Edge]:
    return lambda app: Edge(app, metrics)


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, HelmRecError | HTTPException)
    return problems.of_error(error, request.state.request_id, request.url.path)
