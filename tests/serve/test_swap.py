"""Another model takes over under load: no error, no score of a mixture, the old one ends."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.model.weights import LoadedModel, save_model
from helmrec.serve.app import make_app
from helmrec.serve.node import make_port
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.settings import ServeConfig
from helmrec.serve.swap import SwappingPort
from helmrec.types import RankRequest
from tests.helpers import TINY_PAGES, tiny_engine, tiny_geometry, tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import infer_binary, rank_requests, tensors_of
from tests.serve.conftest import TOKEN

ADMIN = {"authorization": f"Bearer {TOKEN}"}
REQUESTS = rank_requests(6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: `first` and `second` differ in weights, `deep` in size of pages, `other` in what clients get."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, LoadedModel] = {
        "first": tiny_model(0),
        "second": tiny_model(1),
        "other": tiny_model(0, num_tasks=3),
        "deep": tiny_model(2, num_layers=3),
    }
    for name, model in made.items():
        save_model(folder / name, model.config, model.dense, model.tables)
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


def scores_of(model: LoadedModel, requests: list[RankRequest]) -> Any:
    engine = tiny_engine(model)
    return np.concatenate([result.scores for result in engine.rank(requests)])


def port_of(models: Path, *, is_apart: bool, **settings: Any) -> SwappingPort | ProcessPort:
    pool_bytes = TINY_PAGES * tiny_geometry(tiny_model().config).page_bytes
    serve: dict[str, Any] = {"engine_process": is_apart, "ring_bytes": 1 << 20, "log_level": "error"}
    config = EngineConfig(pool_bytes=pool_bytes, page_tokens=4, audit_every=2)
    port = make_port(models / "first", config, ServeConfig(**serve | settings))
    assert isinstance(port, SwappingPort | ProcessPort)
    return port


@pytest.fixture(params=[False, True], ids=["in process", "apart"])
def caller(models: Path, request: pytest.FixtureRequest) -> Iterator[Caller]:
    port = port_of(models, is_apart=request.param)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, models_path=str(models)))) as caller:
        caller.wait_until_ready()
        yield caller


def infer(caller: Caller) -> Any:
    """Scores of six users in one call."""
    sent = infer_binary(tensors_of(REQUESTS))
    reply = caller.post("/v2/models/tiny/infer", sent.body, sent.headers)
    assert reply.status == 200, reply.body
    raw = reply.body[int(reply.headers["inference-header-content-length"]) :]
    return np.frombuffer(raw, np.float32).reshape(-1, 2)


def swap(caller: Caller, name: str) -> Any:
    return caller.post("/v1/admin/model", {"name": name}, ADMIN)


def test_under_load_every_call_is_scored_by_one_model_and_after_the_swap_by_the_new_one(caller: Caller) -> None:
    old, new = (scores_of(tiny_model(seed), REQUESTS) for seed in (0, 1))
    assert np.abs(old - new).max() > 0.1
    seen: list[Any] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                seen.append(infer(caller))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(seen) > 20)
    num_before = len(seen)
    reply = swap(caller, "second")
    num_during = len(seen) - num_before
    after = [infer(caller) for _ in range(3)]
    is_over.set()
    for thread in threads:
        thread.join()
    assert (reply.status, errors) == (200, [])
    assert reply.json["name"] == "second"
    assert num_during > 0, "requests went on"
    assert all(np.allclose(each, new, atol=1e-5) for each in after)
    kinds = [
        "old" if np.allclose(each, old, atol=1e-5) else "new" if np.allclose(each, new, atol=1e-5) else "mixed"
        for each in seen
    ]
    assert set(kinds) == {"old", "new"}
    assert set(kinds[:num_before]) == {"old"}
    stats = caller.get("/v1/pool").json
    assert stats["audits"] > 0
    assert stats["audit_mismatches"] == 0


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("third", 404, "there is no model 'third'"),
        ("../first", 400, "name"),
        ("..", 400, "name"),
        ("/etc", 400, "name"),
        ("empty", 400, "no config.json"),
        ("broken", 400, "config.json"),
        ("other", 400, "its num_tasks must be 2, got 3"),
    ],
)
def test_what_cannot_be_served_leaves_the_old_model_as_it_was(models: Path, name: str, status: int, told: str) -> None:
    port = port_of(models, is_apart=False)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, models_path=str(models)))) as caller:
        caller.wait_until_ready()
        before = infer(caller)
        reply = swap(caller, name)
        assert reply.status == status
        assert told in reply.json["detail"]
        np.testing.assert_allclose(infer(caller), before, atol=1e-5)


def test_a_swap_needs_the_token_and_a_folder_of_models(models: Path) -> None:
    port = port_of(models, is_apart=False)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN))) as caller:
        caller.wait_until_ready()
        assert caller.post("/v1/admin/model", {"name": "second"}).status == 401
        assert swap(caller, "second").status == 403


def test_hot_rows_and_the_split_are_handed_on(models: Path) -> None:
    port = port_of(models, is_apart=False)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, models_path=str(models)))) as caller:
        caller.wait_until_ready()
        for _ in range(3):
            infer(caller)
        assert caller.post("/v1/admin/alpha", {"alpha": 0.6}, ADMIN).status == 200
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.6, abs=0.02))
        rows = caller.get("/v1/pool").json["pool"]["resident_rows"]
        assert rows > 10
        assert swap(caller, "second").status == 200
        pool = caller.get("/v1/pool").json["pool"]
        assert pool["alpha"] == pytest.approx(0.6, abs=0.02)
        assert pool["resident_rows"] >= rows
        assert pool["resident_users"] <= 1, "no KV but the warm-up's"


def test_what_the_old_engine_has_taken_it_still_answers(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old engine is held until the new one serves; then it answers what waits, and ends."""
    port = port_of(models, is_apart=False)
    assert isinstance(port, SwappingPort)
    old = port.current.engine
    step, may_go_on = Engine.step, threading.Event()

    def held(self: Engine) -> bool:
        if self is old and old._scheduler.queue_length:
            may_go_on.wait(20)
        return step(self)

    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, models_path=str(models)))) as caller:
        caller.wait_until_ready()
        monkeypatch.setattr(Engine, "step", held)
        found: dict[str, Any] = {}
        asked = threading.Thread(target=lambda: found.update(scores=infer(caller)))
        asked.start()
        wait_for(lambda: old._scheduler.queue_length > 0)
        swapped = threading.Thread(target=lambda: found.update(reply=swap(caller, "second")))
        swapped.start()
        wait_for(lambda: port.current.engine is not old)
        np.testing.assert_allclose(infer(caller), scores_of(tiny_model(1), REQUESTS), atol=1e-5)
        may_go_on.set()
        asked.join()
        swapped.join()
        np.testing.assert_allclose(found["scores"], scores_of(tiny_model(0), REQUESTS), atol=1e-5)
        assert found["reply"].status == 200
        assert old._is_closed


