"""Lays the tokens of a batch out flat: which rows it reads, where each token goes, which pages hold its history.

Pure NumPy and Numba; the dense stage moves the result to the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared
from helmrec.memory.prefix import KVPlan
from helmrec.model.config import ModelConfig
from helmrec.model.query_frame import Query, QueryArrays, age_buckets, places, query_arrays
from helmrec.model.window import gap_bucket
from helmrec.types import IntArray

Lengths = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The arrays of one step; names as in `DenseInput` and `RaggedBatch`."""

    event_at: IntArray
    actions: IntArray
    positions: IntArray
    gaps: IntArray
    candidates: IntArray  # indices of the candidates among the events
    head_at: IntArray  # (candidates,) flat position of the token that each is scored with
    num_rows: IntArray  # (requests,) entries of `rows` read for each
    cu_events: IntArray  # (requests + 1,) where each request's events start
    cu_tokens: Lengths
    num_resident: Lengths
    num_new: Lengths  # with tokens whose K/V are not kept
    page_table: NDArray[np.int32]
    write_slots: IntArray
    rows: IntArray  # all rows the step reads: those of its events, table by table, then those of its context tokens
    num_candidates: list[int]
    context_at: IntArray
    context_owner: IntArray
    context_table: IntArray
    context_counts: tuple[int, ...]
    query: QueryArrays | None = None  # in a model with a query frame
    num_full: Lengths | None = None  # in a model whose attention has a window with a tail; as in `RaggedBatch`
    times: IntArray | None = None  # in a model with an attention bias; as in `RaggedBatch`
    cu_times: Lengths | None = None

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


class _LayoutShape(NamedTuple):
    """Sizes of the model and its pages that the compiled layout needs."""

    num_features: int
    num_user: int  # user-context tokens
    num_request: int  # request-context tokens
    placeholder: int  # the action of a candidate
    num_buckets: int
    page_tokens: int
    table_width: int
    is_retrieval: bool  # candidates are no tokens: their place is after all tokens


class _Tokens(NamedTuple):
    """The compiled part of an assembly, in the order of its fields."""

    event_at: IntArray
    actions: IntArray
    positions: IntArray
    gaps: IntArray
    candidates: IntArray
    head_at: IntArray
    num_rows: IntArray
    cu_events: IntArray
    cu_tokens: Lengths
    num_resident: Lengths
    num_new: Lengths
    page_table: NDArray[np.int32]
    write_slots: IntArray


# Columns of the array that describes each request before its tokens are laid out.
_EVENTS, _CANDIDATES, _GAP, _RESIDENT, _TOKENS, _PAGES = range(6)


def assemble(members: Sequence[tuple[Prepared, KVPlan]], config: ModelConfig, page_tokens: int) -> Assembly:
    """Lay out one step for these requests and their plans."""
    num_features, num_user = len(config.features), len(config.user_context)
    known = [
        (r.num_events, r.num_candidates, r.candidate_gap, plan.num_resident, plan.num_tokens, len(plan.pages))
        for r, plan in members
    ]
    lines, parts = [], []
    for request, plan in members:
        skipped = max(0, plan.num_resident - num_user)
        # With the event before the first new one, if any: the first time gap reaches back to it.
        lines.append(request.columns[num_features:, max(0, skipped - 1) :])
        parts += [request.columns[:num_features, skipped:], request.candidate_rows]
    shape = _LayoutShape(
        num_features=num_features,
        num_user=num_user,
        num_request=len(config.request_context),
        placeholder=config.num_actions,
        num_buckets=config.time_buckets,
        page_tokens=page_tokens,
        table_width=max(1, *(each[_PAGES] for each in known)),
        is_retrieval=config.retrieval is not None,
    )
    pages = np.fromiter(chain.from_iterable(plan.pages for _, plan in members), np.int32)
    tokens = _lay_out(np.array(known), np.concatenate(lines, axis=1), pages, shape)
    query = None
    if (frame := config.query_frame) is not None:
        query = query_arrays(frame, config.time_buckets, [_query(r, num_user) for r, _ in members])
        tokens = _in_query_frame(tokens, members, config)
    context = _context(members, tokens, num_user)
    split = num_features * tokens.event_at.size
    rows = np.empty(split + context.rows.size, np.int64)
    np.concatenate(parts, axis=1, out=rows[:split].reshape(num_features, -1))
    rows[split:] = context.rows
    return Assembly(
        *tokens,
        rows=rows,
        num_candidates=[each[_CANDIDATES] for each in known],
        context_at=context.at,
        context_owner=context.owners,
        context_table=context.tables,
        context_counts=tuple(context.counts.tolist()),
        query=query,
        num_full=np.array([r.num_full for r, _ in members], np.int32) if config.full_attn_tail else None,
        **_times(members, config),
    )


