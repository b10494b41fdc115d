"""A server under steady load while everything changes: appends, deletes, row updates, boundary moves.

One request in ten is scored again without caches. When the server has ended, every invariant of its engine and every
stored history is checked.
"""

import json
import queue
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.app import make_app
from helmrec.serve.client import Client
from helmrec.serve.histories import StoredHistories
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.port import InProcessPort
from helmrec.serve.server import listen, serve_until_stopped
from helmrec.serve.settings import ServeConfig
from helmrec.types import RankRequest
from helmrec_bench.measure.server import ServerProcess, free_port

NUM_ROWS, NUM_USERS, NUM_CANDIDATES = 20_000, 240, 32
MODEL = profile("demo", NUM_ROWS)
WORKERS = 8
LOAD = 0.7  # of what the server can do
SECONDS, CAPACITY_S = 20.0, 4.0
WARM_UP = 0.25  # share of the time before memory is looked at
ALPHAS = (0.2, 0.6)
TOKEN = "soak-token"
SHARES = {"rank": 0.68, "append": 0.2, "rank with history": 0.07, "delete": 0.02, "rows": 0.03}
MOST_APPENDED = 40  # events at a time
MEAN_EVENTS = MOST_APPENDED / 2 * SHARES["append"] / SHARES["delete"]  # of a user, once the soak is in balance


def serve(folder: Path, port: int) -> None:
    """The server, in a process of its own; what it prints last says whether every check was clean."""
    log_to_stderr("error")
    engine = Engine.from_model(folder / "model", EngineConfig(pool_bytes="16MiB", alpha=0.3, audit_every=10))
    config = ServeConfig(port=port, admin_token=TOKEN)
    kept = HistoryConfig(sync="interval", max_events_per_user=MODEL.window)
    with listen(config) as listener:
        histories = StoredHistories.open(folder / "histories", MODEL, kept)
        serve_until_stopped(make_app(InProcessPort(engine), config, histories), config, listener)
    engine.check()
    with EmbeddedHistory(folder / "histories", EventSchema.of_model(MODEL)) as store:
        store.check()
    sys.stdout.write("clean\n")


def administer(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/admin/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60):
        pass


@dataclass
class Tally:
    """What became of the calls, of all workers."""

    done: list[str] = field(default_factory=list)  # kinds
    errors: list[str] = field(default_factory=list)


