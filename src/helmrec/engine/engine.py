"""The engine: plan a batch, run it, commit it, and move the boundary in between.

The main loop is `step`. Everything it decides lives in the scheduler and the pool; everything it does, in the
runner. Safe to call from several threads; steps run one at a time.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike

from helmrec.clock import Clock, MonotonicClock
from helmrec.collector import PROCESS, CollectorStats
from helmrec.config import EngineConfig
from helmrec.engine.audit import TOLERANCE, Auditor
from helmrec.engine.curves import CurveFeed
from helmrec.engine.dense import Dense, Progress
from helmrec.engine.intake import Intake, Prepared, prepare_rows
from helmrec.engine.pipeline import Ended, Pipeline
from helmrec.engine.relay.pre_inference import Decided, Relay, RelayStats, tell
from helmrec.engine.report import EngineReport, make_report
from helmrec.engine.runner import Runner, StepOutput
from helmrec.engine.scheduler import Batch, Scheduler, refuse
from helmrec.engine.setup import build
from helmrec.errors import DeadlineExceeded, EngineClosed, Forgotten
from helmrec.failures import FailureLog
from helmrec.kernels.compiling import follow_compilers
from helmrec.memory.ledger import Owner
from helmrec.memory.miss_curves import JointCurves, MissCurveConfig
from helmrec.memory.stats import PoolStats
from helmrec.model.weights import LoadedModel, load_model
from helmrec.pauses import Cause, GapMonitor, PauseStats, follow_process
from helmrec.steps import Steps
from helmrec.types import Ids, IntArray, PrefillRequest, PrefillResult, RankRequest, RankResult

log = logging.getLogger("helmrec.engine")
_MOST_EXPOSED = 3  # times a step's own time that a reload may add; what adds more is something else
_STRANGER_WARNING = 32
_FIRST_STEPS = 256  # whose cost is learned by all engines, so that the first signal meets a judge who has seen some


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at the engine."""

    pool: PoolStats
    queue_length: int
    steps: int
    busy_s: float  # that they took
    served: int
    non_finite: int  # requests that failed because their scores were not numbers
    refused: int
    audits: int
    audit_mismatches: int
    audit_max_error: float
    background_failures: int
    relay: RelayStats
    pauses: PauseStats
    collector: CollectorStats  # of its process
    controller_failures: int = 0  # of what moves the boundary, where a server has one


