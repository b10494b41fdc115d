"""Several engines on this host behind one front: each in a process and, on cards, on a card of its own. Without Ray.

A request goes to the engine that is expected to answer it first (`router/`). The front sends every request, so it knows
who waits where and which users were served where; engines report the rest: split, hit rate and a sketch of their rows.
When an engine ends, its unanswered requests go to another one: all engines compute the same scores. It starts again by
itself. The tables are in memory once: all engines read them, and a keeper writes their updates (`serve/row_keeper.py`).
If rows are on disk, each engine caches rows of the same files in its part of the memory, and the front writes one log
of updates that all engines read (`serve/host_log.py`).
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from helmrec.cluster.dispatch import warm_up
from helmrec.cluster.hint import Describer
from helmrec.cluster.host_logs import HostLogs
from helmrec.cluster.keepers import Keepers
from helmrec.cluster.merge import merge_looks, merge_stats
from helmrec.cluster.port import rank_by_user
from helmrec.cluster.report import ServiceTime
from helmrec.config import EngineConfig
from helmrec.control.rebalancer import Mode
from helmrec.costs.learned import StageCosts
from helmrec.costs.routing import RouterCost
from helmrec.deltas.consumer import StreamStart
from helmrec.engine.choose import choose_device
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake, prepare_rows
from helmrec.errors import ConfigError, EngineClosed, ModelError
from helmrec.failures import FailureLog
from helmrec.model.file_check import FileCheck
from helmrec.router.nodes import RouteRequest
from helmrec.router.policy import Choice, EmbKVAware
from helmrec.router.settings import StateSettings
from helmrec.router.sketch import RowSketch
from helmrec.router.state import ClusterState, NodeReport
from helmrec.serve.host_log import HostLog, one_of, verify_files, with_own_log
from helmrec.serve.node import process_port
from helmrec.serve.port import EngineView, Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.row_keeper import RowKeeper
from helmrec.serve.row_round import RoundLimits
from helmrec.serve.settings import ServeConfig
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult, UserId

log = logging.getLogger("helmrec.serve")
T = TypeVar("T")
_LOOK_EVERY_S = 0.5
_SKETCH_EVERY_S = 2.0
_FIRST_LOOK_EVERY_S = 0.05  # until all engines are ready
_ANSWER_S = 5.0  # for the state of an engine, which the others are not to wait for


def make_engines(
    model: Path, engine: EngineConfig, serve: ServeConfig, limits: RoundLimits | None = None
) -> "EnginesPort":
    """Make a port to as many engines as the settings say. Raises if the settings or the model's folder are wrong.

    `limits` are those of updates of the tables that they share.
    """
    if engine.verify == "start" and serve.row_deltas is None:
        verify_files(model)

    def make_keeper(folder: Path, start: StreamStart | None = None) -> RowKeeper:
        return RowKeeper(folder, serve, limits, start, engine.host_row_dtype)

    keeper = make_keeper(model) if engine.host_rows_bytes is None else None
    follows_log = keeper is None and serve.row_deltas is None
    first, shared, ports = model if keeper is None else keeper.model, one_of(engine, serve), {}
    for i, card in enumerate(cards_of(engine, serve.engines)):
        environment = {} if card is None else {"CUDA_VISIBLE_DEVICES": card}
        snapshots = serve if serve.snapshot_path is None else _with_path(serve, f"{serve.snapshot_path}.{i}")
        own = shared if follows_log or keeper is not None else with_own_log(shared, model, i)
        ports[f"engine {i}"] = process_port(first, own, snapshots, environment, follows_log=follows_log)
    settings = StateSettings(kept_from_visit=1 if engine.kv_admission == "always" else 2)
    port = EnginesPort(ports, engine.max_history, settings)
    if engine.verify == "background" and serve.row_deltas is None:
        port.check_files(model)
    if keeper is not None:
        port.tables = Keepers(make_keeper, keeper, port.engines)
    elif follows_log:
        port.logs = HostLogs(lambda folder: HostLog(folder, shared), model, port.engines)
    return port


def _with_path(serve: ServeConfig, path: str) -> ServeConfig:
    return serve.model_copy(update={"snapshot_path": path})


def cards_of(engine: EngineConfig, num: int) -> Sequence[str | None]:
    """The card of each engine, as CUDA_VISIBLE_DEVICES names it; None on a CPU, where engines share the cores."""
    if choose_device(engine).config.device == "cpu":
        return [None] * num
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    if num > len(names):
        raise ConfigError(f"engines: each needs a card of its own and {len(names)} are visible, got {num}")
    return names[:num]


class _Seen:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.num_waiting = 0  # unanswered calls
        self.num_reports = 0  # since it got ready; 0: it is not routed to
        self.service = ServiceTime()
        self.sketch: RowSketch | None = None
        self.sketched_s = -math.inf


class EnginesPort:
    """A port to several engine processes. Used in one event loop."""

    def __init__(self, ports: Mapping[str, ProcessPort], max_history: int, settings: StateSettings) -> None:
        """`ports`: engines by name."""
        self._names, self._ports = list(ports), list(ports.values())
        self.model = model = self._ports[0].model
        self._intake = Intake(model, version=0, max_history=max_history)  # names what is wrong with a request
        self._describer = Describer(model)
        self._settings = settings
        self._policy = EmbKVAware(RouterCost.unknown())
        self._costs: dict[int, StageCosts] = {}  # of engines, learned from their own steps; kept over a restart
        self._state = ClusterState(settings)
        self._seen = [_Seen() for _ in ports]
        self._is_closed = self._has_started = False
        self._checking = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._failures = FailureLog(log)
        self._replica_stats: dict[str, EngineStats] = {}
        self.tables: Keepers | None = None  # None: engines have tables of their own
        self.logs: HostLogs | None = None  # None: engines write logs of their own, or none
        self._check: FileCheck | None = None  # None: engines check files, or nobody
        self._corrupt: ModelError | None = None
        self.num_retries = 0

    def check_files(self, model: Path) -> None:
        """Check the model's large files beside serving, once for all engines; if one is corrupt, refuse requests."""
        self._corrupt = None  # before the check begins, which may end at once
        self._check = FileCheck(model, self._stop_serving)

    def _stop_serving(self, problem: ModelError) -> None:
        self._corrupt = problem

    @property
    def engines(self) -> Sequence[ProcessPort]:
        """The ports of all engines, for those who watch them."""
        return self._ports

    @property
    def num_routed(self) -> int:
        """Number of engines that requests are sent to."""
        return sum(seen.num_reports > 0 for seen in self._seen)

    @property
    def keepers(self) -> list[RowKeeper]:
        """The keepers of the tables in use: one, and during a swap two."""
        return [] if self.tables is None else self.tables.all

    @property
    def health(self) -> Health:
        """Ready while some engine is and files are right; at the start, once every engine is ready or has failed."""
        states = {port.health for port in self._ports}
        if self._is_closed:
            return Health.CLOSED
        if self._corrupt is not None or states == {Health.FAILED}:
            return Health.FAILED
        if not self._has_started and self._keeper_reasons(Health.FAILED):
            return Health.FAILED
        if not self._has_started:
            return Health.STARTING
        return Health.READY if Health.READY in states else Health.RESTARTING

    @property
    def reason(self) -> str | None:
        down = [f"{name}: {port.reason}" for name, port in zip(self._names, self._ports, strict=True) if port.reason]
        corrupt = [] if self._corrupt is None else [str(self._corrupt)]
        return "; ".join([*corrupt, *self._keeper_reasons(*Health), *down]) or None

    def _keeper_reasons(self, *states: Health) -> list[str]:
        return [] if self.tables is None else self.tables.reasons(*states)

    @property
    def num_restarts(self) -> int:
        return sum(port.num_restarts for port in self._ports)

    @property
    def replica_stats(self) -> Mapping[str, EngineStats]:
        return self._replica_stats

    def start(self) -> None:
        if self.tables is not None:
            self.tables.start(self._swap)
        for port in self._ports:
            port.start()
        self._watch = asyncio.get_running_loop().create_task(self._look_after())

    async def _look_after(self) -> None:
        """Keep the router's view of the engines up to date, of each by itself: one that hangs delays no other."""
        await asyncio.to_thread(warm_up, self._policy, self._settings)
        await asyncio.gather(*(self._look_after_one(node) for node in range(len(self._ports))))

    async def _look_after_one(self, node: int) -> None:
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._look_at(node)
            except EngineClosed:
                self._lose(node)
            except Exception as error:  # the engine is routed to by its last report
                self._failures.note("reports of engines", error)
            self._has_started |= all(
                seen.num_reports or port.health is Health.FAILED
                for seen, port in zip(self._seen, self._ports, strict=True)
            )
            await asyncio.sleep(_LOOK_EVERY_S if self._has_started else _FIRST_LOOK_EVERY_S)

    async def _look_at(self, node: int) -> None:
        """Ask an engine for its state and report it to the router."""
        port, seen = self._ports[node], self._seen[node]
        if port.health is not Health.READY:
            self._lose(node)
            return
        stats, now_s = await port.stats(), time.monotonic()
        if now_s - seen.sketched_s >= _SKETCH_EVERY_S:
            seen.sketch, seen.sketched_s = await port.row_sketch(self._settings.sketch_bits), now_s
        if not seen.num_reports:
            self._state.join(node)
        seen.num_reports += 1
        if stats.costs is not None:
            self._costs[node] = stats.costs
            self._policy.learn(RouterCost.learned(list(self._costs.values()), len(self.model.features)))
        pool = stats.pool
        report = NodeReport(
            node=node,
            sequence=seen.num_reports,
            as_of_s=now_s,
            queue_ms=seen.num_waiting * seen.service.mean_ms(stats),
            num_waiting=seen.num_waiting,
            waiting_tokens=0,
            alpha=pool.alpha,
            pool_tokens=pool.num_pages * pool.page_tokens,
            row_hit_rate=pool.row_hit_rate,
            sketch=seen.sketch,
        )
        self._state.report(report, now_s)

    def _lose(self, node: int) -> None:
        """Route nothing to an engine until it reports again. Its caches are empty then."""
        if self._seen[node].num_reports:
            self._state.leave(node)
            self._seen[node] = _Seen()

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        came_s = time.monotonic() - spent_ms / 1e3
        if len(requests) == 1:
            return await self._rank(requests, came_s)
        self._intake.prepare_all(requests)  # raises what an engine would raise, before any request of the call runs
        return await rank_by_user(requests, lambda some: self._rank(some, came_s))

    async def _rank(self, requests: Sequence[RankRequest], came_s: float) -> list[RankResult]:
        return await self._send(requests[0], lambda port: port.submit(requests, _since_ms(came_s)))

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        came_s = time.monotonic() - spent_ms / 1e3
        return await self._send(request, lambda port: port.prefill(request, _since_ms(came_s)))

    async def _send(self, request: RankRequest | PrefillRequest, call: Callable[[ProcessPort], Awaitable[T]]) -> T:
        """Make a call to the engine that answers it first, or to another one if that one ends."""
        if self._corrupt is not None:
            raise EngineClosed(f"serving has stopped: {self._corrupt}")
        described = self._describer.hint(request).route_request()
        first = self._choose(described, avoided=None)
        try:
            return await self._call_one(first, described, call)
        except EngineClosed as error:
            log.warning("an engine was lost", extra={"engine": self._names[first.node], "reason": str(error)})
            self.num_retries += 1
            self._lose(first.node)
        return await self._call_one(self._choose(described, avoided=first.node), described, call)

    def _choose(self, request: RouteRequest, avoided: int | None) -> Choice:
        now_s = time.monotonic()
        nodes = self._state.look(request.user, now_s)
        is_ready = [node != avoided and self._ports[node].health is Health.READY for node in nodes.ids.tolist()]
        nodes = nodes._replace(is_alive=nodes.is_alive & np.array(is_ready, np.bool_))
        choice = self._policy.choose(request, nodes, now_s)
        if choice is None:
            raise EngineClosed("no engine is ready" + (f": {self.reason}" if self.reason else ""))
        return choice

    async def _call_one(self, choice: Choice, request: RouteRequest, call: Callable[[ProcessPort], Awaitable[T]]) -> T:
        seen = self._seen[choice.node]
        sent = self._state.sent(request, choice.node, choice.service_ms, time.monotonic())
        seen.num_waiting += 1
        try:
            return await call(self._ports[choice.node])
        finally:
            seen.num_waiting -= 1
            self._state.finished(sent)

    async def stats(self) -> EngineStats:
        self._replica_stats = await self._answers(lambda port: port.stats())
        return await self._with_host(merge_stats(list(self._replica_stats.values())))

    async def look(self) -> EngineView:
        looks = await self._answers(lambda port: port.look())
        self._replica_stats = {name: look.stats for name, look in looks.items()}
        merged = merge_looks(list(looks.values()))
        return replace(merged, stats=await self._with_host(merged.stats))

    async def _with_host(self, stats: EngineStats) -> EngineStats:
        """Add what is known of all engines together: the check of files, and the stream that the keeper follows."""
        if self._check is not None:
            stats = replace(stats, file_check=self._check.stats())
        if self.tables is None:
            return stats
        stream = await self.tables.row_stream()
        if stream is not None:
            self._replica_stats = {n: replace(each, row_stream=stream) for n, each in self._replica_stats.items()}
        return replace(stats, row_stream=stream)

    async def _answers(self, ask: Callable[[ProcessPort], Awaitable[T]]) -> dict[str, T]:
        """Ask all engines at once; return the answers of those that answer in time. EngineClosed if none does."""
        answers = await asyncio.gather(*(_in_time(ask(port)) for port in self._ports))
        found = {name: each for name, each in zip(self._names, answers, strict=True) if each is not None}
        if not found:
            raise EngineClosed("no engine answers" + (f": {self.reason}" if self.reason else ""))
        return found

    async def move_alpha(self, alpha: float) -> None:
        await self._everywhere(lambda port: port.move_alpha(alpha))

    async def set_mode(self, mode: Mode) -> None:
        await self._everywhere(lambda port: port.set_mode(mode))

    async def forget(self, user_id: UserId) -> None:
        await self._everywhere(lambda port: port.forget(user_id))

    async def swap(self, model: str) -> None:
        """Swap one engine after the other. Meanwhile a request is served by the old model or by the new one."""
        await self._swap(model, None)

    async def _swap(self, model: str, start: StreamStart | None) -> None:
        """Swap in a model whose rows have this place in the stream of row deltas; None: the place of its folder."""
        if self.tables is not None:
            await self.tables.swap(model, start, self._everywhere)
        elif self.logs is not None:
            await self.logs.swap(model, self._everywhere)
        else:
            await self._everywhere(lambda port: port.swap(model))
        if self._check is not None:
            await asyncio.to_thread(self._check.close)
            self.check_files(Path(model))
        self.model = self._ports[0].model
        self._intake = Intake(self.model, version=0, max_history=self._intake.recipe.max_history)
        self._describer = Describer(self.model)
        self._costs = {}  # of the model before

    async def _everywhere(self, call: Callable[[ProcessPort], Awaitable[None]]) -> None:
        """Make a call to every engine; EngineClosed before any of them is called if one is not ready."""
        for name, port in zip(self._names, self._ports, strict=True):
            if port.health is not Health.READY:
                raise EngineClosed(f"{name} is {port.health.value}: {port.reason}; nothing was changed, try again")
        for port in self._ports:
            await call(port)

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Update rows on every engine. One that is not running has them before it serves again."""
        async with self._checking:  # one by one, so that calls stay in order; a wrong one reaches no engine
            update = await asyncio.to_thread(prepare_rows, self.model, table, ids, values)
        if (shared := self.tables or self.logs) is not None:
            await shared.update_rows(table, ids, update.values)
            return
        await asyncio.gather(*(port.update_rows_now_or_later(table, ids, values) for port in self._ports))

    async def close(self) -> None:
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await asyncio.gather(*(port.close() for port in self._ports))
        if self.tables is not None:
            await self.tables.close()
        if self.logs is not None:
            self.logs.close()
        if self._check is not None:
            await asyncio.to_thread(self._check.close)


async def _in_time(answer: Awaitable[T]) -> T | None:
    """Wait for the answer of an engine; None if it has ended or does not answer in time."""
    with suppress(EngineClosed, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            return await answer
    return None


def _since_ms(came_s: float) -> float:
    return max(0.0, (time.monotonic() - came_s) * 1e3)
