"""Engines of a host share one copy of the tables: its memory, its updates, and kill -9 of any process under load."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.cluster.engines import EnginesPort, make_engines
from helmrec.engine.engine import Engine
from helmrec.errors import ModelError
from helmrec.model.config import TableConfig
from helmrec.model.weights import LoadedModel, save_model
from helmrec.serve.app import make_app
from helmrec.serve.port import Health
from helmrec.serve.row_keeper import RowKeeper
from helmrec.serve.row_round import RoundLimits
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import rank_requests
from tests.serve.test_process_port import engine_config

LIMITS = RoundLimits(hold_s=0.5, cut_off_s=5.0)
SERVE = ServeConfig(engines=2, ring_bytes=1 << 20, log_level="error", policy="none")
LARGE = {"features": (TableConfig(name="item", num_rows=200_000), TableConfig(name="category", num_rows=20))}
REQUESTS = rank_requests(12)
IDS = sorted({int(item) for request in REQUESTS for item in (*request.items, *request.candidates)})


def large_model(seed: int = 0) -> LoadedModel:
    return tiny_model(seed, **LARGE)


def values(value: float) -> Any:
    return np.full((len(IDS), 16), value, np.float32)


def save(path: Path, model: LoadedModel) -> Path:
    save_model(path, model.config, model.dense, model.tables)
    return path


def scores_of(engine: Engine) -> list[Any]:
    return [result.scores for result in engine.rank(REQUESTS)]


class Host:
    """A front, a keeper and two engines."""

    def __init__(self, port: EnginesPort, caller: Caller) -> None:
        self.port = port
        self.caller = caller

    @property
    def keeper(self) -> RowKeeper:
        (keeper,) = self.port.keepers
        return keeper

    def pid(self, of: Any) -> int:
        assert of._process is not None
        pid: int = of._process.pid
        return pid

    @property
    def pids(self) -> list[int]:
        return [self.pid(process) for process in (self.keeper, *self.port._ports)]

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return self.caller.run(work())

    def wait(self) -> None:
        wait_for(lambda: all(process.health is Health.READY for process in (self.keeper, *self.port._ports)))
        wait_for(lambda: all(seen.num_reports for seen in self.port._seen))

    def scores(self, engine: int) -> list[Any]:
        return [result.scores for result in self.run(lambda: self.port._ports[engine].submit(REQUESTS))]


def large_engines(folder: Path) -> EnginesPort:
    return make_engines(folder, engine_config(), SERVE, LIMITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tables") / "large", large_model())


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Host]:
    with Caller(make_app(large_engines(folder), ServeConfig())) as caller:
        host = Host(caller.app.state.front.port, caller)
        caller.wait_until_ready()
        yield host
        host.wait()
        pids = host.pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def pss_bytes(pid: int, mapping: str) -> int:
    """Sum of the proportional shares of the mappings whose names match."""
    found, is_wanted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            is_wanted = re.search(mapping, line) is not None
        elif is_wanted and line.startswith("Pss:"):
            found += 1_024 * int(line.split()[1])
    return found


def test_the_tables_are_in_memory_once(host: Host) -> None:
    host.wait()
    size = large_model().config.num_rows * 64
    for engine in range(2):
        host.scores(engine)
    tables = [pss_bytes(pid, "helmrec-tables") for pid in host.pids]
    assert all(tables), "all processes read them"
    assert 0.99 * size <= sum(tables) <= 1.05 * size
    assert not any(pss_bytes(pid, r"tables/.*\.safetensors") for pid in host.pids), "and no second time from the files"


def test_an_update_is_seen_by_both_exactly(host: Host) -> None:
    expected = tiny_engine(large_model())
    for value in (0.25, -0.5):
        host.caller.run(host.port.update_rows("item", IDS, values(value).tolist()))
        expected.update_rows("item", IDS, values(value))
        for engine in range(2):
            for found, wanted in zip(host.scores(engine), scores_of(expected), strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert host.run(host.keeper.stats).engines == 2


def test_rounded_tables_are_shared_and_updated_as_an_engine_rounds_its_own(tmp_path: Path) -> None:
    settings = engine_config(row_dtype="int8", host_row_dtype="int8")
    expected, folder = (
        tiny_engine(tiny_model(), row_dtype="int8", host_row_dtype="int8"),
        save(tmp_path / "model", tiny_model()),
    )
    with Caller(make_app(make_engines(folder, settings, SERVE), ServeConfig())) as caller:
        host = Host(caller.app.state.front.port, caller)
        caller.wait_until_ready()
        host.wait()
        for value in (None, 0.3):
            if value is not None:
                host.caller.run(host.port.update_rows("item", IDS, values(value).tolist()))
                expected.update_rows("item", IDS, values(value))
            for engine in range(2):
                for found, wanted in zip(host.scores(engine), scores_of(expected), strict=True):
                    np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert sum(pss_bytes(pid, "helmrec-tables") for pid in host.pids) > 0


async def load(host: Host, states: list[list[Any]], is_over: asyncio.Event) -> int:
    """Ask until it is over; every answer must be of one state of the rows. Returns the number of answers."""
    num = 0
    while not is_over.is_set():
        for i, (result,) in enumerate(await asyncio.gather(*(host.port.submit([each]) for each in REQUESTS))):
            assert any(np.allclose(result.scores, state[i], atol=1e-5) for state in states), "a wrong score"
            num += 1
    return num


def under_load(host: Host, kill: Callable[[], None], num_updates: int = 24) -> int:
    """Kill something while requests are answered and rows change; no call may fail."""
    engine = tiny_engine(large_model())
    states = []
    for value in (0.25, -0.5):
        engine.update_rows("item", IDS, values(value))
        states.append(scores_of(engine))

    async def work() -> int:
        await host.port.update_rows("item", IDS, values(-0.5))
        is_over = asyncio.Event()
        loading = asyncio.create_task(load(host, states, is_over))
        for i in range(num_updates):
            if i == num_updates // 3:
                asyncio.get_running_loop().call_later(0.003, kill)
            await host.port.update_rows("item", IDS, values(states_of[i % 2]))
        is_over.set()
        return await loading

    states_of = (0.25, -0.5)
    num: int = host.run(work)
    host.wait()
    for found in (host.scores(0), host.scores(1)):
        for one, wanted in zip(found, states[1], strict=True):
            np.testing.assert_allclose(one, wanted, atol=1e-5)
    return num


def test_a_killed_keeper_costs_nothing_and_the_next_one_copies_nothing(host: Host) -> None:
    host.wait()
    engines, restarts = [host.pid(port) for port in host.port._ports], host.keeper.num_restarts
    keeper = host.pid(host.keeper)
    assert under_load(host, lambda: os.kill(keeper, signal.SIGKILL)) > 0
    assert host.keeper.num_restarts == restarts + 1
    assert [host.pid(port) for port in host.port._ports] == engines, "engines served on"
    assert host.port.health is Health.READY


@pytest.mark.parametrize("engine", [0, 1])
def test_a_killed_engine_finds_the_tables_when_it_starts_again(host: Host, engine: int) -> None:
    host.wait()
    pid, other = host.pid(host.port._ports[engine]), host.pid(host.port._ports[1 - engine])
    assert under_load(host, lambda: os.kill(pid, signal.SIGKILL)) > 0
    assert host.pid(host.port._ports[1 - engine]) == other, "the other served on"
    assert host.pid(host.port._ports[engine]) != pid


def test_an_engine_that_hangs_is_ended_and_the_rows_change(host: Host) -> None:
    host.wait()
    stopped, other = [host.pid(port) for port in host.port._ports]
    os.kill(stopped, signal.SIGSTOP)

    async def work() -> float:
        updating = asyncio.create_task(host.port.update_rows("item", IDS, values(0.75)))
        longest_s = 0.0
        while not updating.done():
            started_s = time.monotonic()
            await host.port._ports[1].submit(REQUESTS)
            longest_s = max(longest_s, time.monotonic() - started_s)
        await updating
        return longest_s

    assert host.run(work) < LIMITS.cut_off_s / 2, "the other was not held until the hung one was ended"
    wait_for(lambda: not Path(f"/proc/{stopped}").exists())
    host.wait()
    assert host.pid(host.port._ports[1]) == other, "the one that did not hang served on"
    expected = tiny_engine(large_model())
    expected.update_rows("item", IDS, values(0.75))
    for engine in range(2):
        for found, wanted in zip(host.scores(engine), scores_of(expected), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_swap_brings_new_tables_and_frees_the_old_ones(host: Host, tmp_path: Path) -> None:
    host.wait()
    old, model = host.pid(host.keeper), large_model(seed=5)
    folder = save(tmp_path / "new", model)
    host.run(lambda: host.port.swap(str(folder)))
    assert not Path(f"/proc/{old}").exists()
    expected = tiny_engine(model)
    expected.update_rows("item", IDS, values(0.25))
    host.run(lambda: host.port.update_rows("item", IDS, values(0.25)))
    os.kill(host.pid(host.port._ports[1]), signal.SIGKILL)
    wait_for(lambda: host.port._ports[1].health is not Health.READY)
    host.wait()
    for engine in range(2):
        for found, wanted in zip(host.scores(engine), scores_of(expected), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    size = model.config.num_rows * 64
    wait_for(lambda: sum(pss_bytes(pid, "helmrec-tables") for pid in host.pids) <= 1.05 * size)


def test_a_swap_that_is_refused_leaves_the_old_tables(host: Host, tmp_path: Path) -> None:
    host.wait()
    before, keeper = host.scores(0), host.pid(host.keeper)
    folder = save(tmp_path / "other", tiny_model(3, name="another", **LARGE))
    with pytest.raises(ModelError, match="cannot be swapped in"):
        host.run(lambda: host.port.swap(str(folder)))
    assert host.pid(host.keeper) == keeper
    for found, wanted in zip(host.scores(0), before, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_tables_that_cannot_be_loaded_are_the_reason_why_the_server_does_not_start(tmp_path: Path) -> None:
    folder = save(tmp_path / "broken", tiny_model())
    port = make_engines(folder, engine_config(), SERVE)
    with (folder / "tables" / "item.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with Caller(make_app(port, ServeConfig())) as caller:
        wait_for(lambda: port.health is Health.FAILED)
        assert "corrupt" in str(port.reason)
        assert caller.get("/readyz").status == 503


FRONT = """
import asyncio, sys
from pathlib import Path
from tests.cluster.test_shared_tables import large_engines

async def main():
    port = large_engines(Path(sys.argv[1]))
    port.start()
    while port.health.value != "ready":
        await asyncio.sleep(0.05)
    print(*(each._process.pid for each in (*port.keepers, *port._ports)), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_front_is_killed(folder: Path) -> None:
    names = set(Path("/dev/shm").iterdir())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", FRONT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout is not None
        pids = [int(pid) for pid in front.stdout.readline().split()]
        assert len(pids) == 3
        front.kill()
    wait_for(lambda: not any(_is_running(pid) for pid in pids))
    assert set(Path("/dev/shm").iterdir()) <= names


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False
