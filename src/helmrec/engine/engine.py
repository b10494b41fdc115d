"""The engine: plan a batch, run it, commit it, and move the boundary in between.

The main loop is `step`. Everything it decides lives in the scheduler and the pool; everything it does, in the
runner. Safe to call from several threads; steps run one at a time.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from helmrec.clock import Clock, MonotonicClock
from helmrec.config import EngineConfig
from helmrec.engine.dense import Dense, EagerDense, Memory, Progress
from helmrec.engine.graphs import GraphedDense, Limits
from helmrec.engine.intake import Intake, table_rows
from helmrec.engine.report import EngineReport, make_report
from helmrec.engine.runner import Runner, StepOutput
from helmrec.engine.scheduler import Batch, Scheduled, Scheduler
from helmrec.errors import ConfigError, EngineClosed, RequestError
from helmrec.kernels import layer_for
from helmrec.memory.arena import Arena
from helmrec.memory.embedding_cache import ABSENT
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.host_tier import RowMaster
from helmrec.memory.pool import Demand, Pool
from helmrec.memory.stats import PoolStats
from helmrec.model.hstu import HstuModel
from helmrec.model.weights import LoadedModel, load_model
from helmrec.types import Ids, RankRequest, RankResult, Timing

log = logging.getLogger("helmrec.engine")
_PAGE_TOKENS = {"cpu": 32, "cuda": 128}
_STRANGER_WARNING = 32
_AUDIT_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at the engine."""

    pool: PoolStats
    queue_length: int
    steps: int
    served: int
    refused: int
    audits: int
    audit_mismatches: int
    audit_max_error: float
    background_failures: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """How a step ended: its output, and what each request gets."""

    output: StepOutput | None  # None: it failed
    results: "Sequence[RankResult | Exception]"
    row_epoch: int  # the row values it was computed from


