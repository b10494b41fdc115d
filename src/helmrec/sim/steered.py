"""A simulated node under the control loop of an engine (`Rebalancer`)."""

from dataclasses import dataclass
from typing import NamedTuple

from helmrec.control.policy import Move, Policy, WindowStats
from helmrec.control.rebalancer import Decision, Rebalancer
from helmrec.memory.miss_curves import JointCurves
from helmrec.memory.stats import PoolStats
from helmrec.sim.curves import NodeCurveFeed
from helmrec.sim.node.node import Node
from helmrec.steps import Steps


class NodeLook(NamedTuple):
    """The state of a simulated node that the rebalancer reads."""

    pool: PoolStats
    queue_length: int


class SteeredNode:
    """A simulated node with the interface of an engine under a rebalancer (`Steered`)."""

    def __init__(self, node: Node, *, has_curves: bool = False) -> None:
        self.node = node
        self._feed = NodeCurveFeed(node) if has_curves else None
        self._num_fed = 0

    @property
    def queue_length(self) -> int:
        return self.node.num_queued

    def stats(self) -> NodeLook:
        return NodeLook(self.node.stats(), self.queue_length)

    def curves(self) -> JointCurves | None:
        """Miss curves of all requests answered so far; None without curves, or while too few are answered."""
        if self._feed is None:
            return None
        answered = self.node.answered[self._num_fed :]
        self._num_fed += answered.size
        self._feed.observe(answered)
        return self._feed.curves()

    def take_steps(self) -> Steps:
        return self.node.take_steps()

    def move_alpha(self, alpha: float) -> None:
        self.node.aim(min(max(alpha, 0.0), self.node.config.alpha_max))


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The time between two decisions, and the move at its end."""

    stats: WindowStats
    move: Move | None
    num_refused: int
    bytes_by_cause: dict[str, int]


class NodeLoop:
    """Runs a rebalancer on a simulated node. Its first window begins at `start_s`."""

    def __init__(self, steered: SteeredNode, policy: Policy, tick_s: float, start_s: float = 0.0) -> None:
        self._node = steered.node
        self._rebalancer = Rebalancer(steered, policy, self._node.config.slo_ms, tick_s)
        self._rebalancer.tick(start_s)
        self._num_recorded = self._node.answered.size
        self._bytes = self._node.bytes_by_cause()

    def tick(self, now_s: float) -> Window | None:
        """Record new answers; return a window if one has ended. Must be called at least every quarter of a tick."""
        node = self._node
        answered = node.answered[self._num_recorded :]
        if answered.size:
            self._num_recorded += answered.size
            self._rebalancer.record_all(node.requests.reads.user[answered], node.outcomes.latency_ms[answered])
        decision = self._rebalancer.tick(now_s)
        return None if decision is None else self._window(decision)

    def _window(self, decision: Decision) -> Window:
        before, self._bytes = self._bytes, self._node.bytes_by_cause()
        grown = {cause: num - before[cause] for cause, num in self._bytes.items()}
        traffic = decision.window.traffic
        return Window(decision.window, decision.move, traffic.num_requests - traffic.num_served, grown)