class Worker:
    """A client of its own users: it knows what it has appended, so any 409 would be an error."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        self._server = server
        self._rng = np.random.default_rng(number)
        self._users = np.arange(number, NUM_USERS, WORKERS)
        self._versions = dict.fromkeys(self._users.tolist(), 0)

    def fill(self) -> None:
        """Give the users histories as long as they would have after hours, so that the load stays what it is."""
        with Client(self._server.url, timeout_s=60) as client:
            for user in self._users.tolist():
                self._append(client, user, 1 + int(self._rng.exponential(MEAN_EVENTS)))

    def run(self, due: "queue.Queue[bool]", tally: Tally) -> None:
        """Make a call for every True that comes; end with the first False."""
        kinds, shares = list(SHARES), list(SHARES.values())
        with Client(self._server.url, timeout_s=60) as client:
            while due.get():
                kind = str(self._rng.choice(kinds, p=shares))
                try:
                    self._do(client, kind, int(self._rng.choice(self._users)))
                except Exception as error:
                    tally.errors.append(f"{kind}: {error!r}")
                else:
                    tally.done.append(kind)

    def _do(self, client: Client, kind: str, user: int) -> None:
        if kind == "rows":
            ids = np.unique(self._rng.integers(0, NUM_ROWS, 8)).tolist()
            values = self._rng.standard_normal((len(ids), MODEL.row_dim)).tolist()
            administer(self._server, "rows", {"table": "item", "ids": ids, "values": values})
        elif kind == "delete":
            client.forget(user)
            self._versions[user] = 0
        elif kind == "append":
            self._append(client, user, int(self._rng.integers(1, MOST_APPENDED)))
        else:
            self._rank(client, kind, user)

    def _append(self, client: Client, user: int, num: int) -> None:
        events = self._events(num, self._versions[user])
        self._versions[user] = client.append(user, self._versions[user], **events).version

    def _rank(self, client: Client, kind: str, user: int) -> None:
        candidates = self._items(NUM_CANDIDATES)
        of_candidates = {"category": candidates % 500}
        context = {"country": user % 200, "hour": int(self._rng.integers(24))}
        if kind == "rank":
            result = client.rank_stored(user, candidates, of_candidates, context)
        else:
            events = self._events(60, 0)
            asked = RankRequest(NUM_USERS + user, **events, candidates=candidates, candidate_features=of_candidates,
                                context=context)  # fmt: skip
            result = client.rank(asked)
        assert result.scores.shape == (NUM_CANDIDATES, MODEL.num_tasks)
        assert np.isfinite(result.scores).all()

    def _events(self, num: int, start: int) -> dict[str, Any]:
        items = self._items(num)
        features = {"category": items % 500}
        return {"items": items, "actions": items % 8, "timestamps": 60 * (start + np.arange(num)), "features": features}

    def _items(self, num: int) -> Any:
        return (NUM_ROWS * self._rng.random(num) ** 3).astype(np.int64)


@contextmanager
def working(workers: list[Worker]) -> Iterator[tuple["queue.Queue[bool]", Tally]]:
    """Every worker in a thread of its own, taking what is due; at the end all of it is done."""
    tally, due = Tally(), queue.Queue[bool]()
    threads = [threading.Thread(target=worker.run, args=(due, tally), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    yield due, tally
    for _ in workers:
        due.put(False)
    for thread in threads:
        thread.join()


def capacity_of(workers: list[Worker]) -> float:
    """Calls a second when every worker always has one to make."""
    started_s = time.perf_counter()
    with working(workers) as (due, tally):
        while time.perf_counter() - started_s < CAPACITY_S:
            if due.qsize() < 2 * WORKERS:
                due.put(True)
            else:
                time.sleep(0.001)
    assert not tally.errors, tally.errors[:3]
    return len(tally.done) / (time.perf_counter() - started_s)


@dataclass(frozen=True)
class Soaked:
    tally: Tally
    num_moves: int
    anonymous_mib: list[float]  # once a second


def soak(server: ServerProcess, workers: list[Worker], rate: float) -> Soaked:
    """Calls that become due at `rate`, Poisson; the boundary moves every few seconds."""
    rng, started_s, due_s, moves, memory = np.random.default_rng(1), time.perf_counter(), 0.0, 0, list[float]()
    with working(workers) as (due, tally):
        while due_s < SECONDS:
            due_s += float(rng.exponential(1 / rate))
            if (left_s := started_s + due_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            due.put(True)
            if due_s > len(memory):
                memory.append(anonymous_mib(server.process.pid))
            if due_s > 4 * (moves + 1):
                administer(server, "alpha", {"alpha": ALPHAS[moves % 2]})
                moves += 1
    return Soaked(tally, moves, memory)


def anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) / 1024


def growth(values: list[float]) -> float:
    """Of the last tenth over the first tenth after warm-up."""
    after = values[int(WARM_UP * len(values)) :]
    tenth = max(1, len(after) // 10)
    return float(np.median(after[-tenth:]) / np.median(after[:tenth]) - 1)


@pytest.mark.slow
def test_twenty_seconds_of_everything_at_once_leave_no_error_and_no_wrong_score(tmp_path: Path) -> None:
    init_model(tmp_path / "model", MODEL, 0)
    port = free_port()
    server = ServerProcess([sys.executable, "-m", "tests.serve.test_soak", str(tmp_path), str(port)], port)
    try:
        workers = [Worker(server, number) for number in range(WORKERS)]
        for worker in workers:
            worker.fill()
        seen = soak(server, workers, LOAD * capacity_of(workers))
        stats = server.stats()
    finally:
        exit_status = server.end()
    assert seen.tally.errors == []
    assert set(seen.tally.done) == SHARES.keys()
    assert seen.num_moves >= 4
    assert stats.audits > 20
    assert (stats.audit_mismatches, stats.background_failures) == (0, 0)
    assert (exit_status, "clean" in server.output) == (0, True)
    assert growth(seen.anonymous_mib) < 0.05, "a leak of any size shows in seconds at this rate"


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
