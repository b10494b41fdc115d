"""Run a trace through one simulated node while a policy moves its boundary; what came of it, window by window.

The policy sees what it would see of an engine (`WindowStats`) and answers with a move; only this loop acts on it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helmrec.control.policy import Move, Policy, Traffic, WindowStats
from helmrec.memory.stats import PoolStats
from helmrec.sim.cost import CostModel
from helmrec.sim.node import Node
from helmrec.sim.node_config import NodeConfig, prepare_requests
from helmrec.sim.node_kv import Kv
from helmrec.sim.node_state import C, Faults, FloatArray, N, Outcomes, Status, make_outcomes
from helmrec.sim.simulate_curves import CurveFeed
from helmrec.sim.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What a run may have beside a policy."""

    faults: Faults | None = None
    has_curves: bool = False  # feed joint miss curves for policies that ask; some ten times slower
    on_tick: Callable[[float], None] = lambda now_s: None  # told the time after each window


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """What happened between two looks, and what the policy made of it."""

    stats: WindowStats
    move: Move | None
    num_refused: int
    bytes_by_cause: dict[str, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies of those served; a refused request is one that missed its SLO."""

    num_requests: int
    num_refused: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    slo_satisfaction: float
    token_reuse_rate: float  # of history tokens: candidates are always computed
    missed_rows_per_request: float


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    calibration: str  # which costs were used
    slo_ms: float
    arrived_s: FloatArray  # (requests,)
    outcomes: Outcomes
    windows: list[Window]
    pool: PoolStats  # at the end
    evicting_from_s: float | None  # from when on both caches had evicted; None: one never did
    wall_s: float  # that the run took

    def summary(self, begin_s: float = 0.0, end_s: float = np.inf) -> Summary:
        """Of requests that arrived in [begin_s, end_s)."""
        return summarise(self.outcomes, (self.arrived_s >= begin_s) & (self.arrived_s < end_s), self.slo_ms)

    def mean_ms_by_arrival(self, window_s: float) -> FloatArray:
        """Mean latency of each window of arrivals, which sweeps over splits compare; NaN where none was served."""
        place = (self.arrived_s // window_s).astype(np.int64)
        is_served = self.outcomes.status == Status.SERVED
        size = int(place.max(initial=-1)) + 1
        total = np.bincount(place[is_served], self.outcomes.latency_ms[is_served], size)
        num = np.bincount(place[is_served], minlength=size)
        return np.divide(total, num, out=np.full(size, np.nan), where=num > 0)


def summarise(outcomes: Outcomes, chosen: NDArray[np.bool_], slo_ms: float) -> Summary:
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
    """Serve all of a trace. Every `tick_s` the policy looks at the window; its moves are applied in bounded steps."""
    options = options or Options()
    started_s = time.perf_counter()
    outcomes = make_outcomes(trace.num_requests)
    node = Node(config, cost, prepare_requests(trace, config), outcomes, options.faults)
    node.send(np.arange(trace.num_requests), trace.time_s)
    watch = Watch(node, CurveFeed(node) if options.has_curves else None)
    windows: list[Window] = []
    evicting_from_s = None
    for tick in range(1, int(np.ceil(trace.duration_s / tick_s)) + 1):
        node.run_until(tick * tick_s)
        windows.append(watch.decide(policy, tick * tick_s))
        if evicting_from_s is None and node.has_evicted:
            evicting_from_s = tick * tick_s
        options.on_tick(tick * tick_s)
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
    """Let a node answer all that was sent."""
    while node.num_unanswered:
        node.run_until(node.now_s + tick_s)


class Watch:
    """Looks at a node at the end of each window and acts on what a policy decides."""

    def __init__(self, node: Node, feed: CurveFeed | None = None, start_s: float = 0.0) -> None:
        self._node = node
        self._feed = feed
        self._before = node.stats()
        self.start_s = start_s
        self._num_logged = 0
        self._counters = self._look()

    def _look(self) -> FloatArray:
        """Counters whose growth tells of a window: revisits, visits, busy times, refusals."""
        counts, clocks, kv = self._node.state.counts, self._node.state.clocks, self._node.state.kv.counts
        return np.array(
            [kv[Kv.REVISITS], kv[Kv.VISITED], clocks[C.COMPUTE_BUSY_MS], clocks[C.BUS_BUSY_MS], counts[N.REFUSED]]
        )

    def decide(self, policy: Policy, now_s: float) -> Window:
        """End the window at `now_s`, ask the policy, and aim where it says."""
        stats, num_refused = self.window(now_s)
        move = policy.decide(stats)
        if move is not None:
            self._node.aim(min(max(move.alpha, 0.0), self._node.config.alpha_max))
        return Window(stats, move, num_refused, self._bytes)

    def window(self, now_s: float) -> tuple[WindowStats, int]:
        """The window that ends now, and how many requests it refused."""
        node, after, counters = self._node, self._node.stats(), self._look()
        answered = node.answered[self._num_logged :]
        grown = counters - self._counters
        if self._feed is not None:
            self._feed.observe(answered)
        traffic = self._traffic(now_s, node.outcomes.latency_ms[answered], grown)
        curves = None if self._feed is None else self._feed.curves()
        stats = WindowStats.between(self._before, after, traffic, curves)
        self._bytes = {
            cause: num - self._before.bytes_by_cause.get(cause, 0) for cause, num in after.bytes_by_cause.items()
        }
        self._before, self._counters, self.start_s = after, counters, now_s
        self._num_logged += answered.size
        return stats, int(grown[4])

    def _traffic(self, now_s: float, latency_ms: FloatArray, grown: FloatArray) -> Traffic:
        """`latency_ms`: of requests answered in the window, NaN for those refused."""
        served = latency_ms[~np.isnan(latency_ms)]
        p50_ms, p99_ms = np.percentile(served, (50, 99)) if served.size else (0.0, 0.0)
        slo_ms, span_ms = self._node.config.slo_ms, (now_s - self.start_s) * 1e3
        return Traffic(
            start_s=self.start_s,
            end_s=now_s,
            num_requests=latency_ms.size,
            num_served=served.size,
            hot_user_share=float(grown[0] / max(1.0, grown[1])),
            mean_ms=float(served.mean()) if served.size else 0.0,
            p50_ms=float(p50_ms),
            p99_ms=float(p99_ms),
            slo_ms=slo_ms,
            slo_satisfaction=float(np.count_nonzero(served <= slo_ms) / max(1, latency_ms.size)),
            num_queued=self._node.num_queued,
            compute_busy=min(1.0, float(grown[2] / span_ms)),
            bus_busy=min(1.0, float(grown[3] / span_ms)),
        )
