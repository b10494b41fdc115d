"""The routes of the Open Inference Protocol (version 2, as in KServe and Triton) over REST, with binary tensors."""

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helmrec.serve.bodies import deadline_ms
from helmrec.serve.front import Front
from helmrec.serve.port import Health
from helmrec.serve.routes import Endpoint, json_answer
from helmrec.serve.schema import tighter
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
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class InferenceRoutes:
    """Handlers of `/v2` for the one model a node serves."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._port = front.port
        self._model = front.port.model
        self._names = TensorNames(self._model)

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
        return json_answer(ServerMetadata("helmrec", SERVER_VERSION, ["binary_tensor_data"]))

    async def live(self, _: Request) -> Response:
        return Response(status_code=503 if self._port.health is Health.FAILED else 200)

    async def ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._front.is_ready and self._front.store_problem is None else 503)

    async def model(self, request: Request) -> Response:
        self._need_model(request)
        inputs = [TensorMetadata(name, "INT64", [-1]) for name in (*self._names.required, *OPTIONAL_INPUTS)]
        scores = TensorMetadata(SCORES, "FP32", [-1, self._model.num_tasks])
        return json_answer(ModelMetadata(self._model.name, "helmrec_hstu", inputs, [scores]))

    async def model_ready(self, request: Request) -> Response:
        self._need_model(request)
        return await self.ready(request)

    def _need_model(self, request: Request) -> None:
        if (name := request.path_params["name"]) != self._model.name:
            raise HTTPException(404, f"the model served here is {self._model.name!r}, got {name[:100]!r}")

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/v2", "What serves here", self.server, gives=ServerMetadata),
            Endpoint("GET", "/v2/health/live", "Does the process live", self.live, statuses=(503,)),
            Endpoint("GET", "/v2/health/ready", "May requests be sent", self.ready, statuses=(503,)),
            Endpoint(
                "GET", "/v2/models/{name}", "Tensors of the model", self.model, gives=ModelMetadata, statuses=(404,)
            ),
            Endpoint("GET", "/v2/models/{name}/ready", "May requests be sent", self.model_ready, statuses=(404, 503)),
            Endpoint(
                method="POST",
                path="/v2/models/{name}/infer",
                summary="Rank candidates of one user or many",
                handler=self.infer,
                takes=InferBody,
                takes_media_types=("application/json", _BINARY),
                gives=InferAnswer,
                statuses=(400, 404, 409, 413, 415, 429, 503),
            ),
        ]
