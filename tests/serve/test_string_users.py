"""Users by string over every API of a server."""

import json
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from helmrec.errors import RequestError
from helmrec.serve.client import Client
from helmrec.serve.tensors import TensorNames, encode_request, read_inference
from helmrec.serve.wire import pack_prefill, pack_requests, unpack_prefill, unpack_requests
from helmrec.types import PrefillRequest
from helmrec.user_ids import path_text
from tests.helpers import random_request, tiny_config
from tests.serve.asgi import Caller
from tests.serve.cases import events_body, infer_json, rank_body, rank_requests, stored_body, tensors_of

NAMES = ["ann", "7", "a/b", "a/events", "50%", "%2F", '"quoted"', "zoë", "a b?c#d", ".", "..", "u" * 256]


def path_of(user: int | str) -> str:
    return f"/v1/users/{quote(path_text(user), safe='')}"


def binary(names: list[str]) -> bytes:
    return b"".join(len(name.encode()).to_bytes(4, "little") + name.encode() for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_of_a_string_is_appended_read_ranked_with_and_forgotten(keeper: Caller, name: str) -> None:
    assert keeper.post("/v1/events", events_body(0, user_id=name)).json["version"] == 3
    assert keeper.get(path_of(name)).json["user_id"] == name
    read = keeper.get(f"{path_of(name)}/events?last=2").json
    assert (read["user_id"], read["first_event"], read["items"]) == (name, 1, events_body(0)["items"][1:])
    assert keeper.post("/v1/rank", stored_body(user_id=name)).json["history_version"] == 3
    assert keeper.post("/v1/rank", stored_body(user_id=7)).json["history_version"] == 0
    assert keeper.delete(path_of(name)).json == {"user_id": name, "had_events": True}
    assert keeper.get(path_of(name)).status == 404


def test_the_string_7_and_the_number_7_are_two_users(keeper: Caller) -> None:
    keeper.post("/v1/events", events_body(0, user_id="7"))
    assert keeper.get("/v1/users/7").status == 404
    assert keeper.get("/v1/users/%227%22").json["user_id"] == "7"
    assert [keeper.post("/v1/rank", rank_body(user_id=user)).json["reused_tokens"] for user in (7, "7", 7, "7")] == [
        0, 0, 4, 4,
    ]  # fmt: skip


@pytest.mark.parametrize(("user", "problem"), [("", "length"), ("x" * 257, "length"), ("ä" * 129, "258 bytes")])
def test_a_string_of_a_wrong_length_is_refused_with_the_limit(keeper: Caller, user: str, problem: str) -> None:
    for path, body in (("/v1/rank", rank_body(user_id=user)), ("/v1/events", events_body(0, user_id=user))):
        reply = keeper.post(path, body)
        assert (reply.status, reply.json["field"].strip(".$")) == (400, "user_id")
        assert problem in reply.json["detail"]


@pytest.mark.parametrize("is_binary", [False, True])
def test_tensors_of_strings_are_ranked(caller: Caller, is_binary: bool) -> None:
    requests = rank_requests(3)
    names = ["ann", "7", "zoë"]
    body = infer_json({name: values for name, values in tensors_of(requests).items() if name != "USER_IDS"})
    users: dict[str, Any] = {"name": "USER_IDS", "shape": [3], "datatype": "BYTES"}
    headers, data = {}, json.dumps(body | {"inputs": [*body["inputs"], users | {"data": names}]}).encode()
    if is_binary:
        blob = binary(names)
        users["parameters"] = {"binary_data_size": len(blob)}
        header = json.dumps(body | {"inputs": [*body["inputs"], users]}).encode()
        headers, data = {"inference-header-content-length": str(len(header))}, header + blob
    first = caller.post("/v2/models/tiny/infer", data, headers)
    assert first.status == 200, first.json
    again = caller.post("/v2/models/tiny/infer", data, headers).json
    assert again["parameters"]["reused_tokens"] > 0
    by_number = caller.post("/v2/models/tiny/infer", infer_json(tensors_of(requests))).json
    assert by_number["parameters"]["reused_tokens"] == 0, "the same events, of other users"
    assert by_number["outputs"][0]["data"] == pytest.approx(again["outputs"][0]["data"], abs=1e-5)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ({"datatype": "BYTES", "shape": [2], "data": ["ann"]}, "shape"),
        ({"datatype": "BYTES", "shape": [1], "data": [7]}, "data"),
        ({"datatype": "BYTES", "shape": [1]}, "shape"),
        ({"datatype": "INT64", "shape": [1], "data": ["7"]}, "data"),
        ({"datatype": "FP32", "shape": [1], "data": [7]}, "datatype"),
    ],
)
def test_tensors_of_users_that_are_neither_are_refused(tensor: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_inference(json.dumps({"inputs": [{"name": "USER_IDS", **tensor}]}).encode(), None)
    assert caught.value.field == f"inputs[0].{problem}"


@pytest.mark.parametrize("raw", [b"\1", b"\5\0\0\0ann", b"\1\0\0\0\xff", b"\1\0\0\0a\1\0"])
def test_bytes_that_are_no_strings_are_refused(raw: bytes) -> None:
    header = json.dumps(
        {
            "inputs": [
                {"name": "USER_IDS", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
            ]
        }
    ).encode()
    with pytest.raises(RequestError, match=r"inputs\[0\]"):
        read_inference(header + raw, str(len(header)))


def test_items_are_never_strings() -> None:
    body = {"inputs": [{"name": "ITEMS", "datatype": "BYTES", "shape": [1], "data": ["7"]}]}
    with pytest.raises(RequestError, match="datatype"):
        read_inference(json.dumps(body).encode(), None)


@pytest.mark.parametrize("user", ["ann", "zoë", 7])
def test_a_request_is_encoded_and_decoded_with_its_user(user: int | str) -> None:
    model = tiny_config()
    request, names = random_request(np.random.default_rng(1), model, user), TensorNames(model)
    encoded = encode_request(request, names)
    (found,) = names.requests(read_inference(encoded.body, str(encoded.json_bytes)).tensors, None)
    assert (found.user_id, list(found.items)) == (user, list(request.items))
    (sent,) = unpack_requests(memoryview(b"".join(pack_requests([request], 0.0)))).requests
    assert sent.user_id == user
    signal = PrefillRequest(user_id=user, items=[1], actions=[0], timestamps=[5])
    assert unpack_prefill(memoryview(b"".join(pack_prefill(signal)))).user_id == user


def test_a_client_escapes_what_a_path_would_misread() -> None:
    sent = list[str]()

    class Noting(Client):
        def _send(self, method: str, path: str, body: bytes | None = None) -> Any:
            sent.append(path)
            raise ConnectionError

    for user in (7, "7", "a/b"):
        with pytest.raises(ConnectionError):
            Noting("http://127.0.0.1:9").user(user)
    assert sent == ["/v1/users/7", "/v1/users/%227%22", "/v1/users/a%2Fb"]
