"""What a stream of new rows costs requests on a card: dlrmv3 shape, a share of what the node bears, open loop.

    helmrec bench run row-stream --anew              # on a card, all runs: about eight minutes
    helmrec bench run row-stream                     # go on with the runs that the file lacks
    helmrec bench run row-stream --quick             # a small model on the CPU: that it runs, no figures

Runs with and without the stream take turns on one engine and one course of requests, from empty caches and the same
warm-up. KV may lag behind rows by `--lag` seconds; the ages of prefixes are spread over that time first, as they are
after a long time of serving. One more, shorter run has exact freshness. A run that is done is kept in the file, with
the rate of arrivals, so a call that begins no further run after `--limit-s` is continued by the next call.
"""

import json
import math
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from helmrec.collector import PROCESS
from helmrec.deltas.consumer import ConsumerLimits
from helmrec.engine.engine import Engine
from helmrec.engine.probe import EngineProbe
from helmrec.load import arrival_times
from helmrec.model.profiles import profile
from helmrec_bench.lab.provenance import provenance, this_command, write_measurement
from helmrec_bench.measure.cards.banked_traffic import banked_for
from helmrec_bench.measure.cards.traffic import card_crowd, equal_rows_model, hit_rates, serving_config, serving_engine
from helmrec_bench.measure.controller.turns import Driver, LiveCourse, LiveRun, figures, serve_all
from helmrec_bench.measure.requests import Crowd
from helmrec_bench.measure.training import Follower, UpdateRate, leave_cores_to_trainer, training

WITHOUT, LAGGING, EXACT = "without stream", "lagging", "exact"
ALPHA, HOT_SHARE = 0.3, 0.85
MOST_MEAN, MOST_P99, MOST_LAG_S = 1.03, 1.10, 1.0  # what the stream may cost, at lagging freshness


@dataclass(frozen=True)
class StreamPlan:
    """Sizes of the runs."""

    crowd: Crowd
    num_visits: int  # of a hot user with different histories
    bank: int  # histories of users who come once
    warm_up: int  # requests
    saturated: int  # requests, to see what the engine bears
    updates: UpdateRate
    table_bytes: int = 16 << 30
    pool_bytes: int = 32 << 30


FULL = StreamPlan(card_crowd(200), 60, 1_000, 1_500, 1_600, UpdateRate(200_000.0, 10_000))
QUICK = StreamPlan(card_crowd(4, 2_100, 64), 4, 8, 16, 16, UpdateRate(4_000.0, 200))


class StreamStand:
    """One engine, and how runs on it are begun."""

    def __init__(self, plan: StreamPlan, *, is_quick: bool) -> None:
        self.plan, self.engine = plan, _engine(plan, is_quick=is_quick)
        self._requests = banked_for(self.engine, plan.crowd, plan.bank, plan.num_visits)
        self._probe = EngineProbe(self.engine)

    def capacity(self) -> float:
        """Requests/s with everything queued at once, without a stream."""
        num = self.plan.warm_up + self.plan.saturated
        requests = self._requests.take([HOT_SHARE] * num, seed=1)
        self._probe.clear(ALPHA)
        serve_all(self.engine, requests[: self.plan.warm_up])
        return self.plan.saturated / serve_all(self.engine, requests[self.plan.warm_up :])

    def course(self, rate: float, seconds: float) -> LiveCourse:
        due_s = arrival_times(np.zeros(max(1, int(rate * seconds))), rate, seed=2)
        num = self.plan.warm_up + due_s.size
        requests = self._requests.take([HOT_SHARE] * num, seed=3)
        first = self.plan.warm_up
        return LiveCourse(requests[:first], requests[first:], due_s, ["all"] * due_s.size)

    def run(self, course: LiveCourse, kind: str, lag_s: float) -> dict[str, Any]:
        """Serve the course once; its figures, and those of the stream."""
        engine, probe = self.engine, self._probe
        probe.clear(ALPHA)
        probe.set_freshness(0.0 if kind == EXACT else lag_s)
        serve_all(engine, course.warm_up)
        run = LiveRun(np.full(len(course.requests), np.nan))
        PROCESS.settle()
        with self._stream(kind) as follower:
            # Only now: a trainer takes seconds to start, in which ages would grow and the first ones expire at once.
            probe.spread_checks(np.random.default_rng(4), 0.0 if kind == EXACT else lag_s)
            before = engine.stats().pool
            engine.reset_pauses()
            if follower is not None:
                follower.catch_up()
            Driver(engine, course, follower, run).go()
            after, stream = engine.stats().pool, None if follower is None else follower.describe()
        assert engine.stats().background_failures == 0
        engine.check()
        return {
            **figures(run.latency_ms),
            **hit_rates(before, after),
            "stale_cuts": after.stale_cuts - before.stale_cuts,
            "stale_tokens": after.stale_tokens - before.stale_tokens,
            "longest_gap_ms": round(engine.stats().pauses.longest_ms, 2),
            "stream": stream,
        }

    @contextmanager
    def _stream(self, kind: str) -> Iterator[Follower | None]:
        if kind == WITHOUT:
            yield None
            return
        with training(self.engine.model_config, self.plan.updates, self.engine) as follower:
            yield follower


