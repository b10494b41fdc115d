"""Engines of a host under a stream of row deltas: one copy of the tables, one position, kill -9 of any process."""

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.cluster.engines import make_engines
from helmrec.config import EngineConfig
from helmrec.deltas.delta import Delta
from helmrec.deltas.folder import DeltaFolder
from helmrec.deltas.producer import DeltaProducer, skip_to
from helmrec.deltas.snapshot import snapshot_name, write_snapshot
from helmrec.errors import ConfigError
from helmrec.model.shared_tables import SharedTables
from helmrec.model.weights import LoadedModel
from helmrec.serve.app import make_app
from helmrec.serve.port import Health
from tests.cluster.test_shared_tables import (
    IDS,
    LIMITS,
    REQUESTS,
    SERVE,
    Host,
    large_model,
    pss_bytes,
    save,
    scores_of,
)
from tests.deltas.test_kills import few_or
from tests.helpers import tiny_engine
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import rank_body
from tests.serve.test_process_port import engine_config

NUM_ROWS = len(IDS)
UNASKED = [100_000, 100_001]  # rows that no request reads


class Stream:
    """Pushes deltas, values and differences in turns, and keeps the rows that a host must have at each position."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        self.producer = DeltaProducer(str(folder / "deltas"))
        self.table = model.tables["item"].numpy().copy()
        self.twin = tiny_engine(model)
        self.expected = {0: scores_of(self.twin)}

    def push(self) -> int:
        """A difference that is applied twice, or not at all, leaves other rows."""
        sequence = self.producer.newest + 1
        values = np.random.default_rng(sequence).standard_normal((NUM_ROWS, 16)).astype(np.float32)
        is_added = sequence % 3 > 0
        self.table[IDS] = self.table[IDS] + values if is_added else values
        self.twin.update_rows("item", IDS, self.table[IDS])
        self.expected[sequence] = scores_of(self.twin)
        self.producer.push("item", IDS, values, step=sequence, add=is_added)
        return sequence

    def check(self, sequence: int, number: int, scores: Any) -> None:
        """Whether request `number` was scored with the rows of this position."""
        np.testing.assert_allclose(scores, self.expected[sequence][number], atol=1e-5)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    save(tmp_path / "large", large_model())
    made = Stream(tmp_path, large_model())
    yield made
    made.producer.close()
    made.twin.close()


class StreamHost(Host):
    """A front, a keeper that follows the stream, and two engines."""

    def position(self) -> int:
        stats = self.run(self.port.stats)
        assert stats.row_stream is not None
        return int(stats.row_stream.position)

    def until(self, sequence: int) -> None:
        wait_for(lambda: self.position() == sequence)

    def check(self, stream: Stream, sequence: int) -> None:
        """Both engines are there, at this position and with its scores, and every row of the tables is right."""
        self.wait()
        self.until(sequence)
        for port in self.port._ports:
            for number, result in enumerate(self.run(partial(port.submit, REQUESTS))):
                assert (result.row_position.sequence, result.row_position.offset) == (sequence, 0)
                stream.check(sequence, number, result.scores)
        found = SharedTables(self.port.model, self.keeper.files).master.tables["item"]
        assert np.array_equal(found.numpy(), stream.table)


def serving(folder: Path, engine: EngineConfig | None = None, **more: Any) -> Caller:
    places = {"row_deltas": str(folder / "deltas"), "row_slice": NUM_ROWS}
    serve = SERVE.model_copy(update=places | more)
    return Caller(make_app(make_engines(folder / "large", engine or engine_config(), serve, LIMITS), serve))


def host_of(caller: Caller) -> StreamHost:
    caller.wait_until_ready()
    return StreamHost(caller.app.state.front.port, caller)


def test_both_engines_follow_with_one_copy_of_the_tables(stream: Stream, tmp_path: Path) -> None:
    for _ in range(3):
        stream.push()
    with serving(tmp_path) as caller:
        host = host_of(caller)
        assert host.position() == 3, "the keeper has caught up before the server is ready"
        host.check(stream, 3)
        host.check(stream, stream.push())
        size = large_model().config.num_rows * 64
        tables = [pss_bytes(pid, "helmrec-tables") for pid in host.pids]
        assert all(tables), "all processes read them"
        assert 0.99 * size <= sum(tables) <= 1.05 * size
        answer = caller.post("/v1/rank", rank_body()).json
        assert answer["row_position"] == {"sequence": 4, "offset": 0}
        found = caller.get("/v1/pool").json["row_stream"]
        assert (found["position"], found["deltas"], found["rows"], found["stop"]) == (4, 4, 4 * NUM_ROWS, None)
        metrics = caller.get("/metrics").body.decode()
        assert 'helmrec_row_delta_position{replica="engine 1"} 4.0' in metrics
        assert host.run(host.keeper.stats).engines == 2


@pytest.mark.parametrize("here", ["model", "int8"])
def test_a_keeper_of_rounded_tables_rounds_the_rows_of_the_stream(tmp_path: Path, here: str) -> None:
    """Slices, calls and a later keeper round as an engine rounds its own rows; differences stop the stream."""
    save(tmp_path / "large", large_model())
    producer = DeltaProducer(str(tmp_path / "deltas"))
    rows: dict[str, Any] = {"row_dtype": here, "host_row_dtype": "int8"}
    new = [np.random.default_rng(i).standard_normal((NUM_ROWS, 16)).astype(np.float32) for i in range(4)]
    twin = tiny_engine(large_model(), **rows)
    producer.push("item", IDS, new[0], step=1)
    with serving(tmp_path, engine_config(**rows), row_slice=5) as caller:
        host = host_of(caller)

        def check(sequence: int, values: Any) -> None:
            host.wait()
            host.until(sequence)
            twin.update_rows("item", IDS, values)
            for engine in range(2):
                for found, wanted in zip(host.scores(engine), scores_of(twin), strict=True):
                    np.testing.assert_allclose(found, wanted, atol=1e-5)
            tables = SharedTables(host.port.model, host.keeper.files, "int8").master.tables
            assert torch.equal(tables["item"], twin._master.tables["item"])  # type: ignore[attr-defined]

        check(1, new[0])
        producer.push("item", IDS, new[1], step=2)
        check(2, new[1])
        host.caller.run(host.port.update_rows("item", IDS, new[2].tolist()))
        check(2, new[2])
        producer.push("item", IDS, new[3], step=3, add=True)
        refused = "rows of int8 (host_row_dtype) take new values only"
        wait_for(lambda: refused in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))
        assert host.keeper.num_restarts == 0, "serving goes on, and so does the keeper"
        os.kill(host.pid(host.keeper), signal.SIGKILL)
        wait_for(lambda: host.keeper.num_restarts and host.keeper.health is Health.READY)
        wait_for(lambda: refused in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))
        assert skip_to(DeltaFolder(tmp_path / "deltas"), 2, 3, also_readable=True) == [3]
        producer.push("item", IDS, new[3], step=4)
        check(4, new[3])
    producer.close()
    twin.close()


def test_slices_of_a_delta_are_visible_to_both_at_the_same_position(stream: Stream, tmp_path: Path) -> None:
    with serving(tmp_path, row_slice=3, row_rate=60.0) as caller:
        host = host_of(caller)
        stream.push()
        partly: dict[int, list[Any]] = {}

        async def ask() -> None:
            for port in host.port._ports:
                (result,) = await port.submit(REQUESTS[:1])
                if result.row_position.offset:
                    assert (result.row_position.sequence, result.row_position.offset % 3) == (0, 0)
                    partly.setdefault(result.row_position.offset, []).append(result.scores)

        while host.position() < 1:
            host.run(ask)
        assert any(len(each) > 1 for each in partly.values()), "the delta was visible at once"
        for each in partly.values():
            for scores in each[1:]:
                np.testing.assert_allclose(scores, each[0], atol=1e-6)
        host.check(stream, 1)


def under_load(host: StreamHost, stream: Stream, kills: Callable[[], None], after_s: float) -> None:
    """Kill something while requests are answered and deltas come; no call may fail, and no answer may be wrong."""
    first, num_deltas = stream.producer.newest, 24

    async def ask(is_over: asyncio.Event) -> int:
        num = 0
        while not is_over.is_set():
            answers = await asyncio.gather(*(host.port.submit([each]) for each in REQUESTS))
            for number, (result,) in enumerate(answers):
                assert result.row_position.offset == 0
                stream.check(result.row_position.sequence, number, result.scores)
                num += 1
        return num

    async def work() -> int:
        is_over = asyncio.Event()
        asking = asyncio.create_task(ask(is_over))
        for i in range(num_deltas):
            if i == num_deltas // 3:
                asyncio.get_running_loop().call_later(after_s, kills)
            await asyncio.to_thread(stream.push)
        is_over.set()
        return await asking

    assert host.run(work) > 0
    host.check(stream, first + num_deltas)


@pytest.mark.parametrize("num_kills", few_or(20))
@pytest.mark.parametrize("victim", ["keeper", "engine"])
def test_a_process_is_killed_in_mid_stream(stream: Stream, tmp_path: Path, victim: str, num_kills: int) -> None:
    """Nothing is lost and nothing applied twice, though two of three deltas are differences."""
    with serving(tmp_path) as caller:
        host = host_of(caller)
        for kill in range(num_kills):
            host.wait()
            process = host.keeper if victim == "keeper" else host.port._ports[kill % 2]
            pid = host.pid(process)
            others = [each for each in host.pids if each != pid]
            under_load(
                host, stream, partial(os.kill, pid, signal.SIGKILL), after_s=random.Random(kill).uniform(0, 0.05)
            )
            assert process.num_restarts
            assert set(others) <= set(host.pids), "the others served on"


def test_an_engine_that_hangs_holds_no_other_and_the_stream_goes_on(stream: Stream, tmp_path: Path) -> None:
    with serving(tmp_path) as caller:
        host = host_of(caller)
        stopped, other = [host.pid(port) for port in host.port._ports]
        os.kill(stopped, signal.SIGSTOP)
        stream.push()

        async def ask() -> float:
            longest_s = 0.0
            while (await host.keeper.stats()).row_stream.position < 1:  # type: ignore[union-attr]
                started_s = time.monotonic()
                await host.port._ports[1].submit(REQUESTS)
                longest_s = max(longest_s, time.monotonic() - started_s)
            return longest_s

        assert host.run(ask) < LIMITS.cut_off_s / 2, "the other was not held until the hung one was ended"
        wait_for(lambda: not Path(f"/proc/{stopped}").exists())
        host.check(stream, 1)
        assert host.pid(host.port._ports[1]) == other


def test_a_fault_stops_the_rows_and_not_the_server(stream: Stream, tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "deltas")
    with serving(tmp_path) as caller:
        host = host_of(caller)
        stream.push()
        too_large = np.full((2, 16), 3e38, np.float32)
        stream.producer.push("item", UNASKED, too_large, step=2)
        stream.producer.push("item", UNASKED, too_large, step=3, add=True)
        wait_for(lambda: "does not fit" in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))
        assert "the sum must be finite" in caller.get("/v1/pool").json["row_stream"]["stop"]
        assert caller.post("/v1/rank", rank_body()).json["row_position"]["sequence"] == 2
        os.kill(host.pid(host.keeper), signal.SIGKILL)
        wait_for(lambda: host.keeper.num_restarts and host.keeper.health is Health.READY)
        wait_for(lambda: "the sum must be finite" in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))
        assert skip_to(folder, 2, 3, also_readable=True) == [3]
        host.until(3)
        folder.write(Delta("another", 4, 4, 0.0))
        wait_for(lambda: "DeltaOutOfOrder" in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))


def test_a_new_keeper_knows_the_stream_of_the_one_before(stream: Stream, tmp_path: Path) -> None:
    with serving(tmp_path) as caller:
        host = host_of(caller)
        host.check(stream, stream.push())
        for path in (tmp_path / "deltas").iterdir():
            path.unlink()
        DeltaFolder(tmp_path / "deltas").write(Delta("another", 2, 4, 0.0))
        os.kill(host.pid(host.keeper), signal.SIGKILL)
        wait_for(lambda: host.keeper.num_restarts and host.keeper.health is Health.READY)
        wait_for(lambda: "not of stream" in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))
        host.check(stream, 1)


def test_a_model_in_the_stream_is_swapped_in_where_it_stands(stream: Stream, tmp_path: Path) -> None:
    save(tmp_path / "second", large_model(seed=5))
    with serving(tmp_path) as caller:
        host = host_of(caller)
        host.check(stream, stream.push())
        old = host.pid(host.keeper)
        stream.producer.push_model(tmp_path / "second", step=2)
        stream.twin.close()
        stream.twin, stream.table = tiny_engine(large_model(seed=5)), large_model(seed=5).tables["item"].numpy().copy()
        stream.expected[2] = scores_of(stream.twin)
        host.until(2)
        wait_for(lambda: len(host.port.keepers) == 1 and not Path(f"/proc/{old}").exists())
        host.check(stream, 2)
        host.check(stream, stream.push())
        os.kill(host.pid(host.port._ports[0]), signal.SIGKILL)
        wait_for(lambda: host.port._ports[0].health is not Health.READY)
        host.check(stream, stream.push())


def test_a_model_that_cannot_be_swapped_in_stops_the_stream_there(stream: Stream, tmp_path: Path) -> None:
    save(tmp_path / "second", large_model(seed=5))
    with serving(tmp_path) as caller:
        host = host_of(caller)
        stream.push()
        stream.producer.push_model(tmp_path / "second", step=2)
        (tmp_path / "second").rename(tmp_path / "moved")
        wait_for(lambda: "names a model" in (caller.get("/v1/pool").json["row_stream"]["stop"] or ""))
        host.check(stream, 1)


def test_it_starts_from_the_newest_snapshot_which_may_be_removed_then(stream: Stream, tmp_path: Path) -> None:
    snapshots, deltas = tmp_path / "snapshots", DeltaFolder(tmp_path / "deltas")
    for _ in range(4):
        stream.push()
    write_snapshot(tmp_path / "large", deltas, snapshots / snapshot_name(3), 3)
    deltas.trim(3)
    with serving(tmp_path, row_snapshots=str(snapshots)) as caller:
        host = host_of(caller)
        assert caller.get("/v1/pool").json["row_stream"]["deltas"] == 1
        shutil.rmtree(snapshots)
        for process in (host.keeper, host.port._ports[1]):
            os.kill(host.pid(process), signal.SIGKILL)
            wait_for(lambda process=process: process.num_restarts > 0)
            host.check(stream, stream.push())


def test_a_place_that_is_none_is_named_before_the_start(tmp_path: Path) -> None:
    save(tmp_path / "large", large_model())
    with pytest.raises(ConfigError, match="there is no folder of row deltas"):
        serving(tmp_path)
