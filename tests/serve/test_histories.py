"""A history store that is slow, gone, full of garbage or started again: what clients see of it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.engine.engine import Engine
from helmrec.errors import QueueFull
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema, NewEvents
from helmrec.history.file import Txn
from helmrec.history.users import Append
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_config
from tests.serve.asgi import Caller, Reply, send, wait_for
from tests.serve.cases import events_body, infer_json, rank_body, rank_requests, stored_body, tensors_of

EVENTS, USER = "/v1/events", "/v1/users/7"
CONFIG = HistoryConfig(
    sync="os", map_bytes=1 << 20, read_timeout_ms=100, write_timeout_ms=200, breaker_failures=3, breaker_pause_s=0.05
)
MODEL = tiny_config()
LEAN = {name: v for name, v in tensors_of(rank_requests(4)).items() if name in {"USER_IDS", "NUM_CANDIDATES"}}
LEAN |= {name: v for name, v in tensors_of(rank_requests(4)).items() if name.startswith(("CAND", "cand", "context"))}


class Slow(EmbeddedHistory):
    """A store whose disk can be held up, for readers and for the writer."""

    def __init__(self, path: Path) -> None:
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.num_reads = 0
        self.may_read.set()
        self.may_write.set()
        super().__init__(path, EventSchema.of_model(tiny_config()), CONFIG)
        reading, append = self._file.reading, self._users.append

        def read_slowly() -> Any:
            self.num_reads += 1
            assert self.may_read.wait(60)
            return reading()

        def append_slowly(txn: Txn, new: Append) -> Any:
            assert self.may_write.wait(60)
            return append(txn, new)

        self._file.reading = read_slowly  # type: ignore[method-assign]
        self._users.append = append_slowly  # type: ignore[method-assign]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Slow]:
    store = Slow(tmp_path / "slow")
    yield store
    store.may_read.set()
    store.may_write.set()


@pytest.fixture
def histories(store: Slow) -> StoredHistories:
    return StoredHistories(store, tiny_config(), CONFIG)


def timed(call: Callable[[], Reply]) -> tuple[Reply, float]:
    started_s = time.perf_counter()
    return call(), time.perf_counter() - started_s


def test_while_the_store_hangs_only_what_needs_it_is_refused(keeper: Caller, store: Slow) -> None:
    assert keeper.post(EVENTS, events_body(0)).status == 200
    before = keeper.post("/v1/rank", stored_body()).json
    store.may_read.clear()
    body = json.dumps(stored_body()).encode()

    async def all_at_once() -> list[Reply]:
        return await asyncio.gather(*(send(keeper.app, "POST", "/v1/rank", body) for _ in range(30)))

    replies = keeper.run(all_at_once())
    assert {reply.status for reply in replies} == {503}
    assert {reply.json["type"] for reply in replies} == {"urn:helmrec:error:HistoryUnavailable"}
    assert replies[0].headers["retry-after"] == "1"
    assert keeper.post("/v1/rank", rank_body()).status == 200, "it carries its history"
    ready = keeper.get("/readyz")
    assert (ready.status, ready.json) == (
        503, {"status": "degraded", "histories": "the history store does not answer (no answer for 100 ms)"}
    )  # fmt: skip
    assert keeper.get("/v2/health/ready").status == 503
    assert keeper.get("/healthz").json == {"status": "ready"}
    others = [keeper.get(USER), keeper.post(EVENTS, events_body(3)), keeper.delete(USER)]
    assert [reply.status for reply in others] == [503] * 3
    text = keeper.get("/metrics").body.decode()
    assert "helmrec_history_ready 0.0" in text
    assert "helmrec_engine_ready 1.0" in text
    store.may_read.set()
    wait_for(lambda: keeper.get("/readyz").status == 200, 5)
    after = keeper.post("/v1/rank", stored_body()).json
    assert after["history_version"] == 3
    np.testing.assert_allclose(after["scores"], before["scores"], atol=1e-5)
    assert "helmrec_history_ready 1.0" in keeper.get("/metrics").body.decode()


def test_while_reads_wait_everything_else_is_answered(
    keeper: Caller, store: Slow, histories: StoredHistories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "_config", CONFIG.model_copy(update={"read_timeout_ms": 30_000}))
    store.may_read.clear()
    stored, whole = (json.dumps(body).encode() for body in (stored_body(), rank_body()))

    async def ask() -> None:
        num_reads = store.num_reads
        waiting = [asyncio.create_task(send(keeper.app, "POST", "/v1/rank", stored)) for _ in range(3)]
        while store.num_reads < num_reads + 3:
            await asyncio.sleep(0.001)
        for method, path, body in (("GET", "/healthz", b""), ("GET", "/readyz", b""), ("POST", "/v1/rank", whole)):
            assert (await send(keeper.app, method, path, body)).status == 200
        assert not any(task.done() for task in waiting)
        store.may_read.set()
        assert [(await task).status for task in waiting] == [200] * 3

    keeper.run(ask())


def test_a_store_that_hangs_is_left_alone_until_it_is_tried_again(keeper: Caller, store: Slow) -> None:
    store.may_read.clear()
    wait_for(lambda: keeper.get("/readyz").status == 503, 10)
    num_reads = store.num_reads
    for _ in range(50):
        assert keeper.post("/v1/rank", stored_body()).status == 503
    assert store.num_reads - num_reads <= CONFIG.read_threads, "reads that hang, and no more"
    store.may_read.set()
    wait_for(lambda: keeper.get("/readyz").status == 200, 5)


def test_too_many_reads_at_once_are_not_taken_for_a_store_that_is_gone(histories: StoredHistories, store: Slow) -> None:
    """All threads are busy, one after another comes back: some wait too long, and the store is fine."""

    def slow_read(*_: Any) -> None:
        time.sleep(0.03)

    async def flood() -> list[Any]:
        calls = [histories._call(slow_read) for _ in range(80)]  # ten a thread: 300 ms, where each may wait 100
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(flood())
    kinds = {type(outcome) for outcome in outcomes}
    assert kinds == {type(None), QueueFull}
    assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) > 20
    assert histories.problem is None
    store.close()


def test_an_event_loop_that_is_late_does_not_make_the_store_late(histories: StoredHistories, store: Slow) -> None:
    async def read() -> int:
        reading = asyncio.create_task(histories.read([7], MODEL))
        appending = asyncio.create_task(histories.append(8, 0, NewEvents([1], [1], [1], {"category": [1]}), MODEL))
        await asyncio.sleep(0.01)
        time.sleep(2 * CONFIG.write_timeout_ms / 1e3)
        assert (await appending).version == 1
        return (await reading)[0].version

    assert asyncio.run(read()) == 0
    assert histories.num_failures == 0
    store.close()


def test_a_call_of_many_users_may_take_longer_than_one_read(
    keeper: Caller, store: Slow, histories: StoredHistories
) -> None:
    read_last = store.read_last

    def slow_read(user_id: int | str, num_events: int) -> Any:
        time.sleep(0.03)
        return read_last(user_id, num_events)

    store.read_last = slow_read  # type: ignore[method-assign]
    many = {name: list(values) * 10 for name, values in LEAN.items()}
    reply, seconds = timed(lambda: keeper.post("/v2/models/tiny/infer", infer_json(many)))
    assert reply.status == 200, reply.body
    assert seconds > CONFIG.read_timeout_ms / 1e3


def test_an_append_that_hangs_is_refused_and_acknowledged_once_when_sent_again(keeper: Caller, store: Slow) -> None:
    store.may_write.clear()
    reply, seconds = timed(lambda: keeper.post(EVENTS, events_body(0)))
    assert (reply.status, seconds < 1) == (503, True)
    assert keeper.post("/v1/rank", stored_body()).status == 200, "reads go on"
    assert keeper.get("/readyz").status == 200
    store.may_write.set()
    wait_for(lambda: keeper.get(USER).status == 200, 5)
    again = keeper.post(EVENTS, events_body(0)).json
    assert (again["version"], again["is_repeat"]) == (3, True)


@pytest.mark.parametrize("path", ["/v1/rank", "/v1/prefill", "/v2/models/tiny/infer"])
def test_a_user_who_is_forgotten_while_the_history_is_read_does_not_come_back(
    keeper: Caller, store: Slow, histories: StoredHistories, served: Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = LEAN["USER_IDS"].tolist()
    for user in users:
        assert keeper.post(EVENTS, events_body(0, user_id=user)).status == 200
    forgotten = users[2]
    bodies: dict[str, Any] = {
        "/v1/rank": stored_body(user_id=forgotten),
        "/v1/prefill": {"user_id": forgotten, "context": {"country": 3}, "budget_ms": 0.001},
        "/v2/models/tiny/infer": infer_json(LEAN),
    }
    resident = served.stats().pool.resident_users
    has_read, read_last = threading.Event(), store.read_last
    may_return = threading.Event()

    def read_early(user_id: int, num_events: int) -> Any:
        found = read_last(user_id, num_events)
        if user_id == forgotten and found.version == 3:
            has_read.set()
            may_return.wait(60)
        return found

    monkeypatch.setattr(store, "read_last", read_early)
    monkeypatch.setattr(histories, "_config", CONFIG.model_copy(update={"read_timeout_ms": 30_000}))

    async def race() -> list[Reply]:
        asked = asyncio.create_task(send(keeper.app, "POST", path, json.dumps(bodies[path]).encode()))
        while not has_read.is_set():
            await asyncio.sleep(0.001)
        gone = await send(keeper.app, "DELETE", f"/v1/users/{forgotten}")
        may_return.set()
        return [gone, await asked]

    gone, reply = keeper.run(race())
    assert (gone.status, gone.json["had_events"]) == (200, True)
    assert (reply.status, reply.json["type"]) == (409, "urn:helmrec:error:Forgotten")
    assert served.stats().pool.resident_users == resident
    assert keeper.post("/v1/rank", stored_body(user_id=forgotten)).json["history_version"] == 0


def test_a_server_ends_although_its_store_hangs(served: Engine, store: Slow) -> None:
    with Caller(
        make_app(InProcessPort(served), ServeConfig(), StoredHistories(store, tiny_config(), CONFIG))
    ) as keeper:
        keeper.wait_until_ready()
        store.may_read.clear()
        assert keeper.post("/v1/rank", stored_body()).status == 503


def test_an_unexpected_error_does_not_end_the_looks_at_the_store(
    keeper: Caller, store: Slow, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("helmrec.serve.histories._PING_EVERY_S", 0.01)
    monkeypatch.setattr(store, "ping", fail)
    wait_for(lambda: caplog.text.count("could not be pinged") >= 2, 5)
    monkeypatch.undo()
    store.may_read.clear()
    wait_for(lambda: keeper.get("/readyz").status == 503, 10)
