"""The interface between the HTTP front and an engine, and an engine in the same process behind it.

Handlers await a port; a thread, a process or a cluster behind it steps the engine. Only the port changes when the
engine moves to another process.
"""

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from numpy.typing import ArrayLike

from helmrec.collector import PROCESS
from helmrec.control.rebalancer import Mode
from helmrec.deltas.consumer import SwapModel
from helmrec.engine.choose import device_name
from helmrec.engine.engine import Engine, EngineStats
from helmrec.engine.intake import IntakeRecipe, Prepared
from helmrec.engine.row_stream import RowStreamStats
from helmrec.engine.start_up import COMPILED
from helmrec.engine.warm_up import warm_up
from helmrec.errors import AlphaOutOfRange, Refused, RequestError
from helmrec.failures import FailureLog
from helmrec.model.config import ModelConfig
from helmrec.router.sketch import PackedSketch, build_sketch
from helmrec.serve.control import Controller, ControlView, Steering
from helmrec.serve.snapshot import SnapshotKeeper
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult, UserId

log = logging.getLogger("helmrec.serve")
_IDLE_WAIT_S = 0.02  # between idle steps, in which the boundary moves on; a request ends the wait at once


class Health(enum.Enum):
    """State of an engine, from its start to its end."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineView:
    """Counters, pages and controller of an engine at one moment."""

    stats: EngineStats
    page_owners: bytes  # one byte per page: a value of `memory.ledger.Owner`
    control: ControlView | None  # None: no policy moves the boundary
    device: str = ""  # in words; of several engines, every kind once


class EnginePort(Protocol):
    """An engine as the front sees it. Awaiting never blocks the event loop."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def health(self) -> Health: ...

    @property
    def reason(self) -> str | None:
        """Why the engine is not ready, after a failure."""

    @property
    def num_restarts(self) -> int: ...

    def start(self) -> None:
        """Start the engine; `health` becomes READY when it is."""

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        """Score all requests or none: if one is wrong or refused, the call is refused before any request runs.

        `spent_ms` of their deadlines have passed already.
        """

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        """Have a history computed before its rank, or return why not. The signal arrived `spent_ms` ago."""

    async def stats(self) -> EngineStats: ...

    async def look(self) -> EngineView: ...

    async def move_alpha(self, alpha: float) -> None: ...

    async def set_mode(self, mode: Mode) -> None:
        """Let the policy move the boundary, or freeze it; RequestError if there is no policy."""

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None: ...

    async def forget(self, user_id: UserId) -> None:
        """Drop a user from the caches, and refuse the user's waiting requests."""

    async def close(self) -> None:
        """Stop serving; waiting requests are refused."""


@runtime_checkable
class HasReplicas(Protocol):
    """A port with several engines behind it."""

    @property
    def replica_stats(self) -> Mapping[str, EngineStats]:
        """Result of the last call of `stats` or `look`, by the name of each replica."""


@runtime_checkable
class SwapsModels(Protocol):
    """A port that can change the model it serves."""

    async def swap(self, model: str) -> None:
        """Serve the model in this folder from now on; ModelError if it is no model, or one that clients cannot use.

        Requests are served meanwhile, each by one model. Returns when the old model has answered all of its requests.
        """


class FollowsRows(Protocol):
    """Brings new rows to an engine: `deltas.consumer.RowConsumer`, or `serve.shared_rows.SharedRows`."""

    def follow_models(self, swap: SwapModel) -> None: ...
    def reject_model(self, reason: str) -> None: ...
    def start(self) -> None: ...
    def catch_up(self) -> None: ...
    def apply(self, now: float) -> bool: ...
    def stats(self) -> RowStreamStats | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A ranking call whose requests are in the engine's queue."""

    user_ids: list[UserId]
    futures: "list[Future[RankResult]]"
    started_s: float


