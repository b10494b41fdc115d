"""A cluster as the HTTP front sees it: the same port, with many engines behind it.

Requests of one call go each to the replica of its user. A replica that is lost takes nothing along: ranking again gives
the same scores, so what it had not answered is sent once more, within the deadline.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from numpy.typing import ArrayLike

from helmrec.cluster.hint import Describer, pack_hint
from helmrec.cluster.merge import merge_looks, merge_stats
from helmrec.cluster.remote_clock import Stamp
from helmrec.cluster.replica import Reply
from helmrec.cluster.roster import Roster
from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake
from helmrec.errors import DeadlineExceeded, EngineClosed, QueueFull, RequestError
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
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult

log = logging.getLogger("helmrec.cluster")
T = TypeVar("T")
_LOOK_EVERY_S = 0.5
_LOOK_PATIENCE_S = 5.0
_CALL_PATIENCE_S = 30.0
_GRACE_S = 0.25  # for an answer that was made in time and is on its way


class ReplicaLost(Exception):
    """A replica went away with a request, or before it."""

    def __init__(self, why: str, replica: str = "") -> None:
        super().__init__(why)
        self.replica = replica


class ReplicaSlow(EngineClosed):
    """Not all replicas answered a call in time; others may still serve."""


class ReplicaFleet(Protocol):
    """The replicas, however they are reached."""

    async def send(self, method: str, hint: bytes, stamp: Stamp, payload: bytes) -> Reply:
        """Have a replica of the router's choice `rank` or `prefill`. ReplicaLost if it went away."""

    async def call_all(self, stamp: Stamp, payload: bytes) -> list[Reply]:
        """Have every replica do something; those that go away meanwhile are left out."""


class _Call(NamedTuple):
    """Something for one replica to do. Times are of this process's monotonic clock."""

    method: str
    request: RankRequest | PrefillRequest
    came_s: float
    payload: bytes
    until_s: float  # it is waited for


