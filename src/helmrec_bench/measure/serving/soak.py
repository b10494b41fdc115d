"""A server under steady load for minutes while everything changes: appends, deletes, row updates, boundary moves.

`helmrec bench run soak` writes docs/measurements/soak-cpu.json. One request in ten is scored again without
caches. When the server has ended, every invariant of its engine and every stored history is checked. Driver and server
share the machine; a share of requests that must not be exceeded is computed from what the server could do just before.
"""

import json
import os
import queue
import sys
import tempfile
import threading
import time
import urllib.request
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedReader
from helmrec.history.events import EventSchema
from helmrec.model.config import ModelConfig
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
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.server import MemoryWatch, ServerProcess, free_port

NUM_ROWS, NUM_USERS, NUM_CANDIDATES = 20_000, 240, 32
WORKERS = 8
LOAD = 0.7  # of what the server can do
AUDIT_EVERY = 10
ALPHAS = (0.2, 0.6)
TOKEN = "soak-token"
SHARES = {"rank": 0.68, "append": 0.2, "rank with history": 0.07, "delete": 0.02, "rows": 0.03}
MOST_APPENDED = 40  # events at a time
MEAN_EVENTS = MOST_APPENDED / 2 * SHARES["append"] / SHARES["delete"]  # of a user, once the soak is in balance
WARM_UP = 0.25  # share of the time before memory is looked at


def serve(folder: Path, port: int) -> None:
    """The server, in a process of its own; what it prints last says whether every check was clean."""
    model = profile("demo", NUM_ROWS)
    log_to_stderr("error")
    engine = Engine.from_model(folder / "model", EngineConfig(pool_bytes="16MiB", alpha=0.3, audit_every=AUDIT_EVERY))
    config = ServeConfig(port=port, admin_token=TOKEN)
    kept = HistoryConfig(sync="interval", max_events_per_user=model.window)
    with listen(config) as listener:
        histories = StoredHistories.open(folder / "histories", model, kept)
        serve_until_stopped(make_app(InProcessPort(engine), config, histories), config, listener)
    engine.check()
    with EmbeddedReader(folder / "histories", EventSchema.of_model(model)) as store:
        store.check()
    print("clean", flush=True)


