"""The Open Inference Protocol over gRPC, as Triton's client speaks it and as plain messages, beside HTTP."""

import asyncio
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from helmrec.clock import MonotonicClock
from helmrec.errors import ConfigError, DeadlineExceeded, QueueFull, RequestError, TooLarge
from helmrec.serve.app import make_app
from helmrec.serve.grpc_messages import MESSAGES, SERVICE
from helmrec.serve.grpc_server import PROBLEM_KEY, read_tensors
from helmrec.serve.port import InProcessPort
from helmrec.serve.server import check_grpc
from helmrec.serve.settings import ServeConfig
from helmrec.serve.string_tensors import pack_strings
from tests.helpers import tiny_engine
from tests.serve.asgi import on_loopback, wait_for
from tests.serve.cases import infer_json, rank_requests, tensors_of

REQUESTS = rank_requests(6)
Code = grpc.StatusCode


class Server(NamedTuple):
    """A server with both protocols."""

    app: Any
    http_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.app.state.grpc.port}"

    def call(self, method: str, message: Any, **options: Any) -> Any:
        """A call of our own messages; bytes are sent as they are."""
        kind = MESSAGES[f"{method}Response"]
        with grpc.insecure_channel(self.address) as channel:
            stub = channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=kind.FromString)
            body = message if isinstance(message, bytes) else message.SerializeToString()
            return stub(body, timeout=options.pop("timeout", 60), **options)

    def refusal(self, method: str, message: Any, **options: Any) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, message, **options)
        return caught.value

    def over_http(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())


def serving(**settings: Any) -> Any:
    """An application with gRPC on a free port."""
    engine = tiny_engine(clock=MonotonicClock())
    return make_app(InProcessPort(engine), ServeConfig(**{"grpc_port": 0} | settings))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    app = serving(max_body_bytes=100_000)
    with on_loopback(app) as port:
        server = Server(app, port)
        wait_for(lambda: server.call("ServerReady", b"").ready)
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.concatenate([result.scores for result in tiny_engine().rank(REQUESTS)])


def inputs(tensors: dict[str, Any]) -> list[Any]:
    made = []
    for name, values in tensors.items():
        tensor = triton.InferInput(name, list(values.shape), "INT64")
        tensor.set_data_from_numpy(values)
        made.append(tensor)
    return made


def message_of(tensors: dict[str, Any], *, is_raw: bool = True, datatype: str = "INT64") -> Any:
    """A request in our own messages."""
    asked = MESSAGES["ModelInferRequest"](model_name="tiny", id="r-1")
    for name, values in tensors.items():
        tensor = asked.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if is_raw:
            asked.raw_input_contents.append(np.asarray(values).astype(datatype.lower()).tobytes())
        elif datatype.endswith("64"):
            getattr(tensor.contents, f"{datatype.lower()}_contents").extend(values.tolist())
        else:
            getattr(tensor.contents, f"{datatype.rstrip('0123456789').lower()}_contents").extend(values.tolist())
    return asked


def scores_of(answer: Any) -> Any:
    (output,) = answer.outputs
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(output.shape)


def test_tritonclient_ranks_a_ragged_batch(client: Any, expected: Any) -> None:
    outputs = [triton.InferRequestedOutput("SCORES")]
    result = client.infer("tiny", inputs(tensors_of(REQUESTS)), "1", outputs, "r-1", timeout=60_000_000)
    np.testing.assert_allclose(result.as_numpy("SCORES"), expected, atol=1e-5)
    answer = result.get_response()
    assert (answer.id, answer.model_name, answer.model_version) == ("r-1", "tiny", "1")
    assert answer.parameters["computed_tokens"].int64_param > 0
    assert answer.parameters["row_misses"].WhichOneof("parameter_choice") == "int64_param", "also if it is zero"


@pytest.mark.parametrize("is_raw", [True, False])
@pytest.mark.parametrize("datatype", ["INT64", "UINT64", "INT32", "UINT16"])
def test_raw_and_typed_contents_of_any_width_give_the_same_scores(
    server: Server, expected: Any, is_raw: bool, datatype: str
) -> None:
    tensors = tensors_of(REQUESTS)
    if datatype == "UINT16":
        tensors["TIMESTAMPS"] = tensors["TIMESTAMPS"] % 2**16
    answer = server.call("ModelInfer", message_of(tensors, is_raw=is_raw, datatype=datatype))
    np.testing.assert_allclose(scores_of(answer), expected, atol=1e-5)


