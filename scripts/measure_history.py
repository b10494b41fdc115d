"""What the history store costs on this machine: appends a second under each sync policy, and reading a long history.

`python -m scripts.measure_history`. Appends come from many clients at once, each waiting for its acknowledgement before
it sends again, one event at a time; so group commit sees what a server would give it. The raw cost of a forced
write on the same disk stands beside them.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lmdb
import numpy as np

from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema, FeatureTable, NewEvents
from helmrec.memory.history import HashKey, advance, begin_chain, chain
from scripts.provenance import write_measurement

OUT = Path("docs/measurements/history-cpu.json")
SYNCS: tuple[Literal["commit", "interval", "os"], ...] = ("commit", "interval", "os")
NUM_EVENTS = 6_700
FEATURES = tuple(FeatureTable(name=f"feature_{i}", num_rows=1_000) for i in range(5))
SCHEMA = EventSchema(num_items=1_000_000, num_actions=64, features=FEATURES)


def some_events(num: int, start: int, rng: np.random.Generator) -> NewEvents:
    return NewEvents(
        items=rng.integers(0, SCHEMA.num_items, num),
        actions=rng.integers(0, SCHEMA.num_actions, num),
        timestamps=np.arange(start, start + num),
        features={table.name: rng.integers(0, table.num_rows, num) for table in FEATURES},
    )


def percentiles_us(call: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Wall time, and CPU time of this thread, which other work on the machine disturbs less."""
    walls, cpus = [], []
    for i in range(repeats):
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        call(i)
        cpus.append((time.thread_time() - cpu_s) * 1e6)
        walls.append((time.perf_counter() - wall_s) * 1e6)
    return {
        "p50": round(statistics.median(walls), 1),
        "p99": round(float(np.quantile(walls, 0.99)), 1),
        "cpu_p50": round(statistics.median(cpus), 1),
    }


class Clients:
    """Users that append an event, wait for the acknowledgement, and append the next, all at once."""

    def __init__(self, store: EmbeddedHistory, num_users: int, seconds: float) -> None:
        self._store = store
        self._event = some_events(1, 0, np.random.default_rng(0))
        self._sent_s = [0.0] * num_users
        self._open = num_users
        self._all_done = threading.Event()
        self._versions = [0] * num_users
        self._until_s = time.perf_counter() + seconds
        self.waits_ms: list[float] = []

    def run(self) -> None:
        for user in range(len(self._versions)):
            self._send(user)
        self._all_done.wait()

    def _send(self, user: int) -> None:
        self._sent_s[user] = time.perf_counter()
        done = self._store.submit(user, self._versions[user], self._event)
        done.add_done_callback(lambda acknowledged: self._acknowledge(user, acknowledged.result().version))

    def _acknowledge(self, user: int, version: int) -> None:
        now_s = time.perf_counter()
        self.waits_ms.append((now_s - self._sent_s[user]) * 1e3)
        self._versions[user] = version
        if now_s < self._until_s:
            self._send(user)
            return
        self._open -= 1
        if self._open == 0:
            self._all_done.set()


def appends(folder: Path, sync: Literal["commit", "interval", "os"], num_users: int, seconds: float) -> dict[str, Any]:
    config = HistoryConfig(sync=sync)
    with EmbeddedHistory(folder / f"{sync}-{num_users}", SCHEMA, config) as store:
        store.append(10**6, 0, some_events(3, 0, np.random.default_rng(0)))
        before, start_s, cpu_s = store.num_commits, time.perf_counter(), time.process_time()
        clients = Clients(store, num_users, seconds)
        clients.run()
        took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        num = len(clients.waits_ms)
        return {
            "sync": sync,
            "clients": num_users,
            "appends_per_s": round(num / took_s),
            "appends_per_commit": round(num / (store.num_commits - before), 1),
            "cpu_us_per_append": round(cpu_s / num * 1e6, 1),
            "wait_ms_p50": round(statistics.median(clients.waits_ms), 3),
            "wait_ms_p99": round(float(np.quantile(clients.waits_ms, 0.99)), 3),
        }


def reads(folder: Path, num_users: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    with EmbeddedHistory(folder / "reads", SCHEMA, HistoryConfig(sync="os")) as store:
        for user in range(num_users):
            store.append(user, 0, some_events(NUM_EVENTS, 0, rng))
        users = rng.integers(0, num_users, repeats).tolist()
        return {
            "events": NUM_EVENTS,
            "fields": SCHEMA.num_fields,
            "users": num_users,
            "file_bytes_per_event": round(store.stats().used_bytes / (num_users * NUM_EVENTS), 1),
            "read_last_all_us": percentiles_us(lambda i: store.read_last(users[i], NUM_EVENTS), repeats),
            "read_from_new_16_us": percentiles_us(lambda i: store.read_from(users[i], NUM_EVENTS - 16), repeats),
            "state_us": percentiles_us(lambda i: store.state(users[i]), repeats),
        }


def hashing(repeats: int) -> dict[str, Any]:
    """The states of a whole history, and the one state after the 16 events that are new."""
    columns = np.random.default_rng(0).integers(0, 1_000, (SCHEMA.num_fields, NUM_EVENTS))
    key, seed, new = HashKey.random(), (1, 2, 3), np.ascontiguousarray(columns[:, :16])
    state = begin_chain(key, seed)
    return {
        "chain_us": percentiles_us(lambda _: chain(key, seed, 0, columns), repeats),
        "advance_by_16_us": percentiles_us(lambda _: advance(key, state, new), repeats),
    }


def forced_write(folder: Path, repeats: int) -> dict[str, float]:
    file = os.open(folder / "forced", os.O_RDWR | os.O_CREAT)

    def write(_: int) -> None:
        os.write(file, b"x" * 8_192)
        os.fdatasync(file)

    try:
        return percentiles_us(write, repeats)
    finally:
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row of the table of appends")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, load = Path(name), [round(average, 1) for average in os.getloadavg()]
        rows = [appends(folder, sync, clients, options.seconds) for sync in SYNCS for clients in (1, 64, 1_024)]
        results = {
            "lmdb": {"package": lmdb.__version__, "library": ".".join(map(str, lmdb.version()))},
            "load_average_before": load,
            "forced_write_us": forced_write(folder, 200),
            "appends_of_one_event": rows,
            "reads": reads(folder, 200, 2_000),
            "hashing": hashing(2_000),
        }
    for row in rows:
        print(row)
    print(results["reads"], results["hashing"], results["forced_write_us"])
    write_measurement(options.out, results)


if __name__ == "__main__":
    main()
