"""`/v1`, health, metrics: what is answered, and what is told when a request is wrong."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.engine.runner import Runner, Running
from helmrec.engine.scheduler import Batch
from helmrec.serve.app import make_app
from helmrec.serve.port import Health, InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import Caller, Reply, send, wait_for
from tests.serve.cases import as_request, infer_json, rank_body, tensors_of
from tests.serve.conftest import TOKEN

ADMIN = {"authorization": f"Bearer {TOKEN}"}


def test_rank_gives_the_scores_the_engine_gives(caller: Caller) -> None:
    (expected,) = tiny_engine().rank([as_request(rank_body())])
    reply = caller.post("/v1/rank", rank_body())
    assert reply.status == 200
    np.testing.assert_allclose(reply.json["scores"], expected.scores, rtol=1e-6)
    assert reply.json["computed_tokens"] == expected.computed_tokens
    assert reply.json["timing"]["compute_ms"] > 0


def test_the_answer_to_a_returning_user_has_the_reused_tokens(caller: Caller) -> None:
    first, *_, last = [caller.post("/v1/rank", rank_body()).json for _ in range(3)]
    assert first["reused_tokens"] == 0
    assert last["reused_tokens"] == 4
    assert last["scores"] == pytest.approx(np.array(first["scores"]), abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rank", "/v2/models/tiny/infer"])
def test_scores_that_are_not_finite_are_an_error_that_says_so(path: str) -> None:
    """Never a 200 with nulls; who ranks without the bad row is served."""
    model = tiny_model()
    model.tables["item"][2] = np.nan
    good = rank_body(user_id=8, items=[1, 3, 3])
    bodies = [
        body if path == "/v1/rank" else infer_json(tensors_of([as_request(body)])) for body in (rank_body(), good)
    ]
    with Caller(make_app(InProcessPort(tiny_engine(model, MonotonicClock())), ServeConfig())) as caller:
        caller.wait_until_ready()
        reply, beside = (caller.post(path, body) for body in bodies)
        assert (reply.status, beside.status) == (500, 200)
        assert reply.json["type"] == "urn:helmrec:error:NonFiniteScores"
        assert "non-finite scores to 2 of 2 candidates of user 7" in reply.json["detail"]
        assert reply.headers["content-type"] == "application/problem+json"
        assert "helmrec_non_finite_total 1.0" in caller.get("/metrics").body.decode()


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ({"items": [1, 2, 999]}, "items[2]", 999),
        ({"items": [1, "two", 3]}, "items[1]", "two"),
        ({"items": [1, 2.5, 3]}, "items[1]", 2.5),
        ({"items": "123"}, "items", "123"),
        ({"user_id": -4}, "user_id", -4),
        ({"user_id": 1 << 63}, "user_id", str(1 << 63)),
        ({"shoes": 1}, "shoes", 1),
        ({"candidates": []}, "candidates", 0),
        ({"context": {"country": 3}}, "context", "['country']"),
        ({"context": {"country": 3, "hour": 24}}, "context['hour']", 24),
        ({"features": {"category": [1, 1]}}, "features['category']", 2),
        ({"timestamps": [10, 20, 15]}, "timestamps[2]", 15),
        ({"deadline_ms": 0}, "deadline_ms", 0),
    ],
)
def test_a_wrong_field_is_named_with_its_value(caller: Caller, overrides: Any, field: str, value: Any) -> None:
    reply = caller.post("/v1/rank", rank_body(**overrides))
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/problem+json"
    assert (reply.json["field"], reply.json.get("value")) == (field, value)
    assert reply.json["detail"].startswith(f"{field}: ")
    assert reply.json["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b'{"\xff":1}'])
def test_what_is_not_json_is_a_bad_request(caller: Caller, body: bytes) -> None:
    reply = caller.post("/v1/rank", body)
    assert (reply.status, reply.json["field"]) == (400, "body")


def test_a_missing_field_is_named(caller: Caller) -> None:
    body = rank_body()
    del body["items"]
    assert caller.post("/v1/rank", body).json["detail"].startswith("items: is required")


def test_a_body_over_the_limit_is_refused_while_it_arrives(caller: Caller) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 10_000

    pieces, num_read = endless(), 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    sent: list[Any] = []

    async def collect(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/rank", "headers": [], "query_string": b""}
    caller.run(caller.app(scope, receive, collect))
    assert sent[0]["status"] == 413
    assert num_read == 11


def test_a_body_declared_too_long_is_not_read_at_all(caller: Caller) -> None:
    reply = caller.post("/v1/rank", b"{}", {"content-length": "100001"})
    assert (reply.status, reply.headers["connection"]) == (413, "close")


def test_a_client_that_leaves_while_it_sends_is_counted_and_not_answered(caller: Caller) -> None:
    inbox = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    assert _answer_of(caller, inbox, "/v1/rank", method="POST") == []
    assert 'helmrec_http_requests_total{route="/v1/rank",status="499"} 1.0' in caller.get("/metrics").body.decode()


def test_paths_are_found_below_the_prefix_of_a_server_in_front(caller: Caller) -> None:
    for path in ("/healthz", "/v2/models/tiny"):
        found, lost = (_answer_of(caller, [], prefix + path, root_path="/v2") for prefix in ("/v2", "/v1"))
        assert (found[0]["status"], lost[0]["status"]) == (200, 404)
    assert _answer_of(caller, [], "/v2/health/live", root_path="/v2")[0]["status"] == 404, "the prefix is not the path"


def _answer_of(caller: Caller, inbox: list[Any], path: str, method: str = "GET", root_path: str = "") -> list[Any]:
    """All messages the application sends."""
    sent: list[Any] = []

    async def receive() -> Any:
        return inbox.pop(0)

    async def collect(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root_path, "headers": [], "query_string": b""}
    caller.run(caller.app(scope, receive, collect))
    return sent


def test_head_is_answered_as_get_is(caller: Caller) -> None:
    assert caller.post("/healthz", b"", method="HEAD").status == 200


def test_a_compressed_body_is_not_taken(caller: Caller) -> None:
    assert caller.post("/v1/rank", b"", {"content-encoding": "gzip"}).status == 415


def test_unknown_routes_and_methods_have_different_statuses(caller: Caller) -> None:
    lost = caller.get("/v1/rnak")
    assert (lost.status, lost.json["detail"]) == (404, "there is no such path, got '/v1/rnak'; /docs lists all")
    assert caller.get("/healthz/").status == 404
    wrong = caller.get("/v1/rank")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json["title"] == "Method Not Allowed"


def test_a_request_keeps_the_id_its_client_gave(caller: Caller) -> None:
    reply = caller.post("/v1/rank", rank_body(), {"x-request-id": "trace-7"})
    assert reply.headers["x-request-id"] == "trace-7"
    replaced = [caller.get("/healthz", **{"x-request-id": bad}).headers["x-request-id"] for bad in ("a b", "x" * 65)]
    assert len(set(replaced) | {"a b", "x" * 65}) == 4


def test_the_log_has_the_id_of_a_refused_request(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "helmrec.serve"):
        caller.post("/v1/rank", b"{", {"x-request-id": "trace-8"})
    seen = [vars(record) for record in caplog.records if record.message == "request"]
    assert [(each["id"], each["route"], each["status"]) for each in seen] == [("trace-8", "/v1/rank", 400)]


def test_a_deadline_in_the_header_holds(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    submit = InProcessPort.submit

    async def look(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        seen.append(requests[0].deadline_ms)
        return await submit(self, requests, spent_ms)

    monkeypatch.setattr(InProcessPort, "submit", look)
    for body, header in (({}, "5000"), ({"deadline_ms": 9000}, "4000"), ({"deadline_ms": 3000}, "4000")):
        caller.post("/v1/rank", rank_body(**body), {"deadline-ms": header})
    assert seen == [5000, 4000, 3000]
    for bad in ("soon", "-1", "nan", "inf"):
        reply = caller.post("/v1/rank", rank_body(), {"deadline-ms": bad})
        assert (reply.status, reply.json["field"], reply.json["value"]) == (400, "deadline-ms", bad)


def test_admin_calls_need_the_token(caller: Caller) -> None:
    for path in ("/v1/admin/alpha", "/v1/admin/rows"):
        assert caller.post(path, {"alpha": 0.5}).status == 401
        assert caller.post(path, {"alpha": 0.5}, {"authorization": "Bearer wrong"}).status == 401


def test_admin_calls_are_off_without_a_token() -> None:
    with Caller(make_app(InProcessPort(tiny_engine()), ServeConfig())) as caller:
        assert caller.post("/v1/admin/alpha", {"alpha": 0.5}, ADMIN).status == 403


def test_alpha_moves_without_requests(caller: Caller) -> None:
    assert caller.post("/v1/admin/alpha", {"alpha": 0.5}, ADMIN).json["alpha_target"] == 0.5
    wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.5, abs=0.02))
    for wrong in (1.5, 0.999, "half"):
        assert caller.post("/v1/admin/alpha", {"alpha": wrong}, ADMIN).status == 400


def test_new_rows_change_scores(caller: Caller) -> None:
    before = caller.post("/v1/rank", rank_body()).json["scores"]
    update = {"table": "item", "ids": [1, 4], "values": [[0.5] * 16, [1.0] * 16]}
    assert caller.post("/v1/admin/rows", update, ADMIN).json == {"updated": 2}
    assert caller.post("/v1/rank", rank_body()).json["scores"] != before
    bad = caller.post("/v1/admin/rows", update | {"values": [[1.0], [2.0]]}, ADMIN)
    assert (bad.status, bad.json["field"]) == (400, "values")


def test_metrics_count_what_happened(caller: Caller) -> None:
    for _ in range(4):
        caller.post("/v1/rank", rank_body())
    caller.post("/v1/rank", b"{")
    text = caller.get("/metrics").body.decode()
    for line in (
        'helmrec_http_requests_total{route="/v1/rank",status="200"} 4.0',
        'helmrec_http_requests_total{route="/v1/rank",status="400"} 1.0',
        "helmrec_compute_seconds_count 4.0",
        "helmrec_audit_mismatches_total 0.0",
        "helmrec_queue_length 0.0",
        "helmrec_engine_ready 1.0",
        "helmrec_engine_restarts_total 0.0",
        "helmrec_pool_alpha 0.4",
    ):
        assert line in text
    assert 'helmrec_pool_bytes_total{cause="' in text


def test_the_document_describes_every_route(caller: Caller) -> None:
    document = caller.get("/openapi.json").json
    assert {"/v1/rank", "/v1/pool", "/v1/admin/alpha", "/v1/admin/rows", "/metrics"} <= document["paths"].keys()
    rank = document["paths"]["/v1/rank"]["post"]
    ref = rank["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][ref.rsplit("/", 1)[1]]
    assert set(schema["required"]) == {"user_id", "candidates"}
    assert {"200", "400", "413", "429", "503", "500"} <= rank["responses"].keys()
    assert document["paths"]["/v1/admin/rows"]["post"]["security"]
    users = document["paths"]["/v1/users/{user_id}"]
    assert users.keys() == {"get", "delete"}
    assert [kind["type"] for kind in users["get"]["parameters"][0]["schema"]["anyOf"]] == ["integer", "string"]
    assert "409" in document["paths"]["/v1/events"]["post"]["responses"]


def hold_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No step begins until the event is set."""
    may_step, step = threading.Event(), engine.step

    def wait_and_step() -> bool:
        may_step.wait()
        return step()

    monkeypatch.setattr(engine, "step", wait_and_step)
    return may_step