@pytest.mark.parametrize("is_raw", [True, False])
def test_users_may_be_strings(server: Server, expected: Any, is_raw: bool) -> None:
    tensors, names = tensors_of(REQUESTS), [f"zoë {request.user_id}" for request in REQUESTS]
    asked = message_of({name: values for name, values in tensors.items() if name != "USER_IDS"}, is_raw=is_raw)
    users = asked.inputs.add(name="USER_IDS", datatype="BYTES", shape=[len(names)])
    if is_raw:
        asked.raw_input_contents.append(pack_strings(names))
    else:
        users.contents.bytes_contents.extend(name.encode() for name in names)
    np.testing.assert_allclose(scores_of(server.call("ModelInfer", asked)), expected, atol=1e-5)


def test_every_field_is_that_of_tritons_messages() -> None:
    files = (model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR)
    of_triton = {name: kind for file in files for name, kind in _messages(file)}
    assert set(MESSAGES) <= of_triton.keys()
    for name, kind in MESSAGES.items():
        for field in kind.DESCRIPTOR.fields:
            twin = of_triton[name].fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (twin.number, twin.type, twin.is_repeated), name
            if field.enum_type:
                theirs = {value.name: value.number for value in twin.enum_type.values}
                assert {value.name: value.number for value in field.enum_type.values} == theirs


def _messages(file: Any) -> Iterator[tuple[str, Any]]:
    for name, kind in file.message_types_by_name.items():
        yield name, kind
        yield from kind.nested_types_by_name.items()


def test_health_and_metadata_are_those_of_http(server: Server, client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", "1")
    assert client.get_server_metadata(as_json=True) == server.over_http("/v2")
    metadata = _as_http(client.get_model_metadata("tiny", "1"))
    assert metadata == server.over_http("/v2/models/tiny")
    config = _as_http(client.get_model_config("tiny").config, keep_defaults=False)
    assert config | {"max_batch_size": 0} == server.over_http("/v2/models/tiny/config")
    index = client.get_model_repository_index()
    assert [_as_http(each) for each in index.models] == [
        {**each, "reason": ""} for each in server.over_http("/v2/repository/index", {})
    ]


def test_statistics_count_calls_of_both_protocols(server: Server, client: Any) -> None:
    def num_ranked() -> int:
        (found,) = server.over_http("/v2/models/stats")["model_stats"]
        (same,) = client.get_inference_statistics().model_stats
        assert _as_http(same) == found
        return int(found["inference_count"])

    before = num_ranked()
    client.infer("tiny", inputs(tensors_of(REQUESTS)))
    assert num_ranked() == before + len(REQUESTS)


def _as_http(message: Any, *, keep_defaults: bool = True) -> Any:
    """A message as the JSON that HTTP has: protobuf writes integers of 64 bits as text."""
    made = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=keep_defaults)
    return _whole(made)


def _whole(value: Any) -> Any:
    unread = ("memory_usage", "response_stats")  # of statistics: fields of Triton that we leave out
    if isinstance(value, dict):
        is_text = {"version", "versions", "string_value"}
        return {k: v if k in is_text else _whole(v) for k, v in value.items() if k not in unread}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value


def changed(name: str, index: int, value: int) -> dict[str, Any]:
    tensors = tensors_of(REQUESTS)
    tensors[name][index] = value
    return tensors


@pytest.mark.parametrize(
    "tensors",
    [
        changed("ITEMS", 4, 300),
        changed("LENGTHS", 0, -1),
        {name: values for name, values in tensors_of(REQUESTS).items() if name != "CANDIDATES"},
        tensors_of(REQUESTS) | {"COLOURS": np.zeros(6, np.int64)},
    ],
)
def test_a_wrong_request_gets_the_error_of_http(server: Server, tensors: dict[str, Any]) -> None:
    refused = server.refusal("ModelInfer", message_of(tensors), metadata=[("x-request-id", "mine")])
    there = server.over_http("/v2/models/tiny/infer", infer_json(tensors))
    trailing = dict(refused.trailing_metadata())
    problem = json.loads(trailing[PROBLEM_KEY])
    assert (refused.code(), refused.details()) == (Code.INVALID_ARGUMENT, there["detail"])
    assert trailing["x-request-id"] == problem.pop("request_id") == "mine"
    assert problem["type"] == "urn:helmrec:error:RequestError"
    assert problem == {name: value for name, value in there.items() if name not in {"request_id", "error"}}


def test_tritonclient_raises_the_error_of_the_server(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="the model served here is 'tiny', got 'huge'") as caught:
        client.infer("huge", inputs(tensors_of(REQUESTS)))
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="the version served here is '1', got '2'"):
        client.is_model_ready("tiny", "2")
    with pytest.raises(InferenceServerException, match="the only output is SCORES"):
        client.infer("tiny", inputs(tensors_of(REQUESTS)), outputs=[triton.InferRequestedOutput("LABELS")])


