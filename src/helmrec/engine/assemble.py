"""Lay the tokens of a batch out flat: which rows, where each token goes, which pages hold its history.

Pure NumPy; the runner moves the result to the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared
from helmrec.memory.kv_cache import KVPlan
from helmrec.model.config import ModelConfig
from helmrec.model.window import gap_buckets
from helmrec.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """Arrays of one step; names as in `DenseInput` and `RaggedBatch`."""

    event_rows: IntArray  # (features, events)
    event_at: IntArray
    actions: IntArray
    positions: IntArray
    gaps: IntArray
    event_owner: IntArray  # (events,) request of each event
    candidates: IntArray
    num_candidates: list[int]
    context_rows: IntArray
    context_at: IntArray
    context_owner: IntArray
    context_table: IntArray
    context_counts: tuple[int, ...]
    cu_tokens: NDArray[np.int32]
    num_resident: NDArray[np.int32]
    num_new: NDArray[np.int32]
    page_table: NDArray[np.int32]
    write_slots: IntArray

    @property
    def rows(self) -> IntArray:
        """All rows the step reads: those of its events, table by table, then those of its context tokens."""
        return np.concatenate([self.event_rows.ravel(), self.context_rows])

    @property
    def row_owners(self) -> IntArray:
        """The request each of `rows` is read for."""
        return np.concatenate([np.tile(self.event_owner, self.event_rows.shape[0]), self.context_owner])


@dataclass(slots=True)
class _Builder:
    config: ModelConfig
    page_tokens: int
    num_tokens: int = 0
    num_events: int = 0
    columns: list[IntArray] = field(default_factory=list)  # (5 + features, events): see `add_events`
    candidates: list[IntArray] = field(default_factory=list)
    context: list[tuple[int, int, int, int]] = field(default_factory=list)  # table, row, position, owner
    slots: list[IntArray] = field(default_factory=list)

    def add(self, owner: int, request: Prepared, plan: KVPlan) -> None:
        num_user = request.history.context_rows.size
        first_event = max(0, plan.num_resident - num_user)
        for i in range(min(plan.num_resident, num_user), num_user):
            self.add_context(i, int(request.history.context_rows[i]), owner)
        self.add_events(owner, request, first_event)
        for i, row in enumerate(request.request_rows.tolist()):
            self.add_context(num_user + i, row, owner)
        self.add_candidates(owner, request)
        kept = np.arange(plan.num_resident, plan.num_tokens)
        pages = np.array(plan.pages, np.int64)
        slots = np.full(self.num_tokens - sum(s.size for s in self.slots), -1, np.int64)
        slots[: kept.size] = pages[kept // self.page_tokens] * self.page_tokens + kept % self.page_tokens
        self.slots.append(slots)

    def add_context(self, table: int, row: int, owner: int) -> None:
        self.context.append((table, row, self.num_tokens, owner))
        self.num_tokens += 1

    def add_events(self, owner: int, request: Prepared, first: int) -> None:
        times = request.timestamps
        gaps = np.diff(times[max(first - 1, 0) :])
        if first == 0 and times.size:  # the anchor event's gap would reach outside the window
            gaps = np.concatenate([[0], gaps])
        self._add(
            owner,
            request.history.event_rows[:, first:],
            request.actions[first:],
            np.arange(first, times.size),
            gap_buckets(gaps, self.config.time_buckets),
        )

    def add_candidates(self, owner: int, request: Prepared) -> None:
        num = request.num_candidates
        self.candidates.append(np.arange(self.num_events, self.num_events + num))
        placeholder, position = self.config.num_actions, request.num_events
        self._add(owner, request.candidate_rows, placeholder, position, request.candidate_gap)

    def _add(self, owner: int, rows: IntArray, *columns: IntArray | int) -> None:
        num_features, num = rows.shape
        block = np.empty((5 + num_features, num), np.int64)
        block[0] = owner
        block[1] = np.arange(self.num_tokens, self.num_tokens + num)
        for i, column in enumerate(columns):
            block[2 + i] = column
        block[5:] = rows
        self.columns.append(block)
        self.num_tokens += num
        self.num_events += num


def assemble(members: Sequence[tuple[Prepared, KVPlan]], config: ModelConfig, page_tokens: int) -> Assembly:
    builder = _Builder(config, page_tokens)
    bounds = [0]
    for owner, (request, plan) in enumerate(members):
        builder.add(owner, request, plan)
        bounds.append(builder.num_tokens)
    columns = np.concatenate(builder.columns, axis=1)
    num_tables = len(config.user_context) + len(config.request_context)
    context = np.array(sorted(builder.context), np.int64).reshape(-1, 4)
    table = np.zeros((len(members), max(1, *(len(plan.pages) for _, plan in members))), np.int32)
    for i, (_, plan) in enumerate(members):
        table[i, : len(plan.pages)] = plan.pages
    return Assembly(
        event_rows=columns[5:],
        event_at=columns[1],
        actions=columns[2],
        positions=columns[3],
        gaps=columns[4],
        event_owner=columns[0],
        candidates=np.concatenate(builder.candidates),
        num_candidates=[request.num_candidates for request, _ in members],
        context_rows=context[:, 1],
        context_at=context[:, 2],
        context_owner=context[:, 3],
        context_table=context[:, 0],
        context_counts=tuple(np.bincount(context[:, 0], minlength=num_tables).tolist()),
        cu_tokens=np.array(bounds, np.int32),
        num_resident=np.array([plan.num_resident for _, plan in members], np.int32),
        num_new=np.array([plan.num_new for _, plan in members], np.int32),
        page_table=table,
        write_slots=np.concatenate(builder.slots),
    )
