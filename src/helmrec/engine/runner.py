"""Run one batch: find its rows, run the model over the arena's pages, return scores.

With `dense.py` and `graphs.py` the only part of the engine that touches tensors. It decides nothing: pages were
planned, rows are admitted by the cache's own rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.assemble import assemble
from helmrec.engine.dense import Dense, EagerDense, Memory, StepRows
from helmrec.engine.intake import Prepared
from helmrec.engine.scheduler import Batch
from helmrec.memory.arena import Arena
from helmrec.memory.embedding_cache import ABSENT, Admission
from helmrec.memory.expander import PageSave
from helmrec.memory.host_pages import HostPages
from helmrec.memory.host_tier import RowMaster
from helmrec.memory.pool import Pool
from helmrec.memory.prefix import KVPlan
from helmrec.model.hstu import HstuModel
from helmrec.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """Rows that were read from the host, and where the step left them on the device."""

    rows: IntArray
    gathered: Tensor
    positions: IntArray  # of each row in `gathered`


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step produced, request by request."""

    scores: list[NDArray[np.float32]]
    row_hits: NDArray[np.int64]
    row_misses: NDArray[np.int64]
    missed: Missed
    missed_bytes: int  # that crossed the bus for it


class Runner:
    """Model, arena and row master on one device."""

    def __init__(self, model: HstuModel, dense: Dense, arena: Arena, master: RowMaster, pool: Pool) -> None:
        self._model = model
        self._dense = dense
        self._arena = arena
        self._master = master
        self._pool = pool
        self._latest: Missed | None = None  # of the latest step, while its rows are where it left them
        self._host = HostPages(pool.expander, arena.pages)

    def run(self, batch: Batch) -> StepOutput:
        """Score a planned batch; K/V of new tokens land in the planned pages."""
        self._latest = None
        self._prepare_pages([member.plan for member in batch.members])
        members = [(member.request, member.plan) for member in batch.members]
        step = assemble(members, self._model.config, self._pool.geometry.page_tokens)
        all_rows = step.rows
        rows = StepRows.find(all_rows, self._pool.rows.lookup(all_rows))
        scored = self._dense.score(step, rows)
        scores = _split(scored.logits.cpu(), step.num_candidates)
        row_misses = step.count_by_request(rows.absent)
        row_hits = step.num_rows - row_misses
        self._latest = Missed(rows.missed, scored.rows, scored.absent_at)
        missed_bytes = rows.absent.size * self._pool.geometry.row_stride
        self._pool.bytes_by_cause["row-miss"] += missed_bytes
        return StepOutput(scores, row_hits, row_misses, self._latest, missed_bytes)

    def _prepare_pages(self, plans: Sequence[KVPlan]) -> None:
        """Bring back pages from the host and make copies, in the order the plans were made."""
        self._host.wait_for_saves()
        for plan in plans:
            if plan.loads:
                self._host.load(plan.loads)
                self._pool.bytes_by_cause["kv-reload"] += len(plan.loads) * self._pool.geometry.page_bytes
            if plan.copy is not None:
                self._arena.copy_tokens(plan.copy)

    def close(self) -> None:
        """Unlock the host's memory."""
        self._host.close()
        self._master.close()

    def save_pages(self, saves: Sequence[PageSave]) -> None:
        """Copy sealed pages to the host; off the request path."""
        self._host.save(saves)

    def refill(self, refill: Admission) -> None:
        """Read rows ahead of demand into empty slots; off the request path."""
        try:
            self._arena.write_rows(refill.slots, self._master.gather(refill.rows))
        except BaseException:
            self._pool.rows.withdraw(refill)
            raise
        self._pool.rows.publish(refill, is_cold=True)

    def admit(self, missed: Missed) -> None:
        """Give missed rows that earn it a slot; off the request path, and without a second trip over the bus.

        Does nothing once another step has run: it may have read its own rows into the same place.
        """
        if missed is not self._latest or not missed.rows.size:
            return
        admission = self._pool.rows.admit(missed.rows, missed.positions)
        try:
            self._arena.keep_rows(admission.slots, missed.gathered, admission.positions)
        except BaseException:
            self._pool.rows.withdraw(admission)
            raise
        self._pool.rows.publish(admission)

    def score_without_caches(self, request: Prepared) -> NDArray[np.float32]:
        """The plain answer: rows from the master, all history computed, in private pages."""
        config, model, num_tokens = self._model.config, self._model, request.history.num_tokens
        geometry = self._pool.geometry
        num_pages = geometry.pages_for(num_tokens)
        plan = KVPlan(prefix=None, num_resident=0, num_tokens=num_tokens, pages=list(range(num_pages)))
        step = assemble([(request, plan)], config, geometry.page_tokens)
        shape = (config.num_layers, max(1, num_pages), geometry.page_tokens, config.num_heads)
        k_pages, v_pages = (
            torch.empty((*shape, dim), dtype=model.dtype, device=model.device) for dim in (config.qk_dim, config.v_dim)
        )
        dense = EagerDense(model, Memory(k_pages, v_pages, self._arena.rows, self._master))
        absent = StepRows.find(step.rows, np.full(step.rows.size, ABSENT, np.int32))
        return _split(dense.score(step, absent).logits.cpu(), step.num_candidates)[0]


def _split(scores: Tensor, counts: list[int]) -> list[NDArray[np.float32]]:
    return np.split(scores.numpy(), np.cumsum(counts[:-1]))
