"""Policies that take turns on one course of requests, live on an engine: the driver, what is noted and the figures.

Knows neither the model nor the device; `live` and `live_cpu` bring engines and courses.
"""

import json
import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from helmrec.collector import PROCESS
from helmrec.control.helm import Helm
from helmrec.control.latency import Prediction
from helmrec.control.policy import Limited
from helmrec.control.rebalancer import Decision, Rebalancer
from helmrec.control.static import UNTUNED_ALPHA
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.pauses import PauseStats
from helmrec.policies import make_policy
from helmrec.serve.control import Steering
from helmrec.serve.server import SWITCH_INTERVAL_S
from helmrec.types import RankResult, UserId
from helmrec_bench.measure.cards.traffic import hit_rates

SCREENED = tuple(round(0.1 * i, 1) for i in range(1, 10))
BEST = "best"  # stands for the constant with the least mean latency of those screened
SLO_MS = 80.0
LOOK_S = 0.25  # between two notes of alpha
DRAIN_S = 3.0  # after the last arrival; who still waits then was not served


@dataclass(frozen=True)
class LiveCourse:
    """Requests and when they are due."""

    warm_up: list[Prepared]
    requests: list[Prepared]
    due_s: NDArray[np.float64]
    stretch: list[str]  # that each belongs to

    def until(self, seconds: float) -> "LiveCourse":
        """Return the requests that are due up to then, at least one."""
        num = max(1, int(np.searchsorted(self.due_s, seconds, side="right")))
        return LiveCourse(self.warm_up, self.requests[:num], self.due_s[:num], self.stretch[:num])


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
    num_unobserved: int = 0  # requests that the miss curves were not shown


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


class BetweenSteps(Protocol):
    """What is called between steps, as a controller is."""

    def tick(self, now_s: float, /) -> object: ...

    def record(self, user_id: UserId, latency_ms: float | None, /) -> None: ...


