"""A port to the engines of a cluster, for the HTTP front.

Each request of a call goes to the replica of its user. When a replica is lost, its unanswered requests are sent once
more within their deadlines: every replica computes the same scores.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from numpy.typing import ArrayLike

from helmrec.cluster.hint import Describer
from helmrec.cluster.merge import merge_looks, merge_stats
from helmrec.cluster.remote_clock import Stamp
from helmrec.cluster.replica import ReplicaReply
from helmrec.cluster.roster import Roster
from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake
from helmrec.errors import DeadlineExceeded, EngineClosed, QueueFull
from helmrec.model.config import ModelConfig
from helmrec.serve.port import EngineView, Health
from helmrec.serve.wire import (
    FrameKind,
    NotForTheWire,
    pack_call,
    pack_prefill,
    pack_requests,
    unpack_error,
    unpack_results,
)
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult, UserId

log = logging.getLogger("helmrec.cluster")
T = TypeVar("T")
_LOOK_EVERY_S = 0.5
_LOOK_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 30.0
_GRACE_S = 0.25  # for an answer that was computed in time and is in transit


async def rank_by_user(
    requests: Sequence[RankRequest], rank: Callable[[Sequence[RankRequest]], Awaitable[list[RankResult]]]
) -> list[RankResult]:
    """Rank the requests of each user together, all users at once; return the results in the order of the requests."""
    by_user: dict[UserId, list[int]] = {}
    for i, request in enumerate(requests):
        by_user.setdefault(request.user_id, []).append(i)
    groups = list(by_user.values())
    ranked = await asyncio.gather(*(rank([requests[i] for i in group]) for group in groups))
    results = dict(zip(chain(*groups), chain(*ranked), strict=True))
    return [results[i] for i in range(len(requests))]


class ReplicaLost(Exception):
    """A replica ended before it answered a request."""

    def __init__(self, why: str, replica: str = "") -> None:
        super().__init__(why)
        self.replica = replica


class ReplicaSlow(EngineClosed):
    """Not all replicas answered a call in time. The others may still serve."""


class ReplicaFleet(Protocol):
    """The replicas of a cluster, and the way to call them."""

    async def send(self, method: str, hint: bytes, stamp: Stamp, payload: bytes) -> ReplicaReply:
        """Call `rank` or `prefill` of the replica that the router chooses. ReplicaLost if it ends before it answers."""

    async def call_all(self, stamp: Stamp, payload: bytes) -> list[ReplicaReply]:
        """Make a call to every replica. Replicas that end before they answer are left out."""


class _Call(NamedTuple):
    """A call to one replica. Times are by this process's monotonic clock."""

    method: str
    request: RankRequest | PrefillRequest
    came_s: float
    payload: bytes
    until_s: float  # end of the wait for an answer


