"""Several fronts of one engine: the same scores through each, and all of them outlive the engine."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.engine.intake import Intake, IntakeRecipe
from helmrec.errors import ConfigError
from helmrec.model.weights import LoadedModel, save_model
from helmrec.serve import child_process
from helmrec.serve.app import make_app
from helmrec.serve.engine_server import FrontDoor
from helmrec.serve.joined_port import JoinedPort
from helmrec.serve.node import make_port
from helmrec.serve.port import Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import as_request, rank_body
from tests.serve.conftest import TOKEN
from tests.serve.test_process_port import engine_config
from tests.serve.test_resume import until

ADMIN = {"authorization": f"Bearer {TOKEN}"}


def second_model() -> LoadedModel:
    """A model of another depth, which clients of the first can use unchanged."""
    return tiny_model(1, num_layers=3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("joined")
    for name, made in (("tiny", tiny_model()), ("second", second_model())):
        save_model(path / name, made.config, made.dense, made.tables)
    return path


def settings(**more: Any) -> ServeConfig:
    common = {"ring_bytes": 1 << 20, "log_level": "error", "policy": "none", "admin_token": TOKEN}
    return ServeConfig(**{**common, **more})


class Fronts:
    """The front that runs the engine, and one that has joined it."""

    def __init__(self, port: ProcessPort, first: Caller, joined: Caller) -> None:
        self.port, self.first, self.joined = port, first, joined


@pytest.fixture(scope="module")
def fronts(place: Path) -> Iterator[Fronts]:
    first = settings(engine_process=True, engine_socket=str(place / "engine"), models_path=str(place))
    second = settings(joined_engine=str(place / "engine"))
    port, other = (make_port(place / "tiny", engine_config(), each) for each in (first, second))
    assert isinstance(port, ProcessPort)
    assert isinstance(other, JoinedPort)
    with Caller(make_app(other, second)) as joined:
        assert joined.get("/readyz").status == 503, "there is no engine yet"
        with Caller(make_app(port, first)) as caller:
            joined.wait_until_ready()
            caller.wait_until_ready()
            yield Fronts(port, caller, joined)
        wait_for(lambda: joined.get("/readyz").status == 503)
    assert not (place / "engine").exists()


def test_every_front_gives_the_scores_of_the_engine_and_shares_its_caches(fronts: Fronts) -> None:
    (expected,) = tiny_engine().rank([as_request(rank_body())])
    for caller in (fronts.first, fronts.joined, fronts.joined):
        reply = caller.post("/v1/rank", rank_body())
        np.testing.assert_allclose(reply.json["scores"], expected.scores, rtol=1e-5)
    assert reply.json["reused_tokens"] > 0
    served = [caller.get("/v1/pool").json["served"] for caller in (fronts.first, fronts.joined)]
    assert served[0] == served[1] >= 3
    assert fronts.joined.delete("/v1/users/7").status == 200
    assert fronts.first.post("/v1/rank", rank_body()).json["reused_tokens"] == 0


def test_a_wrong_request_is_refused_by_its_front(fronts: Fronts) -> None:
    near, far = (each.post("/v1/rank", rank_body(items=[1, 2, 999])) for each in (fronts.first, fronts.joined))
    assert near.status == far.status == 400
    assert {**near.json, "request_id": ""} == {**far.json, "request_id": ""}


def test_only_the_front_that_runs_the_engine_changes_it(fronts: Fronts) -> None:
    update = {"table": "item", "ids": [1], "values": [[0.5] * 16]}
    for path, body in (("alpha", {"alpha": 0.5}), ("mode", {"mode": "freeze"}), ("rows", update)):
        reply = fronts.joined.post(f"/v1/admin/{path}", body, ADMIN)
        assert reply.status == 400
        assert "only the front that runs the engine" in reply.json["detail"]


def test_fronts_join_a_restarted_engine_once_it_has_its_rows(fronts: Fronts) -> None:
    update = {"table": "item", "ids": [1, 4], "values": [[0.5] * 16, [1.0] * 16]}
    assert fronts.first.post("/v1/admin/rows", update, ADMIN).status == 200
    expected = fronts.first.post("/v1/rank", rank_body()).json["scores"]
    assert fronts.port.pid is not None
    os.kill(fronts.port.pid, signal.SIGKILL)
    wait_for(lambda: fronts.joined.get("/readyz").status == 503)
    fronts.joined.wait_until_ready()
    np.testing.assert_allclose(fronts.joined.post("/v1/rank", rank_body()).json["scores"], expected, rtol=1e-5)


def test_a_model_that_the_first_front_swaps_in_is_served_by_all(fronts: Fronts) -> None:
    before = fronts.joined.post("/v1/rank", rank_body()).json["scores"]
    assert fronts.joined.post("/v1/admin/model", {"name": "second"}, ADMIN).status >= 400
    assert fronts.first.post("/v1/admin/model", {"name": "second"}, ADMIN).status == 200
    (expected,) = tiny_engine(second_model()).rank([as_request(rank_body())])
    assert np.abs(expected.scores - np.array(before)).max() > 1e-3
    for caller in (fronts.joined, fronts.first):
        np.testing.assert_allclose(caller.post("/v1/rank", rank_body()).json["scores"], expected.scores, rtol=1e-4)
        assert caller.get("/v1/model").json["num_layers"] == 3


def test_other_users_of_the_machine_cannot_join(fronts: Fronts, place: Path) -> None:
    assert (place / "engine").stat().st_mode & 0o077 == 0


def test_a_joined_front_never_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even at an engine that has closed every connection so far."""
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_S", 0.001)

    async def join() -> None:
        num_joins, enough = itertools.count(1), asyncio.Event()

        async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            if next(num_joins) == 6:
                enough.set()

        server = await asyncio.start_unix_server(refuse, tmp_path / "engine")
        port = JoinedPort(str(tmp_path / "engine"), 1 << 20, tiny_model().config, 100)
        port.start()
        try:
            await asyncio.wait_for(enough.wait(), 10)
            assert port.health is Health.RESTARTING
        finally:
            await port.close()
            server.close()

    asyncio.run(join())


