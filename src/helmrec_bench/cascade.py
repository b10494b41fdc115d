"""A cascade of retrieval, pre-processing and ranking over simulated nodes.

Signals come when retrieval begins, ranks when pre-processing ends, each on its node.

A user's signals and ranks go to one node by its hash, or, without affinity, each where chance sends it. Either way
nodes do not depend on each other, so they are run one after another. Knows no search and no report.
"""

from dataclasses import dataclass, field

import numba
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.costs.calibrated import CostModel
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.relay import VERDICTS, R, T
from helmrec.sim.node.state import C, Outcomes, Status, make_outcomes
from helmrec.sim.simulate import finish
from helmrec.traffic.popularity import mix
from helmrec.traffic.trace import Trace
from helmrec.types import FloatArray, IntArray


class CascadeConfig(Frozen):
    """Stages before ranking. RelayGR leaves tens of milliseconds to ranking; the other times are our choice."""

    retrieval_ms: float = Field(50.0, ge=0, description="from the user's coming to its candidates, on average")
    preprocessing_ms: float = Field(20.0, ge=0, description="from the candidates to those that are ranked, on average")
    spread: float = Field(0.4, ge=0, le=1, description="each stage takes its time give or take this share")
    budget_ms: float = Field(50.0, gt=0, description="what ranking may take")

    def rank_times(self, signal_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """When the ranks of signals that came then are asked for."""
        stages = np.array([self.retrieval_ms, self.preprocessing_ms]) / 1e3
        factor = 1 + self.spread * rng.uniform(-1, 1, (signal_s.size, stages.size))
        return signal_s + (factor * stages).sum(axis=1)


@dataclass(frozen=True, slots=True)
class Relaying:
    """What is sent where."""

    cascade: CascadeConfig = field(default_factory=CascadeConfig)
    has_signals: bool = True
    has_affinity: bool = True
    num_nodes: int = 1
    num_new_users: int = 0  # signals without a rank, for each signal with one
    warm_up_s: float = 0.0  # left out of the figures
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CascadeResult:
    """Ranks that were asked for after the warm-up, and what nodes did."""

    latency_ms: FloatArray  # infinite for those refused
    token_reuse_rate: float
    busy: float  # share of the time that nodes computed
    engine_busy: float  # share of the time that steps took, the host's part included
    ahead_busy: float  # of that, for nobody yet
    verdicts: dict[str, int]
    leases_used: int
    leases_expired: int
    most_held: float  # largest share of KV pages that leases of a node may have taken
    most_compute: float  # largest share of a second that a node had promised to computing ahead
    reloaded_pages: int

    def share_within(self, budget_ms: float) -> float:
        return float(np.mean(self.latency_ms <= budget_ms))

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.latency_ms, percent, method="higher"))


class _CascadePlan:
    """Who comes when, and goes where."""

    def __init__(self, trace: Trace, relaying: Relaying) -> None:
        rng = np.random.default_rng(relaying.seed)
        self.signal_s = trace.time_s
        self.rank_s = relaying.cascade.rank_times(trace.time_s, rng)
        self.rank_node = self.signal_node = highest_hash(trace.user, np.arange(relaying.num_nodes))
        if not relaying.has_affinity:
            self.rank_node, self.signal_node = rng.integers(0, relaying.num_nodes, (2, trace.num_requests))


@numba.njit(cache=True)
def highest_hash(users: IntArray, alive: IntArray) -> IntArray:
    """The node of each user, by hash. When a node fails, only its own users move."""
    chosen = np.empty(users.size, np.int64)
    for i in range(users.size):
        best, highest = alive[0], np.uint64(0)
        for node in alive:
            word = mix(users[i], node + 1)
            if word > highest:
                best, highest = node, word
        chosen[i] = best
    return chosen


def simulate_cascade(trace: Trace, config: NodeConfig, cost: CostModel, relaying: Relaying) -> CascadeResult:
    """Serve all ranks of a trace; its times are when users come."""
    plan, outcomes = _CascadePlan(trace, relaying), make_outcomes(trace.num_requests)
    requests = prepare_requests(trace, config)
    nodes = []
    for index in range(relaying.num_nodes):
        node = Node(config, cost, requests, outcomes)
        mine = np.flatnonzero(plan.rank_node == index)
        mine = mine[np.argsort(plan.rank_s[mine], kind="stable")]
        node.send(mine, plan.rank_s[mine])
        if relaying.has_signals:
            node.send_signals(*_signals(trace, plan, relaying, index))
        node.run_until(float(plan.rank_s.max(initial=0.0)))
        finish(node, 1.0)
        node.check()
        nodes.append(node)
    return _result(nodes, outcomes, plan.rank_s >= relaying.warm_up_s)


def _signals(trace: Trace, plan: _CascadePlan, relaying: Relaying, index: int) -> tuple[IntArray, FloatArray]:
    """Signals of a node, in order of time. A new user is a user of the trace who comes much later, or came before."""
    mine = np.flatnonzero(plan.signal_node == index)
    rng = np.random.default_rng([relaying.seed, index])
    num = mine.size * relaying.num_new_users
    others = rng.integers(0, trace.num_requests, num)
    when_s = np.sort(rng.uniform(0, trace.duration_s, num))
    requests, times_s = np.append(mine, others), np.append(plan.signal_s[mine], when_s)
    order = np.argsort(times_s, kind="stable")
    return requests[order], times_s[order]


def _result(nodes: list[Node], outcomes: Outcomes, counted: NDArray[np.bool_]) -> CascadeResult:
    counts = np.array([node.state.relay.counts for node in nodes])
    clocks = np.array([node.state.relay.clocks for node in nodes])
    is_served = outcomes.status == Status.SERVED
    latency_ms = np.where(is_served, outcomes.latency_ms, np.inf)[counted]
    chosen = counted & is_served
    reused, total = outcomes.reused_tokens[chosen].sum(), outcomes.history_tokens[chosen].sum()
    span_s = sum(node.now_s for node in nodes)
    kv_pages = min(node.config.num_pages - node.stats().emb_pages for node in nodes)
    return CascadeResult(
        latency_ms=latency_ms,
        token_reuse_rate=float(reused / max(1, total)),
        busy=float(sum(node.state.clocks[C.COMPUTE_BUSY_MS] for node in nodes) / 1e3 / span_s),
        engine_busy=float(clocks[:, T.STEPS_S].sum() / span_s),
        ahead_busy=float(clocks[:, T.BUSY_S].sum() / span_s),
        verdicts={verdict.name.lower().replace("_", " "): int(counts[:, verdict].sum()) for verdict in VERDICTS},
        leases_used=int(counts[:, R.USED].sum()),
        leases_expired=int(counts[:, R.EXPIRED].sum()),
        most_held=float(counts[:, R.MOST_HELD_PAGES].max() / kv_pages),
        most_compute=float(clocks[:, T.MOST_SHARE].max()),
        reloaded_pages=sum(node.stats().host_reloaded_pages for node in nodes),
    )
