"""Requests, results, calls and errors come out of the wire as they went in."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.errors import (
    DeadlineExceeded,
    EngineClosed,
    Forgotten,
    NonFiniteScores,
    PoolTooSmall,
    QueueFull,
    RequestError,
)
from helmrec.serve.wire import (
    NotForTheWire,
    pack_call,
    pack_error,
    pack_requests,
    pack_results,
    unpack_call,
    unpack_error,
    unpack_requests,
    unpack_results,
)
from helmrec.types import RankRequest
from tests.helpers import tiny_engine
from tests.serve.cases import as_request, rank_body, rank_requests


def joined(parts: Any) -> memoryview:
    return memoryview(b"".join(bytes(part) for part in parts))


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_requests_keep_every_field() -> None:
    requests = [
        *rank_requests(5),
        as_request(rank_body(first_event=40, request_time=90, deadline_ms=12_500)),
        as_request(rank_body(items=[], actions=[], timestamps=[], features={"category": []})),
        replace(rank_requests(1)[0], items=np.arange(3, dtype=np.uint8), actions=np.zeros(3, np.int16)),
    ]
    for got, sent in zip(unpack_requests(joined(pack_requests(requests, 0.0))).requests, requests, strict=True):
        assert isinstance(got, RankRequest)
        for name in ("user_id", "first_event", "request_time", "deadline_ms"):
            assert getattr(got, name) == getattr(sent, name)
        for name in ("items", "actions", "timestamps", "candidates"):
            assert np.array_equal(getattr(got, name), getattr(sent, name))
        assert got.context == sent.context
        assert same(got.features, sent.features)
        assert same(got.candidate_features, sent.candidate_features)


def test_an_engine_gives_the_same_scores_to_what_came_over_the_wire() -> None:
    requests = rank_requests(8)
    sent = tiny_engine().rank(requests)
    got = tiny_engine().rank(unpack_requests(joined(pack_requests(requests, 0.0))).requests)
    back = unpack_results(joined(pack_results(got)))
    for one, other, returned in zip(sent, got, back, strict=True):
        assert np.array_equal(one.scores, other.scores)
        assert np.array_equal(returned.scores, other.scores)
        assert replace(returned, scores=other.scores) == other


@pytest.mark.parametrize(
    "wrong",
    [
        {"items": [1, 2.5, 3]},
        {"items": [[1], [2, 3]]},
        {"items": [1 << 70, 1, 1]},
        {"user_id": 1 << 64},
        {"context": {"hour": object()}},
        {"candidates": "ab"},
    ],
)
def test_what_cannot_be_packed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(NotForTheWire):
        pack_requests([as_request(rank_body(**wrong))], 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"user_id": 7.5},
        {"user_id": b"7"},
        {"first_event": [1, 2]},
        {"request_time": 1.5},
        {"deadline_ms": {"ms": 3}},
        {"context": [1, 2]},
        {"features": None},
        {"candidate_features": "abc"},
    ],
    ids=str,
)
def test_a_field_of_another_kind_cannot_cross(wrong: dict[str, Any]) -> None:
    with pytest.raises(NotForTheWire):
        pack_requests([replace(rank_requests(1)[0], **wrong)], 0.0)


def test_numbers_of_numpy_and_long_deadlines_cross() -> None:
    numbers: dict[str, Any] = {"user_id": np.int64(3), "first_event": np.int32(0), "deadline_ms": 2**70}
    asked = replace(rank_requests(1)[0], **numbers)
    (got,) = unpack_requests(joined(pack_requests([asked], 0.0))).requests
    assert (got.user_id, got.first_event, got.deadline_ms) == (3, 0, float(2**70))


def test_the_way_counts_towards_the_deadline() -> None:
    sent = pack_requests([as_request(rank_body())], spent_ms=40.0)
    assert unpack_requests(joined(sent)).spent_ms >= 40
    time.sleep(0.06)
    assert 100 <= unpack_requests(joined(sent)).spent_ms < 10_000


@pytest.mark.parametrize("kind", [QueueFull, DeadlineExceeded, EngineClosed, Forgotten, NonFiniteScores, PoolTooSmall])
def test_an_error_keeps_its_class_and_words(kind: Any) -> None:
    back = unpack_error(joined(pack_error(kind("not now"))))
    assert (type(back), str(back)) == (kind, "not now")


@pytest.mark.parametrize("value", [7, -1.5, "x", None, [1, "a"], np.int64(3)])
def test_a_wrong_field_keeps_its_name_and_value(value: Any) -> None:
    sent = RequestError("items[2]", value, "values run from 0 to 5")
    back = unpack_error(joined(pack_error(sent)))
    assert isinstance(back, RequestError)
    assert (back.field, back.value, back.problem) == ("items[2]", value, sent.problem)


def test_what_is_no_error_of_ours_is_a_failure() -> None:
    assert type(unpack_error(joined(pack_error(ZeroDivisionError("by zero"))))) is RuntimeError
    assert type(unpack_error(memoryview(b""))) is QueueFull
    huge = unpack_error(joined(pack_error(RequestError("user_id", 1 << 70, "too large"))))
    assert isinstance(huge, RequestError)
    assert huge.value == str(1 << 70)


def test_calls_have_names_and_arguments() -> None:
    assert unpack_call(joined(pack_call("move_alpha", {"alpha": 0.5}))) == ("move_alpha", {"alpha": 0.5})


@pytest.mark.parametrize("error", [OSError("file \udcff"), RequestError("field \ud800", "\udcff", "wrong \udcff")])
def test_an_error_with_text_that_has_no_bytes_is_packed_all_the_same(error: Exception) -> None:
    assert "\\ud" in str(unpack_error(joined(pack_error(error))))
