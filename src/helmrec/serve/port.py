"""What the HTTP front knows of an engine, and an engine in the same process behind it.

The front awaits; an engine steps. A port stands between the two and is all that has to change when the engine
moves to a process of its own.
"""

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from numpy.typing import ArrayLike

from helmrec.collector import PROCESS
from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import Engine, EngineStats
from helmrec.engine.warm_up import made_up_request as made_up_request  # noqa: PLC0414 - to try a port with
from helmrec.engine.warm_up import warm_up
from helmrec.errors import AlphaOutOfRange, DeadlineExceeded, Refused, RequestError
from helmrec.failures import FailureLog
from helmrec.model.config import ModelConfig
from helmrec.serve.control import Controller, ControlView, Steering
from helmrec.serve.snapshot import SnapshotKeeper
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult

log = logging.getLogger("helmrec.serve")
_IDLE_WAIT_S = 0.02  # the boundary goes on moving while nobody asks; a request ends the wait at once


class Health(enum.Enum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineView:
    """All that may be seen of an engine at one moment."""

    stats: EngineStats
    page_owners: bytes  # one a page: a value of `memory.ledger.Owner`
    control: ControlView | None  # None: nobody moves the boundary


class EnginePort(Protocol):
    """An engine as the front sees it. Awaiting never blocks the event loop."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def health(self) -> Health: ...

    @property
    def reason(self) -> str | None:
        """Why the engine is not ready, where something went wrong."""

    @property
    def num_restarts(self) -> int: ...

    def start(self) -> None:
        """Begin to get ready; `health` says when that is done."""

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        """Score all requests or none: one that is wrong or refused refuses the call, before any other has run.

        `spent_ms` of their deadlines went by before.
        """

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        """Have a history computed ahead of its rank, or hear why not. The signal came in `spent_ms` before."""

    async def stats(self) -> EngineStats: ...

    async def look(self) -> EngineView: ...

    async def move_alpha(self, alpha: float) -> None: ...

    async def set_mode(self, mode: Mode) -> None:
        """Let the policy move the boundary, or freeze it; RequestError if there is none."""

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None: ...

    async def forget(self, user_id: int) -> None:
        """Drop what the caches hold of a user; what it has waiting is refused."""

    async def close(self) -> None:
        """Stop serving; what still waits is refused."""


@runtime_checkable
class HasReplicas(Protocol):
    """A port with several engines behind it."""

    @property
    def replica_stats(self) -> Mapping[str, EngineStats]:
        """What the last call of `stats` found, by the name of each replica."""


@runtime_checkable
class SwapsModels(Protocol):
    """A port that can change the model it serves."""

    async def swap(self, model: str) -> None:
        """Serve the model in this folder from now on; ModelError if it is none, or not one clients can go on with.

        Requests go on meanwhile, each scored by one model. Returns when nobody waits for the old one any more.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A call on its way through an engine."""

    user_ids: list[int]
    futures: "list[Future[RankResult]]"
    started_s: float


class InProcessPort:
    """An engine in this process, stepped by one thread. Owns the engine and closes it."""

    num_restarts = 0  # it ends with the process

    def __init__(
        self, engine: Engine, steering: Steering | None = None, snapshots: SnapshotKeeper | None = None
    ) -> None:
        """`steering` says who moves the boundary; without it only admin calls do. `snapshots` outlive the engine."""
        self._engine = engine
        self._steering = steering
        self._snapshots = snapshots
        self._failures = FailureLog(log)
        self._controller = None if steering is None else Controller(steering, engine, self._failures, time.time())
        self._health = Health.STARTING
        self._reason: str | None = None
        self._has_work = threading.Event()
        self._is_over = False
        self._is_heir = self._is_retired = False
        self._stepper = threading.Thread(target=self._run, name="helmrec-steps", daemon=True)

    @property
    def model(self) -> ModelConfig:
        return self._engine.model_config

    @property
    def health(self) -> Health:
        return self._health

    @property
    def reason(self) -> str | None:
        return self._reason

    def start(self) -> None:
        self._stepper.start()

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        return await self.results(self.enqueue(requests, spent_ms))

    def enqueue(self, requests: Sequence[RankRequest], spent_ms: float) -> "Queued":
        """Queue all requests of a call or none; their arrays are not looked at any more when this returns."""
        if len(requests) > 1:  # a lone request is looked at once, by the engine itself
            for i, request in enumerate(requests):
                self._validate(i, request)
        queued = Queued([request.user_id for request in requests], [], time.perf_counter())
        try:
            left = [self._less_spent(request, spent_ms) for request in requests]
            queued.futures.extend(self._engine.submit(request) for request in left)
        except Refused:
            self._record(queued, None)
            raise
        finally:
            if len(queued.futures) < len(requests):
                self._withdraw(queued)
            self._has_work.set()
        return queued

    async def results(self, queued: "Queued") -> list[RankResult]:
        """Wait for a call that was queued."""
        try:
            results = await asyncio.gather(*map(asyncio.wrap_future, queued.futures))
            self._record(queued, (time.perf_counter() - queued.started_s) * 1e3)
            return results
        except Refused:
            self._record(queued, None)
            raise
        finally:
            self._withdraw(queued)  # of a call that was refused half way; what is done stays as it is

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        return await asyncio.wrap_future(self.signal(request))

    def signal(self, request: PrefillRequest) -> "Future[PrefillResult]":
        """Queue a signal; its arrays are not looked at any more when this returns."""
        future = self._engine.submit_prefill(request)
        self._has_work.set()
        return future

    def _withdraw(self, queued: "Queued") -> None:
        for future in queued.futures:
            future.cancel()
        self._has_work.set()  # the next step takes the cancelled out of the queue

    def _record(self, queued: "Queued", latency_ms: float | None) -> None:
        """Tell the controller of answers, or of refusals."""
        if self._controller is not None:
            for user_id in queued.user_ids:
                self._controller.record(user_id, latency_ms)

    def _less_spent(self, request: RankRequest, spent_ms: float) -> RankRequest:
        """The request with what is left of its deadline; DeadlineExceeded if nothing is and it is else a good one."""
        if request.deadline_ms is None or not request.deadline_ms > 0:  # the engine says what is wrong with the latter
            return request
        if spent_ms < request.deadline_ms:
            return replace(request, deadline_ms=request.deadline_ms - spent_ms)
        self._engine.validate(request)
        raise DeadlineExceeded(f"the deadline passed {spent_ms:.1f} ms after the request came in, on its way")

    def _validate(self, i: int, request: RankRequest) -> None:
        try:
            self._engine.validate(request)
        except RequestError as error:
            raise RequestError(f"requests[{i}].{error.field}", error.value, error.problem) from None

    async def stats(self) -> EngineStats:
        return await asyncio.to_thread(self._stats)  # waits for the running step

    def _stats(self) -> EngineStats:
        """Of the engine, with the failures of what runs beside it."""
        stats, beside = self._engine.stats(), self._failures.count("miss curves")
        if self._snapshots is not None:
            beside += self._snapshots.failures.count()
        return replace(
            stats,
            background_failures=stats.background_failures + beside,
            controller_failures=self._failures.count("controller"),
        )

    async def look(self) -> EngineView:
        return await asyncio.to_thread(self._look)

    def _look(self) -> EngineView:
        view = None if self._controller is None else self._controller.view
        return EngineView(self._stats(), self._engine.page_owners(), view)

    async def set_mode(self, mode: Mode) -> None:
        if self._controller is None:
            raise RequestError("mode", mode, "this server was given no policy")
        self._controller.set_mode(mode, time.time())

    async def move_alpha(self, alpha: float) -> None:
        await asyncio.to_thread(self._engine.move_alpha, alpha)
        self._has_work.set()

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        await asyncio.to_thread(self._engine.update_rows, table, ids, values)

    async def forget(self, user_id: int) -> None:
        await asyncio.to_thread(self._engine.forget, user_id)

    def inherit(self, old: "InProcessPort") -> None:
        """Before it is started: begin where another engine stands, as far as that helps with other weights."""
        self._is_heir = True
        stats = old._engine.stats().pool
        with suppress(AlphaOutOfRange):  # pages may have another size
            self._engine.move_alpha(stats.alpha_target)
            self._engine.settle()
        if self.model.tables == old.model.tables:
            self._engine.warm(old._engine.hot_rows())
        if self._controller is not None and old._controller is not None:
            self._controller.inherit(old._controller)
            if self.model == old.model:
                self._controller.relearn(old._controller)

    async def retire(self) -> None:
        """Answer what was submitted, then close. Nothing may be submitted any more; no snapshot is taken."""
        self._is_retired = True
        await self.close()

    async def close(self) -> None:
        self._is_over = True
        self._has_work.set()
        if self._stepper.is_alive():
            await asyncio.to_thread(self._stepper.join)
        else:
            self._engine.close()

    def _run(self) -> None:
        try:
            self._get_ready()
            self._health = Health.READY
            log.info("ready", extra={"model": self.model.name, "start": str(self._engine.start_up)})
            self._step_until_over()
            while self._is_retired and (self._engine.step() or self._engine.stats().queue_length):
                pass
            if self._snapshots is not None and not self._is_retired:
                self._snapshots.keep(self._engine, self._steering)
            self._health = Health.CLOSED
        except Exception as error:
            self._health, self._reason = Health.FAILED, f"{type(error).__name__} in the engine"
            log.exception("the engine failed")
        finally:
            self._engine.close()

    def _get_ready(self) -> None:
        """Everything that would make the first requests wait."""
        start_up = self._engine.start_up
        if self._snapshots is not None and not self._is_heir:
            start_up.begin("snapshot")
            self._snapshots.restore(self._engine, self._steering)
        warm_up(self._engine)
        if self._controller is not None:
            start_up.begin("controller")
            self._controller.warm_up()
        start_up.end()
        PROCESS.settle()
        self._engine.reset_pauses()

    def _step_until_over(self) -> None:
        while not self._is_over:
            self._has_work.clear()  # before the step: what is submitted during it must end the wait
            if self._engine.step():
                PROCESS.when_busy()
            elif not self._has_work.wait(_IDLE_WAIT_S):
                PROCESS.when_idle()
            if self._controller is not None:
                with self._engine.operation("controller"):
                    self._controller.tick(time.monotonic(), time.time())  # the engine's clock, and the wall's
            if self._snapshots is not None:
                with self._engine.operation("snapshot"):
                    self._snapshots.keep_if_due(self._engine, self._steering, time.perf_counter())
