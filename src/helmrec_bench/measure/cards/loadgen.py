"""The largest rate MLPerf LoadGen finds valid on a card: dlrmv3 shape, Server scenario, P99 within 80 ms.

With reuse, and without: then every request comes from a user nobody knows, with a history of the same length. Runs are
shorter than a submission's 600 s; the file says how long. Requests reach the engine prepared, as a sample library may
hold them, and once more as a client sends them, so that checking and hashing count too.

Before that, a server with its engine in a process of its own answers a few requests over HTTP, and its scores are
compared with those of an engine in this process.

    helmrec bench run loadgen-card             # on a card; writes docs/measurements/gpu-loadgen-h200.json
    helmrec bench run loadgen-card --quick     # anywhere, a small shape: does the script work
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec.types import RankRequest, RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.loadgen import LoadGenConfig, ServerScenario, Verdict, largest_valid
from helmrec_bench.measure.cards.traffic import Mix, Traffic, serving_config, serving_engine, set_limit

THREADS = 8
SPARE = 1.15  # LoadGen draws how many queries fit the time


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    device: str
    table_bytes: int
    pool_bytes: int
    alpha: float
    mix: Mix
    batches: tuple[int, ...]  # requests in a step, to choose from
    seconds: float  # of each point
    warm_up: int  # requests
    saturated: int  # requests, to see what the engine can do at most
    latency_ms: float = 80.0


FULL = Plan("cuda", 40 << 30, 64 << 30, 0.3, Mix(0.85, 400), (8, 16), 5.0, 2_000, 640)
QUICK = Plan("cpu", 64 << 20, 1 << 30, 0.3, Mix(0.85, 3, 2_001), (2,), 3.0, 4, 4, 60_000.0)


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED_S:6.1f} s  {text}", flush=True)


STARTED_S = time.perf_counter()


class Requests:
    """The next requests of a traffic, made by several threads; `is_known` False makes every user a new one."""

    def __init__(self, engine: Engine, traffic: Traffic, *, is_known: bool) -> None:
        self._engine = engine
        self._traffic = traffic
        self._is_known = is_known
        self._next_stranger = 1 << 50

    def raw(self, num: int) -> list[RankRequest]:
        asked = [self._traffic._next() for _ in range(num)]
        if not self._is_known:
            asked = [(self._next_stranger + i, items, candidates) for i, (_, items, candidates) in enumerate(asked)]
            self._next_stranger += num
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda each: self._traffic._request(*each), asked))

    def offers(self, num: int, *, is_prepared: bool) -> Callable[[], "Future[RankResult]"]:
        """What submits one after the other of `num` requests."""
        engine, raw = self._engine, self.raw(num)
        if not is_prepared:
            left = iter(raw)
            return lambda: engine.submit(next(left))
        with ThreadPoolExecutor(THREADS) as threads:
            made = iter(list(threads.map(engine._intake.prepare, raw)))
        return lambda: engine._scheduler.submit(next(made), engine._clock.now())


def saturate(engine: Engine, requests: Requests, num: int) -> float:
    """Requests a second when all are queued at once."""
    offer = requests.offers(num, is_prepared=True)
    started_s = time.perf_counter()
    futures = [offer() for _ in range(num)]
    while not futures[-1].done():
        engine.step()
    took_s = time.perf_counter() - started_s
    for future in futures:
        future.result(timeout=10)
    return num / took_s


def judged(engine: Engine, requests: Requests, plan: Plan, qps: float, *, is_prepared: bool) -> Verdict:
    offer = requests.offers(int(SPARE * qps * plan.seconds) + 64, is_prepared=is_prepared)
    config = LoadGenConfig(target_qps=qps, seconds=plan.seconds, latency_ms=plan.latency_ms)
    PROCESS.settle()
    verdict = ServerScenario(engine, offer, config).run()
    say(
        f"{qps:8.1f}/s {'VALID' if verdict.is_valid else 'INVALID'} p50 {verdict.percentiles_ms['50']:.1f} "
        f"p99 {verdict.percentiles_ms['99']:.1f} ms, {verdict.num_queries} queries {'; '.join(verdict.problems)}"
    )
    return verdict


def search(engine: Engine, requests: Requests, plan: Plan, steps: int, *, is_prepared: bool) -> dict[str, Any]:
    """Points that close in on the largest valid rate, below what the engine does when saturated."""
    saturate(engine, requests, plan.warm_up)
    limit = best_batch = 0.0
    for batch in plan.batches:
        set_limit(engine, "max_batch_requests", batch)
        seen = saturate(engine, requests, plan.saturated)
        say(f"saturated, {batch} requests a step: {seen:.1f}/s")
        if seen > limit:
            limit, best_batch = seen, batch
    set_limit(engine, "max_batch_requests", int(best_batch))
    before = engine.stats().pool
    seen_all = largest_valid(
        lambda qps: judged(engine, requests, plan, qps, is_prepared=is_prepared), 0.5 * limit, 1.05 * limit, steps
    )
    after = engine.stats().pool
    hits, misses = after.row_hits - before.row_hits, after.row_misses - before.row_misses
    valid = [verdict for verdict in seen_all if verdict.is_valid]
    return {
        "is_prepared": is_prepared,
        "saturated_per_s": round(limit, 1),
        "max_batch_requests": best_batch,
        "largest_valid_qps": round(max(verdict.target_qps for verdict in valid), 1) if valid else None,
        "row_hit_rate": round(hits / max(1, hits + misses), 4),
        "token_reuse_rate": round(
            (after.reused_tokens - before.reused_tokens) / max(1, after.total_tokens - before.total_tokens), 4
        ),
        "points": [asdict(verdict) for verdict in seen_all],
    }


def shape(plan: Plan) -> ModelConfig:
    config = serving_config(6, plan.table_bytes)
    return config if plan.device == "cuda" else config.model_copy(update={"num_layers": 1})


@contextmanager
def apart(folder: Path, device: str) -> Iterator[str]:
    """A server with its engine in a process of its own; yields its address once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--pool", "256MiB", "--device", device, "--port", str(port), "--set", "engine_process=true"]
    flags += ["--set", "log_level=error"]
    process = subprocess.Popen([sys.executable, "-m", "helmrec", "serve", str(folder), *flags], env=os.environ.copy())
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            while not client.is_ready():
                assert process.poll() is None, "the server did not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def small_requests(model: ModelConfig, num: int) -> list[RankRequest]:
    """Five users who come back with a few more events each time."""
    rng, extra = np.random.default_rng(0), model.features[1:]
    items = rng.integers(0, 500, (5, 40 + 7 * num))
    made = []
    for i in range(num):
        events, candidates = items[i % 5, : 40 + 7 * i], rng.integers(0, 500, 32)
        made.append(
            RankRequest(
                user_id=i % 5,
                items=events,
                actions=events % model.num_actions,
                timestamps=np.arange(events.size) * 60,
                candidates=candidates,
                features={table.name: events % table.num_rows for table in extra},
                candidate_features={table.name: candidates % table.num_rows for table in extra},
                context={table.name: i % 5 % table.num_rows for table in (*model.user_context, *model.request_context)},
            )
        )
    return made