class ClusterPort:
    """A port to many engines. Used in one event loop."""

    def __init__(self, fleet: ReplicaFleet, model: ModelConfig, max_history: int, patience_s: float) -> None:
        """`patience_s`: how long a request without a deadline is waited for."""
        self.model = model
        self.health = Health.STARTING
        self.reason: str | None = None
        self._fleet = fleet
        self._patience_s = patience_s
        self._front = secrets.token_hex(8)  # name of this process's clock
        self._intake = Intake(model, version=0, max_history=max_history)  # names what is wrong with a request
        self._describer = Describer(model)
        self._watch: asyncio.Task[None] | None = None
        self._roster = Roster()
        self._replica_stats: dict[str, EngineStats] = {}
        self.num_retries = 0

    @property
    def num_restarts(self) -> int:
        """Replicas that replaced another one. The cluster starts them, not this port."""
        return self._roster.num_restarts

    @property
    def replica_stats(self) -> Mapping[str, EngineStats]:
        return self._replica_stats

    def start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._look_for_replicas())

    async def _look_for_replicas(self) -> None:
        """Update `health`: ready while some replica answers. A slow replica does not change it."""
        while True:
            try:
                self._replica_stats = await self._answers("stats", EngineStats, _LOOK_TIMEOUT_S)
                self.health, self.reason = Health.READY, None
            except ReplicaSlow as error:
                self.reason = str(error)
            except EngineClosed as error:
                self._lose_readiness(str(error))
            except Exception as error:
                reason = f"the replicas could not be asked for their state ({type(error).__name__})"
                if self.reason != reason:
                    log.exception("the replicas could not be asked for their state")
                self._lose_readiness(reason)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _lose_readiness(self, reason: str) -> None:
        if self.health is Health.READY:
            self.health = Health.RESTARTING
        self.reason = reason

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        came_s = time.monotonic() - spent_ms / 1e3
        if len(requests) == 1:
            return await self._rank(requests, came_s)
        self._intake.prepare_all(requests)  # raises what an engine would raise, before any request of the call runs
        return await rank_by_user(requests, lambda some: self._rank(some, came_s))

    async def _rank(self, requests: Sequence[RankRequest], came_s: float) -> list[RankResult]:
        """Rank the requests of one user on one replica, or on another if that one is lost."""
        try:
            payload = b"".join(pack_requests(requests, 0.0))
        except NotForTheWire as unfit:
            self._intake.prepare_all(requests)
            raise QueueFull(f"the call cannot be sent to a replica: {unfit}") from None
        until_s = self._until_s(requests, came_s)
        reply = await self._send(_Call("rank", requests[0], came_s, payload, until_s))
        return unpack_results(memoryview(reply.payload))

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        """Send a signal to the replica that the user's rank will be sent to.

        The replica refuses a signal that arrived before its user was forgotten.
        """
        try:
            payload = b"".join(pack_prefill(request))
        except NotForTheWire as unfit:
            self._intake.prepare_ahead(request)
            raise QueueFull(f"the signal cannot be sent to a replica: {unfit}") from None
        came_s = time.monotonic() - spent_ms / 1e3
        reply = await self._send(_Call("prefill", request, came_s, payload, came_s + self._patience_s))
        return msgspec.msgpack.decode(reply.payload, type=PrefillResult)

    async def _send(self, call: _Call) -> ReplicaReply:
        """Return the answer of a replica, or of another one if that is lost."""
        try:
            return await self._send_once(call, avoid="")
        except ReplicaLost as lost:
            log.warning("a replica was lost", extra={"replica": lost.replica, "reason": str(lost)})
            self.num_retries += 1
            try:
                return await self._send_once(call, avoid=lost.replica)
            except ReplicaLost as again:
                raise EngineClosed(f"two replicas were lost one after the other: {again}") from None

    async def _send_once(self, call: _Call, *, avoid: str) -> ReplicaReply:
        hint = msgspec.msgpack.encode(self._describer.hint(call.request, avoid))
        now_s = time.monotonic()
        left_s = max(0.0, call.until_s - now_s)
        try:
            async with asyncio.timeout(left_s + _GRACE_S):
                stamp = Stamp(self._front, call.came_s, now_s)
                reply = await self._fleet.send(call.method, hint, stamp, call.payload)
        except TimeoutError:
            raise DeadlineExceeded(f"no replica answered within {left_s:.1f} s") from None
        if reply.kind != FrameKind.ERROR:
            return reply
        error = unpack_error(memoryview(reply.payload))
        if isinstance(error, EngineClosed):
            raise ReplicaLost(str(error), reply.replica)
        raise error

    def _until_s(self, requests: Sequence[RankRequest], came_s: float) -> float:
        """Return the latest deadline of the requests, or the end of `patience_s`. Replicas refuse wrong ones."""
        allowed_ms = [request.deadline_ms for request in requests]
        if any(not isinstance(each, int | float) or not each > 0 for each in allowed_ms):
            return came_s + self._patience_s
        return came_s + max(float(each) for each in allowed_ms if each is not None) / 1e3

    async def stats(self) -> EngineStats:
        self._replica_stats = await self._answers("stats", EngineStats)
        return merge_stats(list(self._replica_stats.values()))

    async def look(self) -> EngineView:
        looks = await self._answers("look", EngineView)
        self._replica_stats = {name: look.stats for name, look in looks.items()}
        return merge_looks(list(looks.values()))

    async def move_alpha(self, alpha: float) -> None:
        await self._call("move_alpha", alpha=alpha)

    async def set_mode(self, mode: Mode) -> None:
        await self._call("set_mode", mode=mode)

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Update rows on every running replica. A replica that starts later has the rows of the model's folder."""
        await self._call("update_rows", table=table, ids=list(ids), values=values)

    async def forget(self, user_id: UserId) -> None:
        await self._call("forget", user_id=user_id)

    async def _call(self, name: str, **arguments: Any) -> None:
        """Call a method of all replicas; EngineClosed if there is none. Raises the first error of a replica."""
        await self._replies(b"".join(pack_call(name, arguments)), _CALL_TIMEOUT_S)

    async def _answers(self, name: str, kind: type[T], timeout_s: float = _CALL_TIMEOUT_S) -> dict[str, T]:
        """Call a method of all replicas and return the values by replica, in order of names."""
        replies = await self._replies(b"".join(pack_call(name, {})), timeout_s)
        return {reply.replica: msgspec.msgpack.decode(reply.payload, type=kind) for reply in replies}

    async def _replies(self, payload: bytes, timeout_s: float) -> list[ReplicaReply]:
        now_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` may lose the cancellation of its caller
                replies = await self._fleet.call_all(Stamp(self._front, now_s, now_s), payload)
        except TimeoutError:
            raise ReplicaSlow(f"a replica did not answer within {timeout_s:g} s") from None
        self._roster.note({reply.replica for reply in replies})
        if not replies:
            raise EngineClosed("no replica is running")
        for reply in replies:
            if reply.kind == FrameKind.ERROR:
                raise unpack_error(memoryview(reply.payload))
        return sorted(replies, key=lambda reply: reply.replica)

    async def close(self) -> None:
        """Stop watching the replicas. They keep running: the cluster owns them."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        self.health = Health.CLOSED
