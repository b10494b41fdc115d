"""A simulated cluster: many nodes behind a router, with loss of nodes.

Time advances in slices. Requests of a slice are routed by the state at its start, as in a real cluster, where load
reports are a fraction of a second old. Unanswered requests of a lost node are sent once more, to another node; their
latency counts from their first arrival.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Policy
from helmrec.costs.calibrated import CostModel
from helmrec.errors import ConfigError
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import Faults, Requests, Status, make_outcomes
from helmrec.sim.simulate import ServedTrace
from helmrec.sim.steered import NodeLoop, SteeredNode, Window
from helmrec.traffic.trace import Trace
from helmrec.types import FloatArray, IntArray


class NodeLoss(Frozen):
    """A node fails, and may come back with empty caches."""

    node: int = Field(ge=0)
    at_s: float = Field(ge=0)
    back_s: float | None = Field(None, gt=0, description="None: it does not come back")


class ClusterSimConfig(Frozen):
    """The number of nodes of a simulated cluster, its time steps and its failures."""

    num_nodes: int = Field(ge=1)
    slice_s: float = Field(0.1, gt=0, description="greatest age of the loads that a router sees")
    tick_s: float = Field(1.0, gt=0, description="interval between decisions of the policies; a whole number of slices")
    notice_s: float = Field(1.0, ge=0, description="time until the requests of a lost node are sent again")
    losses: tuple[NodeLoss, ...] = ()


class Router(Protocol):
    """Chooses nodes, as the router of a real cluster does."""

    def observe(self, nodes: Mapping[int, Node], now_s: float) -> None:
        """Read the state of the running nodes before each slice."""

    def route_requests(self, requests: IntArray, when_s: FloatArray) -> IntArray:
        """A node for each request of the trace, in order of time."""


@dataclass(frozen=True, slots=True, eq=False)
class ClusterResult(ServedTrace):
    """The result of `simulate_cluster`."""

    node: IntArray  # (requests,) the last node that got the request
    num_retried: int
    windows: list[list[Window]]  # by node


class Fleet(NamedTuple):
    """The configuration, policy and faults of all nodes of a cluster."""

    config: NodeConfig
    cost: CostModel
    policy_for: Callable[[int], Policy]
    has_curves: bool = False  # for policies that use miss curves; several times slower
    faults: dict[int, Faults] = {}  # noqa: RUF012 - never written; node -> faults


def simulate_cluster(
    trace: Trace,
    fleet: Fleet,
    router: Router,
    config: ClusterSimConfig,
) -> ClusterResult:
    """Serve a trace on a cluster."""
    started_s = time.perf_counter()
    cluster = _Cluster(trace, fleet, router, config)
    num_slices = int(np.ceil(trace.duration_s / config.slice_s)) + 1
    for index in range(1, num_slices + 1):
        cluster.run_slice(index * config.slice_s)
        cluster.tick(index * config.slice_s)
    cluster.finish(num_slices * config.slice_s)
    cluster.check()
    return ClusterResult(
        calibration=fleet.cost.name,
        slo_ms=fleet.config.slo_ms,
        arrived_s=trace.time_s,
        outcomes=cluster.outcomes,
        node=cluster.node_of,
        num_retried=cluster.num_retried,
        windows=cluster.windows,
        wall_s=time.perf_counter() - started_s,
    )


class _Cluster:
    def __init__(self, trace: Trace, fleet: Fleet, router: Router, config: ClusterSimConfig) -> None:
        if unknown := [loss.node for loss in config.losses if loss.node >= config.num_nodes]:
            raise ConfigError(f"losses must name nodes below {config.num_nodes}, got {unknown[0]}")
        self._trace, self._fleet, self._router, self._config = trace, fleet, router, config
        self._requests: Requests = prepare_requests(trace, fleet.config)
        self.outcomes = make_outcomes(trace.num_requests)
        self.node_of = np.full(trace.num_requests, -1, np.int64)
        self._nodes = [self._make_node(i) for i in range(config.num_nodes)]
        self._policies = [fleet.policy_for(i) for i in range(config.num_nodes)]
        self._loops = [self._make_loop(i) for i in range(config.num_nodes)]
        self._is_alive = np.ones(config.num_nodes, np.bool_)
        self._events = _loss_events(config.losses)
        self._next_arrival = 0
        self._retries: list[tuple[float, int]] = []  # when, request
        self._retried_at: dict[int, float] = {}
        self.windows: list[list[Window]] = [[] for _ in self._nodes]

    @property
    def num_retried(self) -> int:
        return len(self._retried_at)

    @property
    def _alive(self) -> list[int]:
        """The running nodes."""
        return np.flatnonzero(self._is_alive).tolist()

    def _make_node(self, index: int) -> Node:
        fleet = self._fleet
        return Node(fleet.config, fleet.cost, self._requests, self.outcomes, fleet.faults.get(index))

    def _make_loop(self, index: int, start_s: float = 0.0) -> NodeLoop:
        steered = SteeredNode(self._nodes[index], has_curves=self._fleet.has_curves)
        return NodeLoop(steered, self._policies[index], self._config.tick_s, start_s)

    def run_slice(self, end_s: float) -> None:
        """Route the requests that arrive before `end_s`, then advance every node to it."""
        self._router.observe({index: self._nodes[index] for index in self._alive}, end_s - self._config.slice_s)
        self._send(*self._arrivals(end_s))
        for index in self._alive:
            self._nodes[index].run_until(end_s)
        while self._events and self._events[0].time_s <= end_s:
            event = self._events.pop(0)
            if event.comes_back:
                self._revive(event.node, end_s)
            elif self._is_alive[event.node]:
                self._lose(event.node, end_s)

    def _arrivals(self, end_s: float) -> tuple[IntArray, FloatArray]:
        """Requests that arrive before `end_s`, first or again, and their times."""
        times_s, begin = self._trace.time_s, self._next_arrival
        self._next_arrival = end = int(np.searchsorted(times_s, end_s))
        requests, when_s = np.arange(begin, end), times_s[begin:end]
        due = [retry for retry in self._retries if retry[0] < end_s]
        if not due:
            return requests, when_s
        self._retries = [retry for retry in self._retries if retry[0] >= end_s]
        requests = np.concatenate([requests, [request for _, request in due]])
        when_s = np.concatenate([when_s, [at_s for at_s, _ in due]])
        order = np.argsort(when_s, kind="stable")
        return requests[order], when_s[order]

    def _send(self, requests: IntArray, when_s: FloatArray) -> None:
        if not requests.size:
            return
        if not self._is_alive.any():
            self.outcomes.status[requests] = Status.LOST
            return
        chosen = self._router.route_requests(requests, when_s)
        assert self._is_alive[chosen].all(), "a request was sent to a failed node"
        self.node_of[requests] = chosen
        order = np.argsort(chosen, kind="stable")
        ends = np.searchsorted(chosen[order], np.arange(len(self._nodes) + 1))
        for index in np.unique(chosen).tolist():
            mine = order[ends[index] : ends[index + 1]]
            self._nodes[index].send(requests[mine], when_s[mine])

    def _lose(self, index: int, now_s: float) -> None:
        """Remove a node; its unanswered requests are sent once more, or are lost if they were sent twice."""
        self._is_alive[index] = False
        for request in self._nodes[index].unanswered().tolist():
            if request in self._retried_at:
                self.outcomes.status[request] = Status.LOST
            else:
                self._retried_at[request] = now_s + self._config.notice_s
                self._retries.append((now_s + self._config.notice_s, request))

    def _revive(self, index: int, now_s: float) -> None:
        self._nodes[index] = self._make_node(index)
        self._nodes[index].run_until(now_s)
        self._policies[index].reset()
        self._loops[index] = self._make_loop(index, now_s)
        self._is_alive[index] = True

    def tick(self, now_s: float) -> None:
        """Run the control loops of the running nodes."""
        for index in self._alive:
            if (window := self._loops[index].tick(now_s)) is not None:
                self.windows[index].append(window)

    def finish(self, now_s: float) -> None:
        """Advance without new requests until all are answered."""
        while self._retries or any(self._nodes[index].num_unanswered for index in self._alive):
            now_s += self._config.slice_s
            self.run_slice(now_s)
        for request, retried_s in self._retried_at.items():
            waited_ms = (retried_s - self._trace.time_s[request]) * 1e3
            self.outcomes.latency_ms[request] += waited_ms
            self.outcomes.queue_ms[request] += waited_ms

    def check(self) -> None:
        """Assert that every request has an outcome, and the invariants of the nodes."""
        assert (self.outcomes.status != Status.WAITING).all(), "a request has no outcome"
        for index in self._alive:
            self._nodes[index].check()


class _LossEvent(NamedTuple):
    time_s: float
    node: int
    comes_back: bool


def _loss_events(losses: tuple[NodeLoss, ...]) -> list[_LossEvent]:
    events = [_LossEvent(loss.at_s, loss.node, comes_back=False) for loss in losses]
    events += [_LossEvent(loss.back_s, loss.node, comes_back=True) for loss in losses if loss.back_s is not None]
    return sorted(events)
