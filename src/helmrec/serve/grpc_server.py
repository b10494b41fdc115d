"""The Open Inference Protocol over gRPC, in the event loop of the HTTP server and in front of the same engine.

Admission, limits, errors, metrics and log lines are those of HTTP; `inference` has the calls themselves.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import msgspec
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from helmrec.errors import ConfigError, RequestError
from helmrec.serve.bodies import DEADLINE_HEADER, parse_deadline
from helmrec.serve.calls import CLIENT_GONE, ID_HEADER, explain
from helmrec.serve.front import Front
from helmrec.serve.grpc_messages import MESSAGES, SERVICE
from helmrec.serve.inference import OpenInference
from helmrec.serve.routes import MODEL_VERSION
from helmrec.serve.schema import Problem, tighter
from helmrec.serve.tensors import SCORES, InputTensor, Scored, Tensor, ValueFields, check_outputs, tensors_by_name

log = logging.getLogger("helmrec.serve")
PROBLEM_KEY = "problem-bin"  # of the trailing metadata: the error as JSON, as HTTP has it in its body
_MAX_CALLS = 4_096  # at once on one connection; the engine's queue is bounded besides
_CODES = {  # status of HTTP -> of gRPC; all others are INTERNAL
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_CODES_BY_NAME = dict.fromkeys(("DeadlineExceeded", "DiskTooSlow"), grpc.StatusCode.DEADLINE_EXCEEDED)
_CONTENTS = {"INT64": "int64_contents", "UINT64": "uint64_contents", "BYTES": "bytes_contents"} | {
    f"{kind}{bits}": f"{kind.lower()}_contents" for kind in ("INT", "UINT") for bits in (8, 16, 32)
}
_FIELDS = ValueFields(raw="raw_input_contents[{i}]", listed="inputs[{i}].contents")
_ABSENT = {
    "ModelStreamInfer": "streams are not served: send each request as ModelInfer",
    "RepositoryModelLoad": "models are swapped over HTTP: POST /v1/admin/model",
    "RepositoryModelUnload": "the one model cannot be unloaded; it is swapped over HTTP: POST /v1/admin/model",
    **dict.fromkeys(
        (f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
        "shared memory is not used: send tensors in the request",
    ),
    **dict.fromkeys(("TraceSetting", "LogSettings"), "settings are given when the server starts"),
}


class _Call:
    """A call that is being answered: its message, what its metadata says, and when it arrived."""

    def __init__(self, message: Any, context: Any, started_s: float) -> None:
        self.message = message
        self.started_s = started_s
        self._context = context

    @property
    def allowed_ms(self) -> float | None:
        """The client's deadline: of the call itself, or of its metadata, whichever is sooner."""
        left_s = self._context.time_remaining()
        return tighter(
            None if left_s is None else left_s * 1e3, parse_deadline(_metadata(self._context, DEADLINE_HEADER))
        )


Work = Callable[[_Call], Awaitable[Any]]