def _engine(plan: StreamPlan, *, is_quick: bool) -> Engine:
    if not is_quick:
        return serving_engine(serving_config(6, plan.table_bytes), pool_bytes=plan.pool_bytes, alpha=ALPHA)
    config = profile("demo", 20_000).model_copy(update={"user_context": (), "request_context": ()})
    small = {"device": "cpu", "max_batch_requests": 4, "max_batch_tokens": 4_096}
    model = equal_rows_model(config)
    apart = {
        name: rows.clone() for name, rows in model.tables.items()
    }  # a CPU writes new rows to the tables themselves
    return serving_engine(replace(model, tables=apart), pool_bytes="12MiB", alpha=ALPHA, **small)


def order_of(num_pairs: int) -> list[tuple[str, int]]:
    """(kind, number) of each run: pairs take turns in who is first; the exact mode comes last."""
    pairs = [
        (kind, pair)
        for pair in range(num_pairs)
        for kind in ((WITHOUT, LAGGING) if pair % 2 == 0 else (LAGGING, WITHOUT))
    ]
    return [*pairs, (EXACT, 0)]


def judged(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians over the pairs, and their ratios; empty until there is a pair."""
    by_kind = {kind: [run for name, run in runs.items() if name.startswith(kind)] for kind in (WITHOUT, LAGGING, EXACT)}
    if not by_kind[WITHOUT] or not by_kind[LAGGING]:
        return {}
    medians = {
        kind: {name: _median(run[name] for run in found) for name in ("mean_ms", "p99_ms")}
        for kind, found in by_kind.items()
        if found
    }
    costs = {
        kind: {name: _ratio(each[name], medians[WITHOUT][name]) for name in each}
        for kind, each in medians.items()
        if kind != WITHOUT
    }
    lag_s = max(run["stream"]["lag_p99_s"] for run in by_kind[LAGGING])
    bounds = {"mean_ms": MOST_MEAN, "p99_ms": MOST_P99}
    is_met = all((cost := costs[LAGGING][name]) is not None and cost <= most for name, most in bounds.items())
    is_met = is_met and lag_s < MOST_LAG_S
    return {"medians": medians, "over_without": costs, "lag_p99_s": lag_s, "is_met": is_met}


def _median(values: Iterable[float | None]) -> float | None:
    """None is a percentile that lies among requests that were not served: later than any."""
    found = statistics.median(float("inf") if value is None else value for value in values)
    return None if math.isinf(found) else round(found, 3)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else round(value / base, 4)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic in a run")
    parser.add_argument("--exact-seconds", type=float, default=20.0, help="of traffic in the run of exact freshness")
    parser.add_argument("--anew", action="store_true", help="leave out the runs that the file has")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--lag", type=float, default=300.0, help="seconds by which KV may lag behind rows")
    parser.add_argument("--load", type=float, default=0.7, help="share of what the engine bears")
    parser.add_argument("--limit-s", type=float, default=460.0, help="begin no further run after so long")
    parser.add_argument("--quick", action="store_true", help="a small model on the CPU")


def default_out(flags: Namespace) -> str:
    return "row-stream-quick.json" if flags.quick else "row-stream-h200.json"


def main(flags: Namespace) -> None:
    started_s = time.perf_counter()
    plan = QUICK if flags.quick else FULL
    asked = {
        "seconds": flags.seconds,
        "exact_seconds": flags.exact_seconds,
        "lag_s": flags.lag,
        "load": flags.load,
        "updates_per_s": plan.updates.rows_per_s,
        "slice_rows": ConsumerLimits().slice_rows,
    }
    found = json.loads(flags.out.read_text()) if flags.out.exists() and not flags.anew else {}
    if found.get("asked") != asked:
        found = {"asked": asked, "runs": {}}
    leave_cores_to_trainer()
    stand = StreamStand(plan, is_quick=flags.quick)
    print(f"{time.perf_counter() - started_s:6.1f} s  ready\n{stand.engine.report()}", flush=True)
    if "capacity_per_s" not in found:
        found["capacity_per_s"] = round(stand.capacity(), 1)
    course = stand.course(flags.load * found["capacity_per_s"], flags.seconds)
    left = [run for run in order_of(flags.pairs) if f"{run[0]} {run[1]}" not in found["runs"]]
    print(f"{time.perf_counter() - started_s:6.1f} s  {len(course.requests)} requests, {len(left)} runs", flush=True)
    for kind, number in left:
        if time.perf_counter() - started_s > flags.limit_s:
            print(f"not done: {kind} {number} and later ones; run the command again", flush=True)
            break
        run = stand.run(course.until(flags.exact_seconds) if kind == EXACT else course, kind, flags.lag)
        found["runs"][f"{kind} {number}"] = {"at": provenance(this_command()), **run}
        found["judged"] = judged(found["runs"])
        write_measurement(flags.out, _without_provenance(found))
        print(f"{time.perf_counter() - started_s:6.1f} s  {kind} {number}: {run}", flush=True)
    else:
        print(f"all runs are done: {found['judged']}", flush=True)
    stand.engine.close()


def _without_provenance(found: dict[str, Any]) -> dict[str, Any]:
    """What this measurement has written; `write_measurement` adds the rest anew."""
    return {name: found[name] for name in ("asked", "capacity_per_s", "judged", "runs") if name in found}
