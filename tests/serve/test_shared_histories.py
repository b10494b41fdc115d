"""A server whose histories are in a Redis that is stopped, killed, started again or full of garbage."""

import logging
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helmrec.errors import TablesTooSmall
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema, NewEvents
from helmrec.model.config import ModelConfig, TableConfig
from helmrec.serve.histories import StoredHistories
from helmrec.serve.logs import Logfmt
from tests.helpers import tiny_config
from tests.history.places import redis_process
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import events_body, rank_body, stored_body

pytest.importorskip("redis", reason="helmrec[cluster] is not installed")
EVENTS, USER = "/v1/events", "/v1/users/7"
PASSWORD = "hunter2secret"
APPEND_ONLY = ("--appendonly", "yes", "--requirepass", PASSWORD)
CONFIG = HistoryConfig(
    read_timeout_ms=100, write_timeout_ms=200, breaker_failures=3, breaker_pause_s=0.05, map_bytes=1 << 20
)


class Place:
    """A Redis that tests stop, kill and start again; what was acknowledged is in its log on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder / 'redis.sock'}?password={PASSWORD}"
        self._running = ExitStack()
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        self.process = self._running.enter_context(redis_process(self.folder, *APPEND_ONLY))
        return self.process

    def end(self) -> None:
        self._running.close()


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        place = Place(Path(folder))
        yield place
        place.end()


@pytest.fixture
def histories(place: Place) -> StoredHistories:
    return StoredHistories.open(place.url, tiny_config(), CONFIG)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Everything that is logged, as a server writes it."""
    caplog.set_level(logging.DEBUG)
    yield lambda: "\n".join(Logfmt().format(record) for record in caplog.records)


def test_a_redis_that_stops_refuses_stored_histories_and_nothing_else(keeper: Caller, place: Place, lines: Any) -> None:
    assert keeper.post(EVENTS, events_body(0)).status == 200
    place.process.send_signal(signal.SIGSTOP)
    started_s = time.perf_counter()
    refused = keeper.post("/v1/rank", stored_body())
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert time.perf_counter() - started_s < 1
    assert keeper.post("/v1/rank", rank_body()).status == 200
    wait_for(lambda: keeper.get("/readyz").status == 503, 10)
    assert keeper.get("/readyz").json["status"] == "degraded"
    bodies = [call.body for call in (keeper.get(USER), keeper.post(EVENTS, events_body(3)), keeper.get("/readyz"))]
    assert keeper.get("/metrics").status == 200
    place.process.send_signal(signal.SIGCONT)
    wait_for(lambda: keeper.get("/readyz").status == 200, 10)
    assert keeper.post("/v1/rank", stored_body()).json["history_version"] == 3
    assert 'event="the history store does not answer"' in lines()
    for text in (lines(), *(body.decode() for body in bodies)):
        assert PASSWORD not in text


def test_a_redis_that_is_killed_and_started_again_lost_nothing(keeper: Caller, place: Place, lines: Any) -> None:
    assert keeper.post(EVENTS, events_body(0)).status == 200
    place.process.kill()
    place.process.wait()
    assert keeper.post("/v1/rank", stored_body()).status == 503
    assert keeper.post(EVENTS, events_body(3, timestamps=[40, 50, 60])).status == 503
    wait_for(lambda: keeper.get("/readyz").status == 503, 10)
    assert "cannot be reached" in keeper.get("/readyz").json["histories"]
    place.start()
    wait_for(lambda: keeper.get("/readyz").status == 200, 10)
    assert keeper.post("/v1/rank", stored_body()).json["history_version"] == 3
    assert keeper.post(EVENTS, events_body(3, timestamps=[40, 50, 60])).json["version"] == 6
    assert PASSWORD not in lines()


