"""Describes the step of a batch: which rows it reads, which of its tokens are new, which pages hold its history.

Pure NumPy; `layout.py` fills the arrays of the step, and the dense stage moves them to the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared
from helmrec.engine.layout import NO_CONTEXT, NUM_COLUMNS, PAGES, LayoutShape, Lengths, StepArrays, lay_out
from helmrec.memory.prefix import KVPlan, page_numbers
from helmrec.model.config import ModelConfig
from helmrec.model.query_frame import Query, QueryArrays, age_buckets, places, query_arrays
from helmrec.types import IntArray

Members = Sequence[tuple[Prepared, KVPlan]]


class ModelTerms(NamedTuple):
    """What some models read of each request besides its tokens."""

    query: QueryArrays | None = None  # in a model with a query frame
    num_full: Lengths | None = None  # in a model whose attention has a window with a tail; as in `RaggedBatch`
    times: IntArray | None = None  # in a model with an attention bias; as in `RaggedBatch`
    cu_times: Lengths | None = None


NO_TERMS = ModelTerms()


class StepForm:
    """The form of the steps of one model, and how their arrays are filled."""

    def __init__(self, config: ModelConfig, page_tokens: int, context_places: int = 0) -> None:
        """context_places: places of each context table in the arrays; 0: context tokens lie one after another."""
        self.config = config
        self.num_features = len(config.features)
        self.num_tables = len(config.user_context) + len(config.request_context)
        self.shape = LayoutShape(
            num_user=len(config.user_context),
            num_request=len(config.request_context),
            placeholder=config.num_actions,
            num_buckets=config.time_buckets,
            page_tokens=page_tokens,
            context_places=context_places,
            is_retrieval=config.retrieval is not None,
        )
        self._has_terms = bool(config.query_frame or config.full_attn_tail or config.attention_bias)

    def fill(self, step: "Outline", out: StepArrays) -> ModelTerms:
        """Fill the arrays of a step, and return what else its model reads of the requests."""
        pages = page_numbers()
        for _, plan in step.members:
            pages.extend(plan.pages)
        known = np.fromiter(step.known, np.int64, len(step.known)).reshape(-1, NUM_COLUMNS)
        lay_out(known, np.frombuffer(pages, np.int32), self._context(step), self.shape, out)
        return self._terms(step, out) if self._has_terms else NO_TERMS

    def _context(self, step: "Outline") -> IntArray:  # (requests, tables)
        if not self.num_tables:
            return NO_CONTEXT
        rows = [part for request, _ in step.members for part in (request.history.context_rows, request.request_rows)]
        return np.concatenate(rows).reshape(len(step.members), -1)

    def _terms(self, step: "Outline", out: StepArrays) -> ModelTerms:
        config, num_user, query, times, cu_times = self.config, self.shape.num_user, None, None, None
        requests = [request for request, _ in step.members]
        if (frame := config.query_frame) is not None:
            each = [Query(r.query_time, num_user, r.num_events, r.num_candidates) for r in requests]
            query = query_arrays(frame, config.time_buckets, each)
            self._put_in_query_frame(step, out)
        if config.attention_bias is not None:
            own = [request.times for request in requests if request.times is not None]
            times, cu_times = np.concatenate(own), np.cumsum([0, *(each.size for each in own)], dtype=np.int32)
        num_full = np.array([request.num_full for request in requests], np.int32) if config.full_attn_tail else None
        return ModelTerms(query, num_full, times, cu_times)

    def _put_in_query_frame(self, step: "Outline", out: StepArrays) -> None:
        """Count positions back from the query, and times as ages at the query."""
        config, frame, num = self.config, self.config.query_frame, step.num_events
        assert frame is not None
        cu_events = out.cu_events[: len(step.members) + 1]
        num_events = np.repeat([request.num_events for request, _ in step.members], np.diff(cu_events))
        out.positions[:num] = places(frame, self.shape.num_user + num_events - out.positions[:num])
        ages_s: list[IntArray] = []
        for (request, _), skipped in zip(step.members, step.num_skipped, strict=True):
            ages_s += [request.query_time - request.columns[-1, skipped:], np.zeros(request.num_candidates, np.int64)]
        out.gaps[:num] = age_buckets(frame, config.time_buckets, np.concatenate(ages_s))


class Outline:
    """A batch in numbers, before its tokens are laid out."""

    __slots__ = (
        "known",
        "members",
        "num_candidates",
        "num_context",
        "num_events",
        "num_rows",
        "num_skipped",
        "num_tokens",
        "total_candidates",
        "total_rows",
    )

    def __init__(self, members: Members, config: ModelConfig) -> None:
        num_features, num_user, num_request = (
            len(config.features),
            len(config.user_context),
            len(config.request_context),
        )
        is_retrieval = config.retrieval is not None
        self.members = members
        self.known = known = list[int]()  # of all requests, in the columns of `layout.py`
        self.num_candidates: list[int] = []  # by request
        self.num_rows: list[int] = []  # by request: entries read for it
        self.num_skipped: list[int] = []  # by request: resident events
        all_events = all_context = all_candidates = 0
        for request, plan in members:  # one plain loop, since it runs for every step
            resident, num_total, num_candidates = plan.num_resident, request.num_events, request.num_candidates
            skipped = resident - num_user if resident > num_user else 0
            num_events, num_context = num_total - skipped + num_candidates, num_request + num_user - resident + skipped
            known += (num_total, num_candidates, request.candidate_gap, resident, plan.num_tokens, len(plan.pages))
            known += request.places
            assert len(request.candidate_rows) == num_features, "a request for another model"  # read by address
            self.num_candidates.append(num_candidates)
            self.num_rows.append(num_features * num_events + num_context)
            self.num_skipped.append(skipped)
            all_events += num_events
            all_context += num_context
            all_candidates += num_candidates
        self.num_events, self.num_context, self.total_candidates = all_events, all_context, all_candidates
        self.total_rows = num_features * all_events + all_context
        self.num_tokens = all_events + all_context - (all_candidates if is_retrieval else 0)

    @property
    def table_width(self) -> int:
        return max(1, *self.known[PAGES::NUM_COLUMNS])


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The arrays of one step, exactly as long as it is; names as in `StepArrays`, `DenseInput` and `RaggedBatch`."""

    event_at: IntArray
    actions: IntArray
    positions: IntArray
    gaps: IntArray
    candidates: IntArray
    head_at: IntArray
    num_rows: IntArray  # (requests,) entries of `rows` read for each
    cu_events: IntArray
    cu_tokens: Lengths
    num_resident: Lengths
    num_new: Lengths
    page_table: NDArray[np.int32]
    write_slots: IntArray
    rows: IntArray  # all rows the step reads: those of its events, table by table, then those of its context tokens
    num_candidates: list[int]
    context_at: IntArray
    context_owner: IntArray
    context_table: IntArray
    context_counts: tuple[int, ...]
    terms: ModelTerms = NO_TERMS

    @property
    def event_rows(self) -> IntArray:  # (features, events)
        num_events = self.event_at.size
        return self.rows[: self.rows.size - self.context_at.size].reshape(-1, num_events)

    @property
    def context_rows(self) -> IntArray:  # (context tokens,)
        return self.rows[self.rows.size - self.context_at.size :]

    def count_by_request(self, positions: IntArray) -> IntArray:  # (requests,)
        """Count, by request, the given positions in `rows`. positions: ascending."""
        if not positions.size:
            return np.zeros(len(self.num_rows), np.int64)
        split, num_events = self.rows.size - self.context_at.size, self.event_at.size
        # One search per request and table: where its events start among the positions.
        starts = np.arange(0, split, num_events)[:, None] + self.cu_events
        counts = np.diff(np.searchsorted(positions, starts)).sum(0)
        of_context = positions[np.searchsorted(positions, split) :] - split
        return counts + np.bincount(self.context_owner[of_context], minlength=len(counts))


