"""The JSON routes under `/v1`, health checks, and metrics."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from helmrec.engine.engine import EngineStats
from helmrec.serve import metrics as prometheus
from helmrec.serve.bodies import deadline_ms, decode
from helmrec.serve.front import Front, started_s
from helmrec.serve.metrics import ServerView, StoreHealth
from helmrec.serve.port import HasReplicas, Health
from helmrec.serve.routes import Endpoint, json_answer
from helmrec.serve.schema import (
    AlphaAnswer,
    AlphaBody,
    HealthAnswer,
    ModeBody,
    RankAnswer,
    RankBody,
    RowsAnswer,
    RowsBody,
)


class JsonRoutes:
    """Handlers of `/v1`, of the health checks and of `/metrics`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._port = front.port
        self._rank_body = msgspec.json.Decoder(RankBody)
        self._alpha_body = msgspec.json.Decoder(AlphaBody)
        self._mode_body = msgspec.json.Decoder(ModeBody)
        self._rows_body = msgspec.json.Decoder(RowsBody)

    async def rank(self, request: Request) -> Response:
        self._front.need_ready()
        body = decode(self._rank_body, await self._front.bodies.read(request))
        histories, allowed_ms, stored = self._front.histories, deadline_ms(request), None
        if histories is not None and body.is_without_events:
            (stored,) = await histories.read([body.user_id], self._port.model)
        rank = body.request(allowed_ms, stored)  # nothing may be awaited between the read and the engine's queue
        (result,) = await self._front.submit([rank], started_s(request))
        return json_answer(RankAnswer.of(result, None if stored is None else stored.version))

    async def model(self, _: Request) -> Response:
        return Response(self._port.model.model_dump_json(), media_type="application/json")

    async def pool(self, _: Request) -> Response:
        return json_answer(await self._port.stats())

    async def move_alpha(self, request: Request) -> Response:
        asked = await self._front.admin_body(request, self._alpha_body)
        await self._port.move_alpha(asked.alpha)
        pool = (await self._port.stats()).pool
        return json_answer(AlphaAnswer(alpha=pool.alpha, alpha_target=pool.alpha_target))

    async def set_mode(self, request: Request) -> Response:
        asked = await self._front.admin_body(request, self._mode_body)
        await self._port.set_mode(asked.mode)
        return json_answer(asked)

    async def update_rows(self, request: Request) -> Response:
        asked = await self._front.admin_body(request, self._rows_body)
        await self._port.update_rows(asked.table, asked.ids, asked.values)
        return json_answer(RowsAnswer(updated=len(asked.ids)))

    async def healthz(self, _: Request) -> Response:
        health = self._port.health
        return json_answer(HealthAnswer(health.value, self._port.reason), 503 if health is Health.FAILED else 200)

    async def readyz(self, _: Request) -> Response:
        health, histories = self._port.health, self._front.store_problem
        is_ready = self._front.is_ready and histories is None
        status = "degraded" if self._front.is_ready and not is_ready else health.value
        return json_answer(HealthAnswer(status, self._port.reason, histories), 200 if is_ready else 503)

    async def show_metrics(self, _: Request) -> Response:
        histories = self._front.histories
        view = ServerView(
            stats=await self._front.stats(),
            history=None if histories is None else await histories.stats(),
            store=None if histories is None else StoreHealth(histories.problem is None, histories.num_failures),
            is_ready=self._front.is_ready,
            num_restarts=self._port.num_restarts,
            body_bytes=self._front.bodies.held_bytes,
            replicas=self._port.replica_stats if isinstance(self._port, HasReplicas) else None,
        )
        return Response(self._front.metrics.render(view), media_type=prometheus.MEDIA_TYPE)

    def endpoints(self) -> list[Endpoint]:
        refusals, admin = (400, 409, 413, 415, 429, 503), (400, 401, 403, 413, 415, 503)
        return [
            Endpoint("POST", "/v1/rank", "Rank candidates", self.rank, RankBody, RankAnswer, statuses=refusals),
            Endpoint("GET", "/v1/model", "Shape and tables of the model", self.model, gives=dict[str, Any]),
            Endpoint("GET", "/v1/pool", "Look at the pool and the engine", self.pool, gives=EngineStats),
            Endpoint(
                "POST", "/v1/admin/alpha", "Aim the boundary", self.move_alpha, AlphaBody, AlphaAnswer,
                statuses=admin, is_admin=True,
            ),
            Endpoint(
                "POST", "/v1/admin/mode", "Let the policy act, or freeze it", self.set_mode, ModeBody, ModeBody,
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
