"""What freshness costs: KV reuse and requests/s over the rate of row updates and the lag that KV may have.

    helmrec bench run freshness                      # this machine's CPU, the demo shape; about 4 minutes
    helmrec bench run freshness --device cuda        # a card, dlrmv3 shape; about 6 minutes

A trainer pushes new rows of popular items at each rate. The engine always has two steps of requests queued and applies
the stream between steps. Before a point counts, both caches are emptied, the same users visit, and the ages of their
prefixes are spread over the lag, as they are after a long time of serving. Points that are done are kept in the file.
On a CPU that others use, look at requests per second of CPU time (of the thread that steps and computes).
"""

import json
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from helmrec.collector import PROCESS
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.model.profiles import profile
from helmrec.types import RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.banked_traffic import banked_for
from helmrec_bench.measure.cards.traffic import (
    card_crowd,
    equal_rows_model,
    hit_rates,
    serving_config,
    serving_engine,
)
from helmrec_bench.measure.requests import Crowd
from helmrec_bench.measure.training import Follower, UpdateRate, training

ALPHA, HOT_SHARE = 0.3, 0.85
DELTAS_PER_S = 20.0


@dataclass(frozen=True)
class FreshnessPlan:
    """Sizes of a device's points."""

    crowd: Crowd
    num_visits: int
    bank: int  # histories of users who come once
    warm_up: int  # requests
    num_requests: int  # different ones, which are served over and over
    rates: tuple[float, ...]  # rows/s
    lags_s: tuple[float, ...]  # 0: exact


PLANS = {
    "cpu": FreshnessPlan(
        Crowd.around(40, 300, 64), 20, 64, 160, 800, (0.0, 1.0, 10.0, 100.0, 1e3, 1e4), (0.0, 1.0, 10.0, 60.0)
    ),
    "cuda": FreshnessPlan(
        card_crowd(200), 40, 1_000, 1_500, 6_000, (0.0, 1e3, 1e4, 5e4, 2e5), (0.0, 10.0, 60.0, 300.0)
    ),
}


def make_engine(device: str) -> Engine:
    if device == "cuda":
        return serving_engine(serving_config(6, 16 << 30), pool_bytes=32 << 30, alpha=ALPHA)
    model = equal_rows_model(profile("demo").model_copy(update={"user_context": (), "request_context": ()}))
    apart = {
        name: rows.clone() for name, rows in model.tables.items()
    }  # a CPU writes new rows to the tables themselves
    small = {"device": "cpu", "max_batch_requests": 4, "max_batch_tokens": 4_096}
    return serving_engine(replace(model, tables=apart), pool_bytes="48MiB", alpha=ALPHA, **small)


def serve_on(
    engine: Engine, requests: Iterator[Prepared], follower: Follower | None, seconds: float = float("inf")
) -> int:
    """Serve until the time is over or there is no further request; how many were answered."""
    probe, end_s, num_done = EngineProbe(engine), time.monotonic() + seconds, 0
    most, waiting = 2 * engine.config.max_batch_requests, deque[Future[RankResult]]()
    while time.monotonic() < end_s:
        waiting.extend(map(probe.submit, islice(requests, most - len(waiting))))
        if not waiting:
            break
        engine.step()
        if follower is not None:
            follower.tick(time.monotonic())
        while waiting and waiting[0].done():
            waiting.popleft().result(timeout=0)
            num_done += 1
    probe.withdraw(waiting)
    while engine.step():
        pass
    return num_done


class FreshnessStand:
    """One engine and the requests it serves at every point."""

    def __init__(self, device: str) -> None:
        self.plan, self.engine = PLANS[device], make_engine(device)
        made = banked_for(self.engine, self.plan.crowd, self.plan.bank, self.plan.num_visits)
        num = self.plan.warm_up + self.plan.num_requests
        self._requests = made.take([HOT_SHARE] * num, seed=1)
        PROCESS.settle()

    def stream(self, rows_per_s: float) -> AbstractContextManager[Follower | None]:
        if not rows_per_s:
            return nullcontext()
        rate = UpdateRate(rows_per_s, max(1, round(rows_per_s / DELTAS_PER_S)))
        return training(self.engine.model_config, rate, self.engine)

    def point(self, follower: Follower | None, lag_s: float, seconds: float) -> dict[str, Any]:
        engine, probe, first = self.engine, EngineProbe(self.engine), self.plan.warm_up
        probe.clear(ALPHA)
        probe.set_freshness(lag_s)
        serve_on(engine, iter(self._requests[:first]), follower)
        probe.spread_checks(np.random.default_rng(2), lag_s)
        before, rows = engine.stats().pool, 0 if follower is None else follower.stats().rows
        started_s, cpu_s = time.monotonic(), time.thread_time()
        num_done = serve_on(engine, cycle(self._requests[first:]), follower, seconds)
        took_s, cpu_s = time.monotonic() - started_s, time.thread_time() - cpu_s
        after = engine.stats().pool
        updated = 0
        if follower is not None:
            stats = follower.stats()
            assert stats.stop is None, stats
            updated = stats.rows - rows
        engine.check()
        return {
            "requests_per_s": round(num_done / took_s, 1),
            "requests_per_cpu_s": round(num_done / cpu_s, 1),
            **hit_rates(before, after),
            "recomputed_tokens_per_request": round((after.stale_tokens - before.stale_tokens) / max(1, num_done), 1),
            "updated_rows_per_s": round(updated / took_s),
        }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each point")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="*", help="rows/s")
    parser.add_argument("--lags", type=float, nargs="*", help="seconds; 0 is exact")
    parser.add_argument("--limit-s", type=float, default=450.0, help="begin no further rate after so long")


def default_out(flags: Namespace) -> str:
    return "freshness-h200.json" if flags.device == "cuda" else "freshness-cpu.json"


def main(flags: Namespace) -> None:
    started_s, stand = time.perf_counter(), FreshnessStand(flags.device)
    rates, lags = flags.rates or stand.plan.rates, flags.lags or stand.plan.lags_s
    points = json.loads(flags.out.read_text())["points"] if flags.out.exists() else []
    done = {(point["repeat"], point["rate"]) for point in points}
    left = [(i, rate) for i in range(flags.repeats) for rate in rates if (i, rate) not in done]
    for repeat, rate in left:
        if time.perf_counter() - started_s > flags.limit_s:
            print("not done: further rates; run the command again", flush=True)
            break
        with stand.stream(rate) as follower:
            for lag_s in lags if rate else lags[:1]:
                found = stand.point(follower, lag_s, flags.seconds)
                points.append({"repeat": repeat, "rate": rate, "lag_s": lag_s, **found})
                print(f"{time.perf_counter() - started_s:6.1f} s  {points[-1]}", flush=True)
        write_measurement(flags.out, {"device": flags.device, "seconds_a_point": flags.seconds, "points": points})
    stand.engine.close()
