"""The controller live on a CPU: the demonstration's traffic, stretched, against constant splits.

    helmrec bench run live-cpu               # about 25 minutes; writes docs/measurements/live-cpu.json
    helmrec bench run live-cpu --seconds 12 --screen-s 3 --score-after 6 --repeats 1 --out build/live-cpu.json

Nine constants are screened on a short course; then the best of them, the untuned 0.5 and the controller take turns on
one long course. Every run has a new engine in this process; arrivals are open-loop, at a share of what the slowest of
the screened constants answers.
"""

import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.control.helm import Helm
from helmrec.control.policy import Limited
from helmrec.control.rebalancer import Rebalancer
from helmrec.demo.plan import DemoPlan
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import warm_up
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.policies import make_policy, needs_curves
from helmrec.traffic.generate import generate
from helmrec.traffic.requests import rank_requests
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.controller.live import (
    BEST,
    SCREENED,
    SLO_MS,
    Driver,
    LiveCourse,
    LiveRun,
    Notes,
    describe,
    figures,
)

UTILISATION = 0.4  # of what the slowest constant answers one after another: bursts come on top
PROBE = 150  # requests


class CpuStand:
    """A model on disk, and engines that serve it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._plan = folder, DemoPlan()
        init_model(folder, profile("demo", self._plan.num_items), self._plan.seed)
        PROCESS.take_over()
        self._requests: list[Prepared] = []

    def engine(self, alpha: float, *, has_curves: bool) -> Engine:
        config = EngineConfig(pool_bytes=self._plan.pool, alpha=alpha, miss_curves=has_curves, queue_limit=1 << 16)
        engine = Engine.from_model(self._folder, config)
        warm_up(engine)
        return engine

    def course(self, rate: float, seconds: float) -> LiveCourse:
        """Prepared ahead: what is measured is the engine."""
        plan = self._plan.model_copy(update={"seconds": 2 * seconds})
        trace = generate(plan.workload(rate), plan.seed)
        with self.engine(0.5, has_curves=False) as engine:
            probe = EngineProbe(engine)
            prepared = [probe.prepare(one) for one in rank_requests(trace, engine.model_config)]
        due_s = trace.time_s - trace.time_s[0]
        return LiveCourse([], prepared, due_s, [plan.part_at(due) for due in due_s.tolist()])

    def slowest_ms(self) -> float:
        """What a request takes at the constant that suits it worst."""
        course, found = self.course(20.0, 30.0), []
        for alpha in (SCREENED[0], SCREENED[-1]):
            with self.engine(alpha, has_curves=False) as engine:
                started_s = time.perf_counter()
                for one in course.requests[:PROBE]:
                    future = EngineProbe(engine).submit(one)
                    while engine.step():
                        pass
                    future.result(timeout=0)
                found.append((time.perf_counter() - started_s) * 1e3 / PROBE)
        return max(found)

    def run(self, course: LiveCourse, policy: str) -> LiveRun:
        name, _, value = policy.partition(":")
        alpha = float(value) if name == "static" else 0.5
        run = LiveRun(np.full(len(course.requests), np.nan))
        with self.engine(alpha, has_curves=needs_curves(policy)) as engine:
            rebalancer = None
            if name != "static":
                limited = make_policy(policy)
                assert isinstance(limited, Limited) and isinstance(limited.policy, Helm)
                rebalancer = Rebalancer(engine, limited, SLO_MS, on_decision=Notes(run, limited.policy))
            PROCESS.settle()
            engine.reset_pauses()
            run.before = engine.stats().pool
            Driver(engine, course, rebalancer, run).go()
            run.after, run.pauses = engine.stats().pool, engine.stats().pauses
        return run


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--policies", nargs="*", default=[BEST, "static:0.5", "helm"], help="in the order of turns")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each policy")
    parser.add_argument("--seconds", type=float, default=120.0, help="of traffic in a run")
    parser.add_argument("--score-after", type=float, default=60.0, help="seconds of a run that are scored apart")
    parser.add_argument("--screen-s", type=float, default=20.0, help="of traffic for each constant screened")


def main(flags: Namespace) -> None:
    found: dict[str, Any] = {"screened": {}, "runs": {}, "seconds": flags.seconds, "score_after_s": flags.score_after}
    with tempfile.TemporaryDirectory() as name:
        stand = CpuStand(Path(name) / "model")
        rate = UTILISATION * 1e3 / stand.slowest_ms()
        found["arrivals_per_s"] = round(rate, 1)
        print(f"{rate:.0f} requests/s", flush=True)
        course = stand.course(rate, flags.screen_s)
        for alpha in SCREENED:
            found["screened"][f"{alpha:g}"] = details = figures(stand.run(course, f"static:{alpha:g}").latency_ms)
            print(f"screened {alpha:g}: {details}", flush=True)
        best = min(found["screened"], key=lambda alpha: found["screened"][alpha]["mean_ms"])
        course = stand.course(rate, flags.seconds)
        policies = [f"static:{best}" if policy == BEST else policy for policy in flags.policies]
        for _ in range(flags.repeats):
            for policy in dict.fromkeys(policies):
                described = describe(course, stand.run(course, policy), flags.score_after)
                found["runs"].setdefault(policy, []).append(described)
                print(f"{policy}: {described['scored']}, {len(described['moves'])} moves", flush=True)
                write_measurement(flags.out, found)