class GrpcServer:
    """Serves the calls of one front. Used in one event loop."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._calls = OpenInference(front)
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None
        self.port = 0  # that it listens on, once started

    async def start(self) -> None:
        """Listen; ConfigError if the address cannot be had."""
        config = self._front.config
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", int(config.max_body_bytes)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _MAX_CALLS),
                ("grpc.compression_enabled_algorithms_bitset", 1),  # none, as over HTTP
                ("grpc.so_reuseport", 0),  # two servers must not share a port unseen
            ]
        )
        handlers = {name: self._handler(name, work) for name, work in self._works().items()}
        handlers |= {name: _absent(name, why) for name, why in _ABSENT.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{config.grpc_port}")
        except RuntimeError as error:
            raise ConfigError(f"host, grpc_port: cannot listen ({error}), got {host}:{config.grpc_port}") from None
        await self._server.start()
        log.info("listening", extra={"address": f"grpc://{host}:{self.port}"})

    def begin_to_stop(self) -> None:
        """Accept no more calls, and let running ones end for `drain_s` seconds. May be called twice."""
        if self._stopping is None and self._server is not None:
            self._stopping = asyncio.create_task(self._server.stop(self._front.config.drain_s))

    async def stop(self) -> None:
        """Stop, and return when all calls have ended."""
        self.begin_to_stop()
        if self._stopping is not None:
            await self._stopping

    def _works(self) -> Mapping[str, Work]:
        return {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
        }

    def _handler(self, name: str, work: Work) -> Any:
        """Make the handler of a method. Messages are bytes up to here, so that malformed ones get our errors."""
        takes, gives, route = MESSAGES[f"{name}Request"], MESSAGES[f"{name}Response"], f"/{SERVICE}/{name}"

        async def answer(body: bytes, context: Any) -> bytes:
            started_s = time.perf_counter()
            request_id = self._front.calls.request_id(_metadata(context, ID_HEADER) or "")
            status, problem = CLIENT_GONE, None  # or past its deadline
            try:
                with self._front.bodies.holding(len(body)):
                    made = await work(_Call(_parse(takes, body), context, started_s))
                    encoded: bytes = (made if isinstance(made, gives) else ParseDict(made, gives())).SerializeToString()
                    status = 200
                    return encoded
            except Exception as error:
                problem = explain(error, request_id, route)
                status = problem.status
                return await _refuse(context, problem)
            finally:
                spent_s = time.perf_counter() - started_s
                self._front.calls.conclude(request_id, "gRPC", route, status, spent_s, problem)

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _live(self, _: _Call) -> dict[str, Any]:
        return {"live": self._calls.is_live}

    async def _ready(self, call: _Call) -> dict[str, Any]:
        if call.message.DESCRIPTOR.fields:  # it names a model
            self._need_model(call.message)
        return {"ready": self._calls.is_ready}

    async def _server_metadata(self, _: _Call) -> Any:
        return msgspec.to_builtins(self._calls.server())

    async def _model_metadata(self, call: _Call) -> Any:
        self._need_model(call.message)
        return msgspec.to_builtins(self._calls.model())

    async def _model_config(self, call: _Call) -> Any:
        self._need_model(call.message)
        return {"config": msgspec.to_builtins(self._calls.config())}

    async def _model_statistics(self, call: _Call) -> Any:
        if call.message.name:
            self._need_model(call.message)
        return msgspec.to_builtins(await self._calls.statistics())

    async def _index(self, call: _Call) -> Any:
        return {"models": msgspec.to_builtins(self._calls.index(only_ready=call.message.ready))}

    def _need_model(self, message: Any) -> None:
        self._calls.need_model(message.name, message.version)

    async def _infer(self, call: _Call) -> Any:
        asked = call.message
        self._calls.need_model(asked.model_name, asked.model_version)
        self._front.need_ready()
        check_outputs([output.name for output in asked.outputs])
        allowed_ms = tighter(_timeout_ms(asked), call.allowed_ms)
        scored = Scored.of(await self._calls.rank(read_tensors(asked), allowed_ms, call.started_s))
        answer = MESSAGES["ModelInferResponse"](
            model_name=self._calls.model_name, model_version=MODEL_VERSION, id=asked.id
        )
        for name, total in scored.totals.items():
            answer.parameters[name].int64_param = total
        answer.outputs.add(name=SCORES, datatype="FP32", shape=scored.scores.shape)
        answer.raw_output_contents.append(scored.scores.tobytes())
        return answer


def read_tensors(asked: Any) -> dict[str, Tensor]:
    """Return the tensors of a `ModelInferRequest`, from its raw contents or from those of each tensor."""
    raw: list[bytes | None] = list(asked.raw_input_contents)
    if raw and len(raw) != len(asked.inputs):
        raise RequestError("raw_input_contents", len(raw), f"one per tensor is needed, or none, {len(asked.inputs)}")
    inputs = []
    for i, tensor in enumerate(asked.inputs):
        data = _contents(i, tensor)
        if raw and data:
            raise RequestError(f"inputs[{i}].contents", len(data), "values are raw or typed, not both")
        inputs.append(InputTensor(tensor.name, list(tensor.shape), tensor.datatype, data=data))
    return tensors_by_name(inputs, raw or [None] * len(inputs), _FIELDS)


def _contents(i: int, tensor: Any) -> list[int | str]:
    """Return the typed values of a tensor; RequestError if they are in the field of another type."""
    values, wanted = [], _CONTENTS.get(tensor.datatype)
    for field, found in tensor.contents.ListFields():
        if field.name != wanted:
            problem = f"{wanted or 'integers'} is needed for datatype {tensor.datatype}"
            raise RequestError(f"inputs[{i}].contents", field.name, problem)
        values = list(found)
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError:
        raise RequestError(f"inputs[{i}].contents", repr(values)[:100], "UTF-8 is needed") from None


def _timeout_ms(asked: Any) -> float | None:
    """Return the protocol's own deadline, a parameter in microseconds; None without one."""
    if "timeout" not in asked.parameters:
        return None
    given = asked.parameters["timeout"]
    value = getattr(given, given.WhichOneof("choice") or "int64_param")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise RequestError("parameters.timeout", value, "a positive number of microseconds is needed")
    return value / 1e3


def _parse(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise RequestError("body", body[:20], f"a message {name} is needed ({error})") from None


def _metadata(context: Any, name: str) -> str | None:
    return next((value for key, value in context.invocation_metadata() or () if key == name), None)


async def _refuse(context: Any, problem: Problem) -> bytes:
    """End a call with the code of an error, its text, and all of it in the trailing metadata."""
    code = _CODES_BY_NAME.get(problem.type.rpartition(":")[2]) or _CODES.get(problem.status, grpc.StatusCode.INTERNAL)
    trailing = ((ID_HEADER, problem.request_id), (PROBLEM_KEY, msgspec.json.encode(problem)))
    await context.abort(code, problem.detail, trailing)
    raise AssertionError("abort raises")


def _absent(name: str, why: str) -> Any:
    """Make the handler of a method of Triton that is not served."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name}: {why}")

    if name == "ModelStreamInfer":
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