class ClusterPort:
    """Many engines behind one port. Lives in one event loop."""

    def __init__(self, fleet: ReplicaFleet, model: ModelConfig, max_history: int, patience_s: float) -> None:
        self._fleet = fleet
        self._model = model
        self._patience_s = patience_s
        self._front = secrets.token_hex(8)  # the name of this process's clock
        self._intake = Intake(model, version=0, max_history=max_history)  # to say what is wrong with a request
        self._describer = Describer(model)
        self._health = Health.STARTING
        self._reason: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._roster = Roster()
        self._replica_stats: dict[str, EngineStats] = {}
        self.num_retries = 0

    @property
    def model(self) -> ModelConfig:
        return self._model

    @property
    def health(self) -> Health:
        return self._health

    @property
    def reason(self) -> str | None:
        return self._reason

    @property
    def num_restarts(self) -> int:
        """Replicas that came in place of one that went away. Starting them is the cluster's task."""
        return self._roster.num_restarts

    @property
    def replica_stats(self) -> Mapping[str, EngineStats]:
        return self._replica_stats

    def start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._look_for_replicas())

    async def _look_for_replicas(self) -> None:
        """Ready while some replica answers. One that is slow does not make the others unready."""
        while True:
            try:
                self._replica_stats = await self._answers("stats", EngineStats, _LOOK_PATIENCE_S)
                self._health, self._reason = Health.READY, None
            except ReplicaSlow as error:
                self._reason = str(error)
            except EngineClosed as error:
                self._lose_readiness(str(error))
            except Exception as error:
                reason = f"the replicas could not be looked at ({type(error).__name__})"
                if self._reason != reason:
                    log.exception("the replicas could not be looked at")
                self._lose_readiness(reason)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _lose_readiness(self, reason: str) -> None:
        if self._health is Health.READY:
            self._health = Health.RESTARTING
        self._reason = reason

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        came_s = time.monotonic() - spent_ms / 1e3
        if len(requests) == 1:
            return await self._rank(requests, came_s)
        self._refuse_wrong(requests)
        by_user: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_user.setdefault(request.user_id, []).append(i)
        groups = list(by_user.values())
        ranked = await asyncio.gather(*(self._rank([requests[i] for i in group], came_s) for group in groups))
        results = dict(zip(chain(*groups), chain(*ranked), strict=True))
        return [results[i] for i in range(len(requests))]

    def _refuse_wrong(self, requests: Sequence[RankRequest]) -> None:
        """Raise what an engine would raise, before any request of the call has run."""
        for i, request in enumerate(requests):
            try:
                self._intake.prepare(request)
            except RequestError as error:
                if len(requests) == 1:
                    raise
                raise RequestError(f"requests[{i}].{error.field}", error.value, error.problem) from None

    async def _rank(self, requests: Sequence[RankRequest], came_s: float) -> list[RankResult]:
        """Requests of one user, on one replica, or on another if that one is lost."""
        try:
            payload = b"".join(pack_requests(requests, 0.0))
        except NotForTheWire as unfit:
            self._refuse_wrong(requests)
            raise QueueFull(f"the call does not fit the way to a replica: {unfit}") from None
        until_s = self._until_s(requests, came_s)
        reply = await self._sent(_Call("rank", requests[0], came_s, payload, until_s))
        return unpack_results(memoryview(reply.payload))

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        """On the replica the user's rank will be sent to, which refuses what came in before its user was forgotten."""
        try:
            payload = b"".join(pack_prefill(request))
        except NotForTheWire as unfit:
            self._intake.prepare_ahead(request)
            raise QueueFull(f"the signal does not fit the way to a replica: {unfit}") from None
        came_s = time.monotonic() - spent_ms / 1e3
        reply = await self._sent(_Call("prefill", request, came_s, payload, came_s + self._patience_s))
        return msgspec.msgpack.decode(reply.payload, type=PrefillResult)

    async def _sent(self, call: _Call) -> Reply:
        """The answer of a replica, or of another one if that is lost."""
        try:
            return await self._sent_once(call, avoid="")
        except ReplicaLost as lost:
            log.warning("a replica was lost", extra={"replica": lost.replica, "reason": str(lost)})
            self.num_retries += 1
            try:
                return await self._sent_once(call, avoid=lost.replica)
            except ReplicaLost as again:
                raise EngineClosed(f"two replicas were lost one after the other: {again}") from None

    async def _sent_once(self, call: _Call, *, avoid: str) -> Reply:
        hint = pack_hint(self._describer.hint(call.request, avoid))
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
        """The last deadline of these, or when patience ends. What is wrong with one, its replica says."""
        allowed_ms = [request.deadline_ms for request in requests]
        if any(not isinstance(each, int | float) or not each > 0 for each in allowed_ms):
            return came_s + self._patience_s
        return came_s + max(float(each) for each in allowed_ms if each is not None) / 1e3

    async def stats(self) -> EngineStats:
        self._replica_stats = await self._answers("stats", EngineStats)
        return merge_stats(list(self._replica_stats.values()))

    async def look(self) -> EngineView:
        return merge_looks(list((await self._answers("look", EngineView)).values()))

    async def move_alpha(self, alpha: float) -> None:
        await self._call("move_alpha", alpha=alpha)

    async def set_mode(self, mode: Mode) -> None:
        await self._call("set_mode", mode=mode)

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """On every replica that is there; one that starts later has what the model's folder has."""
        await self._call("update_rows", table=table, ids=list(ids), values=values)

    async def forget(self, user_id: int) -> None:
        await self._call("forget", user_id=user_id)

    async def _call(self, name: str, **arguments: Any) -> None:
        """Have all replicas do something; EngineClosed if there is none, and whatever one of them raised."""
        try:
            payload = b"".join(pack_call(name, arguments))
        except OverflowError as error:
            raise RequestError("body", str(error), "numbers of 64 bits are needed") from None
        await self._replies(payload, _CALL_PATIENCE_S)

    async def _answers(self, name: str, kind: type[T], patience_s: float = _CALL_PATIENCE_S) -> dict[str, T]:
        """What each replica says, by its name, in order of names; EngineClosed if there is none."""
        replies = await self._replies(b"".join(pack_call(name, {})), patience_s)
        return {reply.replica: msgspec.msgpack.decode(reply.payload, type=kind) for reply in replies}

    async def _replies(self, payload: bytes, patience_s: float) -> list[Reply]:
        now_s = time.monotonic()
        try:
            async with asyncio.timeout(patience_s):  # `wait_for` may lose the cancellation of its caller
                replies = await self._fleet.call_all(Stamp(self._front, now_s, now_s), payload)
        except TimeoutError:
            raise ReplicaSlow(f"a replica did not answer within {patience_s:g} s") from None
        self._roster.note({reply.replica for reply in replies})
        if not replies:
            raise EngineClosed("no replica is there")
        for reply in replies:
            if reply.kind == FrameKind.ERROR:
                raise unpack_error(memoryview(reply.payload))
        return sorted(replies, key=lambda reply: reply.replica)

    async def close(self) -> None:
        """The replicas stay: they are the cluster's."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        self._health = Health.CLOSED
