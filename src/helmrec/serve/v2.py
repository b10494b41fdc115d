"""The routes of the Open Inference Protocol (version 2, as in KServe and Triton) over REST, with binary tensors."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helmrec.serve.bodies import deadline_ms, decode
from helmrec.serve.front import Front
from helmrec.serve.port import Health
from helmrec.serve.routes import MODEL_VERSION, Endpoint, json_answer
from helmrec.serve.schema import tighter
from helmrec.serve.statistics import StatisticsAnswer
from helmrec.serve.tensors import (
    OPTIONAL_INPUTS,
    SCORES,
    InferAnswer,
    InferBody,
    TensorNames,
    encode_answer,
    read_inference,
)

SERVER_VERSION = "1"
_HEADER_LENGTH = "inference-header-content-length"
_BINARY = "application/octet-stream"
_PLATFORM = "helmrec_hstu"
_OF_MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]


class ServerMetadata(Struct, frozen=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct, frozen=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(Struct, frozen=True, omit_defaults=True):
    name: str
    data_type: str
    dims: list[int]
    optional: bool = False


class ConfigValue(Struct, frozen=True):
    string_value: str


class ModelConfiguration(Struct, frozen=True):
    """Fields of Triton's model configuration that HelmRec has a value for."""

    name: str
    platform: str
    backend: str
    max_batch_size: Annotated[int, Meta(description="0: tensors have no batch dimension")]
    input: list[TensorConfig]
    output: list[TensorConfig]
    parameters: Annotated[dict[str, ConfigValue], Meta(description="limits of a request")]


class IndexBody(Struct, frozen=True):
    """Which models to list."""

    ready: Annotated[bool, Meta(description="only those that are ready")] = False


class IndexEntry(Struct, frozen=True):
    name: str
    version: str
    state: str
    reason: str


class InferenceRoutes:
    """Handlers of `/v2` for the one model a node serves."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._port = front.port
        self._model = front.port.model
        self._names = TensorNames(self._model)
        self._index_body = msgspec.json.Decoder(IndexBody)

    async def infer(self, request: Request) -> Response:
        self._need_model(request)
        self._front.need_ready()
        inference = read_inference(await self._front.bodies.read(request), request.headers.get(_HEADER_LENGTH))
        allowed_ms = tighter(inference.body.deadline_ms, deadline_ms(request))
        histories, stored = self._front.histories, None
        if histories is not None and (users := self._names.users_without_events(inference.tensors)) is not None:
            stored = await histories.read(users, self._port.model)
        ranks = self._names.requests(inference.tensors, allowed_ms, stored)  # nothing may be awaited after the read
        results = await self._front.submit(request, ranks)
        answer = encode_answer(inference.body, self._model.name, results)
        if answer.json_bytes is None:
            return Response(answer.body, media_type="application/json")
        return Response(answer.body, headers={_HEADER_LENGTH: str(answer.json_bytes)}, media_type=_BINARY)

    async def server(self, _: Request) -> Response:
        return json_answer(ServerMetadata("helmrec", SERVER_VERSION, EXTENSIONS))

    async def live(self, _: Request) -> Response:
        return Response(status_code=503 if self._port.health is Health.FAILED else 200)

    async def ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._front.is_ready and self._front.store_problem is None else 503)

    async def model(self, request: Request) -> Response:
        self._need_model(request)
        inputs = [TensorMetadata(name, "INT64", [-1]) for name in (*self._names.required, *OPTIONAL_INPUTS)]
        scores = TensorMetadata(SCORES, "FP32", [-1, self._model.num_tasks])
        return json_answer(ModelMetadata(self._model.name, [MODEL_VERSION], _PLATFORM, inputs, [scores]))

    async def config(self, request: Request) -> Response:
        self._need_model(request)
        model, names = self._port.model, self._names
        inputs = [TensorConfig(name, "TYPE_INT64", [-1]) for name in names.required]
        inputs += [TensorConfig(name, "TYPE_INT64", [-1], optional=True) for name in OPTIONAL_INPUTS]
        limits = {"window": model.window, "max_candidates": model.max_candidates}
        parameters = {name: ConfigValue(str(value)) for name, value in limits.items()}
        scores = TensorConfig(SCORES, "TYPE_FP32", [-1, model.num_tasks])
        return json_answer(ModelConfiguration(model.name, _PLATFORM, "helmrec", 0, inputs, [scores], parameters))

    async def statistics(self, request: Request) -> Response:
        if "name" in request.path_params:
            self._need_model(request)
        stats = await self._front.stats()
        steps = 0 if stats is None else stats.steps
        return json_answer(StatisticsAnswer([self._front.tally.of_model(self._model.name, MODEL_VERSION, steps)]))

    async def index(self, request: Request) -> Response:
        body = await self._front.bodies.read(request)
        asked = decode(self._index_body, body) if body else IndexBody()
        is_ready = self._front.is_ready
        state = "READY" if is_ready else "UNAVAILABLE" if self._port.health is Health.FAILED else "LOADING"
        entry = IndexEntry(self._model.name, MODEL_VERSION, state, self._port.reason or "")
        return json_answer([entry] if is_ready or not asked.ready else [])

    async def model_ready(self, request: Request) -> Response:
        self._need_model(request)
        return await self.ready(request)

    def _need_model(self, request: Request) -> None:
        if (name := request.path_params["name"]) != self._model.name:
            raise HTTPException(404, f"the model served here is {self._model.name!r}, got {name[:100]!r}")
        if (version := request.path_params.get("version", MODEL_VERSION)) != MODEL_VERSION:
            raise HTTPException(404, f"the version served here is {MODEL_VERSION!r}, got {version[:100]!r}")

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
