"""A request router for Ray Serve that translates replicas, reports and answers for `Dispatch`, which decides.

Ray constructs one in every process that holds a handle to the engines; they agree through hashes and reports. Ray's
alpha API is used through `ray.serve.request_router` alone, and `tests/cluster` tests what this module relies on.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from helmrec.cluster.config import OURS
from helmrec.cluster.dispatch import Dispatch
from helmrec.cluster.hint import Hint, unpack_hint
from helmrec.costs.routing import RouterCost
from helmrec.extensions import ROUTERS, extensions
from helmrec.failures import FailureLog
from helmrec.router.policy import EmbKVAware, RoutingPolicy
from helmrec.router.settings import RouterSettings, StateSettings
from helmrec.router.state import ClusterState

log = logging.getLogger("helmrec.cluster")
P = ParamSpec("P")
T = TypeVar("T")
REPORT = "helmrec"  # key of a replica's report among its routing stats
_HINT = 0  # index of the hint among the arguments of a call


class HelmRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Sends each request to the replica that is expected to answer it first.

    All replicas compute the same scores. So a decision that fails is logged, and Ray chooses the replica: an exception
    raised into Ray would leave the request waiting forever.
    """

    def initialize_state(
        self, router: str, cost: dict[str, Any] | None, routing: dict[str, Any], memory: dict[str, Any], seed: int = 0
    ) -> None:
        """Construct policy and state from the settings of `ClusterConfig`, as plain values.

        `cost`: that of a calibration; None: what replicas learn from their own steps.
        """
        policy, state = make_policy(router, cost, routing, seed), ClusterState(StateSettings(**memory))
        self._dispatch = Dispatch(policy, state, time.monotonic, learns=cost is None)
        self._lock = threading.Lock()  # Ray reports answers from another thread than the one that chooses
        self._failures = FailureLog(log)

    def _try(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            with self._lock:
                return work(*args, **kwargs)
        except Exception as error:
            self._failures.note(getattr(work, "__qualname__", "routing"), error, "routing failed")
            return None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._try(self._dispatch.meet, {_name(r.replica_id): r.routing_stats.get(REPORT) for r in replicas})
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others, for when it is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray retries without a pause
        hint = _hint(pending_request)
        if hint is None:
            return [candidate_replicas]
        chosen = self._try(self._dispatch.choose, pending_request.metadata.internal_request_id, hint)
        first = [r for r in candidate_replicas if _name(r.replica_id) == chosen]
        others = [r for r in candidate_replicas if _name(r.replica_id) not in {chosen, hint.avoid}]
        return [rank for rank in (first, others) if rank] or [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        hint = _hint(pending_request)
        if hint is not None:
            self._try(self._dispatch.sent, pending_request.metadata.internal_request_id, hint, _name(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._try(self._dispatch.finished, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._try(self._dispatch.lose, _name(replica_id))
        super().on_replica_actor_died(replica_id)


def make_policy(router: str, cost: dict[str, Any] | None, routing: dict[str, Any], seed: int = 0) -> RoutingPolicy:
    made = RouterCost.unknown() if cost is None else RouterCost(**cost)
    if router == OURS:
        return EmbKVAware(made, RouterSettings(**routing))
    added: RoutingPolicy = extensions(ROUTERS)[router].load()(router, made, np.random.default_rng(seed))
    return added


def _name(replica_id: ReplicaID) -> str:
    return replica_id.unique_id


def _hint(pending_request: PendingRequest) -> Hint | None:
    return unpack_hint(pending_request.args[_HINT]) if pending_request.args else None
