"""The routes of the Open Inference Protocol over REST, with binary tensors."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from helmrec.serve.bodies import deadline_ms, decode
from helmrec.serve.front import Front, started_s
from helmrec.serve.inference import (
    IndexEntry,
    ModelConfiguration,
    ModelMetadata,
    OpenInference,
    ServerMetadata,
)
from helmrec.serve.routes import Endpoint, json_answer
from helmrec.serve.schema import tighter
from helmrec.serve.statistics import StatisticsAnswer
from helmrec.serve.tensors import InferAnswer, InferBody, encode_answer, read_inference

_HEADER_LENGTH = "inference-header-content-length"
_BINARY = "application/octet-stream"
_OF_MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")


class IndexBody(Struct, frozen=True):
    """Which models to list."""

    ready: Annotated[bool, Meta(description="only those that are ready")] = False


class InferenceRoutes:
    """Handlers of `/v2`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._calls = OpenInference(front)
        self._index_body = msgspec.json.Decoder(IndexBody)

    async def infer(self, request: Request) -> Response:
        self._need_model(request)
        self._front.need_ready()
        inference = read_inference(await self._front.bodies.read(request), request.headers.get(_HEADER_LENGTH))
        allowed_ms = tighter(inference.body.deadline_ms, deadline_ms(request))
        results = await self._calls.rank(inference.tensors, allowed_ms, started_s(request))
        answer = encode_answer(inference.body, self._calls.model_name, results)
        if answer.json_bytes is None:
            return Response(answer.body, media_type="application/json")
        return Response(answer.body, headers={_HEADER_LENGTH: str(answer.json_bytes)}, media_type=_BINARY)

    async def server(self, _: Request) -> Response:
        return json_answer(self._calls.server())

    async def live(self, _: Request) -> Response:
        return Response(status_code=200 if self._calls.is_live else 503)

    async def ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._calls.is_ready else 503)

    async def model(self, request: Request) -> Response:
        self._need_model(request)
        return json_answer(self._calls.model())

    async def config(self, request: Request) -> Response:
        self._need_model(request)
        return json_answer(self._calls.config())

    async def statistics(self, request: Request) -> Response:
        if "name" in request.path_params:
            self._need_model(request)
        return json_answer(await self._calls.statistics())

    async def index(self, request: Request) -> Response:
        body = await self._front.bodies.read(request)
        asked = decode(self._index_body, body) if body else IndexBody()
        return json_answer(self._calls.index(only_ready=asked.ready))

    async def model_ready(self, request: Request) -> Response:
        self._need_model(request)
        return await self.ready(request)

    def _need_model(self, request: Request) -> None:
        self._calls.need_model(**request.path_params)

    def endpoints(self) -> list[Endpoint]:
        of_model = [each for path in _OF_MODEL for each in self._of_model(path)]
        return [
            Endpoint("GET", "/v2", "What serves here", self.server, gives=ServerMetadata),
            Endpoint("GET", "/v2/health/live", "Does the process live", self.live, statuses=(503,)),
            Endpoint("GET", "/v2/health/ready", "May requests be sent", self.ready, statuses=(503,)),
            Endpoint("GET", "/v2/models/stats", "Statistics of all models", self.statistics, gives=StatisticsAnswer),
            *of_model,
            Endpoint(
                method="POST",
                path="/v2/repository/index",
                summary="Models and their states",
                handler=self.index,
                takes=IndexBody,
                gives=list[IndexEntry],
                statuses=(400,),
                needs_body=False,
            ),
        ]

    def _of_model(self, path: str) -> list[Endpoint]:
        missing, unready = (404,), (404, 503)
        return [
            Endpoint("GET", path, "Tensors of the model", self.model, gives=ModelMetadata, statuses=missing),
            Endpoint("GET", f"{path}/ready", "May requests be sent", self.model_ready, statuses=unready),
            Endpoint("GET", f"{path}/config", "Configuration", self.config, gives=ModelConfiguration, statuses=missing),
            Endpoint("GET", f"{path}/stats", "Statistics", self.statistics, gives=StatisticsAnswer, statuses=missing),
            Endpoint(
                method="POST",
                path=f"{path}/infer",
                summary="Rank candidates of one user or many",
                handler=self.infer,
                takes=InferBody,
                takes_media_types=("application/json", _BINARY),
                gives=InferAnswer,
                statuses=(400, 404, 409, 413, 415, 429, 503),
            ),
        ]
