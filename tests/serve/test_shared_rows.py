"""Shared rows: engines see whole updates between steps, also when the keeper ends or an engine hangs."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.config import FixedRowDtype
from helmrec.engine.engine import Engine
from helmrec.model.config import ModelConfig
from helmrec.model.folder import find_rows, read_manifest
from helmrec.model.shared_tables import row_bytes_of, row_codec
from helmrec.model.table_memory import TableFiles, TableMemory
from helmrec.model.weights import load_dense, save_model
from helmrec.serve import shared_rows
from helmrec.serve.keeper_process import Keeper
from helmrec.serve.row_round import RoundLimits
from helmrec.serve.shared_rows import SharedRows, TableDoor
from helmrec.types import IntArray, RowPosition
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import wait_for
from tests.serve.cases import as_request, rank_body
from tests.serve.test_process_port import engine_config

LIMITS = RoundLimits(hold_s=0.2, cut_off_s=1.0)
ROWS = np.array([1, 2, 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_model()
    path = tmp_path_factory.mktemp("shared") / "tiny"
    save_model(path, made.config, made.dense, made.tables)
    return path


class Host:
    """A keeper in the loop of a thread of its own, and engines that share its tables."""

    def __init__(self, folder: Path, row_dtype: FixedRowDtype = "model") -> None:
        self.folder = folder
        self.config: ModelConfig = read_manifest(folder).model
        self.row_dtype = row_dtype
        self.files = TableFiles.create(self.config, row_dtype)
        self.cut_off: list[str] = []
        self.ends: dict[str, socket.socket] = {}  # the keeper's ends of its connections
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.engines: list[Engine] = []
        self.rows: list[SharedRows] = []
        self.start_keeper()

    def start_keeper(self) -> None:
        self.memory = TableMemory(self.config, self.files, self.row_dtype)
        spans = {table.name: find_rows(self.folder, table, self.config) for table in self.config.tables}
        self.memory.load(spans, RowPosition(), lambda done, total: None)
        self.keeper = Keeper(self.memory, LIMITS, self.cut_off.append)

    def call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            value = work()
            return await value if asyncio.iscoroutine(value) else value

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def connect(self, rows: SharedRows, name: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends[name] = ours
        self.call(lambda: self.keeper.join(name, ours))
        rows.connect(theirs)
        rows.wait()

    def tables(self, name: str) -> SharedRows:
        rows = SharedRows(self.config, self.files, self.row_dtype)
        self.connect(rows, name)
        return rows

    def engine(self, rows: SharedRows) -> Engine:
        made = Engine(load_dense(self.folder, rows.tables), engine_config(host_row_dtype=self.row_dtype))
        rows.follow_with(made)
        self.engines.append(made)
        return made

    def serving(self) -> list[Engine]:
        """Start two engines."""
        self.rows = [self.tables(name) for name in "ab"]
        engines = [self.engine(each) for each in self.rows]
        for each in self.rows:
            each.start()
        return engines

    def update(self, value: float, rows: IntArray = ROWS, sequence: int = 0) -> None:
        self.call(lambda: self.keeper.update(rows, self.values(value, rows.size), RowPosition(sequence)))

    def values(self, value: float, num: int = ROWS.size) -> Any:
        codec = row_codec(self.config, self.row_dtype)
        return row_bytes_of(codec.encode(torch.full((num, self.config.row_dim), value)))

    def close(self) -> None:
        for engine in self.engines:
            engine.check()
            engine.close()
        self.call(self.keeper.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.files.close()


@pytest.fixture
def host(folder: Path) -> Iterator[Host]:
    host = Host(folder)
    yield host
    host.close()


def score(engine: Engine) -> Any:
    (result,) = engine.rank([as_request(rank_body(items=[1, 2, 3]))])
    return result.scores


def expected(value: float | None) -> Any:
    engine = tiny_engine(tiny_model())
    if value is not None:
        engine.update_rows("item", ROWS, np.full((ROWS.size, engine.model_config.row_dim), value, np.float32))
    return score(engine)


def test_engines_see_an_update_that_was_written_once(host: Host) -> None:
    engines = host.serving()
    for engine in engines:
        for _ in range(3):  # rows and prefixes are cached
            np.testing.assert_allclose(score(engine), expected(None), atol=1e-5)
    for value in (0.25, -0.5):
        host.update(value, sequence=4)
        for engine in engines:
            for _ in range(2):
                np.testing.assert_allclose(score(engine), expected(value), atol=1e-5)
            assert engine.row_position == RowPosition(4)
            assert engine.stats().audit_mismatches == 0
    stats = host.keeper.stats
    assert (stats.updates, stats.rows, stats.turns, stats.engines) == (2, 6, 2, 2)


@pytest.mark.parametrize("code", ["fp8_e4m3", "int8"])
def test_engines_that_share_rounded_tables_score_as_one_with_its_own(folder: Path, code: FixedRowDtype) -> None:
    host = Host(folder, code)
    rows = host.tables("late")
    late, engines = host.engine(rows), host.serving()
    score(late)
    with tiny_engine(tiny_model(), host_row_dtype=code) as alone:
        before = score(alone)
        assert all(np.array_equal(score(engine), before) for engine in engines)
        host.update(0.3)
        alone.update_rows("item", ROWS, np.full((ROWS.size, host.config.row_dim), 0.3, np.float32))
        rows.start()
        for engine in (*engines, late):
            for _ in range(2):
                np.testing.assert_allclose(score(engine), score(alone), atol=1e-6)
            assert engine.stats().audit_mismatches == 0
    host.rows.append(rows)
    host.close()


def test_rows_that_changed_while_an_engine_started_are_right_when_it_serves(host: Host) -> None:
    rows = host.tables("a")
    engine = host.engine(rows)
    for _ in range(3):
        score(engine)  # caches the old rows, as a warm-up does
    host.update(0.25)
    rows.start()
    np.testing.assert_allclose(score(engine), expected(0.25), atol=1e-5)


def test_an_update_larger_than_the_journal_is_written_in_parts(host: Host) -> None:
    rows = host.tables("a")
    engine = host.engine(rows)
    rows.start()
    host.memory.journal.max_rows = 2
    host.update(0.25)
    assert host.keeper.stats.updates == 2
    np.testing.assert_allclose(score(engine), expected(0.25), atol=1e-5)


async def update_and_die(host: Host, bytes_written: int | None) -> None:
    """Begin an update as a keeper that is killed: after so many bytes of the rows, or before it has begun (None)."""

    def die(ids: IntArray, new: Any) -> None:
        for i in range(min(new.size, bytes_written or 0)):
            host.memory._rows[ids[i // new.shape[1]], i % new.shape[1]] = new.flat[i]
        raise KeyboardInterrupt

    if bytes_written is None:
        host.memory.journal.write = lambda write: die(ROWS, host.values(0.25))  # type: ignore[method-assign]
    else:
        host.memory.write = die  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        await host.keeper.update(ROWS, host.values(0.25))
    for end in host.ends.values():
        host.loop.remove_reader(end)
        end.close()


@pytest.mark.parametrize("bytes_written", [None, 0, 5, 70, 10_000])
def test_a_keeper_that_ends_while_engines_are_held_leaves_them_with_all_rows_or_none(
    host: Host, bytes_written: int | None
) -> None:
    engines = host.serving()
    for engine in engines:
        score(engine)

    host.call(lambda: update_and_die(host, bytes_written))
    wanted = expected(None if bytes_written is None else 0.25)
    for engine in engines:
        np.testing.assert_allclose(score(engine), wanted, atol=1e-5)
    host.start_keeper()
    for name, each in zip("cd", host.rows, strict=True):
        host.connect(each, name)
    for value in (0.25, 0.75):
        host.update(value)
        for engine in engines:
            np.testing.assert_allclose(score(engine), expected(value), atol=1e-5)


def test_an_engine_that_hangs_is_cut_off_and_holds_no_other(host: Host) -> None:
    engines = host.serving()
    let_go, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        with engines[0]._lock:
            hangs.set()
            let_go.wait()

    stuck = threading.Thread(target=hang)
    stuck.start()
    hangs.wait()
    updating = threading.Thread(target=host.update, args=(0.25,))
    updating.start()
    while not host.cut_off:
        assert np.allclose(score(engines[1]), expected(None), atol=1e-5), "the other serves on"
    assert host.cut_off == ["a"]
    assert host.keeper.stats.longest_held_s == 0, "nobody was held for it"
    host.call(lambda: host.keeper._leave("a"))  # as when its process is killed
    updating.join(20)
    np.testing.assert_allclose(score(engines[1]), expected(0.25), atol=1e-5)
    let_go.set()
    stuck.join()


def test_an_engine_that_hangs_after_it_was_asked_delays_the_others_by_a_bound(host: Host) -> None:
    engines = host.serving()
    real, calls = engines[0].rows_at_rest, []

    def hang_once() -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first time it is asked, the second time it is to hold
            threading.Event().wait(0.4)
        return real()

    engines[0].rows_at_rest = hang_once  # type: ignore[method-assign]
    host.update(0.25)
    for engine in engines:
        np.testing.assert_allclose(score(engine), expected(0.25), atol=1e-5)
    stats = host.keeper.stats
    assert (stats.turns, stats.cut_off) == (2, 0)
    assert stats.longest_held_s < 2 * LIMITS.hold_s


def test_under_load_every_score_is_of_one_state_of_the_rows(host: Host) -> None:
    engines = host.serving()
    states = [0.25, -0.75]
    host.update(states[1])
    wanted, wrong, is_over = [expected(value) for value in states], list[Any](), threading.Event()

    def load(engine: Engine) -> None:
        while not is_over.is_set():
            found = score(engine)
            if not any(np.allclose(found, each, atol=1e-5) for each in wanted):
                wrong.append(found)

    loads = [threading.Thread(target=load, args=(engine,)) for engine in engines]
    for each in loads:
        each.start()
    for i in range(60):
        host.update(states[i % 2])
    is_over.set()
    for each in loads:
        each.join()
    assert not wrong
    assert all(engine.stats().audit_mismatches == 0 for engine in engines)


def test_a_closed_engine_is_not_waited_for(host: Host) -> None:
    engines = host.serving()
    host.rows[0].close()
    engines[0].close()
    wait_for(lambda: host.keeper.stats.engines == 1)
    host.update(0.25)
    np.testing.assert_allclose(score(engines[1]), expected(0.25), atol=1e-5)
    host.engines.remove(engines[0])


def test_tables_come_through_the_door_and_a_new_keeper_too(host: Host) -> None:
    ours, theirs = socket.socketpair()
    door = TableDoor(theirs)

    def send(name: str, engine: str) -> None:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.call(lambda: host.keeper.join(engine, left))
        payload = f"{name} model {host.folder}".encode()
        socket.send_fds(ours, [payload], [*host.files, right.fileno()])
        right.close()

    send("tables-1", "a")
    rows = door.wait_for(host.folder)
    send("tables-1", "b")
    wait_for(lambda: len(door._rows) == 1 and host.keeper.stats.engines == 2)
    send("tables-2", "c")
    assert door.wait_for(host.folder) is not rows, "other tables of the same model"
    ours.close()
    wait_for(lambda: door._is_closed)
    theirs.close()


def test_an_update_without_rows_moves_the_position_of_all_engines(host: Host) -> None:
    """As a skipped number of a stream does."""
    engines = host.serving()
    host.update(0.25, np.zeros(0, np.int64), sequence=7)
    assert [engine.row_position for engine in engines] == [RowPosition(7)] * 2


def test_rows_that_changed_meanwhile_are_kept_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may change the same rows for as long as an engine takes to start."""
    monkeypatch.setattr(shared_rows, "_FEW_ROWS", 100)
    rng, found, wanted = np.random.default_rng(0), shared_rows._RowSet(), set[int]()
    assert found.rows().size == 0
    for _ in range(200):
        rows = rng.choice(1_000, 10, replace=False)
        found.add(rows)
        wanted |= set(rows.tolist())
        assert found._num_others <= max(100, len(wanted)), "memory is bounded by the rows, not by the updates"
    assert found.rows().tolist() == sorted(wanted)
