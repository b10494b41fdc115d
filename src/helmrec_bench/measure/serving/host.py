"""What the host side costs on this machine: bookkeeping per batch, and what prefix reuse saves on CPU.

`make measure`. Bookkeeping is given as wall time and as CPU time of its one thread, which other work on the machine
disturbs less; reuse as a ratio of interleaved runs.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from helmrec import Engine, EngineConfig, RankRequest
from helmrec.engine.assemble import assemble
from helmrec.engine.intake import Intake
from helmrec.engine.probe import EngineProbe
from helmrec.engine.scheduler import Scheduler
from helmrec.engine.warm_up import make_request
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.pool import Demand, Pool
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec_bench.lab.provenance import write_measurement

REPEATS = 40


class NoMover:
    """Bookkeeping alone: no data behind the slots."""

    def copy_rows(self, source: Any, target: Any) -> None:
        pass


class Host:
    """Everything an engine does per batch but the model and the row gather."""

    def __init__(self, config: ModelConfig, num_users: int, num_events: int) -> None:
        geometry = PageGeometry(64, config.num_layers, config.num_heads, config.qk_dim, config.v_dim, 2, 512, 2)
        pages = (num_users + 16) * geometry.pages_for(num_events + 64)
        engine = EngineConfig(
            pool_bytes=2 * pages * geometry.page_bytes, alpha=0.5, max_batch_requests=64, max_batch_tokens=1 << 22
        )
        self.config = config
        self.pool = Pool(engine, geometry, Demand(config.num_rows, 1, 1), NoMover())
        self.scheduler = Scheduler(engine, self.pool.kv)
        self.intake = Intake(config, version=1, max_history=1 << 20)

    def batch(self, requests: list[RankRequest]) -> int:
        """Take requests through intake, plan, layout and commit; returns tokens reused."""
        for request in requests:
            self.scheduler.submit(self.intake.prepare(request), 0.0)
        batch = self.scheduler.next_batch(0.0)
        assert batch is not None
        members = [(member.request, member.plan) for member in batch.members]
        assemble(members, self.config, self.pool.geometry.page_tokens)
        self.scheduler.commit(batch, 0.0)
        self.pool.stats()
        return sum(plan.num_resident for _, plan in members)


class HostUsers:
    """Growing histories over the first 128 items."""

    def __init__(self, config: ModelConfig, num_users: int, num_events: int) -> None:
        self._config, self._rng = config, np.random.default_rng(0)
        self._items = self._rng.integers(0, 128, (num_users, num_events + 4_096))

    def request(self, user: int, num_events: int, num_candidates: int = 64) -> RankRequest:
        candidates = self._rng.integers(0, 128, num_candidates)
        return make_request(self._config, user, self._items[user, :num_events], candidates)


def bookkeeping(config: ModelConfig, num_events: int, num_requests: int, num_users: int) -> dict[str, Any]:
    """Batches of returning users, each with 16 events more than on the visit before."""
    host, users = Host(config, num_users, num_events + 16 * REPEATS), HostUsers(config, num_users, num_events)
    lengths = [num_events] * num_users
    for start in range(0, num_users, 32):
        host.batch([users.request(user, num_events) for user in range(start, min(start + 32, num_users))])
    times, walls, reused = [], [], 0
    rng = np.random.default_rng(1)
    for _ in range(REPEATS):
        chosen = rng.choice(num_users, num_requests, replace=False).tolist()
        requests = []
        for user in chosen:
            lengths[user] += 16
            requests.append(users.request(user, lengths[user]))
        wall_s, start_s = time.perf_counter(), time.thread_time()
        reused += host.batch(requests)
        times.append((time.thread_time() - start_s) * 1e3)
        walls.append((time.perf_counter() - wall_s) * 1e3)
    host.pool.check()
    assert reused >= 0.9 * REPEATS * num_requests * num_events, "the batches were meant to hit"
    return {
        "rows_per_token": len(config.features),
        "events": num_events,
        "requests": num_requests,
        "resident_users": num_users,
        "cpu_ms_median": round(float(np.median(times)), 3),
        "cpu_ms_p90": round(float(np.percentile(times, 90)), 3),
        "wall_ms_median": round(float(np.median(walls)), 3),
    }


def first_visits(config: ModelConfig, num_events: int) -> dict[str, Any]:
    """The same for users nobody has seen: every token is laid out."""
    host, users = Host(config, 16, num_events), HostUsers(config, 8 * REPEATS, num_events)
    times = []
    for i in range(REPEATS):
        requests = [users.request(8 * i + j, num_events) for j in range(8)]
        start_s = time.thread_time()
        host.batch(requests)
        times.append((time.thread_time() - start_s) * 1e3)
    return {
        "events": num_events,
        "rows_per_token": len(config.features),
        "requests": 8,
        "cpu_ms_median": round(float(np.median(times)), 3),
    }


def reuse_ratio(folder: Path) -> dict[str, Any]:
    """A request with 90% of 2,000 tokens resident against the same request uncached, interleaved."""
    shape = profile("demo").model_copy(update={"window": 2_048, "normaliser": 2_048})
    init_model(folder, shape)
    settings: dict[str, Any] = {"pool_bytes": "256MiB", "alpha": 0.3, "device": "cpu"}
    warm = Engine.from_model(folder, EngineConfig(**settings, kv_admission="always", max_forks=1))
    probe, users = EngineProbe(warm), HostUsers(shape, REPEATS + 1, 2_000)
    cached, uncached = [], []
    for user in range(REPEATS + 1):
        whole = users.request(user, 2_000)
        warm.rank([users.request(user, 1_800)])
        cached.append(_timed(partial(warm.rank, [whole])))
        uncached.append(_timed(partial(probe.score_without_caches, probe.prepare(whole))))
    assert warm.stats().pool.reused_tokens >= 1_800 * REPEATS
    ratios = np.array(cached[1:]) / np.array(uncached[1:])
    return {
        "tokens": 2_000,
        "resident": 1_800,
        "ratio_median": round(float(np.median(ratios)), 3),
        "ratio_p90": round(float(np.percentile(ratios, 90)), 3),
        "cached_ms_median": round(float(np.median(cached[1:])), 2),
        "uncached_ms_median": round(float(np.median(uncached[1:])), 2),
    }


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e3


def main(flags: Namespace) -> None:
    changes = {"window": 65_536, "max_candidates": 256}
    narrow, wide = (profile(name, 1_000).model_copy(update=changes) for name in ("kuairand", "dlrmv3"))
    bookkeeping(narrow, 256, 2, 8)  # compiles the host loops
    with tempfile.TemporaryDirectory() as folder:
        reuse = reuse_ratio(Path(folder) / "model")
    results = {
        "what": "host bookkeeping per batch (intake, hash, lookup, page tables, layout, stats), returning users",
        "by_tokens": [bookkeeping(shape, 1 << n, 8, 64) for shape in (narrow, wide) for n in range(10, 15)],
        "by_users": [bookkeeping(narrow, 4_096, 8, n) for n in (16, 128, 1_024)],
        "by_requests": [bookkeeping(narrow, 4_096, n, 64) for n in (1, 8, 32)],
        "first_visits": [first_visits(shape, 4_096) for shape in (narrow, wide)],
        "prefix_reuse_on_cpu": reuse,
    }
    print(*results.items(), sep="\n")
    write_measurement(flags.out, results)