class SoakServer(ServerProcess):
    """That process, seen from here."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        own = ["bench", "run", "soak", "--serve", str(folder), "--port", str(port)]
        super().__init__([sys.executable, "-m", "helmrec", *own], port)

    def admin(self, path: str, body: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/admin/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60):
            pass


@dataclass
class Tally:
    """What became of the calls, of all workers."""

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, latency_ms: float) -> None:
        with self.lock:
            self.done[kind] += 1
            self.latencies_ms.append(latency_ms)

    def fail(self, kind: str, error: Exception) -> None:
        with self.lock:
            self.errors.append(f"{kind}: {error!r}")


class Worker:
    """A client of its own users: it knows what it has appended, so any 409 would be an error."""

    def __init__(self, server: SoakServer, number: int) -> None:
        self._server = server
        self._rng = np.random.default_rng(number)
        self._users = np.arange(number, NUM_USERS, WORKERS)
        self._versions = dict.fromkeys(self._users.tolist(), 0)
        self._model: ModelConfig = profile("demo", NUM_ROWS)

    def fill(self) -> None:
        """Give the users histories as long as they would have after hours, so that the load stays what it is."""
        with Client(self._server.url, timeout_s=60) as client:
            for user in self._users.tolist():
                self._append(client, user, 1 + int(self._rng.exponential(MEAN_EVENTS)))

    def run(self, due: "queue.Queue[float | None]", tally: Tally) -> None:
        kinds, shares = list(SHARES), list(SHARES.values())
        with Client(self._server.url, timeout_s=60) as client:
            while (due_s := due.get()) is not None:
                kind = str(self._rng.choice(kinds, p=shares))
                try:
                    self._do(client, kind, int(self._rng.choice(self._users)))
                except Exception as error:
                    tally.fail(kind, error)
                else:
                    tally.note(kind, (time.perf_counter() - due_s) * 1e3)

    def _do(self, client: Client, kind: str, user: int) -> None:
        if kind == "rows":
            ids = np.unique(self._rng.integers(0, NUM_ROWS, 8)).tolist()
            values = self._rng.standard_normal((len(ids), self._model.row_dim)).tolist()
            self._server.admin("rows", {"table": "item", "ids": ids, "values": values})
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
        assert result.scores.shape == (NUM_CANDIDATES, self._model.num_tasks)
        assert np.isfinite(result.scores).all()

    def _events(self, num: int, start: int) -> dict[str, Any]:
        items = self._items(num)
        features = {"category": items % 500}
        return {"items": items, "actions": items % 8, "timestamps": 60 * (start + np.arange(num)), "features": features}

    def _items(self, num: int) -> Any:
        return (NUM_ROWS * self._rng.random(num) ** 3).astype(np.int64)


@dataclass
class Soaked:
    tally: Tally
    memory: dict[str, list[float]]  # MiB every second
    moves: int


def drive(server: SoakServer, workers_due: "queue.Queue[float | None]", rate: float, seconds: float) -> int:
    """Calls that become due at `rate`, Poisson, for so long; the boundary moves every few seconds. Returns moves."""
    rng, started_s, due_s, moves = np.random.default_rng(1), time.perf_counter(), 0.0, 0
    while due_s < seconds:
        due_s += float(rng.exponential(1 / rate))
        if (left_s := started_s + due_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        workers_due.put(started_s + due_s)
        if due_s > 4 * (moves + 1):
            server.admin("alpha", {"alpha": ALPHAS[moves % 2]})
            moves += 1
    return moves


@contextmanager
def working(workers: list[Worker]) -> Iterator[tuple["queue.Queue[float | None]", Tally]]:
    """Every worker in a thread of its own, taking what is due; at the end all of it is done."""
    tally, due = Tally(), queue.Queue[float | None]()
    threads = [threading.Thread(target=worker.run, args=(due, tally), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    yield due, tally
    for _ in workers:
        due.put(None)
    for thread in threads:
        thread.join()


def soak(server: SoakServer, workers: list[Worker], rate: float, seconds: float) -> Soaked:
    watch = MemoryWatch(server, "VmRSS", "RssAnon")
    with working(workers) as (due, tally):
        moves = drive(server, due, rate, seconds)
    return Soaked(tally, watch.end(), moves)


def capacity_of(workers: list[Worker], seconds: float) -> float:
    """Calls a second when every worker always has one to make."""
    started_s = time.perf_counter()
    with working(workers) as (due, tally):
        while time.perf_counter() - started_s < seconds:
            if due.qsize() < 2 * WORKERS:
                due.put(time.perf_counter())
            else:
                time.sleep(0.001)
    assert not tally.errors, tally.errors[:3]
    return sum(tally.done.values()) / (time.perf_counter() - started_s)


def growth(values: list[float]) -> float:
    """Of the last tenth over the first tenth after warm-up."""
    after = values[int(WARM_UP * len(values)) :]
    tenth = max(1, len(after) // 10)
    return float(np.median(after[-tenth:]) / np.median(after[:tenth]) - 1)


def run(folder: Path, seconds: float, capacity_s: float = 20.0) -> dict[str, Any]:
    init_model(folder / "model", profile("demo", NUM_ROWS), 0)
    server = SoakServer(folder)
    try:
        workers = [Worker(server, number) for number in range(WORKERS)]
        for worker in workers:
            worker.fill()
        capacity = capacity_of(workers, capacity_s)
        soaked = soak(server, workers, LOAD * capacity, seconds)
        stats = server.stats()
    finally:
        is_clean = server.end() == 0 and "clean" in server.output
    p50, p99 = np.percentile(soaked.tally.latencies_ms, [50, 99])
    memory = soaked.memory
    return {
        "seconds": seconds,
        "capacity_per_s": round(capacity, 1),
        "offered_per_s": round(LOAD * capacity, 1),
        "calls": dict(soaked.tally.done),
        "errors": soaked.tally.errors[:20],
        "num_errors": len(soaked.tally.errors),
        "latency_p50_ms": round(float(p50), 1),
        "latency_p99_ms": round(float(p99), 1),
        "boundary_moves": soaked.moves,
        "audits": stats.audits,
        "audit_mismatches": stats.audit_mismatches,
        "audit_max_error": stats.audit_max_error,
        "background_failures": stats.background_failures,
        "stale_cuts": stats.pool.stale_cuts,
        "token_reuse_rate": round(stats.pool.token_reuse_rate, 4),
        "rss_mib": [round(value, 1) for value in memory["VmRSS"][:: max(1, len(memory["VmRSS"]) // 20)]],
        "rss_growth": round(growth(memory["VmRSS"]), 4),
        "anonymous_growth": round(growth(memory["RssAnon"]), 4),
        "checks_clean": is_clean,
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--serve", type=Path, help=SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=SUPPRESS)


def main(flags: Namespace) -> None:
    if flags.serve is not None:
        return serve(flags.serve, flags.port)
    with tempfile.TemporaryDirectory() as name:
        results = run(Path(name), flags.seconds)
    print(json.dumps(results, indent=2))
    return write_measurement(flags.out, {"load_average_after": round(os.getloadavg()[0], 1), **results})
