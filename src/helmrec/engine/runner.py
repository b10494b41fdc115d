"""Run one batch: gather rows, run the model over the arena's pages, return scores.

The only part of the engine that touches tensors. It decides nothing: pages were planned, rows are admitted by
the cache's own rules.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.assemble import Assembly, assemble
from helmrec.engine.intake import Prepared
from helmrec.engine.scheduler import Batch
from helmrec.kernels.ragged import RaggedBatch
from helmrec.memory.arena import Arena
from helmrec.memory.embedding_cache import ABSENT
from helmrec.memory.host_tier import RowMaster
from helmrec.memory.kv_cache import KVPlan
from helmrec.memory.pool import Pool
from helmrec.model.hstu import DenseInput, HstuModel
from helmrec.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """Rows that were read from the host, and where they lie in the gathered output."""

    rows: IntArray
    positions: IntArray
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step produced, request by request."""

    scores: list[NDArray[np.float32]]
    row_hits: NDArray[np.int64]
    row_misses: NDArray[np.int64]
    missed: Missed


class Runner:
    """Model, arena and row master on one device."""

    def __init__(self, model: HstuModel, arena: Arena, master: RowMaster, pool: Pool) -> None:
        self._model = model
        self._arena = arena
        self._master = master
        self._pool = pool

    def run(self, batch: Batch) -> StepOutput:
        """Score a planned batch; K/V of new tokens land in the planned pages."""
        for member in batch.members:
            if member.plan.copy is not None:
                self._arena.copy_tokens(member.plan.copy)
        members = [(member.request, member.plan) for member in batch.members]
        page_tokens = self._pool.geometry.page_tokens
        step = assemble(members, self._model.config, page_tokens)
        rows = np.concatenate([step.event_rows.ravel(), step.context_rows])
        slots = self._pool.rows.lookup(rows)
        values, missed = self._gather(rows, slots)
        scores = self._score(step, values, page_tokens, self._arena.k_pages, self._arena.v_pages)
        owners = np.concatenate([np.tile(step.event_owner, step.event_rows.shape[0]), step.context_owner])
        absent = np.bincount(owners[slots == ABSENT], minlength=len(members))
        total = np.bincount(owners, minlength=len(members))
        return StepOutput(scores, total - absent, absent, missed)

    def admit(self, missed: Missed) -> None:
        """Give missed rows that earn it a slot; off the request path."""
        admission = self._pool.rows.admit(missed.rows, np.arange(missed.rows.size))
        try:
            self._arena.write_rows(admission.slots, missed.values[torch.from_numpy(admission.positions)])
        except BaseException:
            self._pool.rows.withdraw(admission)
            raise
        self._pool.rows.publish(admission)

    def score_without_caches(self, request: Prepared) -> NDArray[np.float32]:
        """The plain answer: rows from the master, all history computed, in private pages."""
        num_tokens = request.history.num_tokens
        plan = KVPlan(prefix=None, num_resident=0, num_tokens=num_tokens, pages=[0] if num_tokens else [])
        page_tokens = max(1, num_tokens)
        step = assemble([(request, plan)], self._model.config, page_tokens)
        rows = np.concatenate([step.event_rows.ravel(), step.context_rows])
        values = self._master.gather(rows).to(self._model.device)
        config = self._model.config
        pages = [
            torch.empty(
                (config.num_layers, 1, page_tokens, config.num_heads, dim),
                dtype=self._model.dtype,
                device=self._model.device,
            )
            for dim in (config.qk_dim, config.v_dim)
        ]
        return self._score(step, values, page_tokens, *pages)[0]

    def _gather(self, rows: IntArray, slots: NDArray[np.int32]) -> tuple[Tensor, Missed]:
        """Rows by slot where resident, else from the master. Returns (rows, row_dim) on the device."""
        device = self._model.device
        absent = np.flatnonzero(slots == ABSENT)
        from_host = self._master.gather(rows[absent])
        missed = Missed(rows[absent], absent, from_host)
        if absent.size == rows.size:
            return from_host.to(device), missed
        slots = np.where(slots == ABSENT, 0, slots)
        values = self._arena.rows.index_select(0, torch.from_numpy(slots).to(device))
        values[torch.from_numpy(absent).to(device)] = from_host.to(device)
        return values, missed

    def _score(
        self, step: Assembly, values: Tensor, page_tokens: int, k_pages: Tensor, v_pages: Tensor
    ) -> list[NDArray[np.float32]]:
        scores = self._model.score(self._dense_input(step, values, page_tokens), k_pages, v_pages)
        return [part.numpy() for part in scores.cpu().split(step.num_candidates)]

    def _dense_input(self, step: Assembly, values: Tensor, page_tokens: int) -> DenseInput:
        device = self._model.device

        def put(array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        num_features, num_events = step.event_rows.shape
        split = num_features * num_events
        return DenseInput(
            event_rows=values[:split].unflatten(0, (num_features, num_events)),
            event_at=put(step.event_at),
            actions=put(step.actions),
            positions=put(step.positions),
            gaps=put(step.gaps),
            context_rows=values[split:],
            context_at=put(step.context_at),
            context_counts=step.context_counts,
            candidates=put(step.candidates),
            ragged=RaggedBatch(
                cu_tokens=put(step.cu_tokens),
                num_resident=put(step.num_resident),
                num_new=put(step.num_new),
                page_table=put(step.page_table),
                write_slots=put(step.write_slots),
                num_context=len(self._model.config.request_context),
                page_tokens=page_tokens,
            ),
        )
