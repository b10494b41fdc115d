"""No pauses while serving: minutes at a constant share of what a node bears, users growing, one constant split.

    helmrec bench run pauses                                   # this machine's CPU, engine in this process
    helmrec bench run pauses --http                            # `helmrec serve` with the engine in its own process
    helmrec bench run pauses --device cuda --minutes 6 --http --cold    # a card, 24 rows a token

(For a GPU with the engine in the driver's process: `helmrec bench run live --course steady`. There one thread that
checks requests would be slower than the engine that serves them.)

The load is open-loop and Poisson, at 70% of what the node answered when everything was offered at once. Every request
that is not a hot user's comes from a user nobody has seen. `--cold` starts with empty caches of compiled code; the load
begins with the first `/readyz` that says 200. Results are added to docs/measurements/pauses-cpu.json or to
pauses-h200.json there.
"""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.warm_up import warm_up
from helmrec.load import EngineLoad, arrival_times
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model, load_model
from helmrec.pauses import PauseStats
from helmrec.serve.load import HttpLoad
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import provenance, this_command, write_measurement
from helmrec_bench.measure.cards.traffic import serving_config
from helmrec_bench.measure.requests import Crowd, Visitors
from helmrec_bench.measure.server import ServerProcess

LOAD = 0.7
SLO_MS = 80.0
ALPHA = 0.3
TABLE_BYTES, POOL = 4 << 30, "6GiB"  # on a card
HOT_SHARE, NUM_HOT, NUM_KEPT = 0.6, 56, 384
PROBE = 1_500  # requests offered at once, to see what the node bears
PROBE_HTTP, BATCH = 1_500, 8  # requests in all, and in a step


class PauseSetup:
    """What is served, and by what."""

    def __init__(self, device: str) -> None:
        self.is_card = device == "cuda"
        if self.is_card:
            self.model = serving_config(24, TABLE_BYTES)
            self.engine = {"device": "cuda", "pool_bytes": POOL, "max_batch_requests": 8, "max_batch_tokens": 70_016}
            self.mean_events, self.num_candidates = 6_700, 2_048
        else:
            self.model = profile("demo", 20_000)
            self.engine = {"device": "cpu", "pool_bytes": "16MiB"}
            self.mean_events, self.num_candidates = 120, 32
        self.engine |= {"alpha": ALPHA, "queue_limit": 4_096, "log_gaps_ms": 10.0}

    def requests(self) -> Iterator[RankRequest]:
        """Histories of new users are taken from a few, under other user ids: that costs their maker little."""
        crowd = Crowd.around(NUM_HOT, self.mean_events, self.num_candidates, NUM_KEPT)
        visitors = Visitors(self.model, crowd)
        while True:
            yield visitors.next(HOT_SHARE)


def by_minute(due_s: NDArray[np.float64], latency_ms: NDArray[np.float64], minutes: float) -> list[dict[str, Any]]:
    found = []
    for minute in range(int(np.ceil(minutes))):
        inside = latency_ms[(due_s >= 60 * minute) & (due_s < 60 * (minute + 1))]
        found.append({"minute": minute + 1, "answered": inside.size, **percentiles(inside)})
    return found


def percentiles(latency_ms: NDArray[np.float64]) -> dict[str, float]:
    if not latency_ms.size:
        return {}
    p50, p99 = np.percentile(latency_ms, (50, 99))
    return {
        "mean_ms": round(float(latency_ms.mean()), 2),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(float(latency_ms.max()), 2),
    }


def described(load: EngineLoad | HttpLoad, minutes: float) -> dict[str, Any]:
    """Latencies by the minute, and of the first ten seconds."""
    tally = load.tally
    due_s, latency_ms = np.array(tally.due_s), np.array(tally.latencies_ms)
    minutes_found = by_minute(due_s, latency_ms, minutes)
    found: dict[str, Any] = {
        "answered": len(latency_ms),
        "refused": dict(tally.refused),
        "failed": tally.failed,
        "within_slo": round(float((latency_ms <= SLO_MS).mean()), 4),
        "all": percentiles(latency_ms),
        "first_10_s": percentiles(latency_ms[due_s < 10]),
        "minutes": minutes_found,
        "driver_late_p99_ms": round(float(np.percentile(np.array(tally.lags_ms), 99)), 2),
    }
    if len(minutes_found) > 1:
        second = minutes_found[1]["p99_ms"]
        found["first_10_s_over_minute_2"] = round(found["first_10_s"]["p99_ms"] / second, 3)
        found["last_minute_over_minute_2"] = round(minutes_found[-1]["p99_ms"] / second, 3)
    return found


def gaps(pauses: PauseStats) -> dict[str, Any]:
    return {**asdict(pauses), "longest_ms": round(pauses.longest_ms, 2)}


