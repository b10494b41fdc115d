"""Packing of prepared requests into bytes, so that an engine's process gets them checked, in rows and hashed.

Arrays, all of numbers of 64 bits, are sent with a msgpack header, as they are in memory. The sender must have prepared
them from the recipe that the tag identifies: the receiver checks the tag and the sizes, not every id.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from helmrec.engine.intake import IntakeRecipe, Prepared
from helmrec.memory.prefix_hash import History
from helmrec.serve.wire import joined, raw, split_header
from helmrec.types import IntArray, UserId


class _Sizes(NamedTuple):
    """Sizes of the arrays of a request, in the order in which they are sent. The states of its history are last."""

    lines: int  # of `columns`
    events: int
    features: int
    candidates: int
    user_context: int
    request_context: int
    times: int  # 0: none
    states: int

    def ends(self) -> tuple[int, int, int, int, int]:
        """Return where each array but the states ends, counted in values."""
        columns = self.lines * self.events
        candidates = columns + self.features * self.candidates
        user_context = candidates + self.user_context
        request_context = user_context + self.request_context
        return columns, candidates, user_context, request_context, request_context + self.times


class _SentRequest(Struct, frozen=True, array_like=True):
    """The plain fields of a prepared request."""

    sizes: _Sizes
    user_id: UserId
    candidate_gap: int
    window_start: int
    truncated_events: int
    deadline_ms: float | None
    query_time: int
    num_full: int
    is_retrieval: bool
    unknown_ids: dict[str, int]


class _SentRequests(Struct, frozen=True, array_like=True):
    tag: bytes
    came_s: float  # when they arrived, by the monotonic clock of the machine
    requests: list[_SentRequest]


class ReceivedPrepared(NamedTuple):
    """Unpacked requests, the tag of the recipe they were prepared from, and the time since they arrived."""

    tag: bytes
    prepared: list[Prepared]
    spent_ms: float


class PrepareAgain(Exception):
    """The engine has another recipe than the one that requests were prepared from."""

    def __init__(self, recipe: IntakeRecipe) -> None:
        super().__init__("the requests were prepared for another engine")
        self.recipe = recipe


_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(_SentRequests)
_RECIPE = msgspec.msgpack.Decoder(IntakeRecipe)


class PackedPrepared(NamedTuple):
    """Packed requests: what describes them, and their arrays."""

    header: list[bytes | memoryview]
    arrays: list[bytes | memoryview]


def pack_prepared(tag: bytes, prepared: Sequence[Prepared], came_s: float) -> PackedPrepared:
    """Pack the requests of a call that arrived at `came_s`, by the monotonic clock."""
    header = _ENCODER.encode(_SentRequests(tag, came_s, [_plain_fields(each) for each in prepared]))
    return PackedPrepared(joined(header, []), [raw(array) for each in prepared for array in _arrays(each)])


def unpack_prepared(payload: memoryview, arrays: IntArray | None = None) -> ReceivedPrepared:
    """Unpack requests. Their arrays are copies, independent of the payload, or parts of `arrays` if they came apart."""
    header, at = split_header(payload)
    sent = _REQUESTS.decode(header)
    values = np.frombuffer(payload[at:], np.int64) if arrays is None else arrays
    prepared, start = [], 0
    for each in sent.requests:
        end = start + each.sizes.ends()[-1] + each.sizes.states
        if min(each.sizes) < 0 or end > values.size:
            raise ValueError(f"arrays of {each.sizes} do not fit {values.size} numbers")
        prepared.append(_unpacked(each, values[start:end], are_lent=arrays is not None))
        start = end
    if start != values.size:
        raise ValueError(f"prepared requests have {values.size} numbers, {start} by their sizes")
    return ReceivedPrepared(sent.tag, prepared, (time.monotonic() - sent.came_s) * 1e3)


def pack_recipe(recipe: IntakeRecipe) -> list[bytes | memoryview]:
    return [_ENCODER.encode(recipe)]


def unpack_recipe(payload: memoryview) -> IntakeRecipe:
    return _RECIPE.decode(payload)


def _plain_fields(request: Prepared) -> _SentRequest:
    history, times = request.history, request.times
    sizes = _Sizes(
        len(request.columns),
        request.num_events,
        len(request.candidate_rows),
        request.num_candidates,
        history.context_rows.size,
        request.request_rows.size,
        0 if times is None else times.size,
        history.states.size,
    )
    return _SentRequest(
        sizes,
        history.user_id,
        request.candidate_gap,
        request.window_start,
        request.truncated_events,
        request.deadline_ms,
        request.query_time,
        request.num_full,
        request.is_retrieval,
        dict(request.unknown_ids),
    )


def _arrays(request: Prepared) -> list[IntArray]:
    """Return the arrays of a request in the order of `_Sizes`."""
    history = request.history
    arrays = [request.columns, request.candidate_rows, history.context_rows, request.request_rows]
    if request.times is not None:
        arrays.append(request.times)
    return [*arrays, history.states.view(np.int64)]


def _unpacked(sent: _SentRequest, sent_values: IntArray, *, are_lent: bool) -> Prepared:
    """Return the request of a header whose arrays these are. It keeps them if they are lent, otherwise copies."""
    sizes = sent.sizes
    of_columns, of_candidates, of_user, of_request, num = sizes.ends()
    values = sent_values[:num] if are_lent else sent_values[:num].copy()
    # In memory of their own: a resident prefix keeps its states long after the request has ended.
    states = sent_values[num:].view(np.uint64).copy()
    columns = values[:of_columns].reshape(sizes.lines, sizes.events)
    event_rows = columns[:-2, : sizes.states - sizes.user_context]
    return Prepared(
        history=History(sent.user_id, values[of_candidates:of_user], event_rows, states),
        columns=columns,
        candidate_rows=values[of_columns:of_candidates].reshape(sizes.features, sizes.candidates),
        candidate_gap=sent.candidate_gap,
        request_rows=values[of_user:of_request],
        window_start=sent.window_start,
        truncated_events=sent.truncated_events,
        deadline_ms=sent.deadline_ms,
        query_time=sent.query_time,
        num_full=sent.num_full,
        times=values[of_request:num] if sizes.times else None,
        is_retrieval=sent.is_retrieval,
        unknown_ids=sent.unknown_ids,
    )
