"""The engine: plans a batch, runs it, commits it, and moves the boundary of the pool between steps.

The main loop is `step`. The scheduler and the pool decide; the runner acts. Methods may be called from several threads;
steps run one at a time.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike
from torch import Tensor

from helmrec.clock import Clock, MonotonicClock
from helmrec.collector import PROCESS, CollectorStats
from helmrec.config import EngineConfig
from helmrec.costs.learned import Estimator, StageCosts
from helmrec.engine.audit import Auditor
from helmrec.engine.curves import CurveFeed
from helmrec.engine.dense import Dense, Progress
from helmrec.engine.intake import Intake, IntakeRecipe, Prepared, RowUpdate, prepare_rows
from helmrec.engine.pipeline import Ended, Pipeline
from helmrec.engine.precision import audit_tolerance, cache_version
from helmrec.engine.relay.pre_inference import Relay, RelayStats
from helmrec.engine.report import EngineReport, make_report
from helmrec.engine.row_marks import RowMarks
from helmrec.engine.row_stream import RowStreamStats
from helmrec.engine.row_waits import RowWaits
from helmrec.engine.runner import Runner, StagedRows, StepOutput
from helmrec.engine.scheduler import Batch, Reply, Scheduler
from helmrec.engine.setup import build
from helmrec.errors import EngineClosed, ModelError
from helmrec.failures import FailureLog
from helmrec.kernels.compiling import follow_compilers
from helmrec.memory.ledger import Owner
from helmrec.memory.miss_curves import JointCurves, MissCurveConfig
from helmrec.memory.row_fetch import RowTierStats
from helmrec.memory.stats import PoolStats
from helmrec.memory.tiered_rows import TieredRows
from helmrec.model.file_check import FileCheck, FileCheckStats
from helmrec.model.shared_tables import values_of_bytes
from helmrec.model.weights import LoadedModel, load_model
from helmrec.pauses import Cause, GapMonitor, PauseStats, follow_process
from helmrec.steps import Steps
from helmrec.types import Ids, IntArray, PrefillRequest, PrefillResult, RankRequest, RankResult, RowPosition, UserId

log = logging.getLogger("helmrec.engine")
_MIN_UNMATCHED = 32  # histories of known users that match no cached prefix, before the log warns of them
_ROWS_WAIT_S = 0.001  # for rows from disk, before the queue is looked at again
_FIRST_STEPS = 256  # every engine learns the cost of these, so that the first prefill signal finds a fitted cost model


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state and counters of an engine at one time."""

    pool: PoolStats
    queue_length: int
    steps: int
    busy_s: float  # time that steps took
    served: int
    non_finite: int  # requests that failed because their scores were not numbers
    refused: int
    audits: int
    audit_mismatches: int
    audit_max_error: float
    background_failures: int
    relay: RelayStats
    pauses: PauseStats
    collector: CollectorStats  # of the process
    controller_failures: int = 0  # set by a server whose controller moves the boundary
    unknown_ids: dict[str, int] = field(default_factory=dict)  # by table: ids read as the table's row for unknown ones
    row_stream: RowStreamStats | None = None  # set by a server that follows a stream of row deltas
    file_check: FileCheckStats | None = None  # None: files are not checked beside serving
    row_tier: RowTierStats | None = None  # None: all rows are in host memory
    costs: StageCosts | None = None  # learned from the steps that were taken; None: from too few