def _times(members: Sequence[tuple[Prepared, KVPlan]], config: ModelConfig) -> dict[str, Any]:
    """Return the times of all requests one after another, in a model with an attention bias."""
    if config.attention_bias is None:
        return {}
    times = [request.times for request, _ in members if request.times is not None]
    cu_times = np.cumsum([0, *(each.size for each in times)], dtype=np.int32)
    return {"times": np.concatenate(times), "cu_times": cu_times}


def _query(request: Prepared, num_user: int) -> Query:
    return Query(request.query_time, num_user, request.num_events, request.num_candidates)


def _in_query_frame(tokens: _Tokens, members: Sequence[tuple[Prepared, KVPlan]], config: ModelConfig) -> _Tokens:
    """Return the tokens with positions counted back from the query and times as ages at the query."""
    frame, num_user = config.query_frame, len(config.user_context)
    assert frame is not None
    num_events = np.repeat([request.num_events for request, _ in members], np.diff(tokens.cu_events))
    positions = places(frame, num_user + num_events - tokens.positions)
    ages_s: list[IntArray] = []
    for request, plan in members:
        new = request.columns[-1, max(0, plan.num_resident - num_user) :]
        ages_s += [request.query_time - new, np.zeros(request.num_candidates, np.int64)]
    return tokens._replace(positions=positions, gaps=age_buckets(frame, config.time_buckets, np.concatenate(ages_s)))


class _Context(NamedTuple):
    """Context tokens by table, then by request; (context tokens,) each."""

    tables: IntArray
    owners: IntArray
    rows: IntArray
    at: IntArray  # flat positions
    counts: IntArray  # (tables,) tokens of each


def _context(members: Sequence[tuple[Prepared, KVPlan]], tokens: _Tokens, num_user: int) -> _Context:
    rows = [part for request, _ in members for part in (request.history.context_rows, request.request_rows)]
    by_request = np.concatenate(rows).reshape(len(members), -1)
    return _lay_out_context(by_request, tokens.cu_tokens, tokens.num_resident, tokens.num_new, num_user)


@numba.njit(cache=True)
def _lay_out_context(
    by_request: IntArray, cu_tokens: Lengths, num_resident: Lengths, num_new: Lengths, num_user: int
) -> _Context:
    """Lay out the context tokens of a step. by_request: (requests, tables) rows, user tables first.

    User-context tokens precede the events and may be resident; request-context tokens follow them and never are.
    """
    tables, owners, rows, at = np.empty((4, by_request.size), np.int64)
    num_requests, num_tables = by_request.shape
    counts = np.zeros(num_tables, np.int64)
    num = 0
    for table in range(num_tables):
        for i in range(num_requests):
            if table < num_resident[i] and table < num_user:
                continue
            tables[num], owners[num], rows[num] = table, i, by_request[i, table]
            skipped = min(num_resident[i], num_user)
            at[num] = cu_tokens[i] + (table - skipped if table < num_user else num_new[i] + table - num_user)
            counts[table] += 1
            num += 1
    return _Context(tables[:num], owners[:num], rows[:num], at[:num], counts)