def assemble(members: Members, config: ModelConfig, page_tokens: int) -> Assembly:
    """Lay out one step for these requests and their plans."""
    return assemble_outline(Outline(members, config), StepForm(config, page_tokens))


def assemble_outline(step: Outline, form: StepForm) -> Assembly:
    """Lay out a step in arrays of its own."""
    num_requests, num_candidates, num_user = len(step.members), step.total_candidates, form.shape.num_user
    split = form.num_features * step.num_events
    rows = np.empty(step.total_rows, np.int64)
    event_at, actions, positions, gaps = np.empty((4, step.num_events), np.int64)
    out = StepArrays(
        event_rows=rows[:split].reshape(form.num_features, step.num_events),
        context_rows=rows[split:],
        event_at=event_at,
        actions=actions,
        positions=positions,
        gaps=gaps,
        candidates=np.empty(num_candidates, np.int64),
        head_at=np.empty(num_candidates, np.int64),
        context_at=np.empty(step.num_context, np.int64),
        write_slots=np.empty(step.num_tokens, np.int64),
        cu_events=np.empty(num_requests + 1, np.int64),
        cu_tokens=np.empty(num_requests + 1, np.int32),
        num_resident=np.empty(num_requests, np.int32),
        num_new=np.empty(num_requests, np.int32),
        page_table=np.empty((num_requests, step.table_width), np.int32),
    )
    terms = form.fill(step, out)
    tables = np.arange(form.num_tables)[:, None]
    table, owner = np.nonzero((tables >= num_user) | (tables >= out.num_resident))  # not resident, table by table
    arrays = {name: value for name, value in out._asdict().items() if name not in ("event_rows", "context_rows")}
    return Assembly(
        **arrays,
        num_rows=np.array(step.num_rows),
        rows=rows,
        num_candidates=step.num_candidates,
        context_owner=owner,
        context_table=table,
        context_counts=tuple(np.bincount(table, minlength=form.num_tables).tolist()),
        terms=terms,
    )
