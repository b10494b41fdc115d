"""Lays the tokens of a step out in arrays, in one compiled call: exactly as long as the step, or padded to a graph.

Compiled loops over arrays; those of the requests are read at their addresses, where intake or a front has put them.
Padding reads no row, is written to the last token's row, which is unused, and keeps no K/V. Arrays are filled to their
end, because sizes of graphs share memory and values of another size may be invalid indices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
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
    event_at: NDArray[np.integer]  # (events,) flat position
    actions: NDArray[np.integer]  # (events,) as are the next two
    positions: NDArray[np.integer]
    gaps: NDArray[np.integer]
    candidates: NDArray[np.integer]  # (candidates,) indices of the candidates among the events
    head_at: NDArray[np.integer]  # (candidates,) flat position of the token that each is scored with
    context_at: IntArray  # (context,)
    write_slots: IntArray  # (tokens,)
    cu_events: IntArray  # (requests + 1,)
    cu_tokens: Lengths
    num_resident: Lengths  # (requests,)
    num_new: Lengths  # with tokens whose K/V are not kept
    page_table: NDArray[np.int32]  # (requests, pages)


# Columns of the array that describes each request before its tokens are laid out. The last four say where its events
# and its candidates lie: the address of the first line, and how many numbers each line begins after the one before.
EVENTS, CANDIDATES, GAP, RESIDENT, TOKENS, PAGES, EVENTS_AT, EVENTS_STEP, CANDIDATES_AT, CANDIDATES_STEP = range(10)
NUM_COLUMNS = 10
_NUMBER_BYTES = 8
NO_REQUESTS = np.empty((0, NUM_COLUMNS), np.int64)
NO_CONTEXT = np.empty((0, 0), np.int64)
NO_PAGES = np.empty(0, np.int32)


class Place(NamedTuple):
    """Where the lines of an array lie; valid as long as the array."""

    address: int
    step: int  # numbers from the beginning of a line to that of the next


def place_of(lines: IntArray) -> Place:  # lines: (lines, numbers)
    """Return where an array lies. The numbers of a line must lie one after another."""
    step, size = lines.strides
    assert size == _NUMBER_BYTES or lines.shape[1] <= 1, f"the numbers of a line are {size} bytes apart"
    return Place(_address_of(lines), step // _NUMBER_BYTES)


@numba.njit(cache=True)
def _address_of(lines: IntArray) -> int:
    """Return the address of an array, in an eighth of the time that `lines.ctypes.data` takes."""
    return lines.ctypes.data


def _type_pointer(typing_context: Any, address: Any) -> Any:
    """Describe to Numba how `_pointer` is compiled."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate  # type: ignore[no-untyped-call]


_pointer: Callable[[int], Any] = intrinsic(_type_pointer)  # type: ignore[assignment]


@numba.njit(cache=True, nogil=True)
def _numbers_at(address: int, start: int, num: int) -> IntArray:
    """Return `num` numbers in the memory at an address, from number `start` on."""
    return carray(_pointer(address + _NUMBER_BYTES * start), num, np.int64)


@numba.njit(cache=True, nogil=True)
def lay_out(known: IntArray, pages: NDArray[np.int32], context: IntArray, shape: LayoutShape, out: StepArrays) -> None:
    """Lay out all requests.

    pages: of all requests, one after another; context: (requests, tables) rows, user tables first. Parts of arrays are
    sliced first and then filled from their start: the compiler uses no vector instructions for an index that may be
    negative, as a sum may. Assigning one slice to another would be as fast, but takes seconds to compile.
    """
    num_requests, num_features = known.shape[0], out.event_rows.shape[0]
    _put_starts(known, shape, out)
    candidate = 0
    for i in range(num_requests):
        skipped = max(0, known[i, RESIDENT] - shape.num_user)
        first, end = out.cu_events[i], out.cu_events[i + 1]
        split, num_new = end - known[i, CANDIDATES], known[i, EVENTS] - skipped
        at, step = known[i, EVENTS_AT], known[i, EVENTS_STEP]
        for feature in range(num_features):
            _copy(out.event_rows[feature, first:split], _numbers_at(at, feature * step + skipped, num_new))
            rows = _numbers_at(known[i, CANDIDATES_AT], feature * known[i, CANDIDATES_STEP], end - split)
            _copy(out.event_rows[feature, split:end], rows)
        # With the event before the first new one, if any: the first time gap reaches back to it.
        before = int(skipped > 0)
        times = _numbers_at(at, (num_features + 1) * step + skipped - before, num_new + before)
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
        _copy(out.actions[first:split], _numbers_at(at, num_features * step + skipped, num_new))
        _fill(out.actions[split:end], shape.placeholder)
        _put_gaps(out.gaps[first:split], times, shape.num_buckets)
        _fill(out.gaps[split:end], known[i, GAP])
        _count_from(out.candidates[candidate : candidate + end - split], split)
        candidate += end - split
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
def _put_gaps(gaps: NDArray[np.integer], times: IntArray, num_buckets: int) -> None:
    """Fill in the time buckets of the last events. The first event of a window has gap 0: nothing precedes it there.

    Each time is read twice: with the one before kept in a variable, the loop has no vector instructions.
    """
    if not gaps.size:
        return
    own = times[times.size - gaps.size :]
    gaps[0] = gap_bucket(own[0] - times[0], num_buckets)
    for i in range(1, gaps.size):
        gaps[i] = gap_bucket(own[i] - own[i - 1], num_buckets)


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
def _count_from(target: NDArray[np.integer], start: int) -> None:
    for i in range(target.size):
        target[i] = start + i