def with_change(change: Callable[[Any], object], *, is_raw: bool = True) -> Any:
    asked = message_of(tensors_of(REQUESTS), is_raw=is_raw)
    change(asked)
    return asked


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (with_change(lambda m: m.raw_input_contents.pop()), "raw_input_contents"),
        (with_change(lambda m: m.raw_input_contents.insert(0, m.raw_input_contents.pop())), "raw_input_contents[3]"),
        (with_change(lambda m: m.inputs[1].contents.int64_contents.append(3)), "inputs[1].contents"),
        (with_change(lambda m: m.inputs[1].shape.append(1)), "inputs[1].shape"),
        (with_change(lambda m: m.inputs[1].shape.__setitem__(0, -6)), "inputs[1].shape"),
        (with_change(lambda m: setattr(m.inputs[1], "datatype", "FP32")), "inputs[1].datatype"),
        (with_change(lambda m: setattr(m.inputs[1], "name", "USER_IDS")), "inputs[1].name"),
        (with_change(lambda m: m.inputs[0].contents.int64_contents.pop(), is_raw=False), "inputs[0].contents"),
        (with_change(lambda m: m.inputs[0].contents.fp32_contents.append(1.0), is_raw=False), "inputs[0].contents"),
        (with_change(lambda m: setattr(m.inputs[0], "datatype", "INT32"), is_raw=False), "inputs[0].contents"),
        (with_change(lambda m: setattr(m.parameters["timeout"], "int64_param", 0)), "parameters.timeout"),
        (with_change(lambda m: setattr(m.parameters["timeout"], "string_param", "1")), "parameters.timeout"),
        (with_change(lambda m: setattr(m.parameters["timeout"], "bool_param", True)), "parameters.timeout"),
        (b"\xff\xff\xff", "body"),
    ],
)
def test_a_wrong_message_is_refused_and_its_field_is_named(server: Server, asked: Any, field: str) -> None:
    refused = server.refusal("ModelInfer", asked)
    assert refused.code() == Code.INVALID_ARGUMENT
    assert json.loads(dict(refused.trailing_metadata())[PROBLEM_KEY])["field"] == field
    assert refused.details().startswith(f"{field}: ")


def test_values_that_do_not_fit_the_type_are_refused() -> None:
    asked = message_of(tensors_of(REQUESTS), is_raw=False, datatype="INT32")
    asked.inputs[0].datatype = "INT8"
    asked.inputs[0].contents.int_contents[0] = 300
    with pytest.raises(RequestError, match="integers that fit INT8"):
        read_tensors(asked)