def in_process(setup: PauseSetup, minutes: float, share: float) -> dict[str, Any]:
    """Driver and engine in one process, each in its thread."""
    PROCESS.take_over()
    with tempfile.TemporaryDirectory() as folder:
        init_model(Path(folder) / "model", setup.model)
        engine = Engine(load_model(Path(folder) / "model"), EngineConfig(**setup.engine))
    warm_up(engine)
    with engine:
        requests = setup.requests()
        for _ in range(2):
            capacity = saturated(engine, requests)
        PROCESS.settle()
        engine.reset_pauses()
        times_s = arrival_times(np.zeros(int(share * capacity * 60 * minutes)), share * capacity, seed=1)
        print(f"{capacity:.1f} requests/s; {times_s.size} requests over {minutes:g} minutes", flush=True)
        load = EngineLoad(engine)
        load.run(requests, times_s, watch_every_s=1e9)
        stats = engine.stats()
        engine.check()
    return {
        "start_s": {part: round(seconds, 2) for part, seconds in engine.start_up.seconds.items()},
        "capacity_per_s": round(capacity, 1),
        "offered_per_s": round(share * capacity, 1),
        **described(load, minutes),
        "gaps": gaps(stats.pauses),
        "collector": asdict(PROCESS.stats()),
        "resident_users": stats.pool.resident_users,
    }


def saturated(engine: Engine, requests: Iterator[RankRequest]) -> float:
    """Requests/s of everything offered at once by one thread and served by another, intake included."""
    load = EngineLoad(engine)
    end = load.run(requests, np.zeros(PROBE), watch_every_s=1e9)
    assert end.answered == PROBE, end
    return PROBE / end.elapsed_s


def start_server(setup: PauseSetup, folder: Path, *, is_cold: bool) -> ServerProcess:
    """The engine in a process of its own."""
    settings = setup.engine | {"engine_process": "true", "max_body_bytes": "64MiB", "max_bodies_bytes": "1GiB"}
    caches = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR") if is_cold else ()
    return ServerProcess.of_model(folder / "model", settings, {name: tempfile.mkdtemp(dir=folder) for name in caches})


def over_http(setup: PauseSetup, minutes: float, share: float, *, is_cold: bool) -> dict[str, Any]:
    """The load begins when the server says it is ready; what it bears is seen by a server before."""
    PROCESS.take_over()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_model(folder / "model", setup.model)
        requests = setup.requests()
        capacity = http_capacity(setup, folder, requests)
        rate = share * capacity
        times_s = arrival_times(np.zeros(int(rate * 60 * minutes)), rate, seed=1)
        PROCESS.settle()
        server = start_server(setup, folder, is_cold=is_cold)
        try:
            print(f"ready after {server.ready_s:.1f} s; {rate:.1f} requests/s offered", flush=True)
            load = HttpLoad(server.url)
            load.run(requests, setup.model, times_s, watch_every_s=1e9)
            stats = server.stats()
        finally:
            server.end()
            print(server.output[-6_000:], flush=True)
        return {
            "is_cold": is_cold,
            "ready_after_s": round(server.ready_s, 2),
            "capacity_per_s": round(capacity, 1),
            "offered_per_s": round(rate, 1),
            **described(load, minutes),
            "gaps": gaps(stats.pauses),
            "collector_of_engine": asdict(stats.collector),
            "resident_users": stats.pool.resident_users,
        }


def http_capacity(setup: PauseSetup, folder: Path, requests: Iterator[RankRequest]) -> float:
    """Answers/s of a server that always has as many requests as fit two steps; the second stretch counts."""
    server = start_server(setup, folder, is_cold=False)
    try:
        for num in (300, PROBE_HTTP):
            load = HttpLoad(server.url, max_connections=2 * BATCH)
            end = load.run(requests, setup.model, np.zeros(num), watch_every_s=1e9)
            assert not end.refused and not end.failed, end
        return end.answered / end.elapsed_s
    finally:
        server.end()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--http", action="store_true", help="over HTTP, the engine in a process of its own")
    parser.add_argument("--cold", action="store_true", help="with empty caches of compiled code (--http)")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--load", type=float, default=LOAD, help="share of what the node bears")


def default_out(flags: Namespace) -> str:
    return "pauses-h200.json" if flags.device == "cuda" else "pauses-cpu.json"


def main(flags: Namespace) -> None:
    setup = PauseSetup(flags.device)
    if flags.http:
        found = over_http(setup, flags.minutes, flags.load, is_cold=flags.cold)
    else:
        found = in_process(setup, flags.minutes, flags.load)
    path = flags.out
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    runs[("http" + " cold" * flags.cold) if flags.http else "in process"] = {**provenance(this_command()), **found}
    write_measurement(path, {"runs": runs})
    print(json.dumps(found, indent=1))
