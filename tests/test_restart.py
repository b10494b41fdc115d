"""Killed under load and started again: every acknowledged event is there, no score is stale, and rows are warm.

Clients append to their users' histories and rank with them the whole time; nobody tells them of the kill.
"""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.engine.engine import EngineStats
from helmrec.errors import Refused, ServerError, StaleVersion
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec_bench.measure.server import ServerProcess

MODEL = profile("demo", 3_000)
NUM_ITEMS, NUM_CATEGORIES = MODEL.features[0].num_rows, MODEL.features[1].num_rows
FIRST_EVENTS, NUM_CANDIDATES = 60, 32
NUM_CLIENTS, USERS_PER_CLIENT = 3, 4
BEFORE_S, FIRST_SECOND_S = 2.0, 1.0


def events_of(user: int, first: int, num: int) -> dict[str, Any]:
    """Events [first, first + num) of a user: a function of both, so that anyone knows what must be there."""
    draws = [np.random.default_rng((user, index)).random() for index in range(first, first + num)]
    ids = [int(NUM_ITEMS * draw**4) for draw in draws]  # a few are popular
    return {
        "items": ids,
        "actions": [each % MODEL.num_actions for each in ids],
        "timestamps": [1_000 + 10 * index for index in range(first, first + num)],
        "features": {MODEL.features[1].name: [each % NUM_CATEGORIES for each in ids]},
    }


@dataclass
class Customer:
    """A client with users of its own, who goes on whatever happens to the server."""

    url: str
    number: int
    acknowledged: dict[int, int] = field(default_factory=dict)
    num_ranked: int = 0

    def run(self, is_over: threading.Event) -> None:
        rng = np.random.default_rng(self.number)
        users = range(self.number * USERS_PER_CLIENT, (self.number + 1) * USERS_PER_CLIENT)
        with Client(self.url, timeout_s=10) as client:
            while not is_over.is_set():
                try:
                    self._visit(client, int(rng.choice(users)), rng)
                except ServerError:
                    time.sleep(0.05)  # it is gone, or not ready yet
                except Refused:
                    pass
                time.sleep(0.01)

    def _visit(self, client: Client, user: int, rng: np.random.Generator) -> None:
        base = self.acknowledged.get(user, 0)
        num = FIRST_EVENTS if base == 0 else int(rng.integers(1, 4))
        try:
            done = client.append(user, base, **events_of(user, base, num))
        except StaleVersion as stale:  # an append whose acknowledgement the kill took
            assert base < stale.current <= base + FIRST_EVENTS
            self.acknowledged[user] = stale.current
            return
        self.acknowledged[user] = done.version
        items = rng.integers(0, 1_000, NUM_CANDIDATES)
        context = {table.name: user % table.num_rows for table in (*MODEL.user_context, *MODEL.request_context)}
        client.rank_stored(user, items, {MODEL.features[1].name: items % NUM_CATEGORIES}, context)
        self.num_ranked += 1


@dataclass(frozen=True)
class Restarted:
    """What was seen before the kill and after it."""

    ranked_before: int
    row_hit_rate_before: float
    row_hit_rate_after: float  # in the first second
    stats: EngineStats
    acknowledged: dict[int, int]


def row_hit_rate(server: ServerProcess, seconds: float) -> float:
    """Of the rows that are read from now on."""
    old = server.stats().pool
    time.sleep(seconds)
    new = server.stats().pool
    hits, misses = new.row_hits - old.row_hits, new.row_misses - old.row_misses
    return hits / max(1, hits + misses)


def restart(folder: Path, *, has_snapshot: bool) -> Restarted:
    init_model(folder / "model", MODEL, 0)
    settings: dict[str, object] = {"pool_bytes": "8MiB", "history_path": folder / "histories", "audit_every": 7}
    if has_snapshot:
        settings |= {"snapshot_path": folder / "snapshot", "snapshot_every_s": 1}
    server, is_over = ServerProcess.of_model(folder / "model", settings), threading.Event()
    customers = [Customer(server.url, number) for number in range(NUM_CLIENTS)]
    threads = [threading.Thread(target=customer.run, args=(is_over,)) for customer in customers]
    for thread in threads:
        thread.start()
    try:
        before = row_hit_rate(server, BEFORE_S)
        ranked_before = sum(customer.num_ranked for customer in customers)
        server.process.kill()
        server.process.wait()
        server.start()
        after, stats = row_hit_rate(server, FIRST_SECOND_S), server.stats()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        server.end()
    acknowledged = {user: version for each in customers for user, version in each.acknowledged.items()}
    return Restarted(ranked_before, before, after, stats, acknowledged)


def check_histories(folder: Path, acknowledged: dict[int, int]) -> None:
    """Read the store itself: what was acknowledged must be there, each event its user's, in order, once."""
    with EmbeddedHistory(folder / "histories", EventSchema.of_model(MODEL)) as store:
        store.check()
        for user, version in acknowledged.items():
            found = store.read_last(user, 10**9)
            assert found.version >= version, "an acknowledged event is lost"
            wanted = events_of(user, 0, found.version)
            assert (found.items.tolist(), found.timestamps.tolist()) == (wanted["items"], wanted["timestamps"])


@pytest.mark.slow
def test_a_killed_server_comes_back_with_every_acknowledged_event_and_warm_rows(tmp_path: Path) -> None:
    seen = restart(tmp_path, has_snapshot=True)
    check_histories(tmp_path, seen.acknowledged)
    assert sum(seen.acknowledged.values()) >= FIRST_EVENTS * NUM_CLIENTS * USERS_PER_CLIENT
    assert seen.ranked_before > 0
    assert (seen.stats.audits > 0, seen.stats.audit_mismatches) == (True, 0)
    assert seen.row_hit_rate_after >= 0.9 * seen.row_hit_rate_before


@pytest.mark.slow
def test_without_a_snapshot_rows_are_cold_and_nothing_is_lost_either(tmp_path: Path) -> None:
    seen = restart(tmp_path, has_snapshot=False)
    check_histories(tmp_path, seen.acknowledged)
    assert seen.stats.audit_mismatches == 0