def test_a_full_queue_answers_429_and_a_passed_deadline_503(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(clock=MonotonicClock(), queue_limit=3)
    with Caller(make_app(InProcessPort(engine), ServeConfig())) as caller:
        caller.wait_until_ready()
        may_step = hold_steps(engine, monkeypatch)
        refused, tasks = caller.run(_crowd(caller, 10))
        may_step.set()
        assert [reply.status for reply in refused] == [429] * 7
        assert all(reply.headers["retry-after"] == "1" for reply in refused)
        assert [caller.run(_wait_for(task)).status for task in tasks] == [200] * 3
        late = caller.post("/v1/rank", rank_body(deadline_ms=0.001))
        assert (late.status, late.headers["retry-after"]) == (503, "1")
        engine.check()


async def _crowd(caller: Caller, num: int) -> tuple[list[Reply], list["asyncio.Task[Reply]"]]:
    """Send so many at once; those that were answered, and those that wait."""
    body = json.dumps(rank_body()).encode()
    tasks = [asyncio.create_task(send(caller.app, "POST", "/v1/rank", body)) for _ in range(num)]
    done, waiting = await asyncio.wait(tasks, timeout=0.2)
    return [task.result() for task in done], list(waiting)


async def _wait_for(task: "asyncio.Task[Reply]") -> Reply:
    return await task


def test_a_failing_step_is_a_500_that_contains_only_its_id(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Runner, batch: Batch) -> Running:
        raise RuntimeError("secret of the house")

    monkeypatch.setattr(Runner, "launch", fail)
    reply = caller.post("/v1/rank", rank_body())
    monkeypatch.undo()
    assert reply.status == 500
    assert b"secret" not in reply.body
    failed = next(record for record in caplog.records if record.message == "request failed")
    assert vars(failed)["id"] == reply.json["request_id"]
    assert caller.post("/v1/rank", rank_body()).status == 200, "the request failed, not the server"


def test_readiness_waits_for_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(clock=MonotonicClock())
    may_step = hold_steps(engine, monkeypatch)
    with Caller(make_app(InProcessPort(engine), ServeConfig())) as caller:
        ready, healthy = caller.get("/readyz"), caller.get("/healthz")
        assert (ready.status, ready.json, healthy.status) == (503, {"status": "starting"}, 200)
        refused = caller.post("/v1/rank", rank_body())
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        may_step.set()
        caller.wait_until_ready()
        assert caller.post("/v1/rank", rank_body()).status == 200


def test_an_engine_that_cannot_step_makes_the_server_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(clock=MonotonicClock())
    port = InProcessPort(engine)
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()

        def fail() -> bool:
            raise AssertionError("an invariant is broken")

        monkeypatch.setattr(engine, "step", fail)
        wait_for(lambda: port.health is Health.FAILED)
        assert caller.get("/healthz").status == 503
        assert caller.post("/v1/rank", rank_body()).status == 503