class Driver:
    """Offers requests when they are due and steps the engine in between. Latency counts from when one was due."""

    def __init__(
        self,
        engine: Engine,
        course: LiveCourse,
        beside: BetweenSteps | None,
        run: LiveRun,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._drain_s = drain_s
        self._engine, self._course, self._beside, self._run = engine, course, beside, run
        self._probe = EngineProbe(engine)
        self._running: set[Future[RankResult]] = set()
        self._started_s = 0.0

    def go(self) -> None:
        due_s, num, at = self._course.due_s, len(self._course.requests), 0
        end_s, next_look_s = float(due_s[-1]) + self._drain_s, 0.0
        self._started_s = time.perf_counter()
        while (now_s := self._elapsed_s()) < end_s:
            while at < num and due_s[at] <= now_s:
                self._offer(at)
                at += 1
            had_work = self._engine.step()
            if self._beside is not None:
                self._beside.tick(time.monotonic())  # the engine's clock
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
        if self._beside is not None:
            self._beside.record(self._course.requests[at].history.user_id, latency_ms)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s


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
        if decision.explanation is not None:
            said |= {f"{one.layer} wants": one.alpha for one in decision.explanation.proposals}
        self._run.windows.append({name: round(float(value), 4) for name, value in said.items()})
        if move is not None:
            self._run.moves.append(f"{at_s:.1f} s, {window.alpha_target:.3f} -> {move.alpha:.3f}: {move.reason}")


class LiveStand(Protocol):
    """Where runs are made."""

    def course(self, duration_s: float) -> LiveCourse:
        """Traffic of so many seconds."""

    def run(self, course: LiveCourse, policy: str) -> LiveRun:
        """Serve it from empty caches; `policy` as commands name it."""


def start_of(policy: str) -> float:
    """A policy that is no constant starts at the untuned split."""
    name, _, value = policy.partition(":")
    return float(value) if name == "static" else UNTUNED_ALPHA


def serve_course(engine: Engine, course: LiveCourse, policy: str) -> LiveRun:
    serve_all(engine, course.warm_up)
    run = LiveRun(np.full(len(course.requests), np.nan))
    rebalancer, adaptive = None, None
    if not policy.startswith("static:"):
        limited = make_policy(policy)
        assert isinstance(limited, Limited) and isinstance(limited.policy, Helm)
        adaptive = limited.policy
        Steering(policy, SLO_MS).warm_up()  # as a server does before it is ready
        rebalancer = Rebalancer(engine, limited, SLO_MS, on_decision=Notes(run, adaptive))
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a server: the thread of the miss curves works beside the loop
    PROCESS.settle()  # to look through all these requests takes a few hundred milliseconds
    run.before = engine.stats().pool
    engine.reset_pauses()
    Driver(engine, course, rebalancer, run).go()
    run.after, run.pauses = engine.stats().pool, engine.stats().pauses
    run.num_unobserved = EngineProbe(engine).num_unobserved
    if adaptive is not None and adaptive.model.estimator.costs is not None:
        run.costs = adaptive.model.estimator.costs._asdict()
    assert engine.stats().background_failures == 0
    return run


def figures(latency_ms: NDArray[np.float64]) -> dict[str, Any]:
    """Of requests; NaN: not served, which counts as later than anyone. Latencies are None if nobody was served."""
    served, with_late = latency_ms[~np.isnan(latency_ms)], np.nan_to_num(latency_ms, nan=np.inf)
    p99_ms = float(np.percentile(with_late, 99, method="higher"))
    return {
        "offered": latency_ms.size,
        "served": served.size,
        "mean_ms": round(float(served.mean()), 2) if served.size else None,
        "p50_ms": round(float(np.percentile(served, 50)), 2) if served.size else None,
        "p99_ms": round(p99_ms, 2) if np.isfinite(p99_ms) else None,
        "slo_satisfaction": round(float((with_late <= SLO_MS).mean()), 4),
    }


def describe(course: LiveCourse, run: LiveRun, score_after_s: float) -> dict[str, Any]:
    assert run.pauses is not None
    names, minutes = np.array(course.stretch), course.due_s // 60
    late = run.latency_ms[course.due_s >= score_after_s]
    return {
        "whole": figures(run.latency_ms),
        "scored": figures(late if late.size else run.latency_ms),
        "stretches": {name: figures(run.latency_ms[names == name]) for name in dict.fromkeys(course.stretch)},
        "minutes": [figures(run.latency_ms[minutes == minute]) for minute in np.unique(minutes)],
        "gaps": {**asdict(run.pauses), "longest_ms": round(run.pauses.longest_ms, 2)},
        **hit_rates(run.before, run.after),
        "alpha_over_time": run.alphas if run.moves else [],
        "moves": run.moves,
        "prediction_error": prediction_error(run, score_after_s),
        "windows": run.windows,
        "costs": run.costs,
        "unobserved": run.num_unobserved,
    }


def prediction_error(run: LiveRun, score_after_s: float) -> float | None:
    """Median error of a window's mean latency, predicted a window ago; None: nothing was predicted."""
    late = [one for one in run.windows if "predicted_ms" in one and one["measured_ms"] and one["s"] >= score_after_s]
    return float(np.median([abs(one["predicted_ms"] / one["measured_ms"] - 1) for one in late])) if late else None


def turn_options(parser: ArgumentParser) -> None:
    parser.add_argument("--policies", nargs="*", default=[BEST, "static:0.5", "helm"], help="in the order of turns")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each policy")
    parser.add_argument("--seconds", type=float, default=120.0, help="of traffic in a run")
    parser.add_argument("--score-after", type=float, default=60.0, help="seconds of a run that are scored apart")
    parser.add_argument("--screen-s", type=float, default=20.0, help="of traffic for each constant screened; 0: none")
    parser.add_argument("--cost-repeats", type=int, default=0, help="measure what curves and controller cost so often")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no run that would end after so long")


def take_turns(stand: LiveStand, flags: Namespace, found: dict[str, Any], save: Callable[[], None]) -> bool:
    """Screen constants on a short course, then let the policies take turns on a long one.

    Results are added to `found`, and `save` is called after every run: a run that is cut off leaves what it had. Runs
    that `found` has are not made again. False: some are left for another call.
    """
    started_s = time.perf_counter()
    found |= {"duration_s": flags.seconds, "score_after_s": flags.score_after, "screen_s": flags.screen_s}
    screened, runs = found.setdefault("screened", {}), found.setdefault("runs", {})

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started_s:6.1f} s  {text}", flush=True)
        save()

    def is_late(run_s: float) -> bool:
        return time.perf_counter() - started_s + run_s + DRAIN_S > flags.limit_s

    left = [f"{alpha:g}" for alpha in SCREENED if flags.screen_s and f"{alpha:g}" not in screened]
    course = stand.course(flags.screen_s) if left else None
    for alpha in left:
        if is_late(flags.screen_s):
            return False
        assert course is not None
        screened[alpha] = figures(stand.run(course, f"static:{alpha}").latency_ms)
        say(f"screened {alpha}: {screened[alpha]}")
    best = min(screened, key=lambda alpha: _mean_ms(screened[alpha])) if screened else "0.3"
    policies = dict.fromkeys(f"static:{best}" if name == BEST else name for name in flags.policies)
    turns = [(turn, name) for turn in range(flags.repeats) for name in policies if len(runs.get(name, [])) <= turn]
    course = stand.course(flags.seconds) if turns else None
    for _, name in turns:
        if is_late(flags.seconds):
            return False
        assert course is not None
        described = describe(course, stand.run(course, name), flags.score_after)
        runs.setdefault(name, []).append(described)
        say("\n".join((f"{name}: {described['scored']}, whole {described['whole']}", *described["moves"])))
    return True


def _mean_ms(found: dict[str, Any]) -> float:
    """Mean latency by the figures of a run; infinite if nobody was served."""
    return math.inf if found["mean_ms"] is None else float(found["mean_ms"])


def earlier(flags: Namespace) -> dict[str, Any]:
    """What the output file has of an earlier call with the same courses; nothing, if there is none."""
    found: dict[str, Any] = json.loads(flags.out.read_text()) if flags.out.exists() else {}
    asked = {"duration_s": flags.seconds, "score_after_s": flags.score_after, "screen_s": flags.screen_s}
    return found if any(asked.items() <= each.items() for each in (found, *found.get("setups", {}).values())) else {}
