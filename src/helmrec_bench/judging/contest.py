"""One scenario and seed, and whoever wants to be judged on it: the same requests, limits and miss curves for all.

Miss curves see requests, and those are the same at any split, so they are recorded once and shown to every policy.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.control.explain import Explanation
from helmrec.control.policy import Limited, Limits, Move, Policy, WindowStats
from helmrec.control.static import UNTUNED_ALPHA, Static, StaticSettings
from helmrec.memory.miss_curves import JointCurves
from helmrec.sim.curves import curves_at, record_curves
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.scenario import Scenario
from helmrec.sim.simulate import SimResult, simulate
from helmrec.traffic.trace import Trace
from helmrec.traffic.workload import Phase, Workload
from helmrec_bench.baselines.service_cost import ServiceCost, service_cost
from helmrec_bench.judging.judge import with_refused

Floats = NDArray[np.float64]

WINDOW_S = 10.0  # of sweeps and oracles, from the end of the warm-up on; policies look every second


@dataclass(frozen=True, slots=True)
class Score:
    """How one run went, warm-up left out. Refused requests count as in `with_refused`, in the P99 too."""

    mean_ms: float
    p99_ms: float
    slo_satisfaction: float
    num_refused: int
    costs: list[float]  # (windows,) latency summed over the requests that arrived in each, ms
    alphas: list[float]  # (windows,) mean split
    decision_us: tuple[float, float] = (0.0, 0.0)  # median and 99th percentile

    def meets(self, slo_ms: float) -> bool:
        return self.num_refused == 0 and self.p99_ms <= slo_ms


def each_phase(workload: Workload, change: Callable[[Phase], Phase]) -> Workload:
    """The workload with every phase changed, those of the opening too."""
    opening, phases = (tuple(change(one) for one in part) for part in (workload.opening, workload.phases))
    return workload.model_copy(update={"opening": opening, "phases": phases})


def scaled(workload: Workload, load: float) -> Workload:
    """The same traffic, so many times as dense."""
    if load == 1:
        return workload
    return each_phase(workload, lambda one: one.model_copy(update={"rate": (one.rate[0] * load, one.rate[1] * load)}))


class Course:
    """A scenario, a seed and a multiple of the scenario's arrivals; scores are by windows of `window_s`."""

    def __init__(self, scenario: Scenario, seed: int, load: float = 1.0, window_s: float = WINDOW_S) -> None:
        assert scenario.workload is not None, "frozen scenarios spell their traffic out"
        workload = scaled(scenario.workload, load)
        self.scenario = scenario.model_copy(update={"workload": workload})
        self.seed = seed
        self.window_s = window_s
        self._end_s = workload.duration_s

    @cached_property
    def trace(self) -> Trace:
        return self.scenario.make_trace(self.seed)

    @cached_property
    def curves(self) -> Sequence[JointCurves | None]:
        """At the end of every tick; made with a node at the untuned split."""
        return record_curves(self.trace, self.node(), self.scenario.cost(), self.scenario.tick_s)

    @cached_property
    def service_cost(self) -> ServiceCost:
        return service_cost(self.scenario.cost(), self.node(), self.trace)

    def node(self, alpha: float = UNTUNED_ALPHA, **engine: Any) -> NodeConfig:
        config = self.scenario.node_config(self.trace)
        return config.model_copy(update={"engine": config.engine.model_copy(update={"alpha": alpha, **engine})})

    def static(self, alpha: float, **engine: Any) -> Score:
        return self.score(self._simulate(Static(StaticSettings(alpha=alpha)), alpha, **engine))

    def judge(self, policy: Policy) -> Score:
        """Everyone but the constants starts at the untuned split, and is held to the same limits."""
        shown = self.shown(policy)
        score = self.score(self._simulate(shown, UNTUNED_ALPHA))
        return replace(score, decision_us=shown.decision_us)

    def replay(self, policy: Policy, alpha: float) -> Score:
        """For oracles: no limits but those of the pool."""
        return self.score(self._simulate(policy, alpha))

    def watch(self, policy: Policy) -> list[WindowStats]:
        """What a policy saw, miss curves included, from the end of the warm-up on."""
        result, tick_s = self._simulate(self.shown(policy), UNTUNED_ALPHA), self.scenario.tick_s
        stats = [window.stats for window in result.windows if window.stats.traffic.start_s >= self.scenario.warm_up_s]
        return [replace(one, curves=curves_at(self.curves, tick_s, one.traffic.end_s)) for one in stats]

    def shown(self, policy: Policy) -> "Shown":
        """The policy within limits, shown the recorded miss curves."""
        return Shown(policy, self.curves, self.scenario.tick_s)

    def _simulate(self, policy: Policy, alpha: float, **engine: Any) -> SimResult:
        node, cost = self.node(alpha, **engine), self.scenario.cost()
        return simulate(self.trace, node, cost, policy, self.scenario.tick_s)

    def score(self, result: SimResult) -> Score:
        summary, start_s = result.summary(self.scenario.warm_up_s), self.scenario.warm_up_s
        num = int((self._end_s - start_s) // self.window_s)
        place = ((result.arrived_s - start_s) // self.window_s).astype(np.int64)
        is_scored = (place >= 0) & (place < num)
        latency_ms = with_refused(result.outcomes.latency_ms)
        per = round(self.window_s / self.scenario.tick_s)
        ends_s: Floats = start_s + self.scenario.tick_s * np.arange(1, num * per + 1, dtype=np.float64)
        alphas = np.array([window.stats.alpha for window in result.windows_at(ends_s)])
        return Score(
            mean_ms=float(latency_ms[result.arrived_s >= start_s].mean()),
            p99_ms=float(np.percentile(latency_ms[result.arrived_s >= start_s], 99)),
            slo_satisfaction=summary.slo_satisfaction,
            num_refused=summary.num_refused,
            costs=np.bincount(place[is_scored], latency_ms[is_scored], num).tolist(),
            alphas=alphas.reshape(num, per).mean(axis=1).tolist(),
        )


class Shown:
    """A policy within limits that is shown recorded miss curves; it is timed."""

    def __init__(self, policy: Policy, curves: Sequence[JointCurves | None], tick_s: float) -> None:
        self._limited = Limited(policy, Limits())
        self._curves, self._tick_s = curves, tick_s
        self._took_us: list[float] = []
        self._said: list[Explanation] = []

    @property
    def decision_us(self) -> tuple[float, float]:
        median, p99 = np.percentile(self._took_us, (50, 99)) if self._took_us else (0.0, 0.0)
        return float(median), float(p99)

    def decide(self, stats: WindowStats) -> Move | None:
        shown = replace(stats, curves=curves_at(self._curves, self._tick_s, stats.traffic.end_s))
        started = time.perf_counter()
        move = self._limited.decide(shown)
        self._took_us.append((time.perf_counter() - started) * 1e6)
        inner: Policy = self._limited
        while isinstance(inner, Limited):
            inner = inner.policy
        if (said := getattr(inner, "explanation", None)) is not None:
            self._said.append(said)
        return move

    def prediction_error(self, from_s: float) -> float | None:
        """Median error of a window's mean latency, predicted a window ago; None: nothing was predicted."""
        late = [(one.predicted_ms, one.measured_ms) for one in self._said if one.time_s > from_s]
        errors = [abs(predicted / measured - 1) for predicted, measured in late if predicted and measured]
        return float(np.median(errors)) if errors else None

    def reset(self) -> None:
        self._limited.reset()
        self._took_us.clear()
        self._said.clear()


class Wanderer:
    """Walks over the splits at random: what learners watch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.reset()

    def decide(self, stats: WindowStats) -> Move | None:
        return Move(stats.alpha_target + float(self._rng.normal(0, 0.05)), "wander")

    def reset(self) -> None:
        self._rng = np.random.default_rng(self._seed)
