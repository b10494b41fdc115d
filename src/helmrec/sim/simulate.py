"""Simulate one node on a trace while a policy moves its boundary; results by request and by window.

The control loop is the one of an engine (`control/rebalancer.py`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helmrec.control.policy import Policy
from helmrec.control.rebalancer import LOOK_EVERY
from helmrec.costs.calibrated import CostModel
from helmrec.memory.stats import PoolStats
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import Faults, Outcomes, Status, make_outcomes
from helmrec.sim.steered import NodeLoop, SteeredNode, Window
from helmrec.traffic.trace import Trace
from helmrec.types import FloatArray

_LOOKS_PER_TICK = round(1 / LOOK_EVERY)


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Optional settings of a run."""

    faults: Faults | None = None
    has_curves: bool = False  # for policies that use miss curves; a few times slower
    on_tick: Callable[[float], None] = lambda now_s: None  # called with the time after each tick


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a run. Latencies are of served requests; a refused request counts as outside the SLO."""

    num_requests: int
    num_refused: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    slo_satisfaction: float
    token_reuse_rate: float  # of history tokens; candidates are always computed
    missed_rows_per_request: float


@dataclass(frozen=True, slots=True, eq=False)
class ServedTrace:
    """The requests of a trace after a simulation."""

    calibration: str  # name of the costs
    slo_ms: float
    arrived_s: FloatArray  # (requests,)
    outcomes: Outcomes
    wall_s: float  # duration of the simulation

    def summary(self, begin_s: float = 0.0, end_s: float = np.inf) -> Summary:
        """Results of the requests that arrived in [begin_s, end_s)."""
        return summarise(self.outcomes, (self.arrived_s >= begin_s) & (self.arrived_s < end_s), self.slo_ms)


@dataclass(frozen=True, slots=True, eq=False)
class SimResult(ServedTrace):
    """The result of `simulate`."""

    windows: list[Window]  # one ends with every tick; early ticks end others in between
    pool: PoolStats  # at the end
    evicting_from_s: float | None  # when both caches had evicted for the first time; None if one never did

    def windows_at(self, times_s: FloatArray) -> list[Window]:
        """The window that contains each of these times; the last one for later times."""
        ends_s = np.array([window.stats.traffic.end_s for window in self.windows])
        places = np.searchsorted(ends_s, times_s - 1e-9)
        return [self.windows[place] for place in np.minimum(places, ends_s.size - 1)]


def summarise(outcomes: Outcomes, chosen: NDArray[np.bool_], slo_ms: float) -> Summary:
    """Results of the chosen requests."""
    served = chosen & (outcomes.status == Status.SERVED)
    latency_ms = outcomes.latency_ms[served]
    num, num_served = int(np.count_nonzero(chosen)), latency_ms.size
    p50_ms, p99_ms = np.percentile(latency_ms, (50, 99)) if num_served else (np.nan, np.nan)
    reused, history = outcomes.reused_tokens[served].sum(), outcomes.history_tokens[served].sum()
    return Summary(
        num_requests=num,
        num_refused=num - num_served,
        mean_ms=float(latency_ms.mean()) if num_served else np.nan,
        p50_ms=float(p50_ms),
        p99_ms=float(p99_ms),
        slo_satisfaction=float(np.count_nonzero(latency_ms <= slo_ms) / max(1, num)),
        token_reuse_rate=float(reused / max(1, history)),
        missed_rows_per_request=float(outcomes.missed_rows[served].sum() / max(1, num_served)),
    )


def simulate(
    trace: Trace,
    config: NodeConfig,
    cost: CostModel,
    policy: Policy,
    tick_s: float = 1.0,
    options: Options | None = None,
) -> SimResult:
    """Serve a trace. The policy decides every `tick_s`, more often in a burst; the boundary moves in bounded steps."""
    options = options or Options()
    started_s = time.perf_counter()
    outcomes = make_outcomes(trace.num_requests)
    node = Node(config, cost, prepare_requests(trace, config), outcomes, options.faults)
    node.send(np.arange(trace.num_requests), trace.time_s)
    loop = NodeLoop(SteeredNode(node, has_curves=options.has_curves), policy, tick_s)
    windows: list[Window] = []
    evicting_from_s = None
    for look in range(1, _LOOKS_PER_TICK * int(np.ceil(trace.duration_s / tick_s)) + 1):
        now_s = look * tick_s / _LOOKS_PER_TICK
        node.run_until(now_s)
        if (window := loop.tick(now_s)) is not None:
            windows.append(window)
        if look % _LOOKS_PER_TICK == 0:
            evicting_from_s = now_s if evicting_from_s is None and node.has_evicted else evicting_from_s
            options.on_tick(now_s)
    finish(node, tick_s)
    return SimResult(
        calibration=cost.name,
        slo_ms=config.slo_ms,
        arrived_s=trace.time_s,
        outcomes=outcomes,
        windows=windows,
        pool=node.stats(),
        evicting_from_s=evicting_from_s,
        wall_s=time.perf_counter() - started_s,
    )


def finish(node: Node, tick_s: float) -> None:
    """Advance a node until all its requests are answered."""
    while node.num_unanswered:
        node.run_until(node.now_s + tick_s)
