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
from helmrec.errors import ConfigError, EngineClosed, Refused, RequestError
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


class Engine:
    """Ranks candidates with an HSTU model whose rows and KV prefixes live in one pool."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        clock: Clock | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Ready when it returns: on a card, kernels are compiled and graphs captured (`progress` follows that)."""
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device: no CUDA device is available, got 'cuda'")
        self.config = config
        self.model_config = model.config
        self._clock = clock or MonotonicClock()
        dense = {name: tensor.to(config.device) for name, tensor in model.dense.items()}
        hstu = HstuModel(model.config, dense, layer_for(_kernels(config)))
        self._master = RowMaster(model.tables)
        geometry = _geometry(model, config)
        self._arena = Arena(
            config.pool_bytes // geometry.page_bytes, geometry, hstu.dtype, self._master.dtype, config.device
        )
        demand = Demand(model.config.num_rows, model.config.max_prefix_tokens, config.max_batch_tokens)
        self._pool = Pool(config, geometry, demand, self._arena)
        self._dense = _make_dense(hstu, self._arena, self._pool, config)
        self._dense.warm_up(progress)
        self._runner = Runner(hstu, self._dense, self._arena, self._master, self._pool)
        self._scheduler = Scheduler(config, self._pool.kv)
        self._intake = Intake(model.config, model.version, config.max_history)
        self._lock = threading.RLock()
        self._is_closed = False
        self._steps = self._served = self._audits = self._audit_mismatches = 0
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
        """Score all requests. One bad request refuses the call, before anything ran."""
        with self._lock:
            now = self._now()
            futures: list[Future[RankResult]] = []
            prepared = [self._intake.prepare(request) for request in requests]
            try:
                futures.extend(self._scheduler.submit(request, now) for request in prepared)
            except Refused:
                self._scheduler.withdraw(futures)
                raise
        while not all(future.done() for future in futures):
            self.step()
        return [future.result() for future in futures]

    def validate(self, request: RankRequest) -> None:
        """Raise RequestError if `rank` would."""
        self._intake.prepare(request)

    def submit(self, request: RankRequest) -> "Future[RankResult]":
        """Queue one request; some thread must call `step`."""
        with self._lock:
            return self._scheduler.submit(self._intake.prepare(request), self._now())

    def step(self) -> bool:
        """Run the next batch, if any; then the background work that must not delay a request."""
        with self._lock:
            batch = self._scheduler.next_batch(self._now())
            if batch is not None:
                output = self._run(batch)
                self._runner.admit(output.missed)
                self._runner.save_pages(self._pool.next_saves(self.config.save_bytes_per_step))
                self._audit(batch, output)
            self._pool.advance(self.config.move_bytes_per_step, self._steps)
            self._pool.ledger.retire(self._steps)
            return batch is not None

    def _run(self, batch: Batch) -> StepOutput:
        planned_s = self._clock.now()
        try:
            output = self._runner.run(batch)
        except BaseException as error:
            self._scheduler.fail(batch, error)
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
        self._scheduler.commit(batch, results, ended_s)
        self._warn_of_strangers()
        return output

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
            self._master.update(rows, new)
            slots = self._pool.rows.peek(rows)
            resident = slots != ABSENT
            self._arena.write_rows(slots[resident], new[torch.from_numpy(resident)])
            self._pool.row_epochs.mark(rows)

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
            )

    def report(self) -> EngineReport:
        """What the pool holds, and what is left of the card."""
        with self._lock:
            return make_report(self._pool, self._master.num_bytes, self._dense.num_graphs, self._dense.buffer_bytes)

    def check(self) -> None:
        """Assert every invariant of the pool and both caches."""
        with self._lock:
            self._pool.check()

    def close(self) -> None:
        """Refuse what waits and everything after."""
        with self._lock:
            self._is_closed = True
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
        if not every or self._served // every == (self._served - len(batch.members)) // every:
            return
        which = -1 - self._served % every  # the request that made the count a multiple of N
        plain = self._runner.score_without_caches(batch.members[which].request)
        error = float(np.abs(plain - output.scores[which]).max())
        self._audits += 1
        self._audit_max_error = max(self._audit_max_error, error)
        if not error <= self.config.audit_tolerance:
            self._audit_mismatches += 1
            user_id = batch.members[which].request.history.user_id
            log.error("audit: scores of user %d differ by %.3g from an uncached run", user_id, error)

    def _warn_of_strangers(self) -> None:
        if not self._has_warned and self._pool.kv.strangers >= _STRANGER_WARNING:
            self._has_warned = True
            log.warning(
                "%d histories of known users matched nothing in their cached prefix; "
                "clients that send only the last events must set first_event",
                self._pool.kv.strangers,
            )


def _kernels(config: EngineConfig) -> str:
    return config.kernels if config.kernels != "auto" else "triton" if config.device == "cuda" else "torch"


def _make_dense(model: HstuModel, arena: Arena, pool: Pool, config: EngineConfig) -> Dense:
    memory = Memory(arena.k_pages, arena.v_pages, arena.rows)
    if not (config.device == "cuda" and config.cuda_graphs and _kernels(config) == "triton"):
        return EagerDense(model, memory)
    shape = model.config
    limits = Limits(
        num_events=max(config.max_batch_tokens, shape.max_request_tokens),
        num_sequences=config.max_batch_requests,
        num_candidates=min(config.max_batch_requests * shape.max_candidates, config.max_batch_tokens),
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
