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

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.demo.plan import NUM_SIDES, DemoPlan
from helmrec.engine.engine import Engine
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import warm_up
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.policies import needs_curves
from helmrec.traffic.generate import generate
from helmrec.traffic.requests import rank_requests
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.controller.cost import ALPHA, cost_of_control, requests_per_s
from helmrec_bench.measure.controller.turns import (
    SCREENED,
    LiveCourse,
    LiveRun,
    serve_course,
    start_of,
    take_turns,
    turn_options,
)

UTILISATION = 0.4  # of what the slowest constant answers one after another: bursts come on top
SATURATED_S = 8.0  # of traffic that comes at once
PROBE = 150  # requests


class CpuStand:
    """A model on disk, and engines that serve it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._plan = folder, DemoPlan()
        init_model(folder, profile("demo", self._plan.num_items), self._plan.seed)
        PROCESS.take_over()
        self.rate = 20.0  # arrivals a second; of no matter until it is known what the engine bears

    def _engine(self, alpha: float, *, has_curves: bool) -> Engine:
        config = EngineConfig(
            device="cpu", pool_bytes=self._plan.pool, alpha=alpha, miss_curves=has_curves, queue_limit=1 << 16
        )
        engine = Engine.from_model(self._folder, config)
        warm_up(engine)
        return engine

    def course(self, duration_s: float) -> LiveCourse:
        """Prepared ahead: what is measured is the engine."""
        plan = self._plan.model_copy(update={"seconds": NUM_SIDES * duration_s})
        trace = generate(plan.workload(self.rate), plan.seed)
        with self._engine(0.5, has_curves=False) as engine:
            probe = EngineProbe(engine)
            prepared = [probe.prepare(one) for one in rank_requests(trace, engine.model_config)]
        due_s = trace.time_s - trace.time_s[0]
        return LiveCourse([], prepared, due_s, [plan.part_at(due) for due in due_s.tolist()])

    def slowest_ms(self) -> float:
        """What a request takes at the constant that suits it worst."""
        course, found = self.course(30.0), []
        for alpha in (SCREENED[0], SCREENED[-1]):
            with self._engine(alpha, has_curves=False) as engine:
                started_s = time.perf_counter()
                for one in course.requests[:PROBE]:
                    future = EngineProbe(engine).submit(one)
                    while engine.step():
                        pass
                    future.result(timeout=0)
                found.append((time.perf_counter() - started_s) * 1e3 / PROBE)
        return max(found)

    def run(self, course: LiveCourse, policy: str) -> LiveRun:
        with self._engine(start_of(policy), has_curves=needs_curves(policy)) as engine:
            return serve_course(engine, course, policy)

    def saturate(self, *, has_controller: bool) -> float:
        requests = self.course(SATURATED_S).requests
        with self._engine(ALPHA, has_curves=has_controller) as engine:
            return requests_per_s(engine, requests[:PROBE], requests[PROBE:], has_controller=has_controller)


def options(parser: ArgumentParser) -> None:
    turn_options(parser)


def main(flags: Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        stand = CpuStand(Path(name) / "model")
        stand.rate = UTILISATION * 1e3 / stand.slowest_ms()
        print(f"{stand.rate:.0f} requests/s", flush=True)
        found: dict[str, Any] = {"arrivals_per_s": round(stand.rate, 1)}
        if flags.cost_repeats:
            found["cost_of_control"] = cost_of_control(stand, flags.cost_repeats)
            print(f"cost of curves and controller: {found['cost_of_control']}", flush=True)
        take_turns(stand, flags, found, lambda: write_measurement(flags.out, found))