class InProcessPort:
    """An engine in this process, stepped by one thread. Owns the engine and closes it."""

    num_restarts = 0  # it ends with the process

    def __init__(
        self,
        engine: Engine,
        steering: Steering | None = None,
        snapshots: SnapshotKeeper | None = None,
        rows: FollowsRows | None = None,
    ) -> None:
        """Without `steering`, only admin calls move the boundary. `snapshots` are read at the start and kept.

        `rows` follows a stream of row deltas, or tables that others share; the engine is ready when it has caught up.
        """
        self.engine = engine
        self.model = engine.model_config
        self.health = Health.STARTING
        self.reason: str | None = None
        self._steering = steering
        self._snapshots = snapshots
        self._rows = rows
        self._failures = FailureLog(log)
        self._device = device_name(engine.config.device)
        self._controller = None if steering is None else Controller(steering, engine, self._failures, time.time())
        self._has_work = threading.Event()
        self._is_over = self._has_inherited = self._is_retired = False
        self._stepper = threading.Thread(target=self._run, name="helmrec-steps", daemon=True)

    def start(self) -> None:
        self._stepper.start()

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        return await self.results(self.enqueue(requests, spent_ms))

    def enqueue(self, requests: Sequence[RankRequest], spent_ms: float) -> Queued:
        """Queue all requests of a call or none. Their arrays are not read after this returns."""
        return self._enqueue([each.user_id for each in requests], lambda: self.engine.submit_all(requests, spent_ms))

    def enqueue_prepared(self, prepared: Sequence[Prepared], spent_ms: float) -> Queued:
        """As `enqueue`, for requests that were prepared from the recipe of this port's engine."""
        user_ids = [each.history.user_id for each in prepared]
        return self._enqueue(user_ids, lambda: self.engine.submit_prepared(prepared, spent_ms))

    def _enqueue(self, user_ids: list[UserId], submit: "Callable[[], list[Future[RankResult]]]") -> Queued:
        started_s = time.perf_counter()
        try:
            return Queued(user_ids, submit(), started_s)
        except Refused:
            self._record(user_ids, None)
            raise
        finally:
            self._has_work.set()

    async def results(self, queued: Queued) -> list[RankResult]:
        """Wait for the results of a queued call."""
        with self._ending(queued):
            return await asyncio.gather(*map(asyncio.wrap_future, queued.futures))

    def take_results(self, queued: Queued) -> list[RankResult]:
        """Return the results of a queued call that has ended, or raise its error. One error ends a call."""
        with self._ending(queued):
            failed = [future for future in queued.futures if future.done() and future.exception() is not None]
            return [future.result(timeout=0) for future in failed or queued.futures]

    @contextmanager
    def _ending(self, queued: Queued) -> Iterator[None]:
        """Report how a call ends to the controller, and withdraw what is left of it."""
        try:
            yield
            self._record(queued.user_ids, (time.perf_counter() - queued.started_s) * 1e3)
        except Refused:
            self._record(queued.user_ids, None)
            raise
        finally:
            self._withdraw(queued)

    def _withdraw(self, queued: Queued) -> None:
        """Take requests of a call that was refused half way out of the queue; finished ones stay as they are."""
        for future in queued.futures:
            future.cancel()
        self._has_work.set()  # the next step removes cancelled requests from the queue

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        return await asyncio.wrap_future(self.signal(request))

    def signal(self, request: PrefillRequest) -> "Future[PrefillResult]":
        """Queue a signal. Its arrays are not read after this returns."""
        future = self.engine.submit_prefill(request)
        self._has_work.set()
        return future

    def _record(self, user_ids: Sequence[UserId], latency_ms: float | None) -> None:
        """Report answers to the controller, or refusals (None)."""
        if self._controller is not None:
            for user_id in user_ids:
                self._controller.record(user_id, latency_ms)

    async def stats(self) -> EngineStats:
        return await asyncio.to_thread(self._stats)  # waits for the running step

    def _stats(self) -> EngineStats:
        """Return the engine's counters, with the failures of controller and snapshots."""
        if self._controller is None:  # else it takes the steps
            self.engine.take_steps()
        stats, background = self.engine.stats(), self._failures.count("miss curves")
        if self._snapshots is not None:
            background += self._snapshots.failures.count()
        return replace(
            stats,
            background_failures=stats.background_failures + background,
            controller_failures=self._failures.count("controller"),
            row_stream=None if self._rows is None else self._rows.stats(),
        )

    async def look(self) -> EngineView:
        return await asyncio.to_thread(self._look)

    def _look(self) -> EngineView:
        view = None if self._controller is None else self._controller.view
        return EngineView(self._stats(), self.engine.page_owners(), view, self._device)

    async def set_mode(self, mode: Mode) -> None:
        if self._controller is None:
            raise RequestError("mode", mode, "this server was given no policy")
        self._controller.set_mode(mode, time.time())

    async def move_alpha(self, alpha: float) -> None:
        await asyncio.to_thread(self.engine.move_alpha, alpha)
        self._has_work.set()

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        await asyncio.to_thread(self.engine.update_rows, table, ids, values)

    async def follow_log(self) -> None:
        """Apply the row updates that the front has added to their log."""
        await asyncio.to_thread(self.engine.follow_log)

    async def intake_recipe(self) -> IntakeRecipe:
        """Return what a front needs to prepare requests for this engine."""
        return self.engine.intake_recipe

    async def row_sketch(self, num_bits: int) -> PackedSketch:
        """Describe the resident rows to a router."""
        return await asyncio.to_thread(self._sketch, num_bits)

    def _sketch(self, num_bits: int) -> PackedSketch:
        return build_sketch(self.engine.hot_rows(), num_bits).packed()

    async def forget(self, user_id: UserId) -> None:
        await asyncio.to_thread(self.engine.forget, user_id)

    def follow_models(self, swap: SwapModel) -> None:
        """Before the start: have models swapped in that the stream of row deltas names, if one is followed."""
        if self._rows is not None:
            self._rows.follow_models(swap)

    def reject_model(self, reason: str) -> None:
        """Report that a model of the stream was not swapped in."""
        if self._rows is not None:
            self._rows.reject_model(reason)

    def inherit(self, old: "InProcessPort") -> None:
        """Before the start: take over split, hot rows and controller state of another engine, as far as they apply."""
        self._has_inherited = True
        stats = old.engine.stats().pool
        with suppress(AlphaOutOfRange):  # pages may have another size
            self.engine.move_alpha(stats.alpha_target)
            self.engine.settle()
        if self.model.tables == old.model.tables:
            self.engine.warm(old.engine.hot_rows())
        if self._controller is not None and old._controller is not None:
            self._controller.inherit(old._controller)
            if self.model == old.model:
                self._controller.relearn(old._controller)

    async def retire(self) -> None:
        """Answer submitted requests, then close without a snapshot. Nothing may be submitted any more."""
        self._is_retired = True
        await self.close()

    async def close(self) -> None:
        self._is_over = True
        self._has_work.set()
        if self._stepper.is_alive():
            await asyncio.to_thread(self._stepper.join)
        else:
            self._close()

    def _close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self.engine.close()

    def _run(self) -> None:
        try:
            self._get_ready()
            self.health = Health.READY
            log.info("ready", extra={"model": self.model.name, "start": str(self.engine.start_up)})
            self._step_until_over()
            while self._is_retired and (self.engine.step() or self.engine.stats().queue_length):
                pass
            if self._snapshots is not None and not self._is_retired:
                self._snapshots.keep(self.engine, self._steering)
            self.health = Health.CLOSED
        except Exception as error:
            self.reason = str(self.engine.file_problem or f"{type(error).__name__} in the engine")
            self.health = Health.FAILED
            log.exception("the engine failed")
        finally:
            self._close()

    def _get_ready(self) -> None:
        """Do everything that would delay the first requests."""
        start_up = self.engine.start_up
        if self._snapshots is not None and not self._has_inherited:
            start_up.begin("snapshot")
            self._snapshots.restore(self.engine, self._steering)
        warm_up(self.engine)
        if self._rows is not None:
            start_up.begin("row deltas")
            self._rows.start()
            self._rows.catch_up()
        if self._controller is not None:
            start_up.begin("controller", COMPILED)
            self._controller.warm_up()
        start_up.end()
        PROCESS.settle()
        self.engine.reset_pauses()

    def _step_until_over(self) -> None:
        is_behind = False  # whether more rows are to be written at once
        while not self._is_over:
            if self.engine.file_problem is not None:
                raise self.engine.file_problem
            self._has_work.clear()  # before the step: a request submitted during it must end the wait
            if self.engine.step():
                PROCESS.when_busy()
            elif not is_behind and not self._has_work.wait(_IDLE_WAIT_S):
                PROCESS.when_idle()
            if self._rows is not None:
                with self.engine.operation("rows"):
                    is_behind = self._rows.apply(time.monotonic())
            if self._controller is not None:
                with self.engine.operation("controller"):
                    self._controller.tick(time.monotonic(), time.time())  # clock of the engine, and wall clock
            if self._snapshots is not None:
                with self.engine.operation("snapshot"):
                    self._snapshots.keep_if_due(self.engine, self._steering, time.perf_counter())
