"""A server that follows a stream of row deltas: answers say their position, and faults do not end serving."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.deltas import consumer
from helmrec.deltas.delta import Delta
from helmrec.deltas.folder import DeltaFolder
from helmrec.deltas.producer import DeltaProducer, skip_to
from helmrec.deltas.snapshot import snapshot_name, write_snapshot
from helmrec.errors import ConfigError, ModelError
from helmrec.model.config import TableConfig
from helmrec.model.weights import LoadedModel, save_model
from helmrec.serve.app import make_app
from helmrec.serve.node import make_port
from helmrec.serve.settings import ServeConfig
from tests.deltas.places import part
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import as_request, infer_json, rank_body, tensors_of
from tests.serve.test_process_port import engine_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tiny_model()
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    return tmp_path / "tiny"


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[DeltaProducer]:
    with DeltaProducer(str(tmp_path / "deltas")) as made:
        yield made


def config(model: Path, **more: Any) -> ServeConfig:
    settings = {"row_deltas": str(model.parent / "deltas"), "policy": "none", "log_level": "error"}
    return ServeConfig(**settings | more)


def serving(model: Path, **more: Any) -> Caller:
    settings = config(model, **more)
    return Caller(make_app(make_port(model, engine_config(), settings), settings))


def position(caller: Caller) -> int:
    return int(caller.get("/v1/pool").json["row_stream"]["position"])


def push(producer: DeltaProducer, num: int = 3) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(producer.newest)
    made = [(rng.choice(300, 40, replace=False), rng.standard_normal((40, 16)).astype(np.float32)) for _ in range(num)]
    for ids, values in made:
        producer.push("item", ids, values, step=1)
    return made


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in its own process"])
def test_answers_follow_the_stream_and_say_where_they_are(model: Path, producer: DeltaProducer, apart: bool) -> None:
    updates = push(producer)
    twin = tiny_engine(tiny_model())
    with serving(model, engine_process=apart) as caller:
        caller.wait_until_ready()
        assert position(caller) == 3, "it has caught up before it is ready"
        updates += push(producer)
        wait_for(lambda: position(caller) == 6)
        for ids, values in updates:
            twin.update_rows("item", ids, values)
        answer = caller.post("/v1/rank", rank_body()).json
        assert answer["row_position"] == {"sequence": 6, "offset": 0}
        (expected,) = twin.rank([as_request(rank_body())])
        np.testing.assert_allclose(answer["scores"], expected.scores, atol=1e-5)
    twin.close()


def test_metrics_and_the_inference_protocol_tell_the_position(model: Path, producer: DeltaProducer) -> None:
    push(producer)
    with serving(model) as caller:
        caller.wait_until_ready()
        metrics = caller.get("/metrics").body.decode()
        assert "helmrec_row_delta_position 3.0" in metrics
        assert "helmrec_row_delta_rows_total 120.0" in metrics
        assert "helmrec_row_delta_stopped 0.0" in metrics
        answer = caller.post("/v2/models/tiny/infer", infer_json(tensors_of([as_request(rank_body())])))
        assert {"row_sequence": 3, "row_offset": 0}.items() <= answer.json["parameters"].items()


def test_the_log_of_calls_says_the_position(
    model: Path, producer: DeltaProducer, caplog: pytest.LogCaptureFixture
) -> None:
    push(producer)
    with serving(model) as caller:
        caller.wait_until_ready()
        with caplog.at_level(logging.DEBUG, "helmrec.serve"):
            caller.post("/v1/rank", rank_body())
            caller.get("/v1/model")
    lines = {line.route: vars(line) for line in caplog.records if hasattr(line, "route")}
    assert lines["/v1/rank"]["row_sequence"] == 3
    assert "row_sequence" not in lines["/v1/model"]


def test_a_gap_stops_the_rows_and_not_the_server(model: Path, producer: DeltaProducer) -> None:
    push(producer, 2)
    folder = DeltaFolder(model.parent / "deltas")
    folder.write(Delta(producer.stream, 5, 5, 0.0, (part(5, 4, 16),)))
    with serving(model) as caller:
        caller.wait_until_ready()
        stream = caller.get("/v1/pool").json["row_stream"]
        assert (stream["position"], stream["newest"], stream["lag_deltas"]) == (2, 5, 3)
        assert "DeltaGap: delta 3 is missing" in stream["stop"]
        assert caller.post("/v1/rank", rank_body()).json["row_position"]["sequence"] == 2
        assert "helmrec_row_delta_stopped 1.0" in caller.get("/metrics").body.decode()
        assert skip_to(folder, 2, 5) == [3, 4]
        wait_for(lambda: position(caller) == 5)
        wait_for(lambda: caller.get("/v1/pool").json["row_stream"]["stop"] is None)


def test_a_late_node_starts_from_the_newest_snapshot(model: Path, producer: DeltaProducer) -> None:
    push(producer, 8)
    folder = DeltaFolder(model.parent / "deltas")
    snapshots = model.parent / "snapshots"
    write_snapshot(model, folder, snapshots / snapshot_name(6), 6)
    with serving(model) as whole, serving(model, row_snapshots=str(snapshots)) as late:
        for caller in (whole, late):
            caller.wait_until_ready()
        folder.trim(6)
        assert (position(whole), position(late)) == (8, 8)
        assert late.get("/v1/pool").json["row_stream"]["deltas"] == 2
        a, b = (caller.post("/v1/rank", rank_body()).json for caller in (whole, late))
        assert (a["scores"], a["row_position"]) == (b["scores"], b["row_position"])


@pytest.mark.parametrize("apart", [False, True])
def test_a_place_that_is_none_is_named_before_the_start(model: Path, apart: bool) -> None:
    with pytest.raises(ConfigError, match="there is no folder of row deltas"):
        serving(model, engine_process=apart)


@pytest.fixture
def second(model: Path) -> LoadedModel:
    """Another version of the model, in a folder beside it."""
    made = tiny_model(1)
    save_model(model.parent / "second", made.config, made.dense, made.tables)
    return made


def scores_after(made: LoadedModel, updates: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> Any:
    with tiny_engine(made) as twin:
        for ids, values in updates:
            twin.update_rows("item", ids, values)
        return twin.rank([as_request(rank_body())])[0].scores


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in its own process"])
def test_a_model_in_the_stream_is_swapped_in_where_it_stands(
    model: Path, producer: DeltaProducer, second: LoadedModel, apart: bool
) -> None:
    before = push(producer, 2)
    expected = {2: scores_after(tiny_model(), before)}
    with serving(model, engine_process=apart) as caller:
        caller.wait_until_ready()
        producer.push_model(model.parent / "second", step=3)
        answers = [caller.post("/v1/rank", rank_body()).json]  # at once: the swap takes longer
        after = push(producer, 2)
        while answers[-1]["row_position"]["sequence"] < 5:
            answers.append(caller.post("/v1/rank", rank_body()).json)
        expected |= {3 + num: scores_after(tiny_model(1), after[:num]) for num in range(3)}
        positions = [answer["row_position"]["sequence"] for answer in answers]
        for at, answer in zip(positions, answers, strict=True):
            np.testing.assert_allclose(answer["scores"], expected[at], atol=1e-5)
        assert positions == sorted(positions)
        assert positions[0] == 2, "the old model serves until the new one is ready"
        push(producer, 1)
        wait_for(lambda: position(caller) == 6)


def test_a_model_that_cannot_be_served_stops_the_rows_and_can_be_skipped(
    model: Path, producer: DeltaProducer, second: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_ASK_AGAIN_S", 0.2)
    updates = push(producer, 1)
    producer.push_model(model.parent / "second", step=2)
    shutil.rmtree(model.parent / "second")
    updates += push(producer, 1)
    with serving(model) as caller:
        caller.wait_until_ready()
        wait_for(lambda: caller.get("/v1/pool").json["row_stream"]["stop"] is not None)
        stream = caller.get("/v1/pool").json["row_stream"]
        assert "delta 2 names a model that cannot be swapped in:" in stream["stop"]
        assert stream["position"] == 1
        assert caller.post("/v1/rank", rank_body()).json["row_position"]["sequence"] == 1
        assert skip_to(DeltaFolder(model.parent / "deltas"), 1, 2, also_readable=True) == [2]
        wait_for(lambda: position(caller) == 3)
        answer = caller.post("/v1/rank", rank_body()).json
        np.testing.assert_allclose(answer["scores"], scores_after(tiny_model(), updates), atol=1e-5)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (tiny_model(1, num_tasks=3), "its num_tasks must be 2, got 3"),
        (tiny_model(1, request_context=(TableConfig(name="hour", num_rows=25),)), "its tables must be"),
    ],
)
def test_a_model_that_does_not_fit_is_named(
    model: Path, producer: DeltaProducer, other: LoadedModel, named: str
) -> None:
    save_model(model.parent / "other", other.config, other.dense, other.tables)
    producer.push_model(model.parent / "other", step=1)
    with serving(model) as caller:
        caller.wait_until_ready()
        wait_for(lambda: named in str(caller.get("/v1/pool").json["row_stream"]["stop"]))
        assert caller.post("/v1/rank", rank_body()).status == 200


def test_a_snapshot_goes_on_with_the_model_of_the_stream(
    model: Path, producer: DeltaProducer, second: LoadedModel
) -> None:
    push(producer, 2)
    producer.push_model(model.parent / "second", step=3)
    after, snapshots = push(producer, 2), model.parent / "snapshots"
    write_snapshot(model, DeltaFolder(model.parent / "deltas"), snapshots / snapshot_name(4), 4)
    with serving(model, row_snapshots=str(snapshots)) as late:
        late.wait_until_ready()
        answer = late.post("/v1/rank", rank_body()).json
        assert answer["row_position"]["sequence"] == 5
        assert late.get("/v1/pool").json["row_stream"]["deltas"] == 1
    np.testing.assert_allclose(answer["scores"], scores_after(tiny_model(1), after), atol=1e-5)
    third = tiny_model(2)
    shutil.rmtree(model.parent / "second")
    save_model(model.parent / "second", third.config, third.dense, third.tables)
    with pytest.raises(ModelError, match="must hold version"):
        write_snapshot(model, DeltaFolder(model.parent / "deltas"), snapshots / "x")
