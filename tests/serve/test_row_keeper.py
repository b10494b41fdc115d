"""The front's side of the keeper: updates of rows do not hold up its loop, and stay in order."""

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.cluster import engines
from helmrec.cluster.engines import EnginesPort, make_engines
from helmrec.engine.intake import RowUpdate, prepare_rows
from helmrec.errors import RowsNotSynced
from helmrec.model.weights import save_model
from helmrec.serve import host_log, row_keeper
from helmrec.serve.host_log import HostLog
from helmrec.serve.port import Health
from helmrec.serve.row_keeper import RowKeeper
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_model
from tests.serve.test_process_port import engine_config

SERVE = ServeConfig(engines=2, ring_bytes=1 << 20, log_level="error", policy="none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tiny_model(row_dtype="bfloat16")
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    return tmp_path / "tiny"


class ReadyKeeper(RowKeeper):
    """Notes what it would send to its process, which is ready at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SERVE, row_dtype="int8")
        self.sent: list[Any] = []

    async def until_ready(self) -> None:
        pass

    async def _call(self, name: str, kind: type[Any] | None, **arguments: Any) -> Any:
        self.sent.append(int(np.frombuffer(arguments["rows"], np.int64)[0]))


@pytest.fixture
def keeper(folder: Path) -> Iterator[ReadyKeeper]:
    keeper = ReadyKeeper(folder)
    yield keeper
    keeper.files.close()


class SlowAtFirst:
    """Prepares rows; the first update takes long."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def __call__(self, *arguments: Any, **options: Any) -> RowUpdate:
        is_first = not self.threads
        self.threads.add(threading.current_thread())
        time.sleep(0.1 * is_first)
        return prepare_rows(*arguments, **options)


async def update(update_rows: Callable[..., Any], num: int = 3) -> None:
    """Make calls at one time, in the order of their rows."""
    calls = [update_rows("item", [i], np.full((1, 16), i, np.float32)) for i in range(num)]
    await asyncio.gather(*calls)


def test_the_keeper_converts_beside_its_loop_and_in_order(keeper: ReadyKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_keeper, "prepare_rows", prepare := SlowAtFirst())
    asyncio.run(update(keeper.update_rows))
    assert keeper.sent == [0, 1, 2]
    assert threading.main_thread() not in prepare.threads


def test_engines_with_shared_tables_check_beside_their_loop_and_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port: EnginesPort = make_engines(folder, engine_config(), SERVE)
    sent = []

    async def note(table: str, ids: list[int], values: Any) -> None:
        sent.append((table, *ids, float(values[0, 0])))

    (keeper,) = port.keepers
    monkeypatch.setattr(keeper, "update_rows", note)
    monkeypatch.setattr(engines, "prepare_rows", prepare := SlowAtFirst())
    asyncio.run(update(port.update_rows))
    assert sent == [("item", i, float(i)) for i in range(3)]
    assert threading.main_thread() not in prepare.threads
    keeper.files.close()


def test_the_log_of_a_host_checks_beside_its_loop_and_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(host_log, "compile_updates", lambda config, codec: compiled.append(config.row_dtype))
    log = HostLog(folder, engine_config(host_rows_bytes="1MiB"))
    assert compiled == ["bfloat16"], "before the first update"
    sent: list[int] = []
    monkeypatch.setattr(log, "_append", lambda update: sent.append(int(update.rows[0])))
    monkeypatch.setattr(host_log, "prepare_rows", prepare := SlowAtFirst())
    asyncio.run(update(log.update_rows))
    assert sent == [0, 1, 2]
    assert threading.main_thread() not in prepare.threads
    log.close()


def test_an_update_whose_log_cannot_be_synced_is_in_the_log_and_the_error_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fdatasync", fail)
    log = HostLog(folder, engine_config(host_rows_bytes="1MiB"))
    with pytest.raises(RowsNotSynced, match="Input/output error"):
        asyncio.run(log.update_rows("item", [1], [[0.5] * 16]))
    assert log.num_bytes > 0
    log.close()


def test_a_keeper_is_ready_once_updates_are_compiled(keeper: ReadyKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any = object()
    found = []

    def note(config: Any, codec: Any) -> None:
        found.append((codec.code, keeper.health, threading.current_thread() is threading.main_thread()))

    async def call(link: Any, name: str, kind: Any, **arguments: Any) -> Any:
        pass

    monkeypatch.setattr(row_keeper, "compile_updates", note)
    monkeypatch.setattr(keeper, "_call_by", call)
    keeper._link = link
    asyncio.run(keeper._resume(link))
    assert found == [("int8", Health.STARTING, False)]
    assert keeper.health is Health.READY


def test_an_engine_that_comes_while_a_keeper_begins_to_follow_gets_its_tables(
    keeper: ReadyKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, engine = object(), object()
    introduced: list[object] = []

    async def call(to: object, name: str, kind: object) -> None:
        assert name == "follow"
        keeper.enter(engine, None)  # type: ignore[arg-type]

    async def introduce(given: Any, to: object) -> None:
        introduced.append(given)
        keeper._names["engine 0"] = given

    monkeypatch.setattr(row_keeper, "compile_updates", lambda *_: None)
    monkeypatch.setattr(keeper, "_call_by", call)
    monkeypatch.setattr(keeper, "_introduce", introduce)
    keeper._link = link  # type: ignore[assignment]
    asyncio.run(keeper._resume(link))  # type: ignore[arg-type]
    assert introduced == [engine]
    assert keeper.health is Health.READY
