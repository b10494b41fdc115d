"""Lay the tokens of a batch out flat: which rows, where each token goes, which pages hold its history.

Pure NumPy; the runner moves the result to the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared
from helmrec.memory.prefix import KVPlan
from helmrec.model.config import ModelConfig
from helmrec.model.window import gap_bucket
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
    num_rows: IntArray  # (requests,) how many of `rows` are read for each
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

    def count_by_request(self, positions: IntArray) -> IntArray:  # (requests,)
        """How many of these positions in `rows` belong to each request."""
        if not positions.size:
            return np.zeros(len(self.num_rows), np.int64)
        split, num_events = self.event_rows.size, self.event_rows.shape[1]
        of_events = self.event_owner[positions[positions < split] % num_events]
        of_context = self.context_owner[positions[positions >= split] - split]
        return np.bincount(np.concatenate([of_events, of_context]), minlength=len(self.num_rows))


class _Place(NamedTuple):
    """Where one request's tokens go, and what the compiled loop must know of it."""

    owner: int
    first_event: int  # column of its first event in the batch
    first_token: int  # flat position of its first token
    new_context: int  # user-context tokens to compute
    skipped: int  # events whose K/V are resident
    num_resident: int
    num_tokens: int
    request_context: int
    candidate_gap: int
    page_tokens: int
    placeholder: int  # the action of a candidate
    num_buckets: int


_FIXED = 5  # lines of the event block before the rows: owner, flat position, action, position, gap


def assemble(members: Sequence[tuple[Prepared, KVPlan]], config: ModelConfig, page_tokens: int) -> Assembly:
    places = _places(members, config, page_tokens)
    num_features = len(config.features)
    num_events = sum(_num_events(request, place) for (request, _), place in zip(members, places, strict=True))
    bounds = [*(place.first_token for place in places), places[-1].first_token + _num_tokens(*members[-1])]
    block = np.empty((_FIXED + num_features, num_events), np.int64)
    write_slots = np.empty(bounds[-1], np.int64)
    width = max(1, *(len(plan.pages) for _, plan in members))
    table = np.zeros((len(members), width), np.int32)
    for i, (request, plan) in enumerate(members):
        table[i, : len(plan.pages)] = plan.pages
        _lay_out(block, write_slots, request.columns, request.candidate_rows, table[i], places[i])
    context = _context(members, places)
    num_tables = len(config.user_context) + len(config.request_context)
    return Assembly(
        event_rows=block[_FIXED:],
        event_at=block[1],
        actions=block[2],
        positions=block[3],
        gaps=block[4],
        event_owner=block[0],
        candidates=np.flatnonzero(block[2] == config.num_actions),
        num_candidates=[request.num_candidates for request, _ in members],
        num_rows=np.array([_num_rows(request, p) for (request, _), p in zip(members, places, strict=True)]),
        context_rows=context[:, 1],
        context_at=context[:, 2],
        context_owner=context[:, 3],
        context_table=context[:, 0],
        context_counts=tuple(np.bincount(context[:, 0], minlength=num_tables).tolist()),
        cu_tokens=np.array(bounds, np.int32),
        num_resident=np.array([plan.num_resident for _, plan in members], np.int32),
        num_new=np.array([plan.num_new for _, plan in members], np.int32),
        page_table=table,
        write_slots=write_slots,
    )


def _num_tokens(request: Prepared, plan: KVPlan) -> int:
    return plan.num_new + request.request_rows.size + request.num_candidates


def _num_events(request: Prepared, place: _Place) -> int:
    return request.num_events - place.skipped + request.num_candidates


def _num_rows(request: Prepared, place: _Place) -> int:
    num_features = request.candidate_rows.shape[0]
    return num_features * _num_events(request, place) + place.new_context + place.request_context


def _places(members: Sequence[tuple[Prepared, KVPlan]], config: ModelConfig, page_tokens: int) -> list[_Place]:
    places, first_event, first_token = [], 0, 0
    num_user = len(config.user_context)
    for owner, (request, plan) in enumerate(members):
        place = _Place(
            owner=owner,
            first_event=first_event,
            first_token=first_token,
            new_context=max(0, num_user - plan.num_resident),
            skipped=max(0, plan.num_resident - num_user),
            num_resident=plan.num_resident,
            num_tokens=plan.num_tokens,
            request_context=request.request_rows.size,
            candidate_gap=request.candidate_gap,
            page_tokens=page_tokens,
            placeholder=config.num_actions,
            num_buckets=config.time_buckets,
        )
        places.append(place)
        first_event += _num_events(request, place)
        first_token += _num_tokens(request, plan)
    return places


def _context(members: Sequence[tuple[Prepared, KVPlan]], places: Sequence[_Place]) -> IntArray:
    """(context tokens, 4): table, row, flat position, owner; by table."""
    found: list[tuple[int, int, int, int]] = []
    for (request, _), place in zip(members, places, strict=True):
        rows = request.history.context_rows.tolist()
        start = len(rows) - place.new_context
        found += [(i, rows[i], place.first_token + i - start, place.owner) for i in range(start, len(rows))]
        after = place.first_token + place.num_tokens - place.num_resident
        asked = enumerate(request.request_rows.tolist())
        found += [(len(rows) + i, row, after + i, place.owner) for i, row in asked]
    return np.array(sorted(found), np.int64).reshape(-1, 4)


@numba.njit(cache=True)
def _lay_out(
    block: IntArray, slots: IntArray, columns: IntArray, candidates: IntArray, pages: NDArray[np.int32], place: _Place
) -> None:
    """Write one request's lines of the event block and its write slots."""
    num_features, at, token = candidates.shape[0], place.first_event, place.first_token + place.new_context
    for event in range(place.skipped, columns.shape[1]):
        # The first event of a window has no gap: it would reach outside the window.
        gap = columns[num_features + 1, event] - columns[num_features + 1, event - 1] if event else 0
        block[0, at] = place.owner
        block[1, at] = token
        block[2, at] = columns[num_features, event]
        block[3, at] = event
        block[4, at] = gap_bucket(gap, place.num_buckets)
        for feature in range(num_features):
            block[_FIXED + feature, at] = columns[feature, event]
        at, token = at + 1, token + 1
    token += place.request_context
    for candidate in range(candidates.shape[1]):
        block[0, at] = place.owner
        block[1, at] = token
        block[2, at] = place.placeholder
        block[3, at] = columns.shape[1]
        block[4, at] = place.candidate_gap
        for feature in range(num_features):
            block[_FIXED + feature, at] = candidates[feature, candidate]
        at, token = at + 1, token + 1
    kept = place.first_token
    for i in range(place.num_resident, place.num_tokens):
        slots[kept] = np.int64(pages[i // place.page_tokens]) * place.page_tokens + i % place.page_tokens
        kept += 1
    slots[kept:token] = -1