class Engine:
    """Ranks candidates with an HSTU model whose rows and KV prefixes live in one pool."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        clock: Clock | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Ready when it returns: on a card, tables are copied to locked memory and graphs captured.

        `progress` follows the bytes copied, then the graphs.
        """
        self.config = config
        self.model_config = model.config
        self._clock = clock or MonotonicClock()
        parts = build(model, config, progress)
        self._master, self._arena, self._pool, self._dense = parts.master, parts.arena, parts.pool, parts.dense
        self._runner = Runner(parts, self._clock)
        self.start_up = parts.start_up
        tolerance = config.audit_tolerance or TOLERANCE[model.config.dtype]
        self._auditor = Auditor(config.audit_every, tolerance, self._runner.score_without_caches)
        self._scheduler = Scheduler(config, self._pool.kv)
        self._relay = Relay(config.relay, self._scheduler, self._pool.kv, self._pool.expander.costs.steps)
        self._intake = Intake(model.config, model.version, config.max_history)
        self._curves = self._make_curves() if config.miss_curves else None
        self._lock = threading.RLock()
        self._is_closed = self._has_warned = False
        self._gaps = GapMonitor(config.log_gaps_ms)
        follow_process(self._gaps)
        follow_compilers()
        self._pipeline = Pipeline(
            self._runner, self._scheduler, self._clock, self._gaps, overlaps=_overlaps(config, self._dense)
        )
        self._served = self._non_finite = 0
        self._failures = FailureLog(log, self._clock)
        log.info("ready\n%s", self.report())

    @classmethod
    def from_model(
        cls,
        folder: str | Path,
        config: EngineConfig,
        clock: Clock | None = None,
        progress: Progress = lambda done, total: None,
    ) -> "Engine":
        """Load a model folder and start an engine on it."""
        return cls(load_model(Path(folder)), config, clock, progress)

    def rank(self, requests: Sequence[RankRequest]) -> list[RankResult]:
        """Score all requests, driving the engine in this thread until they are done.

        One bad request refuses the call before anything ran; a refusal or failure later on is raised for the
        whole call. Background work of the last step is done before it returns.
        """
        now = self._now()
        prepared = [self._intake.prepare(request) for request in requests]
        futures: list[Future[RankResult]] = []
        try:
            futures.extend(self._scheduler.submit(request, now) for request in prepared)
            while not all(future.done() for future in futures):
                self.step()
            return [future.result() for future in futures]
        finally:
            self._scheduler.withdraw([future for future in futures if not future.done()])

    def validate(self, request: RankRequest) -> None:
        """Raise RequestError if `rank` would."""
        self._intake.prepare(request)

    def submit(self, request: RankRequest) -> "Future[RankResult]":
        """Queue one request; some thread must call `step`."""
        now = self._now()
        return self._scheduler.submit(self._intake.prepare(request), now)

    def submit_all(self, requests: Sequence[RankRequest], spent_ms: float) -> "list[Future[RankResult]]":
        """Queue all requests of a call or none, each with `spent_ms` less of its deadline.

        Raise RequestError if one is wrong, else DeadlineExceeded if a deadline has passed, else what `submit` raises.
        """
        now = self._now()
        prepared = [_less_spent(each, spent_ms) for each in self._intake.prepare_all(requests)]
        futures: list[Future[RankResult]] = []
        try:
            futures.extend(self._scheduler.submit(each, now) for each in prepared)
        finally:
            if len(futures) < len(prepared):
                self._scheduler.withdraw(futures)
        return futures

    def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute a user's history ahead of its rank, when no rank waits, if the rank would be at risk without.

        Returns at once; some thread must call `step`. A later rank uses what is there if its history verifies.
        """
        history = self._intake.prepare_ahead(request)
        with self._lock:
            return self._relay.signal(request, history, self._kv_pages, self._now())

    def submit_prefill(self, request: PrefillRequest) -> "Future[PrefillResult]":
        """`prefill` without waiting for the step that runs: the next one decides."""
        self._now()
        return self._relay.submit(request, self._intake.prepare_ahead(request))

    @property
    def _kv_pages(self) -> int:
        """That prefixes may hold."""
        return self._pool.ledger.num_pages - self._pool.ledger.count(Owner.EMB)

    def step(self) -> bool:
        """Run the next batch, if any, hand out results, then do what must not delay them.

        Where steps overlap, the results are those of the batch before. False: there was nothing to do.
        """
        with self._lock:
            now = self._now()
            decided = self._decide_signals(now)
            self._pool.expander.costs.begin_step()
            batch = self._scheduler.next_batch(now)
            # One chunk at most is ahead of a rank that comes now: none is launched on top of another.
            if batch is None and not self._scheduler.queue_length and not self._pipeline.is_ahead:
                batch = self._relay.next_batch(now)
            expired = self._scheduler.take_expired()
            ended = self._count(self._pipeline.push(batch))
        for future, error in expired:
            future.set_exception(error)
        tell(decided)
        self._conclude(ended)
        return batch is not None or bool(ended)

    def _decide_signals(self, now: float) -> list[Decided]:
        """What signals are told. Computing ahead is an offer: whatever fails here fails those signals and no step."""
        try:
            decided = self._relay.begin_step(self._kv_pages, now)
        except Exception as error:
            self._failures.note("relay", error)
            self._relay.refuse_waiting(error)
            return []
        for each in decided:
            if isinstance(each.result, Exception):
                self._failures.note("relay", each.result)
        return decided

    def _flush(self) -> list[Ended]:
        """End what is running; to be concluded once the lock is released."""
        return self._count(self._pipeline.flush())

    def _count(self, ended: list[Ended]) -> list[Ended]:
        for step in ended:
            if isinstance(step.outcome, StepOutput) and not step.batch.is_ahead:
                self._served += len(step.batch.members) - len(step.outcome.non_finite)
                self._non_finite += len(step.outcome.non_finite)
        return ended

    def _conclude(self, ended: Sequence[Ended]) -> None:
        """Tell the clients, with no lock held since a callback may call the engine; then the background work."""
        start_s = self._clock.now()
        for step in ended:
            step.hand_out()
        with self._lock:
            if not self._is_closed:
                self._work_in_background([step for step in ended if isinstance(step.outcome, StepOutput)])
            failed = [step.batch for step in ended if not isinstance(step.outcome, StepOutput)]
            self._try("other", self._relay.note_failed, failed)
            if len(failed) < len(ended):
                self._pipeline.steps.add_host_ms((self._clock.now() - start_s) * 1e3)
        for step in ended:
            if not isinstance(step.outcome, StepOutput | Exception):  # the process is going down
                raise step.outcome

    def _work_in_background(self, ended: Sequence[Ended]) -> None:
        """Admit rows, save pages, audit, move the boundary. A failure here is logged and fails nobody's request."""
        demand_bytes = 0
        for step in ended:
            assert isinstance(step.outcome, StepOutput)
            demand_bytes += step.outcome.missed_bytes
            self._follow_up(step.batch, step.outcome, step.took_s)
        self._try("boundary move", self._move_boundary)
        self._try("refill", self._runner.refill, self.config.refill_bytes_per_step - demand_bytes)

    def operation(self, cause: Cause) -> AbstractContextManager[None]:
        """What is done inside is noted as an operation that may delay the next step."""
        return self._gaps.operation(cause, self._clock.now)

    def _try(self, cause: Cause, work: Callable[..., None], *args: Any) -> None:
        try:
            with self.operation(cause):
                work(*args)
        except Exception as error:
            self._failures.note(getattr(work, "__qualname__", repr(work)), error)

    def _move_boundary(self) -> None:
        """A page that leaves EMB is free once a step has ended that was launched after it left."""
        if not self._pool.is_settled:
            self._runner.finish_saves_before_moves()
        self._pool.ledger.retire(self._pipeline.num_ended - 1)
        self._pool.advance(self.config.move_bytes_per_step, self._pipeline.num_launched)

    def _follow_up(self, batch: Batch, output: StepOutput, took_s: float) -> None:
        """Each part on its own: one that fails keeps no other from its work."""
        self._try("other", self._learn_costs, batch, took_s)
        self._try("other", self._warn_of_strangers)
        self._try("rows", self._runner.admit, output.running)
        self._try("save", self._save_pages)
        self._try("other", self._relay.note_step, batch, took_s, self._clock.now())
        if batch.is_ahead:
            return
        requests = [member.request for member in batch.members]
        if output.running.row_epoch == self._pool.row_epochs.current:  # else an audit would see other rows
            self._try("audit", self._auditor.look_at, requests, output.scores)
        if self._curves is not None:
            self._try("controller", self._curves.observe, requests)

    def _save_pages(self) -> None:
        self._runner.save_pages(self._pool.next_saves(self.config.save_bytes_per_step))

    def _make_curves(self) -> CurveFeed:
        shape, pool = self.model_config, self._pool
        seen = MissCurveConfig.of_engine(self.config, pool.geometry, self.config.max_batch_tokens)
        return CurveFeed(seen.model_copy(update={"num_pages": pool.ledger.num_pages}), len(shape.features))

    def _learn_costs(self, batch: Batch, seconds: float) -> None:
        is_wanted = self._pool.expander.num_slots or self._relay.is_used
        if not is_wanted and self._pipeline.num_ended > _FIRST_STEPS:
            return
        costs = self._pool.expander.costs
        work = batch.work()
        if num_loads := sum(len(member.plan.loads) for member in batch.members):
            expected_s = costs.steps.seconds(work.tokens, work.pairs, is_whole_step=True)
            costs.observe_reload(num_loads, min(seconds - expected_s, _MOST_EXPOSED * expected_s))
        else:
            costs.steps.observe(work.tokens, work.pairs, seconds)

    def move_alpha(self, alpha: float) -> None:
        """Aim the boundary at `alpha`; it moves between steps, a bounded number of bytes at a time."""
        with self._lock:
            self._now()
            self._pool.aim(alpha)

    def settle(self) -> None:
        """Finish the boundary's move now."""
        with self._lock:
            ended = self._flush()
            while not self._pool.is_settled:
                self._move_boundary()
                self._runner.synchronize()
                self._pool.ledger.retire(self._pipeline.num_launched)
        self._conclude(ended)

    def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Replace rows of a table, between steps: master and resident copy together; KV made from them lapses."""
        update = prepare_rows(self.model_config, table, ids, values)
        rows, new = update.rows, torch.from_numpy(update.values).to(self._master.dtype)
        with self._lock:
            self._now()
            ended = self._flush()
            self._pool.row_epochs.mark(rows)  # first: if a write fails, no KV made from these rows is reused
            try:
                self._runner.update_rows(rows, new)
            except BaseException as error:
                failure: BaseException | None = error
            else:
                failure = None
        self._conclude(ended)
        if failure is not None:
            raise failure

    def forget(self, user_id: int) -> None:
        """Drop a user's KV, in the pool and on the host, and refuse what it has waiting. Rows belong to no user.

        Nothing can find the dropped pages any more; their bytes stay until the pages are used again.
        """
        with self._lock:
            self._now()
            ended = self._flush()  # no step may still write what is to be dropped
            waiting, signals = self._scheduler.take_of(user_id), self._relay.forget(user_id)
            self._pool.kv.forget(user_id)
        tell(signals)
        refuse(waiting, Forgotten(f"user {user_id} was forgotten while the request waited"))
        self._conclude(ended)

    @property
    def queue_length(self) -> int:
        """Requests that wait for a step."""
        with self._lock:
            return self._scheduler.queue_length

    def stats(self) -> EngineStats:
        with self._lock:
            relay = self._relay.stats(self._clock.now())
            return EngineStats(
                pool=replace(self._pool.stats(), leases=relay.leases, leased_pages=relay.held_pages),
                queue_length=self._scheduler.queue_length,
                steps=self._pipeline.num_ended,
                busy_s=self._pipeline.busy_s,
                served=self._served,
                non_finite=self._non_finite,
                refused=self._scheduler.refused,
                audits=self._auditor.audits,
                audit_mismatches=self._auditor.mismatches,
                audit_max_error=self._auditor.max_error,
                background_failures=self._failures.count(),
                relay=relay,
                pauses=self._gaps.stats(self._clock.now()),
                collector=PROCESS.stats(),
            )

    def reset_pauses(self) -> None:
        """Count gaps anew from now on."""
        self._gaps.reset()

    def hot_rows(self) -> IntArray:
        """Resident rows, coldest first: what `warm` takes."""
        with self._lock:
            return self._pool.rows.by_heat()

    def warm(self, rows: IntArray) -> None:
        """Read rows that were hot before a restart into empty slots, the hottest first; unknown ones are left out."""
        known = rows[(rows >= 0) & (rows < self.model_config.num_rows)]
        with self._lock:
            self._now()
            self._runner.warm(known, max(1 << 20, self.config.refill_bytes_per_step))

    def page_owners(self) -> bytes:
        """Who owns each page, one byte a page: a value of `memory.ledger.Owner`."""
        with self._lock:
            return self._pool.ledger.owners().tobytes()

    def curves(self) -> JointCurves | None:
        """What other splits would hit, judged by late traffic; None without `miss_curves`, or while it is too early."""
        with self._lock:
            return None if self._curves is None else self._curves.curves()

    def take_steps(self) -> Steps:
        """Steps that ended since the last call, and how long their stages took."""
        with self._lock:
            return self._pipeline.steps.take()

    def relay_stats(self) -> RelayStats:
        with self._lock:
            return self._relay.stats(self._clock.now())

    def report(self) -> EngineReport:
        """What the pool holds, and what is left of the card."""
        with self._lock:
            dense, keeps_kv = self._dense, self.model_config.is_append_stable
            return make_report(
                self._pool, self._master.num_bytes, dense.num_graphs, dense.buffer_bytes, keeps_kv=keeps_kv
            )

    def check(self) -> None:
        """End what is running, then assert every invariant of the pool, both caches and the queue."""
        with self._lock:
            ended = self._flush()
        self._conclude(ended)
        with self._lock:
            self._pool.check()
            self._scheduler.check()
            self._relay.check()
            assert self._pool.kv.is_idle or not self._pipeline.is_empty, "a pin outlived its step"

    def close(self) -> None:
        """End what is running, refuse what waits and everything after; unlock the host memory."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            ended = self._flush()
            if not was_closed:
                self._runner.close()
        self._conclude(ended)
        if self._curves is not None:
            self._curves.close()
        self._scheduler.drain(EngineClosed("the engine was closed"))
        self._relay.close(EngineClosed("the engine was closed"))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> float:
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        return self._clock.now()

    def _warn_of_strangers(self) -> None:
        kv = self._pool.kv
        if not self._has_warned and kv.strangers >= _STRANGER_WARNING and 2 * kv.strangers > kv.returns:
            self._has_warned = True
            log.warning(
                "%d of %d histories of known users matched nothing in their cached prefix; "
                "clients that send only the last events must set first_event",
                kv.strangers,
                kv.returns,
            )


def _overlaps(config: EngineConfig, dense: Dense) -> bool:
    return bool(dense.num_graphs) if config.overlap is None else config.overlap


def _less_spent(request: Prepared, spent_ms: float) -> Prepared:
    """Take `spent_ms` from the deadline of a request; DeadlineExceeded if nothing is left."""
    if request.deadline_ms is None:
        return request
    if spent_ms >= request.deadline_ms:
        raise DeadlineExceeded(f"the deadline passed {spent_ms:.1f} ms after the request came in, on its way")
    return replace(request, deadline_ms=request.deadline_ms - spent_ms)
