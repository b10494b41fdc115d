"""One engine of a cluster: takes and returns bytes, and reports its state for routing.

Ray runs this class in a process of its own; the class does not know Ray. Each replica has its own pool and controller,
as a single node has.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from helmrec.cluster.remote_clock import RemoteClocks, Stamp
from helmrec.cluster.report import RecentUsers, ReplicaReport, ServiceTime
from helmrec.config import EngineConfig
from helmrec.errors import EngineClosed, Forgotten, HelmRecError
from helmrec.model.config import ModelConfig
from helmrec.router.sketch import RowSketch, build_sketch
from helmrec.serve.node import in_process
from helmrec.serve.port import Health
from helmrec.serve.settings import ServeConfig
from helmrec.serve.wire import Begin, FrameKind, pack_error, pack_results, unpack_call, unpack_prefill, unpack_requests
from helmrec.types import PrefillRequest, RankRequest, UserId
from helmrec.user_ids import routing_number

log = logging.getLogger("helmrec.cluster")
_LOOK_EVERY_S = 0.02
_REPORTED_USERS = 256
_SKETCH_EVERY_S = 2.0
_MOST_FORGOTTEN = 4_096


class ReplicaReply(NamedTuple):
    """An answer of a replica. Sent as a plain tuple."""

    kind: int  # a value of `serve.wire.FrameKind`
    replica: str
    payload: bytes


class ReplicaSettings(msgspec.Struct, frozen=True):
    """Settings of a replica, in addition to those of an engine process."""

    sketch_bits: int
    kept_from_visit: int


class EngineReplica:
    """Serves packed calls with an engine, and describes it to routers."""

    def __init__(self, begin: bytes, settings: bytes, name: str = "") -> None:
        """Start the engine; ready when this returns. Raises if the settings or the model's folder are wrong."""
        received = msgspec.msgpack.decode(begin, type=Begin)
        self._settings = msgspec.msgpack.decode(settings, type=ReplicaSettings)
        self._name = name
        self._port = in_process(Path(received.model), EngineConfig(**received.engine), ServeConfig(**received.serve))
        self._engine = self._port.engine
        self._page_tokens = self._engine.report().page_tokens
        self._served = RecentUsers(self._settings.kept_from_visit)
        self._fronts = RemoteClocks()
        self._forgotten_s: OrderedDict[UserId, float] = OrderedDict()  # time of forgetting, by user
        self._incarnation = secrets.randbits(62)
        self._num_reports = 0
        self._waiting: dict[int, int] = {}  # history tokens of unanswered calls, by number of the call
        self._num_calls = 0
        self._service = ServiceTime()
        self._sketch: RowSketch | None = None
        self._sketch_s = -math.inf
        self._port.start()
        while self._port.health is Health.STARTING:
            time.sleep(_LOOK_EVERY_S)
        self._sketch = self._sketch_rows()  # compiles on first use: before the first request
        self.check_health()

    async def rank(self, hint: bytes, stamp: tuple[str, float, float], payload: bytes) -> tuple[int, str, bytes]:
        """Rank packed requests. `stamp` has the fields of `Stamp`; `hint` is for the router and not read here."""
        came_s = self._came_s(stamp)
        self._num_calls += 1
        call = self._num_calls
        try:
            requests, _ = unpack_requests(memoryview(payload))
            self._waiting[call] = sum(len(request.items) for request in requests)
            self._refuse_forgotten([request.user_id for request in requests], came_s)
            results = await self._port.submit(requests, max(0.0, (time.monotonic() - came_s) * 1e3))
            for request in requests:
                self._served.note(routing_number(request.user_id), self._num_tokens(request))
            return ReplicaReply(FrameKind.RESULTS, self._name, b"".join(pack_results(results)))
        except Exception as error:
            return self._failed(error)
        finally:
            self._waiting.pop(call, None)

    async def prefill(self, hint: bytes, stamp: tuple[str, float, float], payload: bytes) -> tuple[int, str, bytes]:
        """Compute a history before its rank, which the router will send to this replica too."""
        came_s = self._came_s(stamp)
        try:
            request = unpack_prefill(memoryview(payload))
            self._refuse_forgotten([request.user_id], came_s)
            result = await self._port.prefill(request)
            if result.lease is not None:
                self._served.hold(routing_number(request.user_id), self._num_tokens(request))
            return ReplicaReply(FrameKind.VALUE, self._name, msgspec.msgpack.encode(result))
        except Exception as error:
            return self._failed(error)

    async def call(self, stamp: tuple[str, float, float], payload: bytes) -> tuple[int, str, bytes]:
        """Call any other method of the port by name. Every call updates the estimate of the front's clock."""
        self._came_s(stamp)
        try:
            name, arguments = unpack_call(memoryview(payload))
            if name == "forget":
                self._forget(arguments["user_id"])
            value = await getattr(self._port, name)(**arguments)
            return ReplicaReply(FrameKind.VALUE, self._name, msgspec.msgpack.encode(value))
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> ReplicaReply:
        if not isinstance(error, HelmRecError):
            log.error("a call failed", exc_info=error)
        return ReplicaReply(FrameKind.ERROR, self._name, b"".join(pack_error(error)))

    def _came_s(self, stamp: tuple[str, float, float]) -> float:
        """Return when a request arrived at its front, by this process's clock."""
        return self._fronts.came_s(Stamp(*stamp), time.monotonic())

    def _num_tokens(self, request: RankRequest | PrefillRequest) -> int:
        model: ModelConfig = self._port.model
        return len(model.user_context) + min(len(request.items), model.window)

    def _forget(self, user_id: UserId) -> None:
        self._served.forget(routing_number(user_id))
        self._forgotten_s.pop(user_id, None)
        self._forgotten_s[user_id] = time.monotonic()
        if len(self._forgotten_s) > _MOST_FORGOTTEN:
            self._forgotten_s.popitem(last=False)

    def _refuse_forgotten(self, user_ids: Sequence[UserId], came_s: float) -> None:
        """Raise Forgotten if a user was forgotten after the request arrived: its history must not be cached again."""
        for user_id in user_ids:
            if self._forgotten_s.get(user_id, -math.inf) >= came_s:
                raise Forgotten(f"user {user_id} was forgotten while the request was in transit")

    async def report(self) -> bytes:
        """Return the state of the replica for routers, packed."""
        stats = await self._port.stats()
        if time.monotonic() - self._sketch_s >= _SKETCH_EVERY_S:
            self._sketch_s = time.monotonic()
            self._sketch = await asyncio.to_thread(self._sketch_rows)
        pool, sketch = stats.pool, self._sketch
        self._num_reports += 1
        return msgspec.msgpack.encode(
            ReplicaReport(
                taken_s=time.monotonic(),
                queue_ms=len(self._waiting) * self._service.mean_ms(stats),
                num_waiting=len(self._waiting),
                waiting_tokens=sum(self._waiting.values()),
                alpha=pool.alpha,
                pool_tokens=pool.num_pages * self._page_tokens,
                row_hit_rate=pool.row_hit_rate,
                users=self._served.latest(_REPORTED_USERS),
                threshold=0 if sketch is None else int(sketch.threshold),
                fill=0.0 if sketch is None else sketch.fill,
                words=b"" if sketch is None else sketch.words.tobytes(),
                incarnation=self._incarnation,
                sequence=self._num_reports,
                costs=stats.costs,
            )
        )

    def _sketch_rows(self) -> RowSketch:
        return build_sketch(self._engine.hot_rows(), self._settings.sketch_bits)

    def check_health(self) -> None:
        """Raise EngineClosed unless the engine is ready; the cluster then starts another replica."""
        if self._port.health is not Health.READY:
            raise EngineClosed(f"the engine is {self._port.health.value}: {self._port.reason}")

    async def close(self) -> None:
        with contextlib.suppress(HelmRecError):
            await self._port.close()
