"""Several engines of a host with rows on disk: the scores of one engine, one log of updates, and kill -9 under load."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.cluster.engines import EnginesPort, make_engines
from helmrec.errors import ConfigError, EngineClosed, ModelError
from helmrec.model.file_check import FileCheck
from helmrec.model.weights import LoadedModel
from helmrec.serve.app import make_app
from helmrec.serve.port import Health
from helmrec.serve.settings import ServeConfig
from tests.cluster.test_engines import Host
from tests.cluster.test_shared_tables import IDS, REQUESTS, SERVE, save, scores_of, values
from tests.engine.test_rows_on_disk import bytes_for
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import Caller
from tests.serve.test_process_port import engine_config

NUM_FRAMES = 90  # of each engine, of 349 rows; one request may read 50


def two_engines(folder: Path, model: LoadedModel, row_dtype: str = "model", **settings: Any) -> EnginesPort:
    engine = engine_config(host_rows_bytes=2 * bytes_for(NUM_FRAMES, model), row_dtype=row_dtype)
    return make_engines(folder, engine, ServeConfig(**SERVE.model_dump() | settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("disk") / "tiny", tiny_model())


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Host]:
    port = two_engines(folder, tiny_model())
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        yield Host(port, caller)


def scores(host: Host, engine: int) -> list[Any]:
    return [result.scores for result in host.run(lambda: host.port._ports[engine].submit(REQUESTS))]


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_routed_scores_are_those_of_one_engine_and_each_has_its_part_of_the_memory(host: Host) -> None:
    results = host.run(lambda: host.port.submit(REQUESTS))
    assert_equal([result.scores for result in results], scores_of(tiny_engine()))
    for engine in range(2):
        assert_equal(scores(host, engine), scores_of(tiny_engine()))
    for stats in host.stats_by_engine().values():
        assert stats.row_tier is not None
        assert stats.row_tier.capacity_rows == NUM_FRAMES
        assert stats.row_tier.memory_misses > 0, "it reads the files"
    whole = host.run(host.port.stats).row_tier
    assert whole.capacity_rows == 2 * NUM_FRAMES


def test_an_update_is_logged_once_and_seen_by_both(host: Host, folder: Path) -> None:
    expected = tiny_engine()
    for value in (0.25, -0.5):
        host.caller.run(host.port.update_rows("item", IDS, values(value).tolist()))
        expected.update_rows("item", IDS, values(value))
        for engine in range(2):
            assert_equal(scores(host, engine), scores_of(expected))
    whole = host.run(host.port.stats).row_tier
    assert whole.log_rows == 2 * len(IDS)
    assert whole.log_bytes == folder.with_name("tiny.rows.log").stat().st_size
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny.rows.log"]


def test_updates_at_one_time_are_all_seen(host: Host) -> None:
    async def work() -> None:
        parts = np.array_split(np.array(IDS), 8)
        await asyncio.gather(
            *(
                host.port.update_rows("item", part.tolist(), np.full((part.size, 16), 0.1 * i))
                for i, part in enumerate(parts)
            )
        )

    host.run(work)
    expected = tiny_engine()
    for i, part in enumerate(np.array_split(np.array(IDS), 8)):
        expected.update_rows("item", part.tolist(), np.full((part.size, 16), 0.1 * i))
    for engine in range(2):
        assert_equal(scores(host, engine), scores_of(expected))


@pytest.mark.parametrize("engine", [0, 1])
def test_a_killed_engine_comes_back_with_all_updates_and_costs_no_client_an_error(host: Host, engine: int) -> None:
    host.wait_for_both()
    expected, states = tiny_engine(), []
    for value in (0.25, -0.5):
        expected.update_rows("item", IDS, values(value))
        states.append(scores_of(expected))

    async def ask(is_over: asyncio.Event) -> int:
        num = 0
        while not is_over.is_set():
            for i, (result,) in enumerate(await asyncio.gather(*(host.port.submit([each]) for each in REQUESTS))):
                assert any(np.allclose(result.scores, state[i], atol=1e-5) for state in states), "a wrong score"
                num += 1
        return num

    async def work() -> tuple[int, int]:
        """Update rows until the next engine is ready; return the number of answers and of updates."""
        await host.port.update_rows("item", IDS, values(-0.5))
        is_over, num, killed = asyncio.Event(), 0, host.port._ports[engine]
        asking = asyncio.create_task(ask(is_over))
        await asyncio.sleep(0.05)
        os.kill(host.pid(engine), signal.SIGKILL)
        while num < 4 or killed.health is not Health.READY:  # the last one may come after it has read the log
            await host.port.update_rows("item", IDS, values((0.25, -0.5)[num % 2]))
            num += 1
            await asyncio.sleep(0.02)
        is_over.set()
        return await asking, num

    answers, updates = host.run(work)
    assert answers > 0
    host.wait_for_both()
    for each in range(2):
        assert_equal(scores(host, each), states[(updates - 1) % 2])


def test_a_swap_brings_another_log(host: Host, folder: Path, tmp_path: Path) -> None:
    host.wait_for_both()
    host.run(lambda: host.port.update_rows("item", IDS, values(0.75)))
    size = folder.with_name("tiny.rows.log").stat().st_size
    other = save(tmp_path / "other", tiny_model(5))
    host.run(lambda: host.port.swap(str(other)))
    expected = tiny_engine(tiny_model(5))
    for engine in range(2):
        assert_equal(scores(host, engine), scores_of(expected))
    host.run(lambda: host.port.update_rows("item", IDS, values(0.125)))
    expected.update_rows("item", IDS, values(0.125))
    os.kill(host.pid(0), signal.SIGKILL)
    with pytest.raises(EngineClosed):
        while True:
            scores(host, 0)
    host.wait_for_both()
    for engine in range(2):
        assert_equal(scores(host, engine), scores_of(expected))
    assert folder.with_name("tiny.rows.log").stat().st_size == size
    host.run(lambda: host.port.swap(str(folder)))
    expected = tiny_engine()
    expected.update_rows("item", IDS, values(0.75))
    for engine in range(2):
        assert_equal(scores(host, engine), scores_of(expected))


def test_a_front_that_starts_again_has_all_updates(tmp_path: Path) -> None:
    folder, expected = save(tmp_path / "again", tiny_model()), tiny_engine()
    for value in (0.25, -0.5):
        port = two_engines(folder, tiny_model())
        with Caller(make_app(port, ServeConfig())) as caller:
            caller.wait_until_ready()
            for engine in range(2):
                assert_equal(scores(Host(port, caller), engine), scores_of(expected))
            caller.run(port.update_rows("item", IDS, values(value)))
            expected.update_rows("item", IDS, values(value))


def test_a_pool_of_rounded_rows_reads_files_and_log_as_they_are(tmp_path: Path) -> None:
    folder, expected = save(tmp_path / "rounded", tiny_model()), tiny_engine(row_dtype="int8")
    port = two_engines(folder, tiny_model(), row_dtype="int8")
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        for value in (None, 0.3):
            if value is not None:
                caller.run(port.update_rows("item", IDS, values(value)))
                expected.update_rows("item", IDS, values(value))
            for engine in range(2):
                assert_equal(scores(Host(port, caller), engine), scores_of(expected))


def test_rounded_host_memory_is_refused_with_rows_on_disk() -> None:
    with pytest.raises(ConfigError, match="host_row_dtype must be 'model' with host_rows_bytes, got 'int8'"):
        engine_config(host_rows_bytes=2 * bytes_for(NUM_FRAMES, tiny_model()), host_row_dtype="int8")


def test_memory_that_is_too_small_for_each_is_refused_before_an_engine_starts(folder: Path, tmp_path: Path) -> None:
    model = save(tmp_path / "small", tiny_model())
    enough_for_one = bytes_for(60, tiny_model())
    with pytest.raises(ConfigError, match=rf"host_rows_bytes must be at least \d+ .* got {enough_for_one // 2}"):
        make_engines(model, engine_config(host_rows_bytes=enough_for_one), SERVE)


def test_engines_that_follow_deltas_have_logs_of_their_own(tmp_path: Path) -> None:
    model = save(tmp_path / "streamed", tiny_model())
    (tmp_path / "deltas").mkdir()
    port = two_engines(model, tiny_model(), row_deltas=str(tmp_path / "deltas"))
    logs = [each._begin.engine["row_log"] for each in port.engines]
    assert logs == [str(tmp_path / f"streamed.rows.log.{i}") for i in range(2)]
    assert not any(each._begin.follows_log for each in port.engines)


def break_table(folder: Path) -> None:
    with (folder / "tables" / "item.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


@pytest.mark.parametrize("on_disk", [True, False])
def test_files_are_checked_once_for_all_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, on_disk: bool
) -> None:
    model = save(tmp_path / "checked", tiny_model())
    memory = {"host_rows_bytes": 2 * bytes_for(NUM_FRAMES, tiny_model())} if on_disk else {}
    port = make_engines(model, engine_config(**memory), SERVE)
    assert [each._begin.engine["verify"] for each in port.engines] == ["never", "never"]
    assert port._check is not None
    monkeypatch.setattr("helmrec.cluster.engines.FileCheck", partial(FileCheck, larger_than=0))
    port.check_files(model)
    port._check.join()
    assert port._corrupt is None
    break_table(model)
    port.check_files(model)
    port._check.join()
    with pytest.raises(EngineClosed, match=r"serving has stopped: .*item.safetensors is corrupt"):
        asyncio.run(port.submit(REQUESTS[:1]))
    assert port.health is Health.FAILED
    assert "item.safetensors is corrupt" in str(port.reason)


def test_files_are_checked_before_the_first_engine_starts_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "checked", tiny_model())
    monkeypatch.setattr("helmrec.serve.host_log.VERIFY_BYTES", 0)
    make_engines(model, engine_config(verify="start"), SERVE)
    break_table(model)
    with pytest.raises(ModelError, match=r"item.safetensors is corrupt"):
        make_engines(model, engine_config(verify="start"), SERVE)