@pytest.mark.slow
def test_an_engine_that_is_started_again_serves_the_model_that_was_swapped_in(models: Path) -> None:
    port = port_of(models, is_apart=True)
    assert isinstance(port, ProcessPort)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, models_path=str(models)))) as caller:
        caller.wait_until_ready()
        assert swap(caller, "second").status == 200
        assert port._process is not None
        port._process.kill()
        wait_for(lambda: port.num_restarts == 1 and caller.get("/readyz").status == 200, 60)
        np.testing.assert_allclose(infer(caller), scores_of(tiny_model(1), REQUESTS), atol=1e-5)


@pytest.mark.slow
def test_rows_survive_a_crash_after_a_swap_to_a_model_that_refuses_the_old_split(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = port_of(models, is_apart=True)
    assert isinstance(port, ProcessPort)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN, models_path=str(models)))) as caller:
        caller.wait_until_ready()
        highest = caller.get("/v1/pool").json["pool"]["alpha_max"]
        assert caller.post("/v1/admin/alpha", {"alpha": highest}, ADMIN).status == 200
        assert swap(caller, "deep").status == 200
        assert caller.get("/v1/pool").json["pool"]["alpha_max"] < highest - 0.01
        ids = sorted({int(item) for request in REQUESTS for item in request.candidates})
        before = infer(caller)
        update = {"table": "item", "ids": ids, "values": [[3.0] * 16] * len(ids)}
        assert caller.post("/v1/admin/rows", update, ADMIN).status == 200
        updated = infer(caller)
        assert np.abs(updated - before).max() > 0.01
        assert port._process is not None
        port._process.kill()
        wait_for(lambda: port.num_restarts == 1 and caller.get("/readyz").status == 200, 60)
        np.testing.assert_allclose(infer(caller), updated, atol=1e-5)
    assert "a setting was not restored" in caplog.text