def smoked(device: str) -> dict[str, Any]:
    """What `smoke` found, or how it failed: the rest is to be measured all the same."""
    try:
        return smoke(device)
    except Exception as error:
        say(f"the engine in a process of its own failed: {error!r}")
        return {"failed": repr(error)}


def smoke(device: str) -> dict[str, Any]:
    """Scores of an engine in its own process, over HTTP, beside those of one in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        init_model(folder, profile("demo", 500), 0)
        requests = small_requests(profile("demo", 500), 40)
        started_s = time.perf_counter()
        with apart(folder, device) as url, Client(url) as client:
            ready_s = time.perf_counter() - started_s
            told = [client.rank(request).scores for request in requests]
        with Engine.from_model(folder, EngineConfig(pool_bytes="256MiB", device=device)) as engine:
            own = [engine.rank([request])[0].scores for request in requests]
    error = max(float(np.abs(a - b).max()) for a, b in zip(told, own, strict=True))
    say(f"engine in a process of its own: ready after {ready_s:.1f} s, largest difference {error:g}")
    return {"requests": len(requests), "ready_s": round(ready_s, 1), "largest_score_difference": error}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit-s", type=float, default=170, help="begin no further search after so long")
    parser.add_argument("--skip-smoke", action="store_true", help="only the rates")
    parser.add_argument("--steps", type=int, default=4, help="points of each search")
    parser.add_argument("--quick", action="store_true", help="a small shape, on any machine")


def main(flags: Namespace) -> None:
    plan = QUICK if flags.quick else FULL
    results: dict[str, Any] = {
        "scenario": "Server",
        "latency_ms": plan.latency_ms,
        "seconds_a_point": plan.seconds,
        "pool_bytes": plan.pool_bytes,
        "alpha": plan.alpha,
        "table_bytes": plan.table_bytes,
        "mix": asdict(plan.mix),
    }
    if not flags.skip_smoke:
        results["engine_process"] = smoked(plan.device)
    settings = {"device": plan.device, "pool_bytes": plan.pool_bytes, "alpha": plan.alpha}
    engine = serving_engine(shape(plan), max_batch_requests=max(plan.batches), **settings)
    say(f"ready\n{engine.report()}")
    traffic = Traffic(engine, plan.mix)
    searches = (
        ("with_reuse", True, True, flags.steps),
        ("without_reuse", False, True, flags.steps - 1),
        ("with_reuse_and_intake", True, False, flags.steps - 1),
    )
    for name, is_known, is_prepared, steps in searches:
        if time.perf_counter() - STARTED_S > flags.limit_s:
            say(f"out of time: {name} is not measured")
            continue
        requests = Requests(engine, traffic, is_known=is_known)
        say(name)
        results[name] = search(engine, requests, plan, steps, is_prepared=is_prepared)
        write_measurement(flags.out, results)
    engine.close()
