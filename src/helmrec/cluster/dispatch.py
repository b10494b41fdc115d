"""Routing decisions over replicas that have names instead of numbers. Pure: the clock, a monotonic one, is passed in.

Holds one policy and the estimated state of the replicas. `request_router` connects it to Ray.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from helmrec.cluster.hint import Hint
from helmrec.cluster.remote_clock import RemoteClock
from helmrec.cluster.report import ReplicaReport, unpack_report
from helmrec.costs.learned import StageCosts
from helmrec.costs.routing import RouterCost
from helmrec.router.policy import LearnsCosts, RoutingPolicy
from helmrec.router.settings import StateSettings
from helmrec.router.sketch import build_sketch, sample_rows
from helmrec.router.state import ClusterState, NodeReport, Sent

_MOST_OPEN = 100_000  # requests that are tracked; beyond it the oldest are dropped
_EARLIER_INCARNATIONS = 8  # of a replica, whose late reports are recognised


def node_of(replica: str) -> int:
    """Return a replica's number: the same in every process, so that all routers hash alike."""
    return int.from_bytes(hashlib.blake2b(replica.encode(), digest_size=8).digest(), "little") >> 1


class _Inbox:
    """Orders the reports of one replica and translates their times."""

    def __init__(self) -> None:
        self.latest: object = None  # as received
        self._incarnation: int | None = None
        self._earlier: deque[int] = deque(maxlen=_EARLIER_INCARNATIONS)
        self._clock = RemoteClock()
        self._sequence = 0

    def is_outdated(self, report: ReplicaReport) -> bool:
        """Return whether a report is older than the last accepted one, or from before a restart of the replica."""
        is_older = report.incarnation == self._incarnation and report.sequence <= self._sequence
        return is_older or report.incarnation in self._earlier

    def is_restart(self, report: ReplicaReport) -> bool:
        """Return whether a report is the first after a restart. If so, sequence and clock are reset."""
        before, self._incarnation = self._incarnation, report.incarnation
        if before is None or before == report.incarnation:
            return False
        self._earlier.append(before)
        self._clock, self._sequence = RemoteClock(), 0
        return True

    def node_report(self, report: ReplicaReport, node: int, now_s: float) -> NodeReport:
        """Convert a report."""
        self._sequence = report.sequence
        return report.node_report(node, self._clock.local_s(report.taken_s, now_s))


class Dispatch:
    """Chooses replicas by name and tracks the requests sent to them."""

    def __init__(
        self, policy: RoutingPolicy, state: ClusterState, clock: Callable[[], float], *, learns: bool = True
    ) -> None:
        """`learns`: predict with what replicas have learned of their own costs, if the policy does."""
        self.state = state
        self._learner = policy if learns and isinstance(policy, LearnsCosts) else None
        self._costs: dict[str, StageCosts] = {}  # by replica
        self._rows_per_token = 0
        self._policy, self._clock = policy, clock
        self._node: dict[str, int] = {}
        self._inboxes: dict[str, _Inbox] = {}
        self._name: dict[int, str] = {}
        self._price_ms: dict[str, float] = {}  # by request, chosen and not sent yet
        self._open: dict[str, Sent] = {}  # by request, sent and not finished

    @property
    def replicas(self) -> frozenset[str]:
        return frozenset(self._node)

    def meet(self, reports: Mapping[str, object]) -> None:
        """Set the running replicas, with the last report of each. All others are removed."""
        for replica in self._node.keys() - reports.keys():
            self.lose(replica)
        for replica in sorted(reports.keys() - self._node.keys()):
            node = self._node[replica] = node_of(replica)
            self._name[node] = replica
            self._inboxes[replica] = _Inbox()
            self.state.join(node)
        now_s = self._clock()
        for replica, value in reports.items():
            if value != self._inboxes[replica].latest:
                self._inboxes[replica].latest = value
                self._take(replica, value, now_s)

    def _take(self, replica: str, value: object, now_s: float) -> None:
        node, inbox, report = self._node[replica], self._inboxes[replica], unpack_report(value)
        if report is None or inbox.is_outdated(report):
            return
        if inbox.is_restart(report):
            self.state.join(node)  # its caches are empty
        self.state.report(inbox.node_report(report, node, now_s), now_s)
        if report.costs is not None:
            self._costs[replica] = report.costs
            self._learn()

    def _learn(self) -> None:
        if self._learner is not None and self._rows_per_token and self._costs:
            self._learner.learn(RouterCost.learned(list(self._costs.values()), self._rows_per_token))

    def lose(self, replica: str) -> None:
        """Remove a replica. Unknown ones are ignored."""
        node = self._node.pop(replica, None)
        self._inboxes.pop(replica, None)
        self._costs.pop(replica, None)
        if node is not None:
            del self._name[node]
            self.state.leave(node)

    def choose(self, request_id: str, hint: Hint) -> str | None:
        """Choose the replica for a request; None if there is none. May be called again for the same request."""
        now_s, request = self._clock(), hint.route_request()
        if request.rows_per_token != self._rows_per_token:
            self._rows_per_token = request.rows_per_token
            self._learn()
        nodes = self.state.look(request.user, now_s)
        avoided = self._node.get(hint.avoid)
        if avoided is not None and len(self._node) > 1:
            nodes = nodes._replace(is_alive=nodes.is_alive & (nodes.ids != avoided))
        choice = self._policy.choose(request, nodes, now_s)
        if choice is None:
            return None
        self._price_ms[request_id] = choice.service_ms
        if len(self._price_ms) > _MOST_OPEN:  # entries of requests that were cancelled before they were sent
            del self._price_ms[next(iter(self._price_ms))]
        return self._name[choice.node]

    def sent(self, request_id: str, hint: Hint, replica: str) -> None:
        """Record that a request was sent to a replica, whether or not `choose` returned it."""
        node, service_ms = self._node.get(replica), self._price_ms.pop(request_id, 0.0)
        if node is None:
            return
        self._open[request_id] = self.state.sent(hint.route_request(), node, service_ms, self._clock())
        if len(self._open) > _MOST_OPEN:
            self.finished(next(iter(self._open)))

    def finished(self, request_id: str) -> None:
        """Record that a request was answered, refused or lost."""
        sent = self._open.pop(request_id, None)
        if sent is not None:
            self.state.finished(sent)


def warm_up(policy: RoutingPolicy, settings: StateSettings) -> None:
    """Make every kind of decision once, so that compilation on first use does not delay requests."""
    dispatch = Dispatch(policy, ClusterState(settings), lambda: 0.0)
    sketch = build_sketch(np.arange(8), settings.sketch_bits)
    report = ReplicaReport(
        0.0, 1.0, 1, 8, 0.5, 100, 0.5, [(1, 8)], int(sketch.threshold), sketch.fill, sketch.words.tobytes()
    )
    sample = sample_rows(np.arange(8).reshape(4, 2), np.arange(8, 12).reshape(2, 2))
    dispatch.meet(dict.fromkeys(("a", "b"), msgspec.msgpack.encode(report)))
    for user in (1, 2, 2):
        hint = Hint(user, 4, 2, 2, int(sample.threshold), sample.hashes.tobytes(), sample.position.tobytes())
        chosen = dispatch.choose("warm-up", hint)
        assert chosen is not None, "two replicas are running"
        dispatch.sent("warm-up", hint, chosen)
        dispatch.finished("warm-up")
