"""A server killed under load and started again: are all acknowledged events there, and how soon is it warm?

`helmrec bench run restart` runs it with and without a snapshot; writes docs/measurements/restart-cpu.json.
Clients append to their users' histories and rank with them the whole time; nobody tells them of the kill.
"""

import os
import tempfile
import threading
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.engine.engine import EngineStats
from helmrec.errors import Refused, ServerError, StaleVersion
from helmrec.history.embedded import EmbeddedReader
from helmrec.history.events import EventSchema
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.server import ServerProcess

LOOK_EVERY_S = 0.25
LATE_LOOKS = 8
NUM_CANDIDATES = 32


@dataclass(frozen=True)
class RestartCase:
    """How large, and how long."""

    num_rows: int = 60_000
    pool: str = "48MiB"
    num_clients: int = 4
    users_per_client: int = 12
    before_s: float = 25.0
    after_s: float = 25.0
    pace_s: float = 0.05  # between two calls of a client

    @property
    def model(self) -> ModelConfig:
        return profile("demo", self.num_rows)


def events_of(user: int, first: int, num: int, model: ModelConfig) -> dict[str, Any]:
    """Events [first, first + num) of a user: a function of both, so that anyone knows what must be there."""
    items, categories = model.features[0].num_rows, model.features[1].num_rows
    draws = [np.random.default_rng((user, index)).random() for index in range(first, first + num)]
    ids = [int(items * draw**4) for draw in draws]  # a few are popular
    return {
        "items": ids,
        "actions": [each % model.num_actions for each in ids],
        "timestamps": [1_000 + 10 * index for index in range(first, first + num)],
        "features": {model.features[1].name: [each % categories for each in ids]},
    }


@dataclass
class Customer:
    """A client with users of its own, who goes on whatever happens to the server."""

    url: str
    case: RestartCase
    number: int
    acknowledged: dict[int, int] = field(default_factory=dict)
    num_ranked: int = 0
    num_wrong_versions: int = 0

    def run(self, is_over: threading.Event) -> None:
        model, rng = self.case.model, np.random.default_rng(self.number)
        users = range(self.number * self.case.users_per_client, (self.number + 1) * self.case.users_per_client)
        with Client(self.url, timeout_s=10) as client:
            while not is_over.is_set():
                user = int(rng.choice(users))
                try:
                    self._visit(client, user, model, rng)
                except ServerError:
                    time.sleep(0.05)  # it is gone, or not ready yet
                except Refused:
                    pass
                time.sleep(self.case.pace_s)

    def _visit(self, client: Client, user: int, model: ModelConfig, rng: np.random.Generator) -> None:
        base = self.acknowledged.get(user, 0)
        num = 60 if base == 0 else int(rng.integers(1, 4))
        try:
            done = client.append(user, base, **events_of(user, base, num, model))
        except StaleVersion as stale:  # an append whose acknowledgement the kill took
            assert base < stale.current <= base + 60
            self.acknowledged[user] = stale.current
            return
        self.acknowledged[user] = done.version
        items, categories = rng.integers(0, 1_000, NUM_CANDIDATES), model.features[1].num_rows
        context = {table.name: user % table.num_rows for table in (*model.user_context, *model.request_context)}
        client.rank_stored(user, items, {model.features[1].name: items % categories}, context)
        self.num_ranked += 1


def rates(old: EngineStats, new: EngineStats) -> dict[str, float]:
    """Hit rates between two looks; of nothing, 0."""

    def grown(name: str) -> int:
        return int(getattr(new.pool, name) - getattr(old.pool, name))

    hits, misses = grown("row_hits"), grown("row_misses")
    return {
        "rows": hits / max(1, hits + misses),
        "tokens": grown("reused_tokens") / max(1, grown("total_tokens")),
    }


def watch(server: ServerProcess, seconds: float) -> list[dict[str, float]]:
    """Hit rates of the last looks, again and again, with the time since the start."""
    started_s, looks, seen = time.monotonic(), [server.stats()], []
    while time.monotonic() - started_s < seconds:
        time.sleep(LOOK_EVERY_S)
        looks.append(server.stats())
        seen.append({"s": time.monotonic() - started_s, **rates(looks[max(0, len(looks) - 1 - LATE_LOOKS)], looks[-1])})
    return seen


def back_after_s(seen: list[dict[str, float]], name: str, before: float) -> float | None:
    """When the rate was first back to 90% of what it was."""
    return next((round(look["s"], 2) for look in seen if look[name] >= 0.9 * before), None)


def run(folder: Path, case: RestartCase, *, has_snapshot: bool) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    init_model(folder / "model", case.model, 0)
    settings: dict[str, object] = {"pool_bytes": case.pool, "history_path": folder / "histories", "audit_every": 7}
    if has_snapshot:
        settings |= {"snapshot_path": folder / "snapshot", "snapshot_every_s": 1}
    server, is_over = ServerProcess.of_model(folder / "model", settings), threading.Event()
    customers = [Customer(server.url, case, number) for number in range(case.num_clients)]
    threads = [threading.Thread(target=customer.run, args=(is_over,)) for customer in customers]
    for thread in threads:
        thread.start()
    try:
        before = watch(server, case.before_s)[-1]
        ranked_before = sum(customer.num_ranked for customer in customers)
        server.kill()
        ready_s = server.start()
        after = watch(server, case.after_s)
        stats = server.stats()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        server.end()
    return {
        "has_snapshot": has_snapshot,
        "ranked_before_the_kill": ranked_before,
        "ready_again_after_s": round(ready_s, 2),
        "row_hit_rate_before": round(before["rows"], 4),
        "row_hit_rate_first_second_after": round(after[3]["rows"], 4),
        "row_hit_rate_back_to_90_percent_after_s": back_after_s(after, "rows", before["rows"]),
        "token_reuse_before": round(before["tokens"], 4),
        "token_reuse_back_to_90_percent_after_s": back_after_s(after, "tokens", before["tokens"]),
        "audits": stats.audits,
        "audit_mismatches": stats.audit_mismatches,
        **judge(folder, case, customers),
    }


def judge(folder: Path, case: RestartCase, customers: list[Customer]) -> dict[str, int]:
    """Read the store itself: what was acknowledged must be there, each event its user's, in order, once."""
    acknowledged = {user: version for each in customers for user, version in each.acknowledged.items()}
    lost = wrong = 0
    with EmbeddedReader(folder / "histories", EventSchema.of_model(case.model)) as store:
        store.check()
        for user, version in acknowledged.items():
            found = store.read_last(user, 10**9)
            lost += max(0, version - found.version)
            wanted = events_of(user, 0, found.version, case.model)
            is_same = found.items.tolist() == wanted["items"] and found.timestamps.tolist() == wanted["timestamps"]
            wrong += not is_same
    return {"events_acknowledged": sum(acknowledged.values()), "events_lost": lost, "histories_wrong": wrong}


def main(flags: Namespace) -> None:
    load = [round(average, 1) for average in os.getloadavg()]
    with tempfile.TemporaryDirectory() as name:
        runs = [run(Path(name) / str(kept), RestartCase(), has_snapshot=kept) for kept in (True, False)]
    for each in runs:
        print(each)
    write_measurement(flags.out, {"load_average_before": load, "runs": runs})
