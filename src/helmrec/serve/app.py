"""The application: friendly JSON under `/v1`, health, metrics, and the document that describes it all.

It knows requests, answers and statuses; how an engine runs is behind its port. No route reads files or runs code.
"""

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helmrec.engine.engine import EngineStats
from helmrec.errors import HelmRecError
from helmrec.serve import metrics as prometheus
from helmrec.serve import problems
from helmrec.serve.bodies import deadline_ms, decode, read_body
from helmrec.serve.edge import Edge
from helmrec.serve.metrics import Metrics
from helmrec.serve.port import EnginePort, Health
from helmrec.serve.routes import Endpoint, json_answer, openapi
from helmrec.serve.schema import (
    AlphaAnswer,
    AlphaBody,
    HealthAnswer,
    Problem,
    RankAnswer,
    RankBody,
    RowsAnswer,
    RowsBody,
)
from helmrec.serve.settings import ServeConfig

API_VERSION = "1"
T = TypeVar("T")


class Front:
    """Handlers of one server, and what they share."""

    def __init__(self, port: EnginePort, config: ServeConfig) -> None:
        self.port = port
        self.config = config
        self.metrics = Metrics()
        self._rank_body = msgspec.json.Decoder(RankBody)
        self._alpha_body = msgspec.json.Decoder(AlphaBody)
        self._rows_body = msgspec.json.Decoder(RowsBody)

    async def body(self, request: Request) -> bytes:
        return await read_body(request, self.config.max_body_bytes)

    async def rank(self, request: Request) -> Response:
        self.need_ready()
        body = decode(self._rank_body, await self.body(request))
        (result,) = await self.port.submit([body.request(deadline_ms(request))])
        self.metrics.count_result(result)
        return json_answer(RankAnswer.of(result))

    async def pool(self, _: Request) -> Response:
        return json_answer(await self.port.stats())

    async def move_alpha(self, request: Request) -> Response:
        asked = await self._admin(request, self._alpha_body)
        await self.port.move_alpha(asked.alpha)
        pool = (await self.port.stats()).pool
        return json_answer(AlphaAnswer(alpha=pool.alpha, alpha_target=pool.alpha_target))

    async def update_rows(self, request: Request) -> Response:
        asked = await self._admin(request, self._rows_body)
        await self.port.update_rows(asked.table, asked.ids, asked.values)
        return json_answer(RowsAnswer(updated=len(asked.ids)))

    async def healthz(self, _: Request) -> Response:
        health = self.port.health
        return json_answer(HealthAnswer(health.value), 503 if health is Health.FAILED else 200)

    async def readyz(self, _: Request) -> Response:
        health = self.port.health
        return json_answer(HealthAnswer(health.value), 200 if health is Health.READY else 503)

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.render(await self.port.stats()), media_type=prometheus.MEDIA_TYPE)

    def need_ready(self) -> None:
        if (health := self.port.health) is not Health.READY:
            raise HTTPException(503, f"the engine is {health.value}", {"retry-after": "1"})

    async def _admin(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """The body of an admin call, once its token is known to be right."""
        token = self.config.admin_token
        if token is None:
            raise HTTPException(403, "admin calls are off: the server was given no admin_token")
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token.get_secret_value()}".encode()):
            raise HTTPException(401, "the admin token is needed", {"www-authenticate": "Bearer"})
        self.need_ready()
        return decode(decoder, await self.body(request))

    def endpoints(self) -> list[Endpoint]:
        refusals, admin = (400, 413, 415, 429, 503), (400, 401, 403, 413, 415, 503)
        return [
            Endpoint("POST", "/v1/rank", "Rank candidates", self.rank, RankBody, RankAnswer, statuses=refusals),
            Endpoint("GET", "/v1/pool", "Look at the pool and the engine", self.pool, gives=EngineStats),
            Endpoint(
                "POST", "/v1/admin/alpha", "Aim the boundary", self.move_alpha, AlphaBody, AlphaAnswer,
                statuses=admin, is_admin=True,
            ),
            Endpoint(
                "POST", "/v1/admin/rows", "Replace rows of a table", self.update_rows, RowsBody, RowsAnswer,
                statuses=admin, is_admin=True,
            ),
            Endpoint("GET", "/healthz", "Does the process live", self.healthz, gives=HealthAnswer),
            Endpoint("GET", "/readyz", "May requests be sent", self.readyz, gives=HealthAnswer),
            Endpoint("GET", "/metrics", "For Prometheus", self.show_metrics, gives_media_type="text/plain"),
        ]  # fmt: skip


def make_app(port: EnginePort, config: ServeConfig) -> Starlette:
    """The application in front of `port`, which it starts and closes."""
    front = Front(port, config)
    endpoints = front.endpoints()
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
