"""Whoever is killed at whatever moment: no delta is lost, none comes twice, and every row is right afterwards."""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.deltas.consumer import RowConsumer
from helmrec.deltas.producer import DeltaProducer
from helmrec.deltas.schedule import SnapshotPlan, make_snapshot
from helmrec.deltas.source import in_order, open_source
from helmrec.errors import DeltaUnavailable
from helmrec.model.weights import save_model
from helmrec.serve.app import make_app
from helmrec.serve.node import make_port
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.settings import ServeConfig
from tests.deltas.following import follow
from tests.deltas.places import KINDS, place
from tests.deltas.producing import ids_of, push_next, push_without_end, values_of
from tests.helpers import tiny_engine, tiny_model
from tests.history.places import redis_process
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import as_request, rank_body
from tests.serve.test_process_port import engine_config


def few_or(many: int) -> list[Any]:
    """The slow tests kill 205 times in all."""
    return [pytest.param(2, id="a few times"), pytest.param(many, id="many times", marks=pytest.mark.slow)]


def processes() -> ForkServerContext:
    """Processes that start at once, since everything is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.deltas.following", "tests.deltas.producing"])
    return context


def rows_at(sequence: int) -> torch.Tensor:
    """The item table after so many deltas, one row at a time."""
    table = tiny_model().tables["item"].clone()
    for number in range(1, sequence + 1):
        for row, value in zip(ids_of(number), values_of(number), strict=True):
            table[row] = torch.from_numpy(value)
    return table


def check_stream(url: str) -> int:
    """Every delta is there once, in order and whole; returns their number."""
    source, last = open_source(url), 0
    for delta in in_order(source.read(0), 0):
        last = delta.sequence
        assert np.array_equal(delta.parts[0].ids, ids_of(last))
        assert np.array_equal(delta.parts[0].values, values_of(last))
    assert source.newest() == last
    source.close()
    return last


def answers(url: str) -> bool:
    """Whether a Redis that was started again has loaded its deltas."""
    source = open_source(url)
    try:
        source.newest()
    except DeltaUnavailable:
        return False
    finally:
        source.close()
    return True


@pytest.mark.parametrize("num_kills", few_or(35))
@pytest.mark.parametrize("kind", KINDS)
def test_a_producer_is_killed(kind: str, num_kills: int, tmp_path: Path) -> None:
    context = processes()
    with place(kind, tmp_path) as url:
        with DeltaProducer(url) as first:
            push_next(first)
        for kill in range(num_kills):
            before = check_stream(url)
            process = context.Process(target=push_without_end, args=(url,))
            process.start()
            source = open_source(url)
            wait_for(lambda source=source, before=before: source.newest() > before)
            source.close()
            time.sleep(random.Random(kill).uniform(0, 0.1))
            process.kill()
            process.join(30)
            assert process.exitcode == -signal.SIGKILL
            assert check_stream(url) > before


@pytest.mark.parametrize("num_kills", few_or(35))
def test_redis_is_killed_under_producer_and_consumer(num_kills: int, tmp_path: Path) -> None:
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    url, target = f"unix://{tmp_path / 'redis.sock'}", 0
    engine = tiny_engine(tiny_model())
    consumer = RowConsumer(open_source(url), engine)
    consumer.start()
    for kill in range(num_kills):
        with redis_process(tmp_path, *durable) as server:
            wait_for(lambda: answers(url))
            end = time.monotonic() + random.Random(kill).uniform(0.05, 0.3)
            with DeltaProducer(url) as producer:
                while time.monotonic() < end:
                    target = push_next(producer)
                    consumer.apply(time.monotonic())
                server.kill()
                server.wait(10)
                with pytest.raises(DeltaUnavailable):
                    push_next(producer)
        wait_for(lambda: consumer.stats().stop is not None)
        engine.check()
    with redis_process(tmp_path, *durable):
        wait_for(lambda: answers(url))
        while consumer.stats().position < target:
            consumer.apply(time.monotonic())
        assert check_stream(url) == consumer.stats().position == target
        assert torch.equal(engine._master.gather(np.arange(300)), rows_at(target))
        wait_for(lambda: consumer.stats().stop is None)
        consumer.close()
    engine.close()


@pytest.mark.parametrize("num_kills", few_or(70))
def test_a_consumer_is_killed_while_rows_come(num_kills: int, tmp_path: Path) -> None:
    """At any moment: while it starts from a snapshot, while it replays, while a delta is half visible."""
    made, rng = tiny_model(), random.Random(num_kills)
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    context = processes()
    plan = SnapshotPlan(model=tmp_path / "tiny", deltas=str(tmp_path / "deltas"), folder=tmp_path / "snapshots")
    plan.folder.mkdir()
    with DeltaProducer(plan.deltas) as producer:
        for kill in range(num_kills):
            (tmp_path / "started").unlink(missing_ok=True)
            process = context.Process(target=follow, args=(tmp_path, None))
            process.start()
            if kill % 3:  # else it may be killed before it follows
                wait_for((tmp_path / "started").exists)
            end_s = time.monotonic() + rng.uniform(0, 0.2)
            while time.monotonic() < end_s:
                push_next(producer)
            process.kill()
            process.join(30)
            assert process.exitcode == -signal.SIGKILL
            if kill % 10 == 5:
                make_snapshot(plan)
            if kill % 10 == 9 or kill == num_kills - 1:
                check_rows(context.Process(target=follow, args=(tmp_path, producer.newest)), tmp_path, producer.newest)


def check_rows(process: BaseProcess, folder: Path, target: int) -> None:
    """Let a consumer follow to the end; every row must be right."""
    process.start()
    process.join(120)
    assert process.exitcode == 0
    with np.load(folder / "found.npz") as found:
        assert found["position"] == target
        assert np.array_equal(found["rows"], rows_at(target).numpy())


@pytest.mark.parametrize("num_kills", few_or(30))
def test_a_node_is_killed_while_rows_come(num_kills: int, tmp_path: Path) -> None:
    """A served engine in its own process: every second time before it is ready."""
    made = tiny_model()
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    with DeltaProducer(str(tmp_path / "deltas")) as producer:
        push_next(producer)
        config = ServeConfig(row_deltas=str(tmp_path / "deltas"), engine_process=True, policy="none", log_level="error")
        port = make_port(tmp_path / "tiny", engine_config(), config)
        assert isinstance(port, ProcessPort)
        with Caller(make_app(port, config)) as caller:
            caller.wait_until_ready()
            for kill in range(num_kills):
                drawn = random.Random(kill)
                if kill % 2 == 0:
                    caller.wait_until_ready()
                end_s = time.monotonic() + drawn.uniform(0, 0.3 if kill % 2 == 0 else 2.0)
                while time.monotonic() < end_s:
                    push_next(producer)
                    time.sleep(0.02)
                assert port._process is not None
                os.kill(port._process.pid, signal.SIGKILL)
                wait_for(lambda kill=kill: port.num_restarts > kill)
            caller.wait_until_ready()
            stream = caller.get("/v1/pool").json["row_stream"]
            assert (stream["position"], stream["stop"]) == (producer.newest, None)
            bodies = [rank_body(candidates=[i, i + 1]) for i in range(0, 300, 2)]  # each row of items is a candidate
            answers = [caller.post("/v1/rank", body).json for body in bodies]
        with tiny_engine(tiny_model()) as twin:
            for number in range(1, producer.newest + 1):
                twin.update_rows("item", ids_of(number), values_of(number))
            for body, answer in zip(bodies, answers, strict=True):
                (expected,) = twin.rank([as_request(body)])
                assert answer["row_position"]["sequence"] == producer.newest
                np.testing.assert_allclose(answer["scores"], expected.scores, atol=1e-5)