class Engine:
    """Ranks candidates with an HSTU model whose embedding rows and KV prefixes share one pool."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        clock: Clock | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Build the parts and warm them up: on a card, copy the tables to locked memory and capture the graphs.

        `progress` is called with the bytes copied, then with the graphs captured, each out of how many.
        """
        self.model_config = model.config
        self._clock = clock or MonotonicClock()
        self._moved_s = self._clock.now()  # when the boundary was looked at last
        parts = build(model, config, progress)
        self.config = config = parts.config
        self._choices = parts.choices
        self._master, self._arena, self._pool, self._dense = parts.master, parts.arena, parts.pool, parts.dense
        self._marks = RowMarks(self._pool.row_epochs, model.config, config)
        self._runner = Runner(parts, self._clock)
        self.start_up = parts.start_up
        tolerance = audit_tolerance(model.config.dtype, config)
        self._auditor = Auditor(config.audit_every, tolerance, self._runner.score_without_caches)
        self._tier = parts.master.fetcher if isinstance(parts.master, TieredRows) else None
        waits = None if self._tier is None else RowWaits(self._tier, 4 * config.max_batch_requests)
        self._scheduler = Scheduler(config, self._pool.kv, waits)
        self._relay = Relay(config.relay, self._scheduler, self._pool.kv, self._pool.host_tier.costs.steps)
        self._intake = Intake(model.config, cache_version(model.version, config), config.max_history)
        self._curves = self._make_curves() if config.miss_curves else None
        self._lock = threading.RLock()
        self._may_step = threading.Event()  # cleared for a thread that waits for the lock: steps take it at once again
        self._may_step.set()
        self._one_follower = threading.Lock()
        self._is_closed = self._has_warned = False
        self._gaps = GapMonitor(config.log_gaps_ms)
        follow_process(self._gaps)
        follow_compilers()
        self._pipeline = Pipeline(
            self._runner, self._scheduler, self._clock, self._gaps, overlaps=_overlaps(config, self._dense)
        )
        self._failures = FailureLog(log, self._clock)
        self._costs = Estimator()
        self._file_check: FileCheck | None = None
        self.file_problem: ModelError | None = None  # why requests are refused: names the corrupt file
        for line in str(self.report()).splitlines():
            log.info("%s", line.strip())

    @classmethod
    def from_model(
        cls,
        folder: str | Path,
        config: EngineConfig,
        clock: Clock | None = None,
        progress: Progress = lambda done, total: None,
        *,
        follows_log: bool = False,
    ) -> "Engine":
        """Load a model folder and start an engine on it.

        If a check beside serving (`verify`) finds a corrupt file, all waiting and later requests get EngineClosed.
        follows_log: another process writes the log of row updates; they come by `follow_log` alone.
        """
        model = replace(load_model(Path(folder), verify=config.verify == "start"), follows_log=follows_log)
        engine = cls(model, config, clock, progress)
        if config.verify == "background":
            engine._file_check = FileCheck(Path(folder), engine._stop_serving)
        return engine

    def _stop_serving(self, problem: ModelError) -> None:
        """Refuse waiting and later requests, since a file of the model is corrupt."""
        self.file_problem = problem
        self._scheduler.drain(EngineClosed(f"serving has stopped: {problem}"))

    def rank(self, requests: Sequence[RankRequest]) -> list[RankResult]:
        """Score all requests, driving the engine in this thread until they are done.

        A bad request raises RequestError before anything runs; a later refusal or failure is raised for the whole
        call. The background work of the last step is done before it returns.
        """
        now = self._now()
        futures = self._scheduler.submit_all([self._intake.prepare(request) for request in requests], now)
        try:
            while not all(future.done() for future in futures):
                self.step()
            return [future.result() for future in futures]
        finally:
            self._scheduler.withdraw([future for future in futures if not future.done()])

    def validate(self, request: RankRequest) -> None:
        """Raise RequestError if `rank` would raise it for this request."""
        self._intake.prepare(request)

    def submit(self, request: RankRequest) -> "Future[RankResult]":
        """Queue one request; some thread must call `step`."""
        now = self._now()
        return self._scheduler.submit(self._intake.prepare(request), now)

    def submit_all(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> "list[Future[RankResult]]":
        """Queue all requests of a call or none; some thread must call `step`.

        Their own deadlines count from `spent_ms` ago. With several requests, RequestError names the one that is wrong.
        """
        now = self._now()
        return self._scheduler.submit_all(self._intake.prepare_all(requests), now, spent_ms)

    @property
    def intake_recipe(self) -> IntakeRecipe:
        """What another process needs to prepare requests for this engine. Secret: it has the key of the prefix hash."""
        return self._intake.recipe

    def is_prepared_by(self, tag: bytes) -> bool:
        """Whether requests with this tag were prepared from this engine's recipe, as its own intake would do it."""
        return tag == self._intake.tag

    def submit_prepared(self, prepared: Sequence[Prepared], spent_ms: float = 0.0) -> "list[Future[RankResult]]":
        """As `submit_all`, for requests that were prepared from this engine's recipe."""
        return self._scheduler.submit_all(prepared, self._now(), spent_ms)

    def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute a user's history before its rank request, while none waits, if that request would be late otherwise.

        Returns the decision at once; some thread must call `step`. A later rank reuses the tokens that verify.
        """
        history = self._intake.prepare_ahead(request)
        with self._lock:
            return self._relay.signal(request, history, self._kv_pages, self._now())

    def submit_prefill(self, request: PrefillRequest) -> "Future[PrefillResult]":
        """Queue a prefill signal without waiting for the running step; the next step decides about it."""
        self._now()
        return self._relay.submit(request, self._intake.prepare_ahead(request))

    @property
    def _kv_pages(self) -> int:
        """Number of pages that prefixes may hold."""
        return self._pool.ledger.num_pages - self._pool.ledger.count(Owner.EMB)

    def step(self) -> bool:
        """Run the next batch, if any, send its results, then do background work; False if there was nothing to do.

        Where steps overlap, the results are those of the batch before.
        """
        self._may_step.wait()
        with self._lock:
            now = self._now()
            self._marks.mark_due(now)
            replies = self._decide_signals(now)
            batch = self._next_batch(now)
            replies += self._scheduler.take_expired()
            ended = self._pipeline.push(batch)
        self._conclude(ended, replies)
        if batch is None and not ended and self._scheduler.waits_for_rows:
            self._scheduler.wait_for_rows(_ROWS_WAIT_S)
            return True
        return batch is not None or bool(ended)

    def _next_batch(self, now: float) -> Batch | None:
        """Plan the next batch: of requests that wait, else a chunk that is computed ahead of its rank request."""
        batch = self._scheduler.next_batch(now)
        # No chunk is launched on top of another, so that a rank request that arrives now waits for one at most.
        if batch is None and not self._scheduler.queue_length and not self._pipeline.is_ahead:
            return self._relay.next_batch(now)
        return batch

    def _decide_signals(self, now: float) -> list[Reply]:
        """Decide about waiting prefill signals. An error here fails those signals and no step: they are optional."""
        try:
            replies = self._relay.begin_step(self._kv_pages, now)
        except Exception as error:
            self._failures.note("relay", error)
            self._relay.refuse_waiting(error)
            return []
        for reply in replies:
            if isinstance(reply.outcome, Exception):
                self._failures.note("relay", reply.outcome)
        return replies

    def _conclude(self, ended: Sequence[Ended], replies: Sequence[Reply] = ()) -> None:
        """Complete futures with no lock held, since their callbacks may call the engine; then do background work."""
        start_s = self._clock.now()
        for reply in replies:
            reply.send()
        for step in ended:
            step.hand_out()
        with self._lock:
            if not self._is_closed:
                self._work_in_background([step for step in ended if isinstance(step.outcome, StepOutput)])
            if failed := [step.batch for step in ended if not isinstance(step.outcome, StepOutput)]:
                self._try("other", self._relay.note_failed, failed)
            if len(failed) < len(ended):
                self._pipeline.steps.add_host_ms((self._clock.now() - start_s) * 1e3)
        for step in ended:
            if not isinstance(step.outcome, StepOutput | Exception):  # an exit or interrupt: end the process
                raise step.outcome

    def _work_in_background(self, ended: Sequence[Ended]) -> None:
        """Admit rows, save pages, audit, move the boundary. A failure here is logged and fails no request."""
        demand_bytes = 0
        for step in ended:
            assert isinstance(step.outcome, StepOutput)
            demand_bytes += step.outcome.missed_bytes
            self._follow_up(step, step.outcome)
        self._try("boundary move", self._move_boundary)
        self._try("refill", self._runner.refill, self.config.refill_bytes_per_step - demand_bytes)

    def operation(self, cause: Cause) -> AbstractContextManager[None]:
        """Record the work inside the context as an operation that may delay the next step."""
        return self._gaps.operation(cause, self._clock.now)

    def _try(self, cause: Cause, work: Callable[..., None], *args: Any) -> None:
        """Do background work; log and count its failure."""
        start_s = self._clock.now()
        try:
            work(*args)
        except Exception as error:
            self._failures.note(getattr(work, "__qualname__", repr(work)), error)
        finally:
            self._gaps.note_work(cause, start_s, self._clock.now())

    def _move_boundary(self) -> None:
        """Move pages between owners. A page that leaves EMB is free once a step that was launched later has ended."""
        before_s, self._moved_s = self._moved_s, self._clock.now()
        if self._pool.is_settled:
            return
        self._runner.finish_saves_before_moves()
        self._pool.ledger.retire(self._pipeline.num_ended - 1)
        self._pool.advance(self.config.move_bytes_per_step, self._pipeline.num_launched, self._moved_s - before_s)

    def _follow_up(self, step: Ended, output: StepOutput) -> None:
        """Do the background work of one step. Parts are independent: one that fails does not stop the others."""
        batch, took_s = step.batch, step.took_s
        if self._learns_costs:
            self._try("other", self._pool.host_tier.costs.observe_step, step.work, took_s)
        if not self._has_warned and self._pool.kv.unmatched >= _MIN_UNMATCHED:
            self._try("other", self._warn_of_unmatched_histories)
        self._try("rows", self._runner.admit, output.running)
        if self._pool.host_tier.num_slots:
            self._try("save", self._runner.save_pages, self.config.save_bytes_per_step)
        self._try("other", self._relay.note_step, batch, took_s, self._clock.now())
        if batch.is_ahead:
            return
        if not self.config.audit_every and self._curves is None:
            return
        requests = [member.request for member in batch.members]
        if output.running.row_epoch == self._pool.row_epochs.current:  # else an audit would read newer rows
            self._try("audit", self._auditor.audit, requests, output.scores)
        if self._curves is not None:
            self._try("controller", self._curves.observe, requests)

    def _make_curves(self) -> CurveFeed:
        shape, pool = self.model_config, self._pool
        seen = MissCurveConfig.of_engine(self.config, pool.geometry, self.config.max_batch_tokens)
        return CurveFeed(seen.model_copy(update={"num_pages": pool.ledger.num_pages}), len(shape.features))

    @property
    def _learns_costs(self) -> bool:
        """Whether reloads or prefills may be decided by the cost model, or it has seen few steps yet."""
        is_used = bool(self._pool.host_tier.num_slots) or self._relay.is_used
        return is_used or self._pipeline.num_ended <= _FIRST_STEPS

    def move_alpha(self, alpha: float) -> None:
        """Set the target of the boundary; it moves between steps, a bounded number of bytes at a time."""
        with self._lock:
            self._now()
            self._pool.aim(alpha)

    def settle(self) -> None:
        """Move the boundary to its target now, without waiting for further steps."""
        with self._lock:
            ended = self._pipeline.flush()
            while not self._pool.is_settled:
                self._move_boundary()
                self._runner.synchronize()
                self._pool.ledger.retire(self._pipeline.num_launched)
        self._conclude(ended)

    def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Replace rows of a table between steps, in the master and in the pool. KV computed from them is not reused.

        If rows are on disk, the update survives a loss of power when this returns.
        """
        self.apply_rows(prepare_rows(self.model_config, table, ids, values))
        if self._tier is not None:
            self._tier.sync()  # beside steps

    def follow_log(self) -> None:
        """Apply what another process has added to the log of row updates, if one writes it. Any thread may call it."""
        with self._one_follower:
            while self._tier is not None and (update := self._tier.next_logged()) is not None:
                values = values_of_bytes(update.values.copy(), self._master.codec)
                self.apply_rows(RowUpdate(update.rows, values))

    def stage_rows(self, update: RowUpdate) -> StagedRows:
        """Copy checked rows to where `apply_rows` takes them, beside running steps. Any thread may call it."""
        return self._runner.stage_rows(update)

    def stage_stored(self, rows: IntArray, values: Tensor) -> StagedRows:  # values: (rows, width of a stored row)
        """The same for values as the master keeps them."""
        return self._runner.stage_stored(rows, values)

    def reread_rows(self, rows: IntArray) -> None:
        """Take new values of these rows from a shared master, which has them already. rows: ascending."""
        if rows.size:
            with self._lock:
                self._now()
                self._marks.mark(rows, self._clock.now())
                self._runner.reread_rows(rows)

    def apply_rows(self, update: RowUpdate | StagedRows, position: RowPosition | None = None) -> None:
        """Write checked rows between steps; `position` of the stream of deltas is that of all later steps.

        A running step goes on: it has read its rows, or reads them before these are written, and its KV counts as
        computed at the row epoch it was planned at. RequestError, with nothing written, if a difference cannot be
        added to a row.
        """
        staged = self._runner.stage_rows(update) if isinstance(update, RowUpdate) else update
        self._end_audited_step()
        with self._lock:
            self._now()
            if staged.rows.size:
                self._write_rows(staged)
            if position is not None:
                self._runner.row_position = position

    def _end_audited_step(self) -> None:
        """Finish the running step if it is to be audited: the audit reads the rows that the step has read."""
        ended: list[Ended] = []
        with self._lock:
            self._now()
            if self._auditor.is_due(self._pipeline.num_running):
                ended = self._pipeline.flush()
        self._conclude(ended)

    @contextmanager
    def rows_at_rest(self) -> Iterator[None]:
        """Read no row of the master while the context is open, so that another process may write it.

        Running steps have read their rows; their layers go on. In the context, this thread may call `apply_rows`.
        """
        self._may_step.clear()
        try:
            self._end_audited_step()
            with self._lock:
                self._now()
                self._runner.finish_reads()
                yield
        finally:
            self._may_step.set()

    def _write_rows(self, staged: StagedRows) -> None:
        sent = staged.sent or self._runner.add_rows(staged)
        self._marks.mark(
            staged.rows, self._clock.now()
        )  # first, so that no KV of these rows is reused if a write fails
        self._runner.write_rows(sent)

    @property
    def row_position(self) -> RowPosition:
        """Position in the stream of deltas that the next step reads rows at."""
        with self._lock:
            return self._runner.row_position

    def start_at(self, position: RowPosition) -> None:
        """Before the first delta: say which position the model's own rows have, as that of a snapshot."""
        with self._lock:
            self._runner.row_position = position
            if self._tier is not None:
                self._tier.discard_updates()  # the stream brings them again

    def forget(self, user_id: UserId) -> None:
        """Drop a user's KV, in the pool and on the host, and refuse its waiting requests. Rows belong to no user.

        The dropped pages can no longer be found; their bytes stay until the pages are used again.
        """
        with self._lock:
            self._now()
            ended = self._pipeline.flush()  # no running step may still write to the dropped pages
            replies = [*self._relay.forget(user_id), *self._scheduler.forget(user_id)]
            self._pool.kv.forget(user_id)
        self._conclude(ended, replies)

    @property
    def queue_length(self) -> int:
        """Number of requests that wait for a step."""
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
                served=self._pipeline.num_served,
                non_finite=self._pipeline.num_non_finite,
                refused=self._scheduler.refused,
                audits=self._auditor.audits,
                audit_mismatches=self._auditor.mismatches,
                audit_max_error=self._auditor.max_error,
                background_failures=self._failures.count(),
                relay=relay,
                pauses=self._gaps.stats(self._clock.now()),
                collector=PROCESS.stats(),
                unknown_ids=dict(self._pipeline.unknown_ids),
                costs=self._costs.costs,
                file_check=None if self._file_check is None else self._file_check.stats(),
                row_tier=None if self._tier is None else self._tier.stats(),
            )

    def reset_pauses(self) -> None:
        """Start counting gaps from zero."""
        self._gaps.reset()

    def hot_rows(self) -> IntArray:
        """Return the resident rows, coldest first, as `warm` takes them."""
        with self._lock:
            return self._pool.rows.by_heat()

    def warm(self, rows: IntArray) -> None:
        """Read rows that were hot before a restart into empty slots, the hottest first; ignore unknown rows."""
        known = rows[(rows >= 0) & (rows < self.model_config.num_rows)]
        with self._lock:
            self._now()
            self._runner.warm(known, max(1 << 20, self.config.refill_bytes_per_step))

    def page_owners(self) -> bytes:
        """Return the owner of each page, one byte a page: a value of `memory.ledger.Owner`."""
        with self._lock:
            return self._pool.ledger.owners().tobytes()

    def curves(self) -> JointCurves | None:
        """Return estimated hits at other splits for recent traffic; None without `miss_curves` or enough requests.

        Does not wait for served requests that its thread has yet to observe; `settled_curves` does.
        """
        with self._lock:
            return None if self._curves is None else self._curves.newest()

    def settled_curves(self) -> JointCurves | None:
        """Return the estimates of `curves` once all served requests are observed."""
        with self._lock:
            return None if self._curves is None else self._curves.curves()

    def take_steps(self) -> Steps:
        """Return the steps that ended since the last call, with the times of their stages."""
        with self._lock:
            steps = self._pipeline.steps.take()
            self._costs.update(steps)
            return steps

    def drop_steps(self) -> None:
        """Learn nothing from the steps that ended since the last call of `take_steps`."""
        with self._lock:
            self._pipeline.steps.take()

    def report(self) -> EngineReport:
        """Return the sizes of the pool and its parts, and the free memory of the card."""
        with self._lock:
            dense, keeps_kv = self._dense, self.model_config.is_append_stable
            report = make_report(
                self._pool, self._master.num_bytes, dense.num_graphs, dense.buffer_bytes, keeps_kv=keeps_kv
            )
            return replace(report, choices=self._choices)

    def check(self) -> None:
        """Finish running steps, then assert every invariant of the pool, both caches and the queue."""
        with self._lock:
            ended = self._pipeline.flush()
        self._conclude(ended)
        with self._lock:
            self._pool.check()
            self._scheduler.check()
            self._relay.check()
            if self._tier is not None:
                self._tier.check()
            assert self._pool.kv.is_idle or not self._pipeline.is_empty, "a pin outlived its step"

    def close(self) -> None:
        """Finish running steps, refuse waiting and later requests, and unlock the host memory."""
        if self._file_check is not None:
            self._file_check.close()
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            ended = self._pipeline.flush()
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
        """Return the time; raise EngineClosed after `close`."""
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        return self._clock.now()

    def _warn_of_unmatched_histories(self) -> None:
        """Log once if most histories of known users match no cached prefix."""
        kv = self._pool.kv
        if 2 * kv.unmatched > kv.returns:
            self._has_warned = True
            log.warning(
                "%d of %d histories of known users matched nothing in their cached prefix; "
                "clients that send only the last events must set first_event",
                kv.unmatched,
                kv.returns,
            )


def _overlaps(config: EngineConfig, dense: Dense) -> bool:
    return bool(dense.num_graphs) if config.overlap is None else config.overlap
