"""Calls of the Open Inference Protocol (version 2, as in KServe and Triton), whichever way they arrive.

Knows tensors and answers as values. `v2` has them over HTTP, `grpc_server` over gRPC.
"""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.exceptions import HTTPException

from helmrec.serve.front import Front
from helmrec.serve.port import Health
from helmrec.serve.routes import MODEL_VERSION
from helmrec.serve.statistics import StatisticsAnswer
from helmrec.serve.tensors import OPTIONAL_INPUTS, SCORES, Tensor, TensorNames
from helmrec.types import RankResult

SERVER_VERSION = "1"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
_PLATFORM = "helmrec_hstu"


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


class IndexEntry(Struct, frozen=True):
    name: str
    version: str
    state: str
    reason: str


class OpenInference:
    """The protocol's calls for the one model a node serves."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._port = front.port
        self._model = front.port.model
        self._names = TensorNames(self._model)

    @property
    def model_name(self) -> str:
        return self._model.name

    def need_model(self, name: str, version: str = "") -> None:
        """Raise 404 unless this model is served, in this version; an empty version is any."""
        if name != self._model.name:
            raise HTTPException(404, f"the model served here is {self._model.name!r}, got {name[:100]!r}")
        if version not in {"", MODEL_VERSION}:
            raise HTTPException(404, f"the version served here is {MODEL_VERSION!r}, got {version[:100]!r}")

    async def rank(self, tensors: dict[str, Tensor], allowed_ms: float | None, started_s: float) -> list[RankResult]:
        """Rank what the tensors ask for. The deadline of `allowed_ms` runs since `started_s`."""
        histories, stored = self._front.histories, None
        if histories is not None and (users := self._names.users_without_events(tensors)) is not None:
            stored = await histories.read(users, self._port.model)
        ranks = self._names.requests(tensors, allowed_ms, stored)  # nothing may be awaited after the read
        return await self._front.submit(ranks, started_s)

    @property
    def is_live(self) -> bool:
        return self._port.health is not Health.FAILED

    @property
    def is_ready(self) -> bool:
        return self._front.is_ready and self._front.store_problem is None

    def server(self) -> ServerMetadata:
        return ServerMetadata("helmrec", SERVER_VERSION, EXTENSIONS)

    def model(self) -> ModelMetadata:
        inputs = [TensorMetadata(name, "INT64", [-1]) for name in (*self._names.required, *OPTIONAL_INPUTS)]
        scores = TensorMetadata(SCORES, "FP32", [-1, self._model.num_tasks])
        return ModelMetadata(self._model.name, [MODEL_VERSION], _PLATFORM, inputs, [scores])

    def config(self) -> ModelConfiguration:
        model, names = self._port.model, self._names
        inputs = [TensorConfig(name, "TYPE_INT64", [-1]) for name in names.required]
        inputs += [TensorConfig(name, "TYPE_INT64", [-1], optional=True) for name in OPTIONAL_INPUTS]
        limits = {"window": model.window, "max_candidates": model.max_candidates}
        parameters = {name: ConfigValue(str(value)) for name, value in limits.items()}
        scores = TensorConfig(SCORES, "TYPE_FP32", [-1, model.num_tasks])
        return ModelConfiguration(model.name, _PLATFORM, "helmrec", 0, inputs, [scores], parameters)

    async def statistics(self) -> StatisticsAnswer:
        stats = await self._front.stats()
        steps = 0 if stats is None else stats.steps
        return StatisticsAnswer([self._front.tally.of_model(self._model.name, MODEL_VERSION, steps)])

    def index(self, *, only_ready: bool) -> list[IndexEntry]:
        is_ready = self._front.is_ready
        state = "READY" if is_ready else "UNAVAILABLE" if self._port.health is Health.FAILED else "LOADING"
        entry = IndexEntry(self._model.name, MODEL_VERSION, state, self._port.reason or "")
        return [entry] if is_ready or not only_ready else []
