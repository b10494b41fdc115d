"""An engine in a process of its own: the same answers, and a front that outlives it."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.engine.intake import Intake
from helmrec.errors import ModelError, TooLarge
from helmrec.model.weights import LoadedModel, save_model
from helmrec.serve import problems
from helmrec.serve.app import make_app
from helmrec.serve.node import make_port
from helmrec.serve.port import Health, InProcessPort
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import TINY_PAGES, tiny_engine, tiny_geometry, tiny_model
from tests.serve.asgi import Caller, Reply, send, wait_for
from tests.serve.cases import as_request, infer_binary, rank_body, rank_requests, tensors_of
from tests.serve.conftest import TOKEN
from tests.serve.malformed import wrong_infer_binary, wrong_rank
from tests.serve.test_malformed import refuse_all

ADMIN = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: LoadedModel = tiny_model()
    path = tmp_path_factory.mktemp("apart") / "tiny"
    save_model(path, made.config, made.dense, made.tables)
    return path


def engine_config(**overrides: Any) -> EngineConfig:
    pool_bytes = TINY_PAGES * tiny_geometry(tiny_model().config).page_bytes
    return EngineConfig(**{"pool_bytes": pool_bytes, "page_tokens": 4, "audit_every": 2} | overrides)


def port_of(folder: Path, **overrides: Any) -> ProcessPort:
    serve: dict[str, Any] = {"engine_process": True, "ring_bytes": 1 << 20, "log_level": "error", "policy": "none"}
    port = make_port(folder, engine_config(**overrides), ServeConfig(**serve))
    assert isinstance(port, ProcessPort)
    return port


class Apart:
    """A front whose engine is elsewhere."""

    def __init__(self, port: ProcessPort, caller: Caller) -> None:
        self.port = port
        self.caller = caller

    @property
    def pid(self) -> int:
        assert self.port._process is not None
        return self.port._process.pid


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Apart]:
    port = port_of(folder)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, max_body_bytes=100_000))) as caller:
        caller.wait_until_ready()
        yield Apart(port, caller)
        pid = port._process.pid if port._process else 0
    assert port.health is Health.CLOSED
    assert not Path(f"/proc/{pid}").exists(), "it ended with its front"


def test_scores_are_those_of_an_engine_in_the_same_process(apart: Apart) -> None:
    (expected,) = tiny_engine().rank([as_request(rank_body())])
    reply = apart.caller.post("/v1/rank", rank_body())
    np.testing.assert_allclose(reply.json["scores"], expected.scores, rtol=1e-5)
    requests = rank_requests(12)
    sent = infer_binary(tensors_of(requests))
    body = apart.caller.post("/v2/models/tiny/infer", sent.body, sent.headers)
    scores = np.frombuffer(body.body[int(body.headers["inference-header-content-length"]) :], np.float32)
    wanted = np.concatenate([result.scores for result in tiny_engine().rank(requests)]).ravel()
    np.testing.assert_allclose(scores, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {"items": [1, 2, 999]},
        {"items": [1, 2, 1 << 70]},
        {"user_id": 1 << 63},
        {"context": {"country": 3}},
        {"features": {"category": [1, 1]}},
        {"timestamps": [10, 20, 15]},
        {"items": list(range(9_000)), "actions": [0] * 9_000},
    ],
)
def test_errors_have_the_same_words_in_both_ports(apart: Apart, overrides: Any) -> None:
    with Caller(make_app(InProcessPort(tiny_engine()), ServeConfig())) as here:
        here.wait_until_ready()
        near, far = (caller.post("/v1/rank", rank_body(**overrides)) for caller in (here, apart.caller))
    assert near.status == far.status == 400
    assert {**near.json, "request_id": ""} == {**far.json, "request_id": ""}


def test_wrong_bodies_are_refused_and_leave_no_trace(apart: Apart, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "helmrec.serve")
    refuse_all(apart.caller, wrong_rank, 400, seed=3)
    refuse_all(apart.caller, wrong_infer_binary, 400, seed=3)


def test_what_can_never_fit_the_ring_is_too_large_and_not_a_matter_of_waiting(apart: Apart) -> None:
    many = [as_request(rank_body())] * 2_000  # the ring takes a quarter of a mebibyte at once
    for call in (apart.port.submit(many), apart.port.update_rows("item", range(40_000), [[1.0] * 16] * 40_000)):
        with pytest.raises(TooLarge, match="at most 262144 bytes fit the ring"):
            apart.caller.run(call)
    error = TooLarge("requests", "9 bytes", "at most 8")
    reply = problems.answer(problems.of_error(error, "id"), "/v1/rank", error)
    assert reply.status_code == 413
    assert "retry-after" not in reply.headers


def test_requests_that_were_prepared_for_another_engine_are_prepared_again(apart: Apart) -> None:
    requests, port = rank_requests(3), apart.port
    before = port.intake
    port.intake = Intake.of(replace(before.recipe, version=before.recipe.version + 1))  # as of a model before
    results = apart.caller.run(port.submit(requests))
    assert port.intake.tag == before.tag
    for got, expected in zip(results, tiny_engine().rank(requests), strict=True):
        np.testing.assert_allclose(got.scores, expected.scores, atol=1e-5)


def test_knobs_and_looks_reach_the_engine(apart: Apart) -> None:
    caller = apart.caller
    assert caller.post("/v1/admin/alpha", {"alpha": 0.5}, ADMIN).json["alpha_target"] == 0.5
    wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.5, abs=0.02))
    live = caller.get("/v1/live").json
    assert live["pages"]["cells"].count("1") == live["stats"]["pool"]["emb_pages"] == 15
    before = caller.post("/v1/rank", rank_body()).json["scores"]
    update = {"table": "item", "ids": [1, 4], "values": [[0.5] * 16, [1.0] * 16]}
    assert caller.post("/v1/admin/rows", update, ADMIN).json == {"updated": 2}
    assert caller.post("/v1/rank", rank_body()).json["scores"] != before
    assert caller.delete("/v1/users/7").status == 200
    assert caller.post("/v1/rank", rank_body()).json["reused_tokens"] == 0
    for path, wrong in (
        ("alpha", {"alpha": 0.999}),
        ("rows", update | {"ids": [1, 1 << 70]}),
        ("mode", {"mode": "freeze"}),
    ):
        assert caller.post(f"/v1/admin/{path}", wrong, ADMIN).status == 400
    assert 'helmrec_pool_bytes_total{cause="row-miss"}' in caller.get("/metrics").body.decode()


def test_many_at_once_are_all_answered(apart: Apart) -> None:
    async def crowd() -> list[Reply]:
        bodies = [json.dumps(rank_body(user_id=user)).encode() for user in range(300)]
        return list(await asyncio.gather(*(send(apart.caller.app, "POST", "/v1/rank", body) for body in bodies)))

    assert {reply.status for reply in apart.caller.run(crowd())} <= {200, 429}
    assert apart.caller.get("/v1/pool").json["audit_mismatches"] == 0


def test_the_front_outlives_its_engine_says_why_and_starts_it_again(
    apart: Apart, caplog: pytest.LogCaptureFixture
) -> None:
    caller, first = apart.caller, apart.pid
    assert caller.post("/v1/admin/alpha", {"alpha": 0.5}, ADMIN).status == 200
    update = {"table": "item", "ids": [1, 4], "values": [[2.0] * 16, [-1.0] * 16]}
    assert caller.post("/v1/admin/rows", update, ADMIN).status == 200
    updated = caller.post("/v1/rank", rank_body()).json["scores"]
    os.kill(first, signal.SIGSTOP)  # it hangs, so that requests wait

    async def crash() -> list[Reply]:
        body = json.dumps(rank_body()).encode()
        waiting = [asyncio.create_task(send(caller.app, "POST", "/v1/rank", body)) for _ in range(5)]
        await asyncio.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        return list(await asyncio.gather(*waiting))

    replies = caller.run(crash())
    assert [(reply.status, reply.headers["retry-after"]) for reply in replies] == [(503, "1")] * 5
    assert "killed by SIGKILL" in replies[0].json["detail"]
    refused = caller.post("/v1/rank", rank_body())
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert caller.get("/readyz").json == {"status": "restarting", "reason": "killed by SIGKILL"}
    assert caller.get("/healthz").status == 200, "the front lives; nobody need start it again"
    assert caller.get("/v1/live").json["status"] == "restarting"
    metrics = caller.get("/metrics").body.decode()
    assert "helmrec_engine_ready 0.0" in metrics
    assert 'helmrec_http_requests_total{route="/v1/rank",status="503"}' in metrics
    caller.wait_until_ready()
    assert apart.pid != first
    assert caller.get("/readyz").json == {"status": "ready"}
    np.testing.assert_allclose(caller.post("/v1/rank", rank_body()).json["scores"], updated, atol=1e-5)
    assert caller.get("/v1/pool").json["pool"]["alpha_target"] == 0.5
    assert apart.port.num_restarts == 1
    assert any(getattr(record, "reason", "") == "killed by SIGKILL" for record in caplog.records)


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_given_up_with_its_reason(folder: Path) -> None:
    port = port_of(folder, pool_bytes=1_000)
    with Caller(make_app(port, ServeConfig())) as caller:
        wait_for(lambda: caller.get("/healthz").status == 503)
        assert "pool_bytes must be at least" in caller.get("/readyz").json["reason"]
        assert caller.post("/v1/rank", rank_body()).status == 503


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        make_port(tmp_path, engine_config(), ServeConfig(engine_process=True))
