"""The compiled node computes ahead what the engine's own relay would, signal by signal."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from helmrec.config import RelayConfig
from helmrec.costs.calibrated import CostModel
from helmrec.engine.relay.pre_inference import Relay
from helmrec.engine.scheduler import Batch, Scheduled
from helmrec.memory.embedding_cache import ABSENT
from helmrec.memory.ledger import Owner
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.relay import VERDICTS, R, T
from helmrec.sim.node.state import Status, make_outcomes, no_faults
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.rows import context_rows, history_rows
from helmrec.traffic.trace import Trace
from helmrec.types import PrefillRequest
from helmrec_bench.cascade import CascadeConfig
from tests.helpers import host_rows
from tests.sim.node.plain_node import PlainNode, _Step
from tests.sim.node.test_conformance import PAGE_BYTES, SLOW, assert_same, node_config
from tests.traffic.cases import small_trace

CASCADE = CascadeConfig(retrieval_ms=400, preprocessing_ms=200)
RELAY = RelayConfig(
    budget_ms=150, risk=0.5, hold_ms=1_500, chunk_tokens=21, max_held=0.3, max_compute=0.4, max_leases=9
)


class RelayNode(PlainNode):
    """A plain node with the engine's relay."""

    def __init__(self, trace: Trace, config: NodeConfig, cost: CostModel, signal_s: np.ndarray[Any, Any]) -> None:
        super().__init__(trace, config, cost, no_faults())
        model = config.model
        self._signals = sorted(range(trace.num_requests), key=lambda i: (signal_s[i], i))
        self._signal_s, self._next_signal, self._whole = signal_s, 0, []
        user_tables = {table.name for table in model.user_context}
        for rank in rank_requests(trace, model):
            fields = {
                name: getattr(rank, name) for name in ("items", "actions", "timestamps", "features", "first_event")
            }
            context = {name: value for name, value in rank.context.items() if name in user_tables}
            request = PrefillRequest(rank.user_id, context=context, num_candidates=len(rank.candidates), **fields)
            self._whole.append((request, self._intake.prepare_ahead(request)))
        self.relay = Relay(config.engine.relay, self.scheduler, self.pool.kv, self.pool.host_tier.costs.steps)
        self._commit_pages = self.scheduler.commit
        self.scheduler.commit = self._commit  # type: ignore[method-assign]

    def run_until(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._take_arrivals()
            if self._ending is not None:
                self._end(self._ending)
            self._take_signals()
            self.pool.host_tier.costs.begin_step()
            batch = self.scheduler.next_batch(self.now_s)
            self._note_expired()
            is_stacked = self._in_flight is not None and self._in_flight.batch.is_ahead
            if batch is None and not self.scheduler.queue_length and not is_stacked:
                batch = self.relay.next_batch(self.now_s)
                self._name_chunks([] if batch is None else batch.members)
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
            else:
                coming = [float(self._trace.time_s[i]) for i in list(self._arrivals)[:1]]
                coming += [float(self._signal_s[i]) for i in self._signals[self._next_signal :][:1]]
                self.now_s = min([until_s, *coming])

    def _name_chunks(self, members: list[Scheduled]) -> None:
        """Which signal each chunk is of."""
        for job, member in zip(self.relay._in_step, members, strict=True):
            index = next(i for i, (_, whole) in enumerate(self._whole) if whole is job.whole)
            self._requests[id(member.request)] = index

    def _take_signals(self) -> None:
        self.relay.expire(self.now_s)
        kv_pages = self.pool.ledger.num_pages - self.pool.ledger.count(Owner.EMB)
        while self._next_signal < len(self._signals) and self._signal_s[self._signals[self._next_signal]] <= self.now_s:
            self.relay.signal(*self._whole[self._signals[self._next_signal]], kv_pages, self.now_s)
            self._next_signal += 1

    def _read_rows(self, batch: Batch) -> tuple[int, int]:
        if not batch.is_ahead:
            return super()._read_rows(batch)
        cache, model, num_read, read = host_rows(self.pool), self._config.model, 0, []
        num_context = len(model.user_context)
        for member in batch.members:
            index, plan, start = self._requests[id(member.request)], member.plan, member.request.window_start
            read += [self._read(context_rows, index)] if plan.num_resident < num_context else []
            later = self._read(history_rows, index, start + plan.num_tokens - num_context).size
            rows = self._read(history_rows, index, start + max(0, plan.num_resident - num_context))
            read.append(rows[: rows.size - later])
            events = plan.num_tokens - max(plan.num_resident, num_context)
            num_read += max(0, num_context - plan.num_resident) + events * len(model.features)
            num_read += len(model.request_context)
        rows = np.concatenate(read)
        missed = np.flatnonzero(cache.lookup(rows) == ABSENT)
        if missed.size:
            cache.publish(cache.admit(rows[missed], missed))
        return num_read, missed.size

    def _end(self, step: _Step) -> None:
        """Outcomes do not change when a prefix is computed ahead."""
        columns: list[np.ndarray[Any, Any]] = list(self.outcomes)
        saved = [column.copy() for column in columns]
        super()._end(step)
        if step.batch.is_ahead:
            for column, before in zip(columns, saved, strict=True):
                column[:] = before

    def _commit(self, batch: Batch, now: float, non_finite: Collection[int] = ()) -> float:
        took_s = self._commit_pages(batch, now, non_finite)
        self.relay.note_step(batch, took_s, now)
        return took_s


CASES: dict[str, dict[str, Any]] = {
    "as the engine comes": {},
    "steps in turn": {"overlap": False},
    "all are at risk": {"relay": RELAY.model_copy(update={"risk": 0.0, "max_held": 0.6, "max_compute": 1.0})},
    "little time": {"relay": RELAY.model_copy(update={"risk": 0.0, "max_compute": 0.1})},
    "short holds": {"relay": RELAY.model_copy(update={"hold_ms": 300.0, "risk": 0.0})},
    "host tier": {"host_kv_bytes": 300 * PAGE_BYTES, "kv_reload": "always", "save_bytes_per_step": 9 * PAGE_BYTES},
    "everything is admitted": {"kv_admission": "always", "row_admission": "always"},
    "KV shrinks": {"relay": RELAY.model_copy(update={"risk": 0.0, "max_held": 1.0, "max_compute": 1.0})},
}


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_node_computes_ahead_as_the_engine_does(name: str) -> None:
    trace, config = small_trace(0), node_config(**{"relay": RELAY} | CASES[name])
    before_s = CASCADE.rank_times(np.zeros(trace.num_requests), np.random.default_rng(0))
    signal_s = trace.time_s - before_s
    node = Node(config, SLOW, prepare_requests(trace, config), make_outcomes(trace.num_requests))
    order = np.argsort(signal_s, kind="stable")
    node.send(np.arange(trace.num_requests), trace.time_s)
    node.send_signals(order, signal_s[order])
    plain = RelayNode(trace, config, SLOW, signal_s)
    for time_s, alpha in ((5.0, config.alpha_max), (12.0, 0.1), (trace.duration_s + 1_000, 0.4)):
        node.run_until(time_s)
        node.check()
        plain.run_until(time_s)
        plain.pool.check()
        plain.relay.check()
        if name == "KV shrinks":
            node.aim(alpha)
            plain.pool.aim(alpha)
    counts, stats = node.state.relay.counts, plain.relay.stats(plain.now_s)
    assert [*counts[list(VERDICTS)].tolist(), 0] == list(stats.verdicts.values()), "no user is forgotten"
    assert [counts[R.LEASES], counts[R.HELD_PAGES]] == [stats.leases, stats.held_pages]
    assert [counts[R.USED], counts[R.EXPIRED], counts[R.LOST]] == [stats.used, stats.expired, stats.lost]
    assert counts[R.STEPS] == stats.steps
    assert_same(node, plain)
    assert counts[R.ADMITTED] > 10
    assert counts[R.USED] > 10
    assert (node.outcomes.status == Status.SERVED).all()
    if name == "KV shrinks":
        assert counts[R.LOST] > 1
    if name == "short holds":
        assert counts[R.EXPIRED] > 20
    refusals = {"as the engine comes": R.NOT_AT_RISK, "all are at risk": R.HELD_ALREADY, "little time": R.TOO_BUSY}
    if name in refusals:
        assert counts[refusals[name]] > 10


def test_bounds_hold_whatever_is_signalled() -> None:
    relay = RELAY.model_copy(update={"risk": 0.0})
    trace, config = small_trace(1), node_config(relay=relay)
    node = Node(config, SLOW, prepare_requests(trace, config), make_outcomes(trace.num_requests))
    times_s = np.repeat(trace.time_s, 5) - 1.0
    node.send(np.arange(trace.num_requests), trace.time_s)
    node.send_signals(np.repeat(np.arange(trace.num_requests), 5), times_s)
    for time_s in np.arange(0.5, trace.duration_s, 0.5):
        node.run_until(float(time_s))
        stats = node.stats()
        assert stats.leased_pages <= relay.max_held * (stats.num_pages - stats.emb_pages)
        assert stats.leases <= relay.max_leases
    assert node.state.relay.clocks[T.MOST_SHARE] <= relay.max_compute + 1e-9
    assert node.state.relay.counts[R.HELD_ALREADY] > 100
