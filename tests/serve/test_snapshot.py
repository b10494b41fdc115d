"""What outlives a restart: hot rows, the split, what a controller learned; and files that cannot be used."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helmrec.clock import MonotonicClock
from helmrec.control.helm import Helm
from helmrec.engine.engine import Engine
from helmrec.serve.app import make_app
from helmrec.serve.control import Steering
from helmrec.serve.port import Health, InProcessPort
from helmrec.serve.settings import ServeConfig
from helmrec.serve.snapshot import Snapshot, SnapshotFile, SnapshotKeeper
from tests.control.bowl import Bowl
from tests.control.served import Served, driven
from tests.helpers import random_request, tiny_config, tiny_engine, tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.conftest import TOKEN
from tests.serve.test_users import plain


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "folder" / "snapshot", tiny_config())


def test_what_is_written_is_read(file: SnapshotFile) -> None:
    assert file.read() is None
    for alpha in (0.25, 0.75):
        file.write(Snapshot(np.array([5, 3, 9]), alpha, {"residual": [0.5, -1.0], "bursts": []}, {"pool_bytes": 7}))
    found = file.read()
    assert found is not None
    assert (found.rows.tolist(), found.alpha) == ([5, 3, 9], 0.75)
    assert (found.learned, found.learned_on) == ({"residual": [0.5, -1.0], "bursts": []}, {"pool_bytes": 7})
    assert [path.name for path in file.path.parent.iterdir()] == ["snapshot"], "nothing else is left behind"


def spoilt(file: SnapshotFile, how: str) -> None:
    file.write(Snapshot(np.arange(50), 0.5))
    whole = file.path.read_bytes()
    if how == "cut":
        file.path.write_bytes(whole[:-7])
    elif how == "noise":
        file.path.write_bytes(b"\xff" * 100)
    elif how == "empty":
        file.path.write_bytes(b"")
    elif how == "foreign":
        save_file({"rows": np.arange(3)}, file.path)
    elif how == "alpha":
        file.write(Snapshot(np.arange(50), 7.0))
    else:
        SnapshotFile(file.path, tiny_config(user_context=())).write(Snapshot(np.arange(50), 0.5))


@pytest.mark.parametrize("how", ["cut", "noise", "empty", "foreign", "alpha", "tables"])
def test_a_file_that_does_not_fit_is_logged_and_ignored(
    file: SnapshotFile, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt(file, how)
    with caplog.at_level(logging.WARNING):
        assert file.read() is None
    assert [record.message for record in caplog.records] == ["snapshot ignored"]
    engine = tiny_engine()
    SnapshotKeeper(file, 60).restore(engine, None)
    assert engine.stats().pool.resident_rows == 0


@pytest.mark.parametrize("learned", [{"costs": [float("nan")]}, {"bursts": [1.0, float("inf")], "costs": [1.0]}])
def test_a_learned_state_with_what_is_no_number_is_ignored_and_rows_are_restored(
    file: SnapshotFile, learned: dict[str, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    file.write(Snapshot(np.arange(50), 0.25, learned))
    found = file.read()
    assert found is not None
    assert (found.rows.size, found.alpha, found.learned) == (50, 0.25, {})
    assert "learned state of the controller is invalid" in caplog.text


def steering(policy: str = "helm") -> Steering:
    made = Steering.of(ServeConfig(policy=policy))
    assert made is not None
    return made


def experienced() -> Steering:
    """One whose controller has learned costs, a residual and a burst."""
    helm = Helm()
    calm, burst = Served(Bowl(rate=60)), Served(Bowl(rate=250))
    for served, start_s in ((calm, 0), (burst, 20), (calm, 40)):
        driven(helm, served, 0.4, 20, start_s)
    made = steering()
    made.relearn(helm.learned)
    assert all(made.learned.values())
    return made


def test_a_restarted_server_is_warm_before_it_is_ready(file: SnapshotFile) -> None:
    rng = np.random.default_rng(0)
    bodies = [
        plain({name: getattr(request, name) for name in request.__slots__ if getattr(request, name) is not None})
        for request in (random_request(rng, tiny_config(), user_id, 9) for user_id in range(8))
    ]
    first = experienced()
    port = InProcessPort(tiny_engine(clock=MonotonicClock()), first, SnapshotKeeper(file, 60))
    learned = first.learned
    admin = {"authorization": f"Bearer {TOKEN}"}
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN))) as caller:
        caller.wait_until_ready()
        caller.post("/v1/admin/alpha", {"alpha": 0.5}, admin)
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == 0.5)
        for body in bodies * 2:
            scores = caller.post("/v1/rank", body).json["scores"]
    again = steering()
    engine = tiny_engine(clock=MonotonicClock())
    port = InProcessPort(engine, again, SnapshotKeeper(file, 60))
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        assert again.learned["bursts"] == learned["bursts"]
        assert again.learned["residual"] == learned["residual"]
        assert engine.stats().pool.alpha == 0.5
        last = caller.post("/v1/rank", bodies[-1]).json
        assert last["row_misses"] == 0
        assert last["scores"] == pytest.approx(np.array(scores), abs=1e-5)
        engine.check()


def test_snapshots_are_written_while_serving_and_a_full_disk_does_not_stop_serving(
    file: SnapshotFile, caplog: pytest.LogCaptureFixture
) -> None:
    engine, keeper = tiny_engine(), SnapshotKeeper(file, every_s=10)
    engine.rank([random_request(np.random.default_rng(0), tiny_config())])
    for now_s in (0.0, 5.0, 9.9):
        keeper.keep_if_due(engine, None, now_s)
    assert not file.path.exists()
    keeper.keep_if_due(engine, None, 10.0)
    wait_for(file.path.exists)
    found = file.read()
    assert found is not None
    assert set(found.rows.tolist()) == set(engine.hot_rows().tolist())
    file.path.unlink()
    file.path.mkdir()  # nothing can take its place
    keeper.keep(engine, None)
    assert "snapshot failed" in caplog.text


def test_a_snapshot_that_fails_in_any_way_is_counted_and_leaves_nothing_half_written(
    file: SnapshotFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(clock=MonotonicClock())
    keeper = SnapshotKeeper(file, every_s=0.01)

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    port = InProcessPort(engine, None, keeper)
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        monkeypatch.setattr(Engine, "hot_rows", fail)
        wait_for(lambda: caller.get("/v1/pool").json["background_failures"] > 2)
        assert caller.get("/readyz").status == 200, "serving goes on"
        monkeypatch.undo()
        monkeypatch.setattr("os.fsync", fail)
        before = keeper.failures.count()
        wait_for(lambda: keeper.failures.count() > before)
    assert port.health is Health.CLOSED
    assert [path for path in file.path.parent.iterdir() if path != file.path] == []
    assert len([record for record in caplog.records if "snapshot failed" in record.message]) == 1, (
        "at most one a minute"
    )


def test_a_snapshot_that_cannot_be_restored_does_not_keep_the_server_from_starting(
    file: SnapshotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    file.write(Snapshot(np.arange(9), 0.4))
    monkeypatch.setattr(Engine, "warm", fail)
    port = InProcessPort(tiny_engine(clock=MonotonicClock()), None, SnapshotKeeper(file, 60))
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        assert caller.get("/v1/pool").json["background_failures"] == 1


def kept(file: SnapshotFile, learned: Steering, engine: Engine) -> None:
    SnapshotKeeper(file, 60).keep(engine, learned)


def test_what_a_controller_learned_comes_back_on_the_same_node(file: SnapshotFile) -> None:
    first, again = experienced(), steering()
    kept(file, first, tiny_engine())
    SnapshotKeeper(file, 60).restore(tiny_engine(), again)
    assert again.learned == first.learned


def _other_model(engine: Engine) -> None:
    engine.model_config = engine.model_config.model_copy(update={"num_actions": engine.model_config.num_actions + 1})


def _other_pool(engine: Engine) -> None:
    engine.config = engine.config.model_copy(update={"pool_bytes": engine.config.sized_pool_bytes + 1})


def _other_device(engine: Engine) -> None:
    engine.config = engine.config.model_copy(update={"device": "another"})


@pytest.mark.parametrize(
    ("change", "named"), [(_other_model, "model"), (_other_pool, "pool_bytes"), (_other_device, "device")]
)
def test_what_was_learned_on_another_node_is_refused_with_a_line_in_the_log(
    file: SnapshotFile, change: Callable[[Engine], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine()
    engine.rank([random_request(np.random.default_rng(0), tiny_config())])
    kept(file, experienced(), engine)
    again, other = steering(), tiny_engine()
    change(other)
    with caplog.at_level(logging.WARNING):
        SnapshotKeeper(file, 60).restore(other, again)
    assert again.learned == steering().learned
    (record,) = [one for one in caplog.records if "from another node" in one.message]
    assert list(record.of) == [named]  # type: ignore[attr-defined]
    assert other.stats().pool.resident_rows > 0, "rows are of use all the same"


@pytest.mark.parametrize("part", ["costs", "residual", "bursts", "missing"])
def test_what_another_version_of_the_controller_learned_is_left_aside_and_rows_are_restored(
    file: SnapshotFile, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine()
    engine.rank([random_request(np.random.default_rng(0), tiny_config())])
    kept(file, experienced(), engine)
    found = file.read()
    assert found is not None
    learned = {**found.learned}
    if part == "missing":
        del learned["bursts"]
    else:
        learned[part] = learned[part][:-1]
    file.write(replace(found, learned=learned))
    again, other = steering(), tiny_engine()
    with caplog.at_level(logging.WARNING):
        SnapshotKeeper(file, 60).restore(other, again)
    assert again.learned == steering().learned
    assert [one.message for one in caplog.records] == ["the learned state of the controller does not fit"]
    assert other.stats().pool.resident_rows > 0


def test_a_file_of_the_controller_before_is_left_aside(file: SnapshotFile, caplog: pytest.LogCaptureFixture) -> None:
    file.write(Snapshot(np.arange(9), 0.5))
    old = file.path.read_bytes().replace(b"helmrec-snapshot-2", b"helmrec-snapshot-1")
    file.path.write_bytes(old)
    with caplog.at_level(logging.WARNING):
        assert file.read() is None
    (record,) = caplog.records
    assert "helmrec-snapshot-1" in record.reason  # type: ignore[attr-defined]


def test_a_split_that_leaves_no_room_is_not_taken(file: SnapshotFile) -> None:
    file.write(Snapshot(np.arange(9), 0.999))
    engine = tiny_engine()
    SnapshotKeeper(file, 60).restore(engine, steering())
    assert engine.stats().pool.alpha == 0.4


def test_a_policy_that_learns_nothing_keeps_nothing() -> None:
    constant = steering("static:0.4")
    constant.relearn(experienced().learned)
    assert constant.learned == {}


@pytest.mark.parametrize(("num_layers", "is_kept"), [(2, True), (3, False)])
def test_a_swapped_model_goes_on_from_what_was_learned_if_it_has_the_same_shape(num_layers: int, is_kept: bool) -> None:
    ports = [
        InProcessPort(tiny_engine(tiny_model(seed, num_layers=layers), clock=MonotonicClock()), made)
        for seed, layers, made in ((0, 2, experienced()), (1, num_layers, steering()))
    ]
    old, new = (port._steering for port in ports)
    assert old is not None
    assert new is not None
    ports[1].inherit(ports[0])
    assert (new.learned == old.learned) == is_kept
    for port in ports:
        port.engine.close()
