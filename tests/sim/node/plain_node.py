"""A node in plain Python over the engine's own classes: `Pool`, `KVCache`, `EmbeddingCache`, `KVHostTier`, `Scheduler`.

Slow, and the reference for the compiled node: the same costs, the same order of things, no code in common but the row
streams and the cost formulas.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from helmrec.costs.calibrated import BusLoad, ComputeWork, CostModel, CostTerms, compute_ms, host_ms, reload_ms, rows_ms
from helmrec.costs.reload import ReloadCosts
from helmrec.costs.steps import StepCosts
from helmrec.engine.intake import Intake, Prepared
from helmrec.engine.scheduler import Batch, Scheduler
from helmrec.errors import DeadlineExceeded, QueueFull
from helmrec.memory.embedding_cache import ABSENT, EmbeddingCache
from helmrec.memory.pool import Demand, Pool
from helmrec.memory.row_cache import Slots
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.node.plan import has_changed
from helmrec.sim.node.state import Faults, Outcomes, Status, make_outcomes
from helmrec.steps import Step
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.rows import candidate_rows, context_rows, history_rows, row_reads, row_space
from helmrec.traffic.trace import Trace
from helmrec.types import RankResult
from tests.helpers import host_rows


class _NoMover:
    def copy_rows(self, source: Slots, target: Slots) -> None: ...


class _KnownCosts(StepCosts):
    """Costs that need no learning."""

    def __init__(self, terms: CostTerms, rows_per_token: int) -> None:
        super().__init__()
        self._terms = terms
        self._rows_per_token = rows_per_token

    def seconds(self, num_tokens: int, num_pairs: float, *, is_whole_step: bool = False) -> float:
        floor_ms = 0.0 if is_whole_step else self._terms.compute_floor_ms
        work = ComputeWork(num_tokens, num_pairs, float(num_tokens * self._rows_per_token))
        return float(compute_ms(self._terms, work) - floor_ms) / 1e3


@dataclass(slots=True, eq=False)
class _Step:
    batch: Batch
    end_s: float
    missed_bytes: int
    delay_s: float  # by pages from the host
    columns: dict[Step, float]  # for the log


class PlainNode:
    def __init__(self, trace: Trace, config: NodeConfig, cost: CostModel, faults: Faults) -> None:
        self._config, self._terms, self._faults, self._trace = config, cost.terms(), faults, trace
        engine, geometry, model = config.engine, config.geometry, config.model
        self.pool = Pool(
            engine, geometry, Demand(model.num_rows, model.max_prefix_tokens, engine.max_batch_tokens), _NoMover()
        )
        page_s = reload_ms(self._terms, float(geometry.page_bytes), 1.0) / 1e3
        self.pool.host_tier.costs = ReloadCosts(_KnownCosts(self._terms, len(model.features)), page_s)
        self.scheduler = Scheduler(engine, self.pool.kv)
        self.outcomes: Outcomes = make_outcomes(trace.num_requests)
        self._reads = row_reads(trace, row_space(trace, model, 1.0))
        self._scratch = np.empty(self._reads.max_rows, np.int64)
        self._overlaps = engine.overlap is not False
        self._requests: dict[int, int] = {}
        self._futures: dict[Future[RankResult], int] = {}
        self._prepared: list[Prepared] = []
        self._intake = Intake(model, 1, engine.max_history)
        for index, request in enumerate(rank_requests(trace, model)):
            self._prepared.append(self._intake.prepare(request))
            self._requests[id(self._prepared[-1])] = index
        self._arrivals = deque(range(trace.num_requests))
        self._in_flight: _Step | None = None
        self._ending: _Step | None = None
        self._bus_free_s = self._compute_free_s = self._moved_s = self.now_s = 0.0
        self.launched = self.ended = 0
        self.log: list[dict[Step, float]] = []

    def run_until(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._take_arrivals()
            if self._ending is not None:
                self._end(self._ending)
            if self._update_is_due():
                self._update()
                continue
            self.pool.host_tier.costs.begin_step()
            batch = self.scheduler.next_batch(self.now_s)
            self._note_expired()
            if batch is not None:
                before, step = self._in_flight, self._launch(batch)
                if not self._overlaps:
                    self._wait_for(step)
                    continue
                self._in_flight = step
                if before is not None:
                    self._wait_for(before)
            elif self._in_flight is not None:
                self._wait_for(self._in_flight)
                self._in_flight = None
            elif self._arrivals:
                self.now_s = min(until_s, float(self._trace.time_s[self._arrivals[0]]))
            else:
                self.now_s = until_s

    def _take_arrivals(self) -> None:
        while self._arrivals and self._trace.time_s[self._arrivals[0]] <= self.now_s:
            index = self._arrivals.popleft()
            try:
                future = self.scheduler.submit(self._prepared[index], float(self._trace.time_s[index]))
                self._futures[future] = index
            except QueueFull:
                self.outcomes.status[index] = Status.QUEUE_FULL
            except DeadlineExceeded:
                self.outcomes.status[index] = Status.HOPELESS

    def _note_expired(self) -> None:
        for each in self.scheduler.take_expired():
            self.outcomes.status[self._futures[each.future]] = Status.EXPIRED

    def _launch(self, batch: Batch) -> _Step:
        terms, geometry = self._terms, self.pool.geometry
        num_read, num_missed = self._read_rows(batch)
        tokens, pairs, _ = batch.work()
        loads = sum(len(member.plan.loads) for member in batch.members)
        self.pool.bytes_by_cause["kv-reload"] += loads * geometry.page_bytes
        stride = geometry.row_stride
        load = BusLoad(float(num_read - num_missed) * stride, float(num_missed) * stride, float(num_missed))
        host_s = host_ms(terms, len(batch.members), tokens, float(num_read)) / 1e3
        bus_s = max(self.now_s + host_s, self._bus_free_s)
        beside_s = max(0.0, self._compute_free_s - bus_s)
        rows_s = rows_ms(terms, load, beside_s * 1e3, 1.0) / 1e3
        load_s = reload_ms(terms, float(loads * geometry.page_bytes), 1.0) / 1e3
        bus_end_s = bus_s + rows_s + load_s
        if self._in_flight is not None:
            overlap_s = max(0.0, min(bus_end_s, self._compute_free_s) - bus_s)
            self._in_flight.end_s += overlap_s * terms.beside_slowdown
            self._in_flight.columns[Step.COMPUTE_MS] += overlap_s * terms.beside_slowdown * 1e3
            self._compute_free_s += overlap_s * terms.beside_slowdown
        compute_s = compute_ms(terms, ComputeWork(tokens, pairs, float(num_read))) / 1e3
        without_pages_s = max(bus_s + rows_s, self._compute_free_s) + compute_s
        started_s = max(bus_s + rows_s + terms.reload_exposed * load_s, self._compute_free_s)
        end_s = max(started_s + compute_s, bus_end_s)
        self._bus_free_s, self._compute_free_s = bus_end_s, end_s
        self.now_s += host_s
        self.launched += 1
        columns = {
            Step.BEGIN_S: batch.started_s,
            Step.REQUESTS: 0 if batch.is_ahead else len(batch.members),
            Step.TOKENS: tokens,
            Step.PAIRS: pairs,
            Step.ROWS_READ: num_read,
            Step.ROWS_MISSED: num_missed,
            Step.PAGES_RELOADED: loads,
            Step.HOST_MS: host_s * 1e3 + terms.background_ms,
            Step.ROWS_MS: (rows_s + load_s) * 1e3,
            Step.COMPUTE_MS: compute_s * 1e3,
        }
        return _Step(batch, end_s, num_missed * stride, end_s - without_pages_s, columns)

    def _read_rows(self, batch: Batch) -> tuple[int, int]:
        """All rows of a batch are looked up, then what was missed is admitted, as on the device."""
        cache, model = host_rows(self.pool), self._config.model
        num_context, num_read, read = len(model.user_context), 0, []
        for member in batch.members:
            index, resident = self._requests[id(member.request)], member.plan.num_resident
            parts = [self._read(context_rows, index)] if resident < num_context else []
            first = member.request.window_start + max(0, resident - num_context)
            parts += [self._read(history_rows, index, first), self._read(candidate_rows, index)]
            self.outcomes.history_tokens[index] = member.plan.num_tokens
            self.outcomes.reused_tokens[index] = resident
            self.outcomes.computed_tokens[index] = member.num_tokens
            events = member.plan.num_tokens - max(resident, num_context) + member.request.num_candidates
            num_read += max(0, num_context - resident) + events * len(model.features) + len(model.request_context)
            read.append(np.concatenate(parts))
        rows = np.concatenate(read)
        slots = cache.lookup(rows)
        for member, found in zip(batch.members, np.split(slots, np.cumsum([part.size for part in read])), strict=False):
            self.outcomes.missed_rows[self._requests[id(member.request)]] = np.count_nonzero(found == ABSENT)
        missed = np.flatnonzero(slots == ABSENT)
        if missed.size:
            cache.publish(cache.admit(rows[missed], missed))
        return num_read, missed.size

    def _read(self, rows_of: Any, index: int, *first: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._scratch[: rows_of(self._reads, index, *first, self._scratch)].copy()

    def _wait_for(self, step: _Step) -> None:
        self._ending = step
        self.now_s = max(self.now_s, step.end_s)

    def _end(self, step: _Step) -> None:
        self._ending = None
        self.ended += 1
        self.log.append(step.columns | {Step.END_S: self.now_s})
        self.scheduler.commit(step.batch, self.now_s)
        for member in step.batch.members:
            index, arrived_s = self._requests[id(member.request)], member.waiting.arrived_s
            self.outcomes.status[index] = Status.SERVED
            self.outcomes.latency_ms[index] = (self.now_s - arrived_s) * 1e3 + self._terms.intake_ms
            self.outcomes.queue_ms[index] = (step.batch.started_s - arrived_s) * 1e3
        engine, pool = self._config.engine, self.pool
        if num_loads := sum(len(member.plan.loads) for member in step.batch.members):
            pool.host_tier.costs.observe_reload(num_loads, step.delay_s)
        pool.next_saves(engine.save_bytes_per_step)
        pool.ledger.retire(self.ended - 1)
        pool.advance(engine.move_bytes_per_step, self.launched, self.now_s - self._moved_s)
        self._moved_s = self.now_s
        self._refill(engine.refill_bytes_per_step - step.missed_bytes)
        self.now_s += self._terms.background_ms / 1e3
        self._take_arrivals()

    def _refill(self, budget_bytes: int) -> None:
        cache, stride = host_rows(self.pool), self.pool.geometry.row_stride
        if budget_bytes <= 0:
            return
        refill = cache.refill(budget_bytes // stride)
        cache.publish(refill, is_cold=True)
        if num := refill.rows.size:
            took_ms = rows_ms(self._terms, BusLoad(0.0, float(num * stride), float(num)), 1e9, 1.0)
            self._bus_free_s = max(self._bus_free_s, self.now_s) + took_ms / 1e3

    def _update_is_due(self) -> bool:
        epoch, times = self.pool.row_epochs.current, self._faults.update_s
        return epoch < times.size and bool(times[epoch] <= self.now_s)

    def _update(self) -> None:
        if self._in_flight is not None:
            self._wait_for(self._in_flight)
            self._in_flight = None
            return
        epoch, faults, catalogue = self.pool.row_epochs.current, self._faults, self._trace.catalogue
        salt, share = int(faults.update_salt[epoch]), float(faults.update_share[epoch])
        changed = [item for item in range(catalogue.num_items) if has_changed(item, salt, share)]
        self.pool.row_epochs.mark(np.array(changed, np.int64))
        num_bytes = share * catalogue.num_lanes * catalogue.num_blocks * self.pool.geometry.row_stride
        self.now_s += reload_ms(self._terms, num_bytes, 1.0) / 1e3

    @property
    def rows(self) -> EmbeddingCache:
        return host_rows(self.pool)
