"""Routing a slice of time at once, for a cluster that tells only who asks and how many requests each node has open.

Turns open requests into reports and a policy's choices into an array of nodes. What it is not told (rows, splits) a
policy must do without, or the caller feeds to `state`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from helmrec.router.nodes import Floats, RouteRequest
from helmrec.router.policy import Policy
from helmrec.router.state import ClusterState, NodeReport
from helmrec.types import IntArray


class Fixed(NamedTuple):
    """What holds for all nodes and is not reported."""

    slice_s: float
    alpha: float
    pool_tokens: int


class SliceRouter:
    """Any policy over a cluster that runs in slices."""

    def __init__(
        self, policy: Policy, state: ClusterState, describe: Callable[[int], RouteRequest], fixed: Fixed
    ) -> None:
        """`describe`: the request a user makes, as far as known beforehand."""
        self.state = state
        self._policy, self._describe, self._fixed = policy, describe, fixed
        self._alive: set[int] = set()
        self._now_s = 0.0
        self._num_slices = 0
        self._num_routed, self._service_ms = 0, 0.0

    def route(self, users: IntArray, loads: Floats) -> IntArray:
        """A node for each request, in order. `loads`: open requests by node, infinite for dead ones; not for all."""
        self._now_s += self._fixed.slice_s
        self._num_slices += 1
        self._meet(set(np.flatnonzero(np.isfinite(loads)).tolist()))
        for node in self._alive:
            self.state.report(self._report(node, loads[node]), self._now_s)
        times_s = self._now_s + self._fixed.slice_s * (np.arange(users.size) + 0.5) / users.size
        return np.array([self._send(*sent) for sent in zip(users.tolist(), times_s.tolist(), strict=True)], np.int64)

    def _meet(self, alive: set[int]) -> None:
        for node in sorted(self._alive - alive):
            self.state.leave(node)
        for node in sorted(alive - self._alive):
            self.state.join(node)
        self._alive = alive

    def _report(self, node: int, num_open: float) -> NodeReport:
        mean_ms = self._service_ms / max(1, self._num_routed)
        return NodeReport(
            node=node,
            sequence=self._num_slices,
            as_of_s=self._now_s,
            queue_ms=num_open * mean_ms,
            num_waiting=int(num_open),
            waiting_tokens=0,
            alpha=self._fixed.alpha,
            pool_tokens=self._fixed.pool_tokens,
            row_hit_rate=float("nan"),
        )

    def _send(self, user: int, now_s: float) -> int:
        request = self._describe(user)
        choice = self._policy.choose(request, self.state.look(user, now_s), now_s)
        assert choice is not None, "a slice is routed while a node is alive"
        self.state.sent(request, choice.node, choice.service_ms, now_s)
        self._num_routed += 1
        self._service_ms += choice.service_ms
        return choice.node
