"""A tiny model on disk, its settings, and a fleet of real engines behind the router's decisions, without Ray."""

import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from helmrec.cluster.dispatch import Dispatch
from helmrec.cluster.hint import Hint, unpack_hint
from helmrec.cluster.port import ReplicaLost
from helmrec.cluster.remote_clock import Stamp
from helmrec.cluster.replica import EngineReplica, ReplicaReply, ReplicaSettings
from helmrec.cluster.report import ReplicaReport
from helmrec.costs.calibrated import default_cost
from helmrec.costs.routing import RouterCost
from helmrec.model.weights import save_model
from helmrec.router.policy import EmbKVAware
from helmrec.router.settings import StateSettings
from helmrec.router.state import ClusterState
from helmrec.serve.settings import Given, Settings, resolve
from helmrec.serve.wire import Begin
from helmrec.types import PrefillRequest, RankRequest
from tests.helpers import TINY_PAGES, tiny_geometry, tiny_model

COST = RouterCost.from_calibration(default_cost().terms(), 2, 64)
MEMORY = StateSettings(sketch_bits=1_024)
_NUMBERS = itertools.count(1)  # of reports


def write_model(folder: Path, seed: int = 0) -> Path:
    made = tiny_model(seed)
    save_model(folder, made.config, made.dense, made.tables)
    return folder


def plain_settings(**overrides: Any) -> dict[str, Any]:
    pool_bytes = TINY_PAGES * tiny_geometry(tiny_model().config).page_bytes
    return {"pool_bytes": pool_bytes, "page_tokens": 4, "log_level": "error", "policy": "none"} | overrides


def settings(**overrides: Any) -> Settings:
    values = plain_settings(**overrides)
    return resolve({name: Given(value, "the test") for name, value in values.items()}, {}, None)


def make_replica(folder: Path, name: str, **overrides: Any) -> EngineReplica:
    made = settings(**overrides)
    begin = Begin(str(folder), made.engine.model_dump(mode="json"), made.serve.model_dump(mode="json"))
    chosen = ReplicaSettings(sketch_bits=1_024, kept_from_visit=2)
    return EngineReplica(msgspec.msgpack.encode(begin), msgspec.msgpack.encode(chosen), name)


def stamp_now() -> tuple[str, float, float]:
    """Of a request that came just now to a front on this machine."""
    return ("front", time.monotonic(), time.monotonic())


def hint_of(user: int, num_tokens: int = 500, avoid: str = "") -> Hint:
    return Hint(user, num_tokens, 8, 2, 0, b"", b"", avoid)


def report_of(taken_s: float, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "taken_s": taken_s,
        "queue_ms": 0.0,
        "num_waiting": 0,
        "waiting_tokens": 0,
        "alpha": 0.4,
        "pool_tokens": 100_000,
        "row_hit_rate": 0.5,
        "users": [],
    }
    return msgspec.msgpack.encode(ReplicaReport(**values | {"sequence": next(_NUMBERS)} | changes))


def make_dispatch(now_s: list[float] | None = None) -> Dispatch:
    clock = time.monotonic if now_s is None else lambda: now_s[0]
    return Dispatch(EmbKVAware(COST), ClusterState(MEMORY), clock)


class LocalFleet:
    """Engines of this process behind the router's decisions. `lost` names go away with the next request they get."""

    def __init__(self, *replicas: EngineReplica) -> None:
        self.replicas = {replica._name: replica for replica in replicas}
        self.dispatch = make_dispatch()
        self.lost: set[str] = set()
        self.went_to: list[str] = []
        self._num_sent = 0

    async def report(self) -> None:
        self.dispatch.meet({name: await replica.report() for name, replica in self.replicas.items()})

    async def send(self, method: str, hint: bytes, stamp: Stamp, payload: bytes) -> ReplicaReply:
        told = unpack_hint(hint)
        assert told is not None
        self._num_sent += 1
        request = str(self._num_sent)
        name = self.dispatch.choose(request, told)
        if name is None:
            raise ReplicaLost("none is there")
        self.dispatch.sent(request, told, name)
        self.went_to.append(name)
        if name in self.lost:
            self.dispatch.lose(name)
            self.replicas.pop(name)
            raise ReplicaLost("it died", name)
        try:
            return ReplicaReply(*await getattr(self.replicas[name], method)(hint, tuple(stamp), payload))
        finally:
            self.dispatch.finished(request)

    async def call_all(self, stamp: Stamp, payload: bytes) -> list[ReplicaReply]:
        return [ReplicaReply(*await replica.call(stamp, payload)) for replica in self.replicas.values()]


def spread(names: list[str]) -> dict[str, int]:
    found, counts = np.unique(names, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def ahead_of(request: RankRequest) -> PrefillRequest:
    return PrefillRequest(
        user_id=request.user_id,
        items=request.items,
        actions=request.actions,
        timestamps=request.timestamps,
        features=request.features,
        context={"country": request.context["country"]},
        first_event=request.first_event,
    )