@numba.njit(cache=True)
def _lay_out(known: IntArray, lines: IntArray, pages: NDArray[np.int32], shape: _LayoutShape) -> _Tokens:
    """Lay out all requests. lines: (2, any) their actions and timestamps, concatenated; pages: theirs, concatenated.

    Parts of arrays are sliced first and then filled from their start: the compiler uses no vector instructions for an
    index that may be negative, as a sum may. Assigning one slice to another would be as fast, but takes seconds to
    compile.
    """
    num_requests = known.shape[0]
    cu_events, cu_tokens = _starts(known, shape)
    at, actions, positions, gaps = np.empty((4, cu_events[-1]), np.int64)
    candidates, head_at = np.empty((2, np.sum(known[:, _CANDIDATES])), np.int64)
    num_rows = np.empty(num_requests, np.int64)
    line = candidate = 0
    for i in range(num_requests):
        skipped = max(0, known[i, _RESIDENT] - shape.num_user)
        first, end = cu_events[i], cu_events[i + 1]
        split, num_new = end - known[i, _CANDIDATES], known[i, _EVENTS] - skipped
        line_end = line + num_new + (skipped > 0)
        new_context = max(0, shape.num_user - known[i, _RESIDENT])
        token = cu_tokens[i] + new_context
        num_rows[i] = shape.num_features * (end - first) + new_context + shape.num_request
        _count_from(at[first:split], token)
        of_head = head_at[candidate : candidate + end - split]
        if shape.is_retrieval:
            fill(at[split:end], cu_tokens[-1])
            fill(of_head, cu_tokens[i + 1] - 1)
        else:
            _count_from(at[split:end], token + num_new + shape.num_request)
            _count_from(of_head, token + num_new + shape.num_request)
        _count_from(positions[first:split], skipped)
        fill(positions[split:end], known[i, _EVENTS])
        copy(actions[first:split], lines[0, line_end - num_new : line_end])
        fill(actions[split:end], shape.placeholder)
        _put_gaps(gaps[first:split], lines[1, line:line_end], shape.num_buckets)
        fill(gaps[split:end], known[i, _GAP])
        _count_from(candidates[candidate : candidate + end - split], split)
        line, candidate = line_end, candidate + end - split
    num_resident = known[:, _RESIDENT].astype(np.int32)
    num_new = (known[:, _EVENTS] + shape.num_user - known[:, _RESIDENT]).astype(np.int32)
    num_kept = (known[:, _TOKENS] - known[:, _RESIDENT]).astype(np.int32)
    table = _page_table(known[:, _PAGES], pages, shape.table_width)
    slots = _write_slots(cu_tokens, num_resident, num_kept, table, shape.page_tokens)
    return _Tokens(
        at,
        actions,
        positions,
        gaps,
        candidates,
        head_at,
        num_rows,
        cu_events,
        cu_tokens,
        num_resident,
        num_new,
        table,
        slots,
    )


@numba.njit(cache=True)
def _starts(known: IntArray, shape: _LayoutShape) -> tuple[IntArray, Lengths]:
    """Return where the events and the tokens of each request start, and where the last end."""
    cu_events, cu_tokens = np.zeros(len(known) + 1, np.int64), np.zeros(len(known) + 1, np.int32)
    for i in range(len(known)):
        skipped = max(0, known[i, _RESIDENT] - shape.num_user)
        cu_events[i + 1] = cu_events[i] + known[i, _EVENTS] - skipped + known[i, _CANDIDATES]
        num_new = known[i, _EVENTS] + shape.num_user - known[i, _RESIDENT]
        cu_tokens[i + 1] = cu_tokens[i] + num_new + shape.num_request
        if not shape.is_retrieval:
            cu_tokens[i + 1] += known[i, _CANDIDATES]
    return cu_events, cu_tokens


@numba.njit(cache=True)
def copy(target: NDArray[np.integer], source: NDArray[np.integer]) -> None:
    """Copy `source` to the start of `target`."""
    for i in range(source.size):
        target[i] = source[i]


@numba.njit(cache=True)
def fill(target: NDArray[np.integer], value: int) -> None:
    for i in range(target.size):
        target[i] = value


@numba.njit(cache=True)
def _count_from(target: IntArray, start: int) -> None:
    for i in range(target.size):
        target[i] = start + i


@numba.njit(cache=True)
def _put_gaps(gaps: IntArray, times: IntArray, num_buckets: int) -> None:
    """Fill in the time buckets of the last events. The first event of a window has gap 0: nothing precedes it there."""
    if not gaps.size:
        return
    before, own = times[0], times[times.size - gaps.size :]
    for i in range(gaps.size):
        gaps[i] = gap_bucket(own[i] - before, num_buckets)
        before = own[i]


@numba.njit(cache=True)
def _page_table(num_pages: IntArray, pages: NDArray[np.int32], width: int) -> NDArray[np.int32]:  # (requests, width)
    table = np.zeros((num_pages.size, width), np.int32)
    start = 0
    for i in range(num_pages.size):
        copy(table[i], pages[start : start + num_pages[i]])
        start += num_pages[i]
    return table


@numba.njit(cache=True)
def _write_slots(
    cu_tokens: Lengths, num_resident: Lengths, num_kept: Lengths, page_table: NDArray[np.int32], page_tokens: int
) -> IntArray:  # (tokens,)
    """Compute where the K/V of each token is written: page * page_tokens + offset, or -1 if it is not kept."""
    slots = np.full(cu_tokens[-1], -1, np.int64)
    for i in range(num_kept.size):
        at, token, end = cu_tokens[i], num_resident[i], num_resident[i] + num_kept[i]
        while token < end:
            page, offset = divmod(token, page_tokens)
            num = min(page_tokens - offset, end - token)
            first = np.int64(page_table[i, page]) * page_tokens + offset
            _count_from(slots[at : at + num], first)
            at, token = at + num, token + num
    return slots