def test_a_redis_that_is_started_again_empty_is_described_anew(keeper: Caller, place: Place) -> None:
    assert keeper.post(EVENTS, events_body(0)).status == 200
    place.process.kill()
    place.process.wait()
    for file in place.folder.iterdir():
        file.unlink()
    place.start()
    wait_for(lambda: keeper.get("/readyz").status == 200, 10)
    assert keeper.post("/v1/rank", stored_body()).json["history_version"] == 0, "its operator let it lose everything"
    stale = keeper.post(EVENTS, events_body(3, timestamps=[40, 50, 60]))
    assert (stale.status, stale.json["current_version"]) == (409, 0)
    assert keeper.post(EVENTS, events_body(0)).json["version"] == 3


@pytest.mark.parametrize("garbage", [b"", b"x" * 32, b"\xff" * 7])
def test_garbage_in_a_redis_is_our_failure_for_that_user_alone(
    keeper: Caller, histories: StoredHistories, garbage: bytes, lines: Any
) -> None:
    for user in (7, 8):
        assert keeper.post(EVENTS, events_body(0, user_id=user)).status == 200
    client, key = histories._store._client, histories._store._keys.user(7)  # type: ignore[attr-defined]
    client.hset(key, b"record", garbage)
    for _ in range(CONFIG.breaker_failures + 1):
        reply = keeper.post("/v1/rank", stored_body())
        assert (reply.status, reply.json["detail"]) == (500, "the server failed; its log has the reason")
    assert keeper.post("/v1/rank", stored_body(user_id=8)).json["history_version"] == 3
    assert keeper.get("/readyz").status == 200
    client.delete(key)
    client.set(key, garbage)  # not even a hash
    assert keeper.post("/v1/rank", stored_body()).status == 500
    assert "HistoryError" in lines()
    assert PASSWORD not in lines()


def test_a_redis_without_memory_is_full_and_one_that_only_reads_is_away(
    keeper: Caller, histories: StoredHistories
) -> None:
    assert keeper.post(EVENTS, events_body(0)).status == 200
    client = histories._store._client  # type: ignore[attr-defined]
    client.config_set("maxmemory", "1")
    try:
        full = keeper.post(EVENTS, events_body(0, user_id=8))
        assert (full.status, full.json["type"]) == (507, "urn:helmrec:error:HistoryFull")
        assert keeper.post("/v1/rank", stored_body()).json["history_version"] == 3
    finally:
        client.config_set("maxmemory", "0")
    client.replicaof("127.0.0.1", "1")
    try:
        assert keeper.post(EVENTS, events_body(0, user_id=8)).status == 503
        assert keeper.post("/v1/rank", stored_body()).json["history_version"] == 3
    finally:
        client.replicaof("NO", "ONE")
    assert keeper.post(EVENTS, events_body(0, user_id=8)).json["version"] == 3


def test_a_server_with_smaller_tables_than_another_says_so_and_harms_nothing(keeper: Caller, place: Place) -> None:
    """Two servers share the store, and one of them serves a larger model already."""
    from helmrec.history.redis import RedisHistory  # noqa: PLC0415 - an extra

    assert keeper.post(EVENTS, events_body(0, user_id=8)).status == 200
    larger = EventSchema.of_model(model_of(400))
    with RedisHistory(place.url, larger, CONFIG) as other:
        other.append(7, 0, NewEvents([1, 399], [0, 1], [10, 20], {"category": [1, 1]}))
    reply = keeper.post("/v1/rank", stored_body())
    assert (reply.status, reply.json["type"]) == (503, "urn:helmrec:error:TablesTooSmall")
    assert keeper.post("/v1/rank", stored_body(user_id=8)).json["history_version"] == 3
    assert keeper.get("/readyz").status == 200
    with pytest.raises(TablesTooSmall, match=r"table 'item' has 300 rows, the events kept in .* were taken for 400"):
        StoredHistories.open(place.url, tiny_config(), CONFIG)


def model_of(num_items: int) -> ModelConfig:
    tables = (TableConfig(name="item", num_rows=num_items), TableConfig(name="category", num_rows=20))
    return tiny_config(features=tables)
