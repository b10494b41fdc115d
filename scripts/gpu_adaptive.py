"""The controller live on a card: Steady, Trend and Burst in one trace, adaptive against constants 0.1 to 0.9.

    python -m scripts.gpu_adaptive                        # on a card; writes docs/measurements/gpu-adaptive-h200.json
    python -m scripts.gpu_adaptive_plot                   # draws docs/images/adaptive-h200.png from that file
    python -m scripts.gpu_adaptive --quick                # a small model on the CPU: that it runs, no figures

The set-up is that of the trade-off map (`scripts.gpu_tradeoff`): 24 rows a token, where the caches compete, and one,
where they do not (with a smaller table, to be ready sooner). One engine serves all runs of a set-up; between runs both
caches are emptied and the same warm-up is served. Arrivals are open-loop at a share of what the best constant bears in
each of three mixes, measured first, so all are equally critical; hot users are in the midst of their visits from the
start, so that a mix costs at the end what it did at the beginning. Everything is short: windows are a quarter of a
second and the travel allowed per minute four times the usual. `scripts.adaptive_twin` is the same in the simulator.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.collector import PROCESS
from helmrec.control.helm import HelmPolicy
from helmrec.control.network import shipped_base
from helmrec.control.policy import Limited, Limits, WindowStats
from helmrec.control.policy import Traffic as Traffic_
from helmrec.control.rebalancer import Decision, Rebalancer, Steered
from helmrec.control.service_cost import ServiceCost
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.memory.miss_curves import JointCurves
from helmrec.model.profiles import profile
from helmrec.sim.cost import default_cost
from helmrec.sim.node_config import NodeConfig
from helmrec.sim.scenario import mean_service_cost
from helmrec.types import RankResult
from scripts import gpu_traffic
from scripts.gpu_tradeoff import NUM_HOT, POOL_BYTES, TABLE_BYTES
from scripts.gpu_traffic import Mix, Traffic, forget, serving_config, serving_engine
from scripts.provenance import write_measurement

OUT = Path("docs/measurements/gpu-adaptive-h200.json")
ALPHAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
FIRST = (0.5, 0.8, 0.2, 0.6, 0.4)  # if time is short
PROBED = (0.2, 0.4, 0.6, 0.8)
TABLES = {24: TABLE_BYTES, 1: 8 << 30}
MIXES = (0.35, 0.6, 0.85)  # shares of requests by hot users; what a mix bears is not linear between the ends
LOAD = 0.7  # of what the best constant bears in each mix
SLO_MS = 80.0
TICK_S, TRAVEL_PER_MINUTE = 0.25, 4.0
WARM_UP, PROBE = 320, 384  # requests
VISITS = 200  # after which a hot user of `gpu_traffic` is as it was
DRAIN_S = 3.0  # after the last arrival; who still waits then was not served


class Stretch(NamedTuple):
    """A part of the trace, over which the share of hot users goes from one value to another."""

    name: str
    share_of_run: float
    hot_share: tuple[float, float]
    rate_factor: float = 1.0


STRETCHES = (
    Stretch("steady", 0.3, (0.35, 0.35)),
    Stretch("trend", 0.3, (0.35, 0.85)),
    Stretch("burst", 0.2, (0.35, 0.35), 1.1),
    Stretch("after", 0.2, (0.85, 0.85)),
)


@dataclass(frozen=True)
class Course:
    """Requests and when they are due."""

    warm_up: list[Prepared]
    requests: list[Prepared]
    due_s: NDArray[np.float64]
    stretch: list[str]  # that each belongs to


@dataclass
class Run:
    """What one policy made of the course."""

    latency_ms: NDArray[np.float64]  # NaN: not served
    alphas: list[tuple[float, float]] = field(default_factory=list)  # time, alpha
    decisions: list[str] = field(default_factory=list)
    before: Any = None
    after: Any = None


def plan_times(rates: dict[float, float], duration_s: float, seed: int) -> Iterator[tuple[float, float, str]]:
    """(due, hot share, stretch) of each request: Poisson arrivals at the rate that goes with the mix."""
    rng, start_s, known = np.random.default_rng(seed), 0.0, sorted(rates)
    for stretch in STRETCHES:
        length_s, at_s = stretch.share_of_run * duration_s, 0.0
        while True:
            passed = at_s / length_s
            share = stretch.hot_share[0] + (stretch.hot_share[1] - stretch.hot_share[0]) * passed
            rate = stretch.rate_factor * np.interp(share, known, [rates[mix] for mix in known])
            at_s += float(rng.exponential(1 / rate))
            if at_s >= length_s:
                break
            yield start_s + at_s, share, stretch.name
        start_s += length_s


def make_requests(engine: Engine, mix: Mix, shares: Sequence[float], seed: int) -> list[Prepared]:
    """One after the other as the shares say; prepared by several threads."""
    traffic, asked = Traffic(engine, mix, seed), []
    traffic._visits = np.random.default_rng(seed).integers(VISITS, size=mix.num_hot)
    for share in shares:
        traffic._mix = replace(mix, hot_share=share)
        asked.append(traffic._next())
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda each: engine._intake.prepare(traffic._request(*each)), asked))


def serve_all(engine: Engine, requests: Sequence[Prepared]) -> float:
    """As fast as it goes; seconds."""
    started_s = time.perf_counter()
    futures = [engine._scheduler.submit(request, engine._clock.now()) for request in requests]
    while engine.step():
        pass
    for future in futures:
        future.result(timeout=0)
    return time.perf_counter() - started_s


class Driver:
    """Offers requests when they are due and steps the engine in between. Latency counts from when one was due."""

    def __init__(self, engine: Engine, course: Course, rebalancer: Rebalancer | None, run: Run) -> None:
        self._engine, self._course, self._rebalancer, self._run = engine, course, rebalancer, run
        self._running: set[Future[RankResult]] = set()
        self._started_s = 0.0

    def go(self) -> None:
        due_s, num, at = self._course.due_s, len(self._course.requests), 0
        end_s, next_look_s = float(due_s[-1]) + DRAIN_S, 0.0
        self._started_s = time.perf_counter()
        while (now_s := self._elapsed_s()) < end_s:
            while at < num and due_s[at] <= now_s:
                self._offer(at)
                at += 1
            had_work = self._engine.step()
            if self._rebalancer is not None:
                self._rebalancer.tick(time.monotonic())  # the engine's clock
            if now_s >= next_look_s:
                self._run.alphas.append((round(now_s, 3), round(self._engine.stats().pool.alpha, 4)))
                next_look_s = now_s + TICK_S
            if not had_work:
                if at == num:
                    break
                time.sleep(max(0.0, min(0.001, float(due_s[at]) - self._elapsed_s())))
        self._engine._scheduler.withdraw([future for future in self._running if not future.done()])
        while self._engine.step():
            pass

    def _offer(self, at: int) -> None:
        future = self._engine._scheduler.submit(self._course.requests[at], self._engine._clock.now())
        self._running.add(future)
        future.add_done_callback(lambda done: self._note(done, at))

    def _note(self, done: "Future[RankResult]", at: int) -> None:
        """Keep numbers only: objects of all requests would make collections long."""
        self._running.discard(done)
        if done.cancelled() or done.exception() is not None:
            return
        latency_ms = (self._elapsed_s() - float(self._course.due_s[at])) * 1e3
        self._run.latency_ms[at] = latency_ms
        if self._rebalancer is not None:
            self._rebalancer.record(self._course.requests[at].history.user_id, latency_ms)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s


class Stand:
    """One engine and how runs on it are begun."""

    def __init__(self, rows_per_token: int, is_quick: bool) -> None:
        self.is_quick = is_quick
        self.mix = Mix(MIXES[0], 4, 2_100) if is_quick else Mix(MIXES[0], NUM_HOT)
        self._rows = rows_per_token
        self.engine = self._make()

    def _make(self) -> Engine:
        if not self.is_quick:
            return serving_engine(serving_config(self._rows, TABLES[self._rows]), pool_bytes=POOL_BYTES, alpha=0.5)
        config = profile("demo", 20_000).model_copy(update={"user_context": (), "request_context": ()})
        small = {"device": "cpu", "max_batch_requests": 4, "max_batch_tokens": 4_096}
        return serving_engine(config, pool_bytes="12MiB", alpha=0.5, **small)

    def begin(self, alpha: float, has_curves: bool) -> Engine:
        """Caches as on the first day, the boundary at `alpha`; curves only for who looks at them: they take time."""
        if self.is_quick:
            self.engine.close()
            self.engine = self._make()
            self.engine.move_alpha(alpha)
            self.engine.settle()
        else:
            forget(self.engine, alpha)
        self.engine._curves = self.engine._make_curves() if has_curves else None
        return self.engine

    def rebalancer(self, told: list[str]) -> Rebalancer:
        node = NodeConfig(model=self.engine.model_config, engine=self.engine.config)
        starts_s = list[float]()  # of the windows

        def note(decision: Decision) -> None:
            starts_s.append(decision.window.traffic.start_s)
            if (said := decision.explanation) is not None and decision.move is not None:
                told.append(said._replace(time_s=said.time_s - starts_s[0]).line())

        return steer(self.engine, node, self.mix.mean_events, note)


def steer(steered: Steered, node: NodeConfig, mean_events: float, note: Callable[[Decision], None]) -> Rebalancer:
    """The controller as it is run here."""
    cost = mean_service_cost(default_cost(), node, mean_events, gpu_traffic.NUM_CANDIDATES)
    policy = Limited(HelmPolicy(cost), Limits(travel_per_minute=TRAVEL_PER_MINUTE))
    return Rebalancer(steered, policy, SLO_MS, TICK_S, on_decision=note)


def compile_policy() -> None:
    """A decision over nothing in particular; it takes as long as an engine takes to be made."""
    alphas, values = np.linspace(0.03, 0.9, 10), np.linspace(1.0, 2.0, 10)
    curves = JointCurves(alphas, 1_000.0, values, values, values, values, values, values)
    traffic = Traffic_(0.0, 1.0, 100, 100, 0.5, 5.0, 5.0, 9.0, SLO_MS, 1.0, 0, 0.5, 0.0, 0.5)
    window = WindowStats(traffic, 0.5, 0.5, 0.0, 0.95, 1 << 30, 0.5, 0.5, 1.0, 1.0, 1.0, 0, 0, curves)
    HelmPolicy(ServiceCost(token_ms=1e-3, missed_row_ms=1e-4)).decide(window)


def rehearse(stand: Stand) -> None:
    """Compile all that decides, which must not happen under load."""
    engine = stand.begin(0.5, has_curves=True)
    rebalancer = stand.rebalancer([])
    rebalancer.tick(0.0)
    serve_all(engine, make_requests(engine, stand.mix, [MIXES[-1]] * 64, seed=4))
    for user in range(64):
        rebalancer.record(user, 10.0)
    rebalancer.tick(1.0)


def capacities(stand: Stand, warm_up: int, probe: int) -> dict[float, dict[float, float]]:
    """Requests/s by mix and constant, everything queued at once."""
    found: dict[float, dict[float, float]] = {}
    for share in MIXES:
        requests = make_requests(stand.engine, stand.mix, [share] * (warm_up + probe), seed=1)
        found[share] = {}
        for alpha in PROBED:
            engine = stand.begin(alpha, has_curves=False)
            serve_all(engine, requests[:warm_up])
            found[share][alpha] = round(probe / serve_all(engine, requests[warm_up:]), 1)
        print(f"hot {share:.2f}: {found[share]}", flush=True)
    return found


def best_constant(found: dict[float, dict[float, float]]) -> float:
    """The one that loses least in the mix it suits worst."""
    return max(PROBED, key=lambda alpha: min(by[alpha] / max(by.values()) for by in found.values()))


def rates_for(found: dict[float, dict[float, float]]) -> dict[float, float]:
    """Arrivals a second by mix."""
    return {share: LOAD * by[best_constant(found)] for share, by in found.items()}


def make_course(stand: Stand, rates: dict[float, float], duration_s: float, warm_up: int) -> Course:
    planned = list(plan_times(rates, duration_s, seed=2))
    shares = [MIXES[0]] * warm_up + [share for _, share, _ in planned]
    requests = make_requests(stand.engine, stand.mix, shares, seed=3)
    due_s = np.array([due for due, _, _ in planned])
    return Course(requests[:warm_up], requests[warm_up:], due_s, [name for _, _, name in planned])


def run_one(stand: Stand, course: Course, alpha: float | None) -> Run:
    """`alpha`: a constant; None is the controller, from the untuned split."""
    engine = stand.begin(0.5 if alpha is None else alpha, has_curves=alpha is None)
    serve_all(engine, course.warm_up)
    run = Run(np.full(len(course.requests), np.nan))
    rebalancer = stand.rebalancer(run.decisions) if alpha is None else None
    run.before = engine.stats().pool
    Driver(engine, course, rebalancer, run).go()
    run.after = engine.stats().pool
    assert engine.stats().background_failures == 0
    return run


def describe(course: Course, run: Run) -> dict[str, Any]:
    """Figures of a run; who was not served counts as later than anyone."""
    latency_ms, names = np.nan_to_num(run.latency_ms, nan=np.inf), np.array(course.stretch)
    served = run.latency_ms[~np.isnan(run.latency_ms)]
    before, after = run.before, run.after
    hits, misses = after.row_hits - before.row_hits, after.row_misses - before.row_misses

    def p99(values: NDArray[np.float64]) -> float | None:
        found = float(np.percentile(values, 99, method="higher"))
        return round(found, 2) if np.isfinite(found) else None

    parts = {name: p99(latency_ms[names == name]) for name in dict.fromkeys(course.stretch)}
    return {
        "offered": len(course.requests),
        "served": int(served.size),
        "mean_ms": round(float(served.mean()), 2),
        "p50_ms": round(float(np.percentile(served, 50)), 2),
        "p99_ms": p99(latency_ms),
        "p99_ms_by_stretch": parts,
        "slo_satisfaction": round(float((latency_ms <= SLO_MS).mean()), 4),
        "row_hit_rate": round(hits / max(1, hits + misses), 4),
        "token_reuse_rate": round(
            (after.reused_tokens - before.reused_tokens) / max(1, after.total_tokens - before.total_tokens), 4
        ),
        "mib_by_cause": {
            cause: round((num - before.bytes_by_cause.get(cause, 0)) / 2**20, 1)
            for cause, num in after.bytes_by_cause.items()
        },
        "alpha_over_time": run.alphas,
        "moves": run.decisions,
    }


def measure(rows_per_token: int, flags: argparse.Namespace, deadline_s: float) -> Iterator[dict[str, Any]]:
    """All there is so far, after every run."""
    started_s = time.perf_counter()
    compiling = threading.Thread(target=compile_policy)
    compiling.start()
    stand = Stand(rows_per_token, flags.quick)
    compiling.join()
    warm_up, probe = (16, 16) if flags.quick else (WARM_UP, PROBE)
    print(f"{rows_per_token} rows a token: ready after {time.perf_counter() - started_s:.1f} s", flush=True)
    rehearse(stand)
    print(f"compiled after {time.perf_counter() - started_s:.1f} s", flush=True)
    found = capacities(stand, warm_up, probe)
    best = best_constant(found)
    rates = rates_for(found)
    duration_s = flags.seconds if rows_per_token == 24 else flags.seconds / 3
    course = make_course(stand, rates, duration_s, warm_up)
    PROCESS.settle()  # to look through all these requests takes a few hundred milliseconds
    print(f"{len(course.requests)} requests made after {time.perf_counter() - started_s:.1f} s", flush=True)
    about = {
        "capacity": {f"{share:g}": {f"{a:g}": rate for a, rate in by.items()} for share, by in found.items()},
        "best_constant_by_capacity": best,
        "arrivals_per_s": {f"{share:g}": round(rate, 1) for share, rate in rates.items()},
        "duration_s": duration_s,
        "stretches": [stretch._asdict() for stretch in STRETCHES],
    }
    policies: dict[str, Any] = {}
    for alpha in dict.fromkeys((None, best, *FIRST, *ALPHAS)):
        if time.perf_counter() > deadline_s:
            print("out of time: the constants left are not measured", flush=True)
            break
        name = "adaptive" if alpha is None else f"static {alpha:g}"
        policies[name] = describe(course, run_one(stand, course, alpha))
        told = {key: policies[name][key] for key in ("mean_ms", "p99_ms", "slo_satisfaction", "p99_ms_by_stretch")}
        print(f"{name}: {told} after {time.perf_counter() - started_s:.1f} s", flush=True)
        if alpha is None:
            print(f"alpha over time: {policies[name]['alpha_over_time']}", flush=True)
        yield {**about, "policies": policies}
    stand.engine.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rows", type=int, nargs="*", choices=(24, 1), default=[24, 1])
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic a run at 24 rows; a third of it at one")
    parser.add_argument("--limit-s", type=float, default=3_600, help="stop after so long with what there is")
    parser.add_argument("--quick", action="store_true", help="a small model on the CPU")
    flags = parser.parse_args()
    if flags.quick:
        gpu_traffic.NUM_CANDIDATES = 64
    elif not torch.cuda.is_available():
        sys.exit("this needs a CUDA device (or --quick)")
    start_s, set_ups = time.perf_counter(), dict[str, Any]()
    set_up = {
        "pool_bytes": POOL_BYTES,
        "table_bytes": TABLES,
        "hot_users": NUM_HOT,
        "load": LOAD,
        "slo_ms": SLO_MS,
        "tick_s": TICK_S,
        "travel_per_minute": TRAVEL_PER_MINUTE,
        "network": shipped_base().record.get("chosen"),
        "calibration": default_cost().name,
    }
    for number, rows in enumerate(flags.rows, start=1):  # what one set-up does not use the next may
        until_s = start_s + flags.limit_s * (0.8 if number < len(flags.rows) else 1)
        for so_far in measure(rows, flags, until_s):  # written run by run: a run that is cut off leaves what it had
            set_ups[str(rows)] = so_far
            write_measurement(flags.out, {"set_up": set_up, "set_ups": set_ups})


if __name__ == "__main__":
    main()
