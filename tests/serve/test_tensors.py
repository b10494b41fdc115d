"""Tensors of the Open Inference Protocol, in and out."""

import json
from typing import Any

import numpy as np
import pytest

from helmrec.errors import RequestError
from helmrec.serve.tensors import TensorNames, read_inference
from helmrec.types import RankRequest
from tests.helpers import tiny_config
from tests.serve.cases import infer_binary, infer_json, rank_requests, tensors_of

NAMES = TensorNames(tiny_config())


def read_binary(tensors: dict[str, Any], datatype: str = "INT64") -> dict[str, Any]:
    sent = infer_binary(tensors, datatype)
    return read_inference(sent.body, sent.headers["inference-header-content-length"]).tensors


def read_json(tensors: dict[str, Any]) -> dict[str, Any]:
    return read_inference(json.dumps(infer_json(tensors)).encode(), None).tensors


def same(one: RankRequest, other: RankRequest) -> bool:
    scalars = ("user_id", "first_event", "request_time", "deadline_ms", "context")
    lists = ("items", "actions", "timestamps", "candidates")
    tables = ("features", "candidate_features")
    return (
        all(getattr(one, name) == getattr(other, name) for name in scalars)
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in lists)
        and all(np.array_equal(getattr(one, t)[n], getattr(other, t)[n]) for t in tables for n in getattr(one, t))
    )


@pytest.mark.parametrize("read", [read_binary, read_json])
def test_ragged_requests_survive_the_way_through_tensors(read: Any) -> None:
    requests = rank_requests(9)
    back = NAMES.requests(read(tensors_of(requests)), None)
    assert len(back) == 9
    assert all(map(same, back, requests))


def test_narrow_integers_are_taken_as_they_are() -> None:
    requests = rank_requests(3)
    back = NAMES.requests(read_binary(tensors_of(requests), "INT32"), None)
    assert back[1].items.dtype == np.int32  # type: ignore[union-attr]
    assert all(map(same, back, requests))


def test_binary_ids_are_views_of_the_body() -> None:
    sent = infer_binary(tensors_of(rank_requests(2)))
    tensors = read_inference(sent.body, sent.headers["inference-header-content-length"]).tensors
    body = np.frombuffer(sent.body, np.uint8)
    for request in NAMES.requests(tensors, None):
        for ids in (request.items, request.timestamps, request.candidates, request.features["category"]):
            assert np.shares_memory(np.asarray(ids).view(np.uint8), body)


def test_first_events_and_request_times_may_be_given() -> None:
    tensors = tensors_of(rank_requests(2)) | {"FIRST_EVENTS": np.array([4, 0]), "REQUEST_TIMES": np.array([9, 8])}
    back = NAMES.requests(read_binary(tensors), deadline_ms=3.0)
    assert [(r.first_event, r.request_time, r.deadline_ms) for r in back] == [(4, 9, 3.0), (0, 8, 3.0)]


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("LENGTHS", [1, 1], "LENGTHS"),
        ("LENGTHS", [-1, 8], "LENGTHS"),
        ("LENGTHS", [2**62, 2**62], "LENGTHS"),
        ("NUM_CANDIDATES", [9, 9], "NUM_CANDIDATES"),
        ("USER_IDS", [1], "LENGTHS"),
        ("ACTIONS", [1], "ACTIONS"),
        ("context.hour", [1], "context.hour"),
        ("FIRST_EVENTS", [1], "FIRST_EVENTS"),
        ("SHOES", [1], "inputs"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(name: str, values: list[int], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        NAMES.requests(read_json(tensors_of(rank_requests(2)) | {name: values}), None)
    assert caught.value.field == field


def test_no_user_at_all_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one user"):
        NAMES.requests({name: np.empty(0, np.int64) for name in NAMES.required}, None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"datatype": "FP32"}, "inputs[0].datatype"),
        ({"datatype": "BYTES"}, "inputs[0].data"),
        ({"datatype": "BYTES", "name": "ITEMS2"}, "inputs[0].datatype"),
        ({"shape": [2, 1]}, "inputs[0].shape"),
        ({"shape": [-1]}, "inputs[0].shape[0]"),
        ({"shape": [3]}, "inputs[0].data"),
        ({"data": None}, "inputs[0].data"),
        ({"data": [1, 2.5]}, "inputs[0].data[1]"),
        ({"data": [1, 300], "datatype": "INT8"}, "inputs[0].data"),
        ({"name": "LENGTHS"}, "inputs[1].name"),
        ({"parameters": {"binary_data_size": 16}}, "inputs[0].data"),
    ],
)
def test_a_wrong_json_tensor_is_named(change: dict[str, Any], field: str) -> None:
    body = infer_json(tensors_of(rank_requests(2)))
    body["inputs"][0] |= change
    with pytest.raises(RequestError) as caught:
        read_inference(json.dumps(body).encode(), None)
    assert caught.value.field == field


@pytest.mark.parametrize("header_length", ["", "-1", "1e3", "99999999", "9" * 30, "²"])
def test_a_wrong_header_length_is_refused(header_length: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_inference(infer_binary(tensors_of(rank_requests(1))).body, header_length)
    assert caught.value.field == "inference-header-content-length"


@pytest.mark.parametrize("cut", [1, 7, 8, 100])
def test_a_truncated_or_padded_body_is_refused(cut: int) -> None:
    sent = infer_binary(tensors_of(rank_requests(2)))
    length = sent.headers["inference-header-content-length"]
    with pytest.raises(RequestError, match="binary_data_size"):
        read_inference(sent.body[:-cut], length)
    with pytest.raises(RequestError, match="JSON and tensors take"):
        read_inference(sent.body + b"x" * cut, length)


def test_an_unknown_output_is_refused() -> None:
    body = infer_json(tensors_of(rank_requests(1)), outputs=[{"name": "LABELS"}])
    with pytest.raises(RequestError, match="the only output is SCORES"):
        read_inference(json.dumps(body).encode(), None)