def test_a_message_may_be_as_long_as_a_body_and_not_compressed(server: Server) -> None:
    asked = message_of(tensors_of(REQUESTS))
    asked.id = "x" * 100_000
    assert server.refusal("ModelInfer", asked).code() == Code.RESOURCE_EXHAUSTED
    asked.id = "x" * 90_000
    assert server.call("ModelInfer", asked).id == asked.id
    refused = server.refusal("ModelInfer", asked, compression=grpc.Compression.Gzip)
    assert refused.code() == Code.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full"), Code.RESOURCE_EXHAUSTED),
        (DeadlineExceeded("late"), Code.DEADLINE_EXCEEDED),
        (TooLarge("requests", 9, "at most 8"), Code.INVALID_ARGUMENT),
        (ZeroDivisionError("a bug of ours"), Code.INTERNAL),
    ],
)
def test_errors_have_their_code_and_their_name(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception, code: Any
) -> None:
    async def refuse(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        raise error

    monkeypatch.setattr(InProcessPort, "submit", refuse)
    refused = server.refusal("ModelInfer", message_of(tensors_of(REQUESTS)))
    assert refused.code() == code
    problem = json.loads(dict(refused.trailing_metadata())[PROBLEM_KEY])
    if code is Code.INTERNAL:
        assert "a bug of ours" not in refused.details()
        assert problem["status"] == 500
    else:
        assert problem["type"] == f"urn:helmrec:error:{type(error).__name__}"


@pytest.mark.parametrize(
    ("options", "timeout_us", "most_ms"),
    [
        ({"timeout": 20}, None, 20_000),
        ({"timeout": 20}, 3_000_000, 3_000),
        ({"timeout": 20, "metadata": [("deadline-ms", "500")]}, 3_000_000, 500),
        ({"timeout": None}, None, None),
    ],
)
def test_the_soonest_deadline_of_the_client_goes_with_the_request(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    timeout_us: int | None,
    most_ms: float | None,
) -> None:
    submit, seen = InProcessPort.submit, list[float | None]()

    async def look(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        seen.extend(request.deadline_ms for request in requests)
        return await submit(self, requests, spent_ms)

    monkeypatch.setattr(InProcessPort, "submit", look)
    asked = message_of(tensors_of(REQUESTS[:1]))
    if timeout_us is not None:
        asked.parameters["timeout"].int64_param = timeout_us
    server.call("ModelInfer", asked, **options)
    (deadline_ms,) = seen
    if most_ms is None or deadline_ms is None:
        assert deadline_ms == most_ms
    else:
        assert 0.7 * most_ms < deadline_ms <= 1.01 * most_ms, "gRPC rounds a deadline up to three digits"


def test_a_call_that_is_past_its_deadline_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    is_given_up = threading.Event()

    async def hang(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            is_given_up.set()

    monkeypatch.setattr(InProcessPort, "submit", hang)
    refused = server.refusal("ModelInfer", message_of(tensors_of(REQUESTS)), timeout=0.2)
    assert refused.code() == Code.DEADLINE_EXCEEDED
    assert is_given_up.wait(10)
    front = server.app.state.front
    wait_for(lambda: front.bodies.held_bytes == 0)
    assert b'route="/inference.GRPCInferenceService/ModelInfer",status="499"} 1.0' in metrics(server)


def metrics(server: Server) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as answer:
        found: bytes = answer.read()
        return found


def test_calls_are_counted_with_those_of_http(server: Server) -> None:
    def counted(status: int) -> float:
        label = f'route="/inference.GRPCInferenceService/ModelInfer",status="{status}"}}'
        _, found, rest = metrics(server).decode().partition(f"helmrec_http_requests_total{{{label} ")
        return float(rest.split()[0]) if found else 0.0

    before = counted(200), counted(400)
    server.call("ModelInfer", message_of(tensors_of(REQUESTS)))
    server.refusal("ModelInfer", message_of(changed("ITEMS", 4, 300)))
    assert (counted(200), counted(400)) == (before[0] + 1, before[1] + 1)


def test_bodies_of_calls_count_against_the_bytes_of_all(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = server.app.state.front.bodies
    monkeypatch.setattr(bodies, "_max_bytes", 100)
    refused = server.refusal("ModelInfer", message_of(tensors_of(REQUESTS)))
    assert refused.code() == Code.UNAVAILABLE
    assert "max_bodies_bytes" in refused.details()
    assert bodies.held_bytes == 0


@pytest.mark.parametrize("method", ["RepositoryModelLoad", "SystemSharedMemoryStatus", "TraceSetting"])
def test_calls_of_triton_that_are_absent_say_what_to_use(server: Server, method: str) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=60)
    assert caught.value.code() == Code.UNIMPLEMENTED
    assert caught.value.details().startswith(f"{method}: ")


def test_a_stream_is_refused_with_a_reason(client: Any) -> None:
    told: list[Any] = []
    client.start_stream(lambda result, error: told.append(error))
    wait_for(lambda: told)
    client.stop_stream()
    assert "ModelStreamInfer: streams are not served" in str(told[0])


def test_a_stopping_server_answers_what_runs_and_accepts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, is_running, may_end = InProcessPort.submit, threading.Event(), asyncio.Event()

    async def wait(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        is_running.set()
        await may_end.wait()
        return await submit(self, requests, spent_ms)

    app = serving()
    with on_loopback(app) as port:
        server = Server(app, port)
        wait_for(lambda: server.call("ServerReady", b"").ready)
        loop = app.state.grpc._server._loop
        monkeypatch.setattr(InProcessPort, "submit", wait)
        asked, answers = message_of(tensors_of(REQUESTS)), list[Any]()
        caller = threading.Thread(target=lambda: answers.append(server.call("ModelInfer", asked)))
        caller.start()
        assert is_running.wait(60)
        loop.call_soon_threadsafe(app.state.begin_to_stop)
        wait_for(lambda: _is_refused(app.state.grpc.port))
        assert server.refusal("ServerLive", b"").code() == Code.UNAVAILABLE
        assert not answers
        loop.call_soon_threadsafe(may_end.set)
        caller.join(60)
    assert scores_of(answers[0]).shape == (sum(len(request.candidates) for request in REQUESTS), 2)


def _is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_that_is_taken_is_an_error_before_the_model_is_loaded(server: Server) -> None:
    port = server.app.state.grpc.port
    with pytest.raises(ConfigError, match=f"host, grpc_port: cannot listen .* got 127.0.0.1:{port}"):
        check_grpc(ServeConfig(grpc_port=port))
    check_grpc(ServeConfig(grpc_port=0))
    check_grpc(ServeConfig())


def test_two_servers_do_not_share_a_port_unseen(server: Server) -> None:
    app = serving(grpc_port=server.app.state.grpc.port)

    async def start() -> None:
        await app.state.grpc.start()

    with pytest.raises(ConfigError, match="host, grpc_port: cannot listen"):
        asyncio.run(start())


def test_without_its_packages_grpc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "helmrec.serve.grpc_server")
    with pytest.raises(ConfigError, match=r"grpc_port needs pip install 'helmrec\[grpc\]'"):
        check_grpc(ServeConfig(grpc_port=0))