def _hand_out(batch: Batch, outcome: Outcome) -> None:
    for member, result in zip(batch.members, outcome.results, strict=True):
        if isinstance(result, Exception):
            member.waiting.future.set_exception(result)
        else:
            member.waiting.future.set_result(result)


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
        _check_device(config)
        self.config = config
        self.model_config = model.config
        self._clock = clock or MonotonicClock()
        dense = {name: tensor.to(config.device) for name, tensor in model.dense.items()}
        hstu = HstuModel(model.config, dense, layer_for(_kernels(config)))
        self._master = _make_master(model, config, progress)
        geometry = _geometry(model, config)
        self._arena = Arena(
            config.pool_bytes // geometry.page_bytes, geometry, hstu.dtype, self._master.dtype, config.device
        )
        demand = Demand(model.config.num_rows, model.config.max_prefix_tokens, config.max_batch_tokens)
        self._pool = Pool(config, geometry, demand, self._arena)
        memory = Memory(self._arena.k_pages, self._arena.v_pages, self._arena.rows, self._master)
        self._dense = _make_dense(hstu, memory, self._pool, config)
        self._dense.warm_up(progress)
        self._runner = Runner(hstu, self._dense, self._arena, self._master, self._pool)
        self._scheduler = Scheduler(config, self._pool.kv)
        self._intake = Intake(model.config, model.version, config.max_history)
        self._lock = threading.RLock()
        self._is_closed = False
        self._steps = self._served = self._audits = self._audit_mismatches = self._unaudited = 0
        self._background_failures = 0
        self._audit_max_error = 0.0
        self._has_warned = False
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

    def step(self) -> bool:
        """Run the next batch, if any, hand out its results, then do what must not delay them."""
        with self._lock:
            batch = self._scheduler.next_batch(self._now())
            expired = self._scheduler.take_expired()
            outcome = self._run(batch) if batch is not None else None
        for future, error in expired:  # these and the results without the lock: a callback may call the engine
            future.set_exception(error)
        if batch is not None and outcome is not None:
            _hand_out(batch, outcome)
        with self._lock:
            self._work_in_background(batch, outcome)
        return batch is not None

    def _work_in_background(self, batch: Batch | None, outcome: "Outcome | None") -> None:
        """Admit rows, save pages, audit, move the boundary. A failure here is logged and fails nobody's request."""
        try:
            if batch is not None and outcome is not None and outcome.output is not None:
                if outcome.row_epoch == self._pool.row_epochs.current:  # else what was read is out of date
                    self._runner.admit(outcome.output.missed)
                    self._audit(batch, outcome.output)
                self._runner.save_pages(self._pool.next_saves(self.config.save_bytes_per_step))
            self._pool.ledger.retire(self._steps - 1)
            self._pool.advance(self.config.move_bytes_per_step, self._steps)
        except Exception:
            self._background_failures += 1
            log.exception("background work failed")

    def _run(self, batch: Batch) -> "Outcome":
        planned_s, epoch = self._clock.now(), self._pool.row_epochs.current
        try:
            output = self._runner.run(batch)
        except Exception as error:
            self._scheduler.abort(batch)
            return Outcome(None, [error] * len(batch.members), epoch)
        except BaseException:
            self._scheduler.abort(batch)
            raise
        ended_s = self._clock.now()
        results = [
            self._result(
                member,
                output,
                i,
                Timing(
                    queue_ms=(batch.started_s - member.waiting.arrived_s) * 1e3,
                    plan_ms=(planned_s - batch.started_s) * 1e3,
                    compute_ms=(ended_s - planned_s) * 1e3,
                ),
            )
            for i, member in enumerate(batch.members)
        ]
        self._learn_costs(batch, ended_s - planned_s)
        self._steps += 1
        self._served += len(results)
        self._scheduler.commit(batch, ended_s)
        self._warn_of_strangers()
        return Outcome(output, results, epoch)

    def _learn_costs(self, batch: Batch, seconds: float) -> None:
        if self._pool.expander.num_slots:
            tokens = sum(member.num_tokens for member in batch.members)
            pairs = sum(member.num_pairs for member in batch.members)
            self._pool.expander.costs.steps.observe(tokens, pairs, seconds)

    def _result(self, member: Scheduled, output: StepOutput, i: int, timing: Timing) -> RankResult:
        return RankResult(
            scores=output.scores[i],
            reused_tokens=member.plan.num_resident,
            computed_tokens=member.num_tokens,
            row_hits=int(output.row_hits[i]),
            row_misses=int(output.row_misses[i]),
            window_start=member.request.window_start,
            truncated_events=member.request.truncated_events,
            timing=timing,
        )

    def move_alpha(self, alpha: float) -> None:
        """Aim the boundary at `alpha`; it moves between steps, a bounded number of bytes at a time."""
        with self._lock:
            self._now()
            self._pool.aim(alpha)

    def settle(self) -> None:
        """Finish the boundary's move now."""
        with self._lock:
            while not self._pool.is_settled:
                self._pool.advance(self.config.move_bytes_per_step, self._steps)
                self._pool.ledger.retire(self._steps)

    def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Replace rows of a table, between steps: master and resident copy together; KV made from them lapses."""
        rows = table_rows(self.model_config, table, ids)
        try:
            array = np.asarray(values, np.float32)
        except (ValueError, TypeError) as error:
            raise RequestError("values", type(values).__name__, f"an array of numbers is needed ({error})") from None
        if array.shape != (rows.size, self.model_config.row_dim):
            raise RequestError("values", array.shape, f"shape {(rows.size, self.model_config.row_dim)} is needed")
        new = torch.from_numpy(array).to(self._master.dtype)
        if (wrong := np.argwhere(~torch.isfinite(new).numpy())).size:
            at, dtype = wrong[0], self.model_config.row_dtype
            raise RequestError(f"values[{at[0]}, {at[1]}]", float(array[*at]), f"numbers finite in {dtype} are needed")
        unique, counts = np.unique(rows, return_counts=True)
        if unique.size != rows.size:
            twice = unique[counts > 1][0] - self.model_config.offsets[table]
            raise RequestError("ids", int(twice), "each id may be given once")
        with self._lock:
            self._now()
            self._pool.row_epochs.mark(rows)  # first: if a write fails, no KV made from these rows is reused
            self._master.update(rows, new)
            slots = self._pool.rows.peek(rows)
            resident = slots != ABSENT
            self._arena.write_rows(slots[resident], new[torch.from_numpy(resident)])

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                pool=self._pool.stats(),
                queue_length=self._scheduler.queue_length,
                steps=self._steps,
                served=self._served,
                refused=self._scheduler.refused,
                audits=self._audits,
                audit_mismatches=self._audit_mismatches,
                audit_max_error=self._audit_max_error,
                background_failures=self._background_failures,
            )

    def report(self) -> EngineReport:
        """What the pool holds, and what is left of the card."""
        with self._lock:
            return make_report(self._pool, self._master.num_bytes, self._dense.num_graphs, self._dense.buffer_bytes)

    def check(self) -> None:
        """Assert every invariant of the pool, both caches and the queue."""
        with self._lock:
            self._pool.check()
            self._scheduler.check()
            assert self._pool.kv.is_idle, "a pin outlived its step"

    def close(self) -> None:
        """Refuse what waits and everything after; unlock the host memory."""
        with self._lock:
            self._is_closed = True
            self._runner.close()
        self._scheduler.drain(EngineClosed("the engine was closed"))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> float:
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        return self._clock.now()

    def _audit(self, batch: Batch, output: StepOutput) -> None:
        """Score one request in N again without caches, after its result was handed out."""
        every = self.config.audit_every
        tolerance = self.config.audit_tolerance or _AUDIT_TOLERANCE[self.model_config.dtype]
        for member, scores in zip(batch.members, output.scores, strict=True) if every else ():
            self._unaudited += 1
            if self._unaudited < every:
                continue
            self._unaudited = 0
            error = float(np.abs(self._runner.score_without_caches(member.request) - scores).max())
            self._audits += 1
            self._audit_max_error = max(self._audit_max_error, error)
            if not error <= tolerance:
                self._audit_mismatches += 1
                user_id = member.request.history.user_id
                log.error("audit: scores of user %d differ by %.3g from an uncached run", user_id, error)

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


def _check_device(config: EngineConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: no CUDA device is available, got 'cuda'")
    if config.device == "cpu" and config.kernels == "triton":
        raise ConfigError("kernels: triton needs device 'cuda', got 'triton' with device 'cpu'")


def _kernels(config: EngineConfig) -> str:
    return config.kernels if config.kernels != "auto" else "triton" if config.device == "cuda" else "torch"


def _make_master(model: LoadedModel, config: EngineConfig, progress: Progress) -> RowMaster:
    return RowMaster.locked(model.tables, progress) if config.device == "cuda" else RowMaster(model.tables)


def _make_dense(model: HstuModel, memory: Memory, pool: Pool, config: EngineConfig) -> Dense:
    if not (config.device == "cuda" and config.cuda_graphs and _kernels(config) == "triton"):
        return EagerDense(model, memory)
    shape = model.config
    limits = Limits(
        num_events=max(config.max_batch_tokens, shape.max_request_tokens),
        num_sequences=config.max_batch_requests,
        num_candidates=max(
            shape.max_candidates, min(config.max_batch_requests * shape.max_candidates, config.max_batch_tokens)
        ),
        num_pages=pool.geometry.pages_for(shape.max_prefix_tokens),
    )
    return GraphedDense(model, memory, limits)


def _geometry(model: LoadedModel, config: EngineConfig) -> PageGeometry:
    shape = model.config
    return PageGeometry(
        page_tokens=config.page_tokens or _PAGE_TOKENS[config.device],
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        kv_itemsize=getattr(torch, shape.dtype).itemsize,
        row_dim=shape.row_dim,
        row_itemsize=getattr(torch, shape.row_dtype).itemsize,
    )
