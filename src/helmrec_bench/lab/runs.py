"""One simulated run: who steers which node under which traffic, and what is kept of it.

All experiments are made of these, so a run that two of them ask for is made once.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.memory.miss_curves import JointCurves
from helmrec.sim.scenario import Scenario
from helmrec.sim.simulate import SimResult, simulate
from helmrec_bench.baselines.service_cost import service_cost
from helmrec_bench.judging.contest import Course, Score, Shown
from helmrec_bench.judging.first_times import is_known
from helmrec_bench.judging.judge import with_refused
from helmrec_bench.lab.curve_file import load_curves, save_curves
from helmrec_bench.lab.policies import is_blind, started_policy
from helmrec_bench.lab.store import digest_of
from helmrec_bench.lab.tiers import with_traffic

Settings = tuple[tuple[str, Any], ...]  # names with values


class Setup(NamedTuple):
    """Traffic: a scenario as read and resized, a seed, how dense, and what is changed of every phase."""

    scenario: Scenario
    seed: int
    load: float
    window_s: float
    traffic: Settings

    @property
    def digest(self) -> str:
        details = self.scenario.model_dump_json() + digest_of(self.scenario.cost())
        details += json.dumps([self.seed, self.load, self.window_s, self.traffic])
        return hashlib.sha256(details.encode()).hexdigest()[:16]

    def course(self) -> Course:
        assert self.scenario.workload is not None
        workload = with_traffic(self.scenario.workload, **dict(self.traffic))
        scenario = self.scenario.model_copy(update={"workload": workload})
        return Course(scenario, self.seed, self.load, self.window_s)


@dataclass(frozen=True, slots=True)
class Run:
    """A policy on a setup; `engine` replaces settings of the scenario's engine, sizes as plain numbers."""

    setup: Setup
    policy: str
    engine: Settings = ()

    @property
    def name(self) -> str:
        details = "".join(f", {name}={value}" for name, value in self.engine)
        return f"{self.policy}{details} on {self.setup.scenario.name} {self.setup.digest}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run, warm-up left out; refused requests count as ten seconds."""

    score: Score
    is_full: bool  # both caches had evicted before counting began
    known_p99_ms: float  # without the first minute and the first burst, if more than that was served
    phases: dict[str, dict[str, float]]  # of the traffic, by name: mean_ms, p99_ms
    ticks: dict[str, list[float]]  # by name: one value a tick, of the window that ended with it

    def meets_when_known(self, slo_ms: float) -> bool:
        """Whether the SLO is met by all requests but those of the first minute and the first burst."""
        return self.score.num_refused == 0 and self.known_p99_ms <= slo_ms

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Outcome":
        score = found["score"]
        return cls(**found | {"score": Score(**score | {"decision_us": tuple(score["decision_us"])})})


class Task(NamedTuple):
    """Runs that share a setup, and where its miss curves are kept."""

    setup: Setup
    runs: tuple[Run, ...]
    curves: Path

    @property
    def name(self) -> str:
        return f"{self.setup.scenario.name} x {self.setup.load:g}, seed {self.setup.seed}"


def perform(task: Task) -> dict[str, dict[str, Any]]:
    """Outcomes by the name of the run."""
    stage = _Stage(task.setup, task.curves)
    return {run.name: asdict(stage.outcome(run)) for run in task.runs}


def tasks_of(runs: Sequence[Run], folder: Path) -> list[Task]:
    """Runs by setup, those that look at miss curves apart: so several processes have something to do at once.

    Whoever records curves comes first, since that takes longest.
    """
    grouped: dict[tuple[bool, str], list[Run]] = {}
    for run in dict.fromkeys(runs):
        grouped.setdefault((is_blind(run.policy), run.setup.digest), []).append(run)
    tasks = {key: Task(ones[0].setup, tuple(ones), folder / f"{key[1]}.npz") for key, ones in grouped.items()}
    return [tasks[key] for key in sorted(tasks, key=lambda key: (key[0], -len(tasks[key].runs)))]


class _Stage:
    """A setup made ready once for all its runs."""

    def __init__(self, setup: Setup, curves: Path) -> None:
        self._course, self._curves_path = setup.course(), curves

    @cached_property
    def _curves(self) -> Sequence[JointCurves | None]:
        if not self._curves_path.exists():
            save_curves(self._curves_path, self._course.curves)
        return load_curves(self._curves_path)

    def outcome(self, run: Run) -> Outcome:
        course, settings = self._course, dict(run.engine)
        cost = service_cost(course.scenario.cost(), course.node(**settings), course.trace)
        found = started_policy(run.policy, cost)
        node, tick_s = course.node(found.alpha, **settings), course.scenario.tick_s
        policy = Shown(found.policy, self._curves, tick_s) if found.has_curves else found.policy
        result = simulate(course.trace, node, course.scenario.cost(), policy, tick_s)
        return _outcome(course, result)


def _outcome(course: Course, result: SimResult) -> Outcome:
    start_s, tick_s = course.scenario.warm_up_s, course.scenario.tick_s
    last_s = result.windows[-1].stats.traffic.end_s
    ends_s = start_s + tick_s * np.arange(1, round((last_s - start_s) / tick_s) + 1, dtype=np.float64)
    by_tick = [window.stats for window in result.windows_at(ends_s)]
    ticks = {
        "alpha": [stats.alpha for stats in by_tick],
        "mean_ms": [stats.traffic.mean_ms for stats in by_tick],
        "p99_ms": [stats.traffic.p99_ms for stats in by_tick],
        "missed_rows": [stats.missed_rows_per_request for stats in by_tick],
    }
    return Outcome(
        score=course.score(result),
        is_full=result.evicting_from_s is not None and result.evicting_from_s <= max(start_s, tick_s),
        known_p99_ms=_known_p99_ms(course, result),
        phases=_phases(course, result),
        ticks={name: np.round(values, 4).tolist() for name, values in ticks.items()},
    )


def _known_p99_ms(course: Course, result: SimResult) -> float:
    latency_ms, is_counted = with_refused(result.outcomes.latency_ms), is_known(course.scenario, result.arrived_s)
    if not is_counted.any():
        is_counted = result.arrived_s >= course.scenario.warm_up_s
    return float(np.percentile(latency_ms[is_counted], 99))


def _phases(course: Course, result: SimResult) -> dict[str, dict[str, float]]:
    trace, latency_ms = course.trace, with_refused(result.outcomes.latency_ms)
    counts = trace.time_s >= course.scenario.warm_up_s
    found = {}
    for code, name in enumerate(trace.phase_names):
        chosen = latency_ms[counts & (trace.phase == code)]
        if chosen.size:
            found[name] = {"mean_ms": float(chosen.mean()), "p99_ms": float(np.percentile(chosen, 99))}
    return found
