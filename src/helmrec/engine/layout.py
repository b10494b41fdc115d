"""Lays the tokens of a step out in arrays, in one compiled call: exactly as long as the step, or padded to a graph.

Pure: compiled loops over arrays. Padding reads no row, is written to the last token's row, which is unused, and keeps
no K/V. Arrays are filled to their end, because sizes of graphs share memory and values of another size may be invalid
indices.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.model.window import gap_bucket
from helmrec.types import IntArray

Lengths = NDArray[np.int32]
ABSENT = -1  # the row of padding, as in `kernels/row_table.py`


class LayoutShape(NamedTuple):
    """Sizes of the model and its pages that the compiled layout needs."""

    num_user: int  # user-context tokens
    num_request: int  # request-context tokens
    placeholder: int  # the action of a candidate
    num_buckets: int
    page_tokens: int
    context_places: int  # places of each context table; 0: context tokens lie one after another
    is_retrieval: bool  # candidates are no tokens: their place is after all tokens


class StepArrays(NamedTuple):
    """The arrays of a step. Events are new events and candidates."""

    event_rows: NDArray[np.integer]  # (features, events)
    context_rows: NDArray[np.integer]  # (context,)
    event_at: IntArray  # (events,) flat position, as are the next
    actions: IntArray
    positions: IntArray
    gaps: IntArray
    candidates: IntArray  # (candidates,) indices of the candidates among the events
    head_at: IntArray  # (candidates,) flat position of the token that each is scored with
    context_at: IntArray  # (context,)
    write_slots: IntArray  # (tokens,)
    cu_events: IntArray  # (requests + 1,)
    cu_tokens: Lengths
    num_resident: Lengths  # (requests,)
    num_new: Lengths  # with tokens whose K/V are not kept
    page_table: NDArray[np.int32]  # (requests, pages)


# Columns of the array that describes each request before its tokens are laid out.
EVENTS, CANDIDATES, GAP, RESIDENT, TOKENS, PAGES = range(6)
NUM_COLUMNS = 6
NO_REQUESTS = np.empty((0, NUM_COLUMNS), np.int64)
NO_CONTEXT = np.empty((0, 0), np.int64)
NO_LINES = np.empty((2, 0), np.int64)
NO_PAGES = np.empty(0, np.int32)


@numba.njit(cache=True, nogil=True)
def lay_out(
    known: IntArray,
    lines: IntArray,
    pages: NDArray[np.int32],
    context: IntArray,
    shape: LayoutShape,
    out: StepArrays,
) -> None:
    """Lay out all requests, except rows of events, whose padding alone is filled in.

    lines: (2, any) actions and timestamps of all requests, one after another; pages: theirs, likewise; context:
    (requests, tables) rows, user tables first. Parts of arrays are sliced first and then filled from their start: the
    compiler uses no vector instructions for an index that may be negative, as a sum may. Assigning one slice to
    another would be as fast, but takes seconds to compile.
    """
    num_requests = known.shape[0]
    _put_starts(known, shape, out)
    line = candidate = 0
    for i in range(num_requests):
        skipped = max(0, known[i, RESIDENT] - shape.num_user)
        first, end = out.cu_events[i], out.cu_events[i + 1]
        split, num_new = end - known[i, CANDIDATES], known[i, EVENTS] - skipped
        line_end = line + num_new + (skipped > 0)
        token = out.cu_tokens[i] + max(0, shape.num_user - known[i, RESIDENT])
        _count_from(out.event_at[first:split], token)
        of_head = out.head_at[candidate : candidate + end - split]
        if shape.is_retrieval:
            _fill(out.event_at[split:end], int(out.cu_tokens[num_requests]))
            _fill(of_head, out.cu_tokens[i + 1] - 1)
        else:
            _count_from(out.event_at[split:end], token + num_new + shape.num_request)
            _count_from(of_head, token + num_new + shape.num_request)
        _count_from(out.positions[first:split], skipped)
        _fill(out.positions[split:end], known[i, EVENTS])
        _copy(out.actions[first:split], lines[0, line_end - num_new : line_end])
        _fill(out.actions[split:end], shape.placeholder)
        _put_gaps(out.gaps[first:split], lines[1, line:line_end], shape.num_buckets)
        _fill(out.gaps[split:end], known[i, GAP])
        _count_from(out.candidates[candidate : candidate + end - split], split)
        line, candidate = line_end, candidate + end - split
    _put_pages(known[:, PAGES], pages, out.page_table)
    _put_context(context, shape, out, num_requests)
    _put_write_slots(known, shape.page_tokens, out)
    _pad(out, int(out.cu_events[num_requests]), candidate)


@numba.njit(cache=True, nogil=True)
def _put_starts(known: IntArray, shape: LayoutShape, out: StepArrays) -> None:
    """Fill in where the events and the tokens of each request start, and how many are resident and new."""
    num_requests = known.shape[0]
    events = tokens = 0
    for i in range(num_requests):
        resident, num_events, num_candidates = known[i, RESIDENT], known[i, EVENTS], known[i, CANDIDATES]
        out.cu_events[i], out.cu_tokens[i] = events, tokens
        out.num_resident[i], out.num_new[i] = resident, num_events + shape.num_user - resident
        events += num_events - max(0, resident - shape.num_user) + num_candidates
        tokens += num_events + shape.num_user - resident + shape.num_request
        if not shape.is_retrieval:
            tokens += num_candidates
    _fill(out.cu_events[num_requests:], events)
    _fill(out.cu_tokens[num_requests:], tokens)
    _fill(out.num_resident[num_requests:], 0)
    _fill(out.num_new[num_requests:], 0)


@numba.njit(cache=True, nogil=True)
def _pad(out: StepArrays, num_events: int, num_candidates: int) -> None:
    """Fill the arrays from the end of the step on."""
    for feature in range(out.event_rows.shape[0]):
        _fill(out.event_rows[feature, num_events:], ABSENT)
    _fill(out.event_at[num_events:], out.write_slots.size - 1)
    _fill(out.actions[num_events:], 0)
    _fill(out.positions[num_events:], 0)
    _fill(out.gaps[num_events:], 0)
    _fill(out.candidates[num_candidates:], 0)
    _fill(out.head_at[num_candidates:], 0)


@numba.njit(cache=True, nogil=True)
def _put_context(context: IntArray, shape: LayoutShape, out: StepArrays, num_requests: int) -> None:
    """Lay out context tokens, table by table.

    User-context tokens precede the events and may be resident; request-context tokens follow them and never are.
    """
    if shape.context_places:
        _fill(out.context_rows, ABSENT)
        _fill(out.context_at, out.write_slots.size - 1)
    num = 0
    for table in range(shape.num_user + shape.num_request):
        for i in range(num_requests):
            resident = out.num_resident[i]
            if table < resident and table < shape.num_user:
                continue
            place = table * shape.context_places + i if shape.context_places else num
            before = table - min(resident, shape.num_user)
            after = out.num_new[i] + table - shape.num_user
            out.context_rows[place] = context[i, table]
            out.context_at[place] = out.cu_tokens[i] + (before if table < shape.num_user else after)
            num += 1


@numba.njit(cache=True, nogil=True)
def _put_pages(num_pages: IntArray, pages: NDArray[np.int32], table: NDArray[np.int32]) -> None:
    start = 0
    for i in range(table.shape[0]):
        num = num_pages[i] if i < num_pages.size else 0
        _copy(table[i], pages[start : start + num])
        _fill(table[i, num:], 0)
        start += num


@numba.njit(cache=True, nogil=True)
def _put_write_slots(known: IntArray, page_tokens: int, out: StepArrays) -> None:
    """Fill in where the K/V of each token is written: page * page_tokens + offset, or -1 if it is not kept."""
    _fill(out.write_slots, -1)
    for i in range(known.shape[0]):
        at, token, end = out.cu_tokens[i], known[i, RESIDENT], known[i, TOKENS]
        while token < end:
            page, offset = divmod(token, page_tokens)
            num = min(page_tokens - offset, end - token)
            first = np.int64(out.page_table[i, page]) * page_tokens + offset
            _count_from(out.write_slots[at : at + num], first)
            at, token = at + num, token + num


@numba.njit(cache=True, nogil=True)
def _put_gaps(gaps: IntArray, times: IntArray, num_buckets: int) -> None:
    """Fill in the time buckets of the last events. The first event of a window has gap 0: nothing precedes it there."""
    if not gaps.size:
        return
    before, own = times[0], times[times.size - gaps.size :]
    for i in range(gaps.size):
        gaps[i] = gap_bucket(own[i] - before, num_buckets)
        before = own[i]


@numba.njit(cache=True, nogil=True)
def _copy(target: NDArray[np.integer], source: NDArray[np.integer]) -> None:
    """Copy `source` to the start of `target`."""
    for i in range(source.size):
        target[i] = source[i]


@numba.njit(cache=True, nogil=True)
def _fill(target: NDArray[np.integer], value: int) -> None:
    for i in range(target.size):
        target[i] = value


@numba.njit(cache=True, nogil=True)
def _count_from(target: IntArray, start: int) -> None:
    for i in range(target.size):
        target[i] = start + i