class RecipeOnly:
    """Stands in for an engine that fronts join: it gives a recipe, or fails to."""

    def __init__(self, recipe: object) -> None:
        self.recipe = recipe

    async def intake_recipe(self) -> object:
        if isinstance(self.recipe, Exception):
            raise self.recipe
        return self.recipe


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (IntakeRecipe('{"name": "later"}', 1, 100, bytes(32)), "ValidationError: "),
        ({"model": 1}, "ValidationError: "),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
    ],
    ids=["model of another release", "recipe of another release", "unexpected error"],
)
def test_an_engine_that_cannot_be_joined_is_tried_again_and_the_cause_is_said(
    recipe: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_S", 0.001)
    engine: Any = RecipeOnly(recipe)

    async def join() -> None:
        door = FrontDoor(str(tmp_path / "engine"), lambda: engine)
        port = JoinedPort(str(tmp_path / "engine"), 1 << 20, tiny_model().config, 100)
        port.start()
        try:
            await until(lambda: port.health is Health.RESTARTING)
            assert f"it cannot be joined ({reason}" in str(port.reason)
            engine.recipe = Intake(tiny_model().config, 1, 100).recipe
            await until(lambda: port.health is Health.READY)
        finally:
            await port.close()
            door.close()

    asyncio.run(join())
    ends = [record for record in caplog.records if record.message == "the engine of another front ended"]
    assert reason in str(vars(ends[0])["reason"])


def test_a_process_that_fails_a_thousand_times_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause doubles only up to the longest one."""
    port, pauses = JoinedPort("nowhere", 1 << 20, tiny_model().config, 100), []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        port._is_over = len(pauses) == 1_100

    async def run_one() -> None:
        pass

    monkeypatch.setattr(port, "_pause", pause)
    monkeypatch.setattr(port, "_run_one", run_one)
    asyncio.run(port._supervise())
    assert pauses[:2] == [0.4, 0.8]
    assert set(pauses[5:]) == {5.0}


def test_a_socket_without_a_process_of_the_engine_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="engine_socket needs engine_process=true"):
        make_port(place / "tiny", engine_config(), settings(engine_socket="here"))
