"""Runs one batch: lays it out, loads its pages, runs the model over the arena's pages, returns scores.

Only this module, the row stage, `dense.py` and `graphs.py` touch tensors in the engine. It makes no decisions: the
scheduler has planned the pages, and the row cache decides which rows it admits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.clock import Clock
from helmrec.engine.assemble import Members, Outline, assemble
from helmrec.engine.dense import EagerDense, Launched, Memory
from helmrec.engine.id_checks import are_finite
from helmrec.engine.intake import Prepared, RowUpdate
from helmrec.engine.row_stage import SentRows
from helmrec.engine.row_values import new_values
from helmrec.engine.scheduler import Batch
from helmrec.engine.setup import Parts
from helmrec.engine.timeline import TIMELINES, DeviceTimeline, Mark, StageTimes, Timeline
from helmrec.kernels.kv_rounding import empty_pages
from helmrec.memory.host_pages import HostPages
from helmrec.memory.prefix import KVPlan, page_numbers
from helmrec.memory.streams import InStream
from helmrec.memory.tiered_rows import TieredRows
from helmrec.types import IntArray, RowPosition


class Running(NamedTuple):
    """A launched step."""

    step: Outline
    launched: Launched
    row_epoch: int  # of the row values that it reads
    row_position: RowPosition  # of the same values, in the stream of deltas
    num_loads: int  # pages loaded from the host
    timeline: Timeline  # valid until three more steps are launched


class StepOutput(NamedTuple):
    """The output of a step, by request."""

    scores: list[NDArray[np.float32]]
    non_finite: frozenset[int]  # indices of requests whose scores are not finite
    row_hits: list[int]
    row_misses: list[int]
    num_missed: int  # rows of all requests
    missed_bytes: int  # of rows that crossed the bus
    ended_ago_s: float  # time between the end on the device and the wait of the host
    times: StageTimes
    running: Running


@dataclass(frozen=True, slots=True, eq=False)
class StagedRows:
    """Rows that are ready to be written between two steps."""

    rows: IntArray
    sent: SentRows | None  # None: no rows, or differences
    differences: RowUpdate | None = None  # an update with some, which are added when it is written

    def part(self, start: int, end: int) -> "StagedRows":
        """Return rows [start, end) of these, in the same memory."""
        sent = None if self.sent is None else self.sent.part(start, end)
        added = None if self.differences is None else self.differences.part(start, end)
        return StagedRows(self.rows[start:end], sent, added)


class Runner:
    """Runs steps on one device: model, arena and row master."""

    def __init__(self, parts: Parts, clock: Clock) -> None:
        self._model = parts.model
        self._dense = parts.dense
        self._arena = parts.arena
        self._kv_dtype, self._transposed_values = parts.arena.k_pages.dtype, parts.arena.transposed_values
        self._master, self._row_bytes = parts.master, parts.master.codec.stride
        self._pool = parts.pool
        self.host = HostPages(parts.pool.host_tier, parts.arena.pages, parts.row_kernels, parts.capture)
        self.row_position = RowPosition()  # of the rows that the next step reads
        timeline = DeviceTimeline if parts.arena.rows.is_cuda or parts.dense.stream is not None else Timeline
        self._timelines = deque(timeline(clock) for _ in range(TIMELINES))

    @property
    def is_asynchronous(self) -> bool:
        """Whether a launched step runs on the device while the host continues."""
        return self._dense.stream is not None

    def launch(self, batch: Batch) -> Running:
        """Start a planned batch; K/V of new tokens are in the planned pages before a later step reads them."""
        timeline = self._timelines[0]
        self._timelines.rotate()
        timeline.begin(batch.started_s)
        members = [(member.waiting.request, member.plan) for member in batch.members]
        if loads := [load for _, plan in members for load in plan.loads]:  # first, since loads take longest
            timeline.mark(Mark.LOADING, self.host.loading_stream)
            self.host.start_loading(loads)
            timeline.mark(Mark.LOADED, self.host.loading_stream)
            self._pool.bytes_by_cause["kv-reload"] += len(loads) * self._pool.geometry.page_bytes
        step = Outline(members, self._model.config)
        self.host.finish_saves_of(self._written_pages(members), self._dense.stream)
        if copies := [plan.copy for _, plan in members if plan.copy is not None]:
            with InStream(self._dense.stream):
                for copy in copies:  # the source is a settled page, never one that is being loaded
                    self._arena.copy_tokens(copy)
        wait_for_pages = partial(self._wait_for_pages, timeline) if loads else _no_pages_to_wait_for
        launched = self._dense.launch(step, wait_for_pages, timeline)
        epoch, position = self._pool.row_epochs.current, self.row_position
        return Running(step, launched, epoch, position, len(loads), timeline)

    def _written_pages(self, members: Members) -> list[int]:
        """Return the pages that a step writes, as far as saves may still read them."""
        if not self.host.is_saving:
            return []
        page_tokens = self._pool.geometry.page_tokens
        return [page for _, plan in members for page in plan.pages[plan.num_resident // page_tokens :]]

    def _wait_for_pages(self, timeline: Timeline) -> None:
        timeline.mark(Mark.WAITING)
        self.host.finish_loading()
        timeline.mark(Mark.RESUMED)

    def finish(self, running: Running) -> StepOutput:
        """Wait for a step and return its output. Steps are finished in the order they were launched."""
        step, scored = running.step, running.launched.wait()
        row_misses = scored.row_misses
        num_missed = sum(row_misses)
        ends = list(accumulate(step.num_candidates, initial=0))
        scores = [scored.logits[start:end] for start, end in pairwise(ends)]
        return StepOutput(
            scores=scores,
            non_finite=_non_finite(scored.logits, scores),
            row_hits=[num - missed for num, missed in zip(step.num_rows, row_misses, strict=True)],
            row_misses=row_misses,
            num_missed=num_missed,
            missed_bytes=num_missed * self._row_bytes,
            ended_ago_s=scored.ended_ago_s,
            times=running.timeline.stages(has_loads=running.num_loads > 0),
            running=running,
        )

    def close(self) -> None:
        """Wait for the device, then unlock the host memory."""
        self.synchronize()
        self.host.close()
        self._master.close()

    def save_pages(self, budget_bytes: int) -> None:
        """Copy the next sealed pages to the host, at most `budget_bytes` (at least a page); off the request path."""
        saves = self._pool.next_saves(budget_bytes)
        try:
            self.host.save(saves)
        except BaseException:
            self._pool.host_tier.withdraw(saves)
            raise

    def finish_saves_before_moves(self) -> None:
        """Make later writes to EMB pages wait for saves that may still read those pages."""
        self.host.finish_saves(self._dense.rows.stream)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self._arena.rows.is_cuda:
            torch.cuda.synchronize()

    def admit(self, running: Running) -> None:
        """Admit missed rows to the cache, unless rows have been updated since; off the request path."""
        if running.row_epoch == self._pool.row_epochs.current:
            running.launched.admit()

    def refill(self, budget_bytes: int) -> None:
        """Read rows ahead of demand into empty slots; off the request path."""
        if budget_bytes > 0:
            self._dense.rows.refill(budget_bytes)

    def warm(self, rows: IntArray, budget_bytes: int) -> None:
        """Read rows into empty slots, `budget_bytes` at a time. rows: coldest first."""
        if isinstance(self._master, TieredRows):
            self._master.warm(rows)
            return
        self._pool.rows.expect(rows)
        for _ in range(1 + rows.size * self._master.codec.stride // budget_bytes):
            self._dense.rows.refill(budget_bytes)

    def stage_rows(self, update: RowUpdate) -> StagedRows:
        """Bring an update to where it can be written at once, beside running steps. Any thread may call it.

        Differences wait for `write_rows`, since they are added to rows that earlier updates may still change.
        """
        if not update.rows.size:
            return StagedRows(update.rows, sent=None)
        if update.is_added is not None:
            return StagedRows(update.rows, sent=None, differences=update)
        return StagedRows(update.rows, self._dense.rows.send(update.rows, new_values(self._master, update)))

    def stage_stored(self, rows: IntArray, values: Tensor) -> StagedRows:  # values: (rows, width of a stored row)
        """The same for values as the master keeps them."""
        return StagedRows(rows, self._dense.rows.send(rows, values) if rows.size else None)

    def reread_rows(self, rows: IntArray) -> None:
        """Read resident ones of these rows again, which a shared master has new values of. rows: ascending."""
        changed = np.intersect1d(self._pool.rows.by_heat(), rows)
        for part in np.array_split(changed, range(_REREAD_ROWS, changed.size, _REREAD_ROWS)):
            if part.size:
                self._dense.rows.write(self._dense.rows.send(part, self._master.gather(part)))

    def finish_reads(self) -> None:
        """Wait until launched steps have read their rows."""
        self._dense.rows.finish_reads()

    def write_rows(self, sent: SentRows) -> None:
        """Replace rows in the master and in the pool between the row reads of two steps; layers run on meanwhile."""
        self._dense.rows.write(sent)

    def add_rows(self, staged: StagedRows) -> SentRows:
        """Add differences to rows; RequestError if a sum is not finite. Waits for row reads, not for layers."""
        update = staged.differences
        assert update is not None, "only differences are not sent ahead"
        self._dense.rows.finish_writes()
        return self._dense.rows.send(update.rows, new_values(self._master, update))

    def score_without_caches(self, request: Prepared) -> NDArray[np.float32]:
        """Score a request without caches: rows from the master, the whole history computed, in private pages."""
        config, model, num_tokens = self._model.config, self._model, request.history.num_tokens
        geometry = self._pool.geometry
        num_pages = geometry.pages_for(num_tokens)
        plan = KVPlan(prefix=None, num_resident=0, num_tokens=num_tokens, pages=page_numbers(range(num_pages)))
        step = assemble([(request, plan)], config, geometry.page_tokens)
        shape = (config.num_layers, max(1, num_pages), geometry.page_tokens, config.num_heads)
        k_pages = empty_pages((*shape, config.qk_dim), self._kv_dtype, model.device)
        transposed = self._transposed_values
        v_pages = empty_pages((*shape, config.v_dim), self._kv_dtype, model.device, transposed=transposed)
        plain = EagerDense(model, Memory(k_pages, v_pages), self._dense.rows)
        self._dense.rows.finish_writes()
        rows = self._master.gather(step.rows).to(model.device)
        rows = self._master.codec.recode(rows, model.row_codec)
        scores: NDArray[np.float32] = plain.score(step, rows, _no_pages_to_wait_for).cpu().numpy()
        return scores


_REREAD_ROWS = 65_536  # at once
_ALL_FINITE: frozenset[int] = frozenset()


def _non_finite(logits: NDArray[np.float32], scores: Sequence[NDArray[np.float32]]) -> frozenset[int]:
    if are_finite(logits):  # the common case, in one pass
        return _ALL_FINITE
    return frozenset(i for i, each in enumerate(scores) if not np.isfinite(each).all())


def _no_pages_to_wait_for() -> None:
    """Return at once: the step loads no page from the host."""
