"""The controller live on a card: one course of steady, drifting and bursting traffic, against constant splits.

    helmrec bench run live                                        # on a card; writes docs/measurements/live-h200.json
    helmrec bench run live --rows 24 --policies static:0.1 static:0.2 static:0.3 --seconds 30 --screen-s 0
    helmrec bench run live --rows 24 --course steady --policies static:0.3 --seconds 360 --repeats 1 --screen-s 0
    helmrec bench run live --quick                                # a small model on the CPU: that it runs, no figures

The setup is that of the trade-off map (experiment `trade-off`): 24 rows a token, where the caches compete, or one,
where they do not (with a smaller table, to be ready sooner). One engine serves all runs of a setup; between runs both
caches are emptied and the same warm-up is served. Arrivals are open-loop at 70% of what the best constant bears in each
of three mixes, measured first. Constants are screened on a short course of the same kind; then the policies take turns
on one long course, which is scored as a whole and after its first minute.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.collector import PROCESS
from helmrec.control.helm import Helm
from helmrec.control.latency import Prediction
from helmrec.control.policy import Limited
from helmrec.control.rebalancer import Decision, Rebalancer
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.model.profiles import profile
from helmrec.pauses import PauseStats
from helmrec.policies import make_policy, needs_curves
from helmrec.types import RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.trade_off import NUM_HOT, POOL_BYTES, TABLE_BYTES
from helmrec_bench.measure.cards.traffic import PreparedTraffic, card_crowd, serving_config, serving_engine
from helmrec_bench.measure.requests import VISITS, Crowd

SCREENED = tuple(round(0.1 * i, 1) for i in range(1, 10))
PROBED = (0.2, 0.4, 0.6, 0.8)
BEST = "best"  # stands for the constant with the least mean latency of those screened
TABLES = {24: TABLE_BYTES, 1: 8 << 30}
MIXES = (0.35, 0.6, 0.85)  # shares of requests by hot users; what a mix bears is not linear between the ends
LOAD = 0.7  # of what the best constant bears in each mix
SLO_MS = 80.0
LOOK_S = 0.25  # between two notes of alpha
WARM_UP, PROBE = 320, 384  # requests
BANK = 1_500  # histories of users who come once; each new user has one of them, under an id of its own
DRAIN_S = 3.0  # after the last arrival; who still waits then was not served


class Stretch(NamedTuple):
    """A part of the course, over which the share of hot users goes from one value to another."""

    name: str
    share_of_run: float
    hot_share: tuple[float, float]
    rate_factor: float = 1.0


COURSES = {
    "all": (
        Stretch("steady", 0.3, (0.35, 0.35)),
        Stretch("trend", 0.3, (0.35, 0.85)),
        Stretch("burst", 0.2, (0.35, 0.35), 1.1),
        Stretch("after", 0.2, (0.85, 0.85)),
    ),
    "steady": (Stretch("steady", 1.0, (0.6, 0.6)),),
}


@dataclass(frozen=True)
class LiveCourse:
    """Requests and when they are due."""

    warm_up: list[Prepared]
    requests: list[Prepared]
    due_s: NDArray[np.float64]
    stretch: list[str]  # that each belongs to


@dataclass
class LiveRun:
    """What one policy made of the course."""

    latency_ms: NDArray[np.float64]  # NaN: not served
    alphas: list[tuple[float, float]] = field(default_factory=list)  # time, alpha
    moves: list[str] = field(default_factory=list)
    windows: list[dict[str, float]] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)  # learned, in ms
    before: Any = None  # of the pool
    after: Any = None
    pauses: PauseStats | None = None


def plan_times(
    stretches: Sequence[Stretch], rates: dict[float, float], duration_s: float, seed: int
) -> Iterator[tuple[float, float, str]]:
    """(due, hot share, stretch) of each request: Poisson arrivals at the rate that goes with the mix."""
    rng, start_s, known = np.random.default_rng(seed), 0.0, sorted(rates)
    for stretch in stretches:
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


class Requests:
    """Prepared requests of a course. Arrays are shared between requests: a minute of distinct ones is 50 GB."""

    def __init__(self, engine: Engine, crowd: Crowd, num_bank: int) -> None:
        self._traffic, self._crowd = PreparedTraffic(EngineProbe(engine), crowd, seed=3), crowd
        self._new_users = self._traffic.prepare([self._traffic.visitors.new() for _ in range(num_bank)])
        self._visits = dict[tuple[int, int], Prepared]()
        self._next_user = 1 << 41

    def make(self, hot_shares: Sequence[float], seed: int) -> list[Prepared]:
        """One request for each share. Hot users are in the midst of their visits from the start."""
        rng = np.random.default_rng(seed)
        visits = rng.integers(VISITS, size=self._crowd.num_hot)
        asked: list[tuple[int, int] | None] = []
        for share in hot_shares:
            if rng.random() >= share:
                asked.append(None)
                continue
            user = int(rng.integers(self._crowd.num_hot))
            visits[user] += 1
            asked.append((user, int(visits[user]) % VISITS))
        new = sorted({visit for visit in asked if visit is not None} - self._visits.keys())
        self._visits |= zip(
            new, self._traffic.prepare([self._traffic.visitors.hot(*visit) for visit in new]), strict=True
        )
        return [self._new_user(rng) if visit is None else self._hot(visit, rng) for visit in asked]

    def _new_user(self, rng: np.random.Generator) -> Prepared:
        history, other = (self._new_users[int(rng.integers(len(self._new_users)))] for _ in range(2))
        self._next_user += 1
        named = replace(history.history, user_id=self._next_user)
        return replace(history, history=named, candidate_rows=other.candidate_rows)

    def _hot(self, visit: tuple[int, int], rng: np.random.Generator) -> Prepared:
        other = self._new_users[int(rng.integers(len(self._new_users)))]
        return replace(self._visits[visit], candidate_rows=other.candidate_rows)


def serve_all(engine: Engine, requests: Sequence[Prepared]) -> float:
    """As fast as it goes; seconds."""
    started_s = time.perf_counter()
    probe = EngineProbe(engine)
    futures = [probe.submit(request) for request in requests]
    while engine.step():
        pass
    for future in futures:
        future.result(timeout=0)
    return time.perf_counter() - started_s


class Driver:
    """Offers requests when they are due and steps the engine in between. Latency counts from when one was due."""

    def __init__(self, engine: Engine, course: LiveCourse, rebalancer: Rebalancer | None, run: LiveRun) -> None:
        self._engine, self._course, self._rebalancer, self._run = engine, course, rebalancer, run
        self._probe = EngineProbe(engine)
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
                next_look_s = now_s + LOOK_S
            if not had_work:
                if at == num:
                    break
                time.sleep(max(0.0, min(0.001, float(due_s[at]) - self._elapsed_s())))
        self._probe.withdraw(list(self._running))
        while self._engine.step():
            pass

    def _offer(self, at: int) -> None:
        future = self._probe.submit(self._course.requests[at])
        self._running.add(future)
        future.add_done_callback(lambda done: self._note(done, at))

    def _note(self, done: "Future[RankResult]", at: int) -> None:
        """Keep numbers only: objects of all requests would make collections long."""
        self._running.discard(done)
        if done.cancelled():
            return
        done.result(timeout=0)  # nothing may fail
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
        crowd = card_crowd(4, 2_100, 64) if is_quick else card_crowd(NUM_HOT)
        self.warm_up, self.probe = (16, 16) if is_quick else (WARM_UP, PROBE)
        self._rows = rows_per_token
        self.engine = self._make()
        self.requests = Requests(self.engine, crowd, 32 if is_quick else BANK)

    def _make(self) -> Engine:
        if not self.is_quick:
            return serving_engine(serving_config(self._rows, TABLES[self._rows]), pool_bytes=POOL_BYTES, alpha=0.5)
        config = profile("demo", 20_000).model_copy(update={"user_context": (), "request_context": ()})
        small = {"device": "cpu", "max_batch_requests": 4, "max_batch_tokens": 4_096}
        return serving_engine(config, pool_bytes="12MiB", alpha=0.5, **small)

    def begin(self, alpha: float, *, has_curves: bool) -> Engine:
        """Caches as on the first day, the boundary at `alpha`; curves only for who looks at them: they take time."""
        if self.is_quick:
            self.engine.close()
            self.engine = self._make()
            self.engine.move_alpha(alpha)
            self.engine.settle()
        else:
            EngineProbe(self.engine).clear(alpha)
        EngineProbe(self.engine).set_curves(is_on=has_curves)
        return self.engine

    def run(self, course: LiveCourse, policy: str) -> LiveRun:
        """`policy` as commands name it. One that is no constant starts at the untuned split."""
        name, _, value = policy.partition(":")
        alpha = float(value) if name == "static" else None
        engine = self.begin(0.5 if alpha is None else alpha, has_curves=needs_curves(policy))
        serve_all(engine, course.warm_up)
        run = LiveRun(np.full(len(course.requests), np.nan))
        rebalancer, adaptive = None, None
        if alpha is None:
            limited = make_policy(policy)
            assert isinstance(limited, Limited) and isinstance(limited.policy, Helm)
            adaptive = limited.policy
            rebalancer = Rebalancer(engine, limited, SLO_MS, on_decision=Notes(run, adaptive))
        run.before = engine.stats().pool
        engine.reset_pauses()
        Driver(engine, course, rebalancer, run).go()
        run.after, run.pauses = engine.stats().pool, engine.stats().pauses
        if adaptive is not None and adaptive.model.estimator.costs is not None:
            run.costs = asdict(adaptive.model.estimator.costs)
        assert engine.stats().background_failures == 0
        return run

    def course(self, stretches: Sequence[Stretch], rates: dict[float, float], duration_s: float) -> LiveCourse:
        planned = list(plan_times(stretches, rates, duration_s, seed=2))
        shares = [stretches[0].hot_share[0]] * self.warm_up + [share for _, share, _ in planned]
        requests = self.requests.make(shares, seed=3)
        due_s = np.array([due for due, _, _ in planned])
        return LiveCourse(requests[: self.warm_up], requests[self.warm_up :], due_s, [name for _, _, name in planned])


class Notes:
    """Keeps what was decided: one line per move, one record per window."""

    def __init__(self, run: LiveRun, policy: Helm) -> None:
        self._run, self._policy = run, policy
        self._forecast: Prediction | None = None  # made a window ago
        self._start_s: float | None = None

    def __call__(self, decision: Decision) -> None:
        window, move = decision.window, decision.move
        traffic = window.traffic
        if self._start_s is None:
            self._start_s = traffic.start_s
        at_s = traffic.end_s - self._start_s
        said = {"s": at_s, "alpha": window.alpha, "measured_ms": traffic.mean_ms}
        if self._forecast is not None:
            said["predicted_ms"] = self._forecast.at(window.alpha)
        self._forecast = self._policy.prediction
        said |= {"arrivals_per_s": traffic.arrival_rate, "queued": traffic.num_queued, "idle": traffic.idle_share}
        self._run.windows.append({name: round(float(value), 4) for name, value in said.items()})
        if move is not None:
            self._run.moves.append(f"{at_s:.1f} s, {window.alpha_target:.3f} -> {move.alpha:.3f}: {move.reason}")


def capacities(stand: Stand) -> dict[float, dict[float, float]]:
    """Requests/s by mix and constant, everything queued at once."""
    found: dict[float, dict[float, float]] = {}
    for share in MIXES:
        requests = stand.requests.make([share] * (stand.warm_up + stand.probe), seed=1)
        found[share] = {}
        for alpha in PROBED:
            engine = stand.begin(alpha, has_curves=False)
            serve_all(engine, requests[: stand.warm_up])
            found[share][alpha] = round(stand.probe / serve_all(engine, requests[stand.warm_up :]), 1)
        print(f"hot {share:.2f}: {found[share]}", flush=True)
    return found


def rates_for(found: dict[float, dict[float, float]]) -> dict[float, float]:
    """Arrivals a second by mix: a share of what the constant bears that loses least in the mix it suits worst."""
    best = max(PROBED, key=lambda alpha: min(by[alpha] / max(by.values()) for by in found.values()))
    return {share: LOAD * by[best] for share, by in found.items()}


def figures(latency_ms: NDArray[np.float64]) -> dict[str, Any]:
    """Of requests; NaN: not served, which counts as later than anyone."""
    served, with_late = latency_ms[~np.isnan(latency_ms)], np.nan_to_num(latency_ms, nan=np.inf)
    p99_ms = float(np.percentile(with_late, 99, method="higher"))
    return {
        "offered": latency_ms.size,
        "served": served.size,
        "mean_ms": round(float(served.mean()), 2),
        "p50_ms": round(float(np.percentile(served, 50)), 2),
        "p99_ms": round(p99_ms, 2) if np.isfinite(p99_ms) else None,
        "slo_satisfaction": round(float((with_late <= SLO_MS).mean()), 4),
    }


def describe(course: LiveCourse, run: LiveRun, score_after_s: float) -> dict[str, Any]:
    assert run.pauses is not None
    names, minutes, before, after = np.array(course.stretch), course.due_s // 60, run.before, run.after
    hits, misses = after.row_hits - before.row_hits, after.row_misses - before.row_misses
    reused, total = after.reused_tokens - before.reused_tokens, after.total_tokens - before.total_tokens
    late = run.latency_ms[course.due_s >= score_after_s]
    return {
        "whole": figures(run.latency_ms),
        "scored": figures(late if late.size else run.latency_ms),
        "stretches": {name: figures(run.latency_ms[names == name]) for name in dict.fromkeys(course.stretch)},
        "minutes": [figures(run.latency_ms[minutes == minute]) for minute in np.unique(minutes)],
        "gaps": {**asdict(run.pauses), "longest_ms": round(run.pauses.longest_ms, 2)},
        "row_hit_rate": round(hits / max(1, hits + misses), 4),
        "token_reuse_rate": round(reused / max(1, total), 4),
        "alpha_over_time": run.alphas if run.moves else [],
        "moves": run.moves,
        "windows": run.windows,
        "costs": run.costs,
    }


class LiveMeasurement:
    """All runs of one setup; `found` holds what there is so far."""

    def __init__(self, rows_per_token: int, flags: Namespace) -> None:
        self._flags, self._started_s = flags, time.perf_counter()
        self._stretches = COURSES[flags.course]
        self._stand = Stand(rows_per_token, flags.quick)
        self._say(f"{rows_per_token} rows a token: ready")
        capacity = capacities(self._stand)
        self._rates = rates_for(capacity)
        self.found: dict[str, Any] = {
            "capacity": {f"{share:g}": {f"{a:g}": rate for a, rate in by.items()} for share, by in capacity.items()},
            "arrivals_per_s": {f"{share:g}": round(rate, 1) for share, rate in self._rates.items()},
            "duration_s": flags.seconds,
            "score_after_s": flags.score_after,
            "screen_s": flags.screen_s,
            "stretches": [stretch._asdict() for stretch in self._stretches],
            "screened": {},
            "runs": {},
        }

    def go(self) -> Iterator[None]:
        """Yields after every run."""
        flags, screened, runs = self._flags, self.found["screened"], self.found["runs"]
        if flags.screen_s:
            course = self._course(flags.screen_s)
            for alpha in SCREENED:
                screened[f"{alpha:g}"] = figures(self._stand.run(course, f"static:{alpha:g}").latency_ms)
                self._say(f"screened {alpha:g}: {screened[f'{alpha:g}']}")
                yield
        course = self._course(flags.seconds)
        for _ in range(flags.repeats):
            for name in self._policies():
                described = describe(course, self._stand.run(course, name), flags.score_after)
                runs.setdefault(name, []).append(described)
                self._say(f"{name}: {described['scored']}, whole {described['whole']}")
                if described["moves"]:
                    self._say("\n".join(described["moves"]))
                yield
        self._stand.engine.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _policies(self) -> list[str]:
        screened = self.found["screened"]
        best = min(screened, key=lambda alpha: screened[alpha]["mean_ms"]) if screened else "0.3"
        return list(dict.fromkeys(f"static:{best}" if name == BEST else name for name in self._flags.policies))

    def _course(self, duration_s: float) -> LiveCourse:
        course = self._stand.course(self._stretches, self._rates, duration_s)
        PROCESS.settle()  # to look through all these requests takes a few hundred milliseconds
        self._say(f"{len(course.requests)} requests made")
        return course

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._started_s:6.1f} s  {text}", flush=True)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", choices=(24, 1), default=[24, 1])
    parser.add_argument("--policies", nargs="*", default=[BEST, "static:0.5", "helm"], help="in the order of turns")
    parser.add_argument("--course", choices=COURSES, default="all")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each policy")
    parser.add_argument("--seconds", type=float, default=120.0, help="of traffic in a run")
    parser.add_argument("--score-after", type=float, default=60.0, help="seconds of a run that are scored apart")
    parser.add_argument("--screen-s", type=float, default=20.0, help="of traffic for each constant screened; 0: none")
    parser.add_argument("--quick", action="store_true", help="a small model on the CPU")


def main(flags: Namespace) -> None:
    setup = {"pool_bytes": POOL_BYTES, "table_bytes": TABLES, "hot_users": NUM_HOT, "load": LOAD, "slo_ms": SLO_MS}
    setups = dict[str, Any]()
    for rows in flags.rows:
        measurement = LiveMeasurement(rows, flags)
        setups[str(rows)] = measurement.found
        for _ in measurement.go():  # written run by run: a measurement that is cut off leaves what it had
            write_measurement(flags.out, {"setup": setup, "setups": setups})
