"""Packing of requests, results and calls into bytes between front and engine, without pickle.

Arrays are sent as they are in memory, behind a msgpack header. Both sides decode into fixed types only.
"""

import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from helmrec import errors
from helmrec.errors import HelmRecError, QueueFull, RequestError, ServerError
from helmrec.types import Ids, PrefillRequest, RankRequest, RankResult, Timing

_ENCODER = msgspec.msgpack.Encoder()


class FrameKind(IntEnum):
    """What a frame contains. 0 is used by the ring itself."""

    BEGIN = 1  # to the engine: model and settings
    RANK = 2
    CALL = 3
    END = 4
    READY = 5  # from the engine
    RESULTS = 6
    VALUE = 7
    ERROR = 8
    FAILED = 9  # the engine ends, with the reason
    PREFILL = 10  # to the engine


class Begin(Struct, frozen=True):
    """First message to an engine process: the model's folder, and settings as plain values by name."""

    model: str
    engine: dict[str, Any]
    serve: dict[str, Any]


class _WireRequest(Struct, frozen=True, array_like=True):
    user_id: int
    first_event: int
    request_time: int | None
    deadline_ms: float | None
    context: dict[str, int]
    features: list[str]
    candidate_features: list[str]
    arrays: list[tuple[str, int]]  # dtype and number of values of each array, in order


class _WireRequests(Struct, frozen=True, array_like=True):
    came_s: float  # when they arrived, by the monotonic clock of the machine
    requests: list[_WireRequest]


class Received(NamedTuple):
    """Unpacked requests, and the time since they arrived at the front."""

    requests: list[RankRequest]
    spent_ms: float


class _WireResult(Struct, frozen=True, array_like=True):
    shape: tuple[int, int]
    reused_tokens: int
    computed_tokens: int
    row_hits: int
    row_misses: int
    window_start: int
    truncated_events: int
    timing: Timing


class _WirePrefill(Struct, frozen=True, array_like=True):
    user_id: int
    first_event: int
    context: dict[str, int]
    features: list[str]
    num_candidates: int
    budget_ms: float | None
    hold_ms: float | None
    arrays: list[tuple[str, int]]  # as in a request


class WireError(Struct, frozen=True):
    """An error of `errors.py` by its class name; an empty name for an unexpected failure."""

    kind: str
    message: str
    field: str | None = None
    value: Any = None


class NotForTheWire(Exception):
    """A request that cannot be packed because it is wrong; an `Intake` names the wrong field."""


_REQUESTS = msgspec.msgpack.Decoder(_WireRequests)
_PREFILL = msgspec.msgpack.Decoder(_WirePrefill)
_RESULTS = msgspec.msgpack.Decoder(list[_WireResult])
_HEADER_BYTES = 8
_RESULT_BYTES = 128  # upper bound on the header of one result


def pack_requests(requests: Sequence[RankRequest], spent_ms: float) -> list[bytes | memoryview]:
    """Pack the requests of a call that arrived `spent_ms` ago; NotForTheWire if one could not be unpacked."""
    headers, arrays, came_s = [], [], time.monotonic() - spent_ms / 1e3
    for request in requests:
        _check_mappings(request.features, request.candidate_features, request.context)
        lines = [
            _line(values)
            for values in (
                *(request.items, request.actions, request.timestamps, request.candidates),
                *request.features.values(),
                *request.candidate_features.values(),
            )
        ]
        headers.append(
            _WireRequest(
                _plain(request.user_id),
                _plain(request.first_event),
                _plain(request.request_time),
                _milliseconds(request.deadline_ms),
                {name: _plain(value) for name, value in request.context.items()},
                list(request.features),
                list(request.candidate_features),
                [(line.dtype.str, line.size) for line in lines],
            )
        )
        arrays.extend(lines)
    return _joined(_readable(_WireRequests(came_s, headers), _REQUESTS), _raw(arrays))


def _plain(value: Any) -> Any:
    """Convert a NumPy integer to a Python integer."""
    return int(value) if isinstance(value, np.integer) else value


def _milliseconds(value: Any) -> Any:
    """Convert an integer to a float: it may exceed the 64 bits of msgpack integers."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_mappings(*values: object) -> None:
    for each in values:
        if not isinstance(each, Mapping):
            raise NotForTheWire(f"{type(each).__name__} where values by table name are needed")


def _readable(header: Any, decoder: "msgspec.msgpack.Decoder[Any]") -> bytes:
    """Encode a header, and check that the receiver can decode it: types and sizes of its numbers."""
    try:
        encoded = _ENCODER.encode(header)
        decoder.decode(encoded)
    except (OverflowError, TypeError, msgspec.MsgspecError) as error:
        raise NotForTheWire(str(error)) from None
    return encoded


def _line(values: Ids) -> NDArray[np.integer]:
    """Convert ids to a contiguous array of integers."""
    try:
        line = np.ascontiguousarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise NotForTheWire(str(error)) from None
    if not line.size:
        return np.empty(0, np.int64)
    if line.ndim != 1 or line.dtype.kind not in "iu":
        raise NotForTheWire(f"{line.dtype} in {line.ndim} dimensions")
    return line


def _raw(lines: Sequence[NDArray[np.integer]]) -> list[bytes | memoryview]:
    """Return the memory of each array."""
    return [line.data.cast("B") if line.size else b"" for line in lines]


def unpack_requests(payload: memoryview) -> Received:
    """Unpack requests. Their arrays are views of the payload."""
    header, at = _split(payload)
    sent, requests = _REQUESTS.decode(header), []
    for each in sent.requests:
        lines = _lines(payload, at, each.arrays)
        at += sum(line.nbytes for line in lines)
        items, actions, timestamps, candidates, *extra = lines
        features = dict(zip(each.features, extra, strict=False))
        of_candidates = dict(zip(each.candidate_features, extra[len(features) :], strict=True))
        requests.append(
            RankRequest(
                user_id=each.user_id,
                items=items,
                actions=actions,
                timestamps=timestamps,
                candidates=candidates,
                features=features,
                candidate_features=of_candidates,
                context=each.context,
                first_event=each.first_event,
                request_time=each.request_time,
                deadline_ms=each.deadline_ms,
            )
        )
    return Received(requests, (time.monotonic() - sent.came_s) * 1e3)


def pack_prefill(request: PrefillRequest) -> list[bytes | memoryview]:
    """Pack a signal; NotForTheWire if it could not be unpacked."""
    _check_mappings(request.features, request.context)
    lines = [_line(each) for each in (request.items, request.actions, request.timestamps, *request.features.values())]
    sent = _WirePrefill(
        _plain(request.user_id),
        _plain(request.first_event),
        {name: _plain(value) for name, value in request.context.items()},
        list(request.features),
        _plain(request.num_candidates),
        _milliseconds(request.budget_ms),
        _milliseconds(request.hold_ms),
        [(line.dtype.str, line.size) for line in lines],
    )
    return _joined(_readable(sent, _PREFILL), _raw(lines))


def unpack_prefill(payload: memoryview) -> PrefillRequest:
    """Unpack a signal. Its arrays are views of the payload."""
    header, at = _split(payload)
    sent = _PREFILL.decode(header)
    items, actions, timestamps, *extra = _lines(payload, at, sent.arrays)
    return PrefillRequest(
        user_id=sent.user_id,
        items=items,
        actions=actions,
        timestamps=timestamps,
        features=dict(zip(sent.features, extra, strict=True)),
        context=sent.context,
        first_event=sent.first_event,
        num_candidates=sent.num_candidates,
        budget_ms=sent.budget_ms,
        hold_ms=sent.hold_ms,
    )


def _lines(payload: memoryview, at: int, arrays: Sequence[tuple[str, int]]) -> list[NDArray[np.integer]]:
    lines: list[NDArray[np.integer]] = []
    for dtype, num in arrays:
        lines.append(np.frombuffer(payload, np.dtype(dtype), num, at) if num else np.empty(0, np.int64))
        at += lines[-1].nbytes
    return lines


def pack_results(results: Sequence[RankResult]) -> list[bytes | memoryview]:
    headers = [
        _WireResult(
            (result.scores.shape[0], result.scores.shape[1]),
            result.reused_tokens,
            result.computed_tokens,
            result.row_hits,
            result.row_misses,
            result.window_start,
            result.truncated_events,
            result.timing,
        )
        for result in results
    ]
    return _joined(_ENCODER.encode(headers), [np.ascontiguousarray(each.scores).tobytes() for each in results])


def results_bytes(requests: Sequence[RankRequest], num_tasks: int) -> int:
    """Return an upper bound on the bytes of the answer to a call."""
    return sum(_RESULT_BYTES + 4 * num_tasks * len(request.candidates) for request in requests)


def unpack_results(payload: memoryview) -> list[RankResult]:
    """Unpack results. Scores are copies, independent of the payload."""
    header, at = _split(payload)
    headers = _RESULTS.decode(header)
    sizes = [each.shape[0] * each.shape[1] * 4 for each in headers]
    return [
        RankResult(
            scores=np.frombuffer(payload[start:end], np.float32).reshape(each.shape).copy(),
            reused_tokens=each.reused_tokens,
            computed_tokens=each.computed_tokens,
            row_hits=each.row_hits,
            row_misses=each.row_misses,
            window_start=each.window_start,
            truncated_events=each.truncated_events,
            timing=each.timing,
        )
        for each, (start, end) in zip(headers, pairwise(accumulate(sizes, initial=at)), strict=True)
    ]


def _joined(header: bytes, blobs: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the header's length, the header padded to a multiple of eight bytes, then the arrays."""
    filled = header + b"\0" * (-len(header) % 8)
    return [len(header).to_bytes(_HEADER_BYTES, "little"), filled, *blobs]


def _split(payload: memoryview) -> tuple[memoryview, int]:
    """Return the header, and the offset of the first array."""
    length = int.from_bytes(payload[:_HEADER_BYTES], "little")
    return payload[_HEADER_BYTES : _HEADER_BYTES + length], _HEADER_BYTES + length + -length % 8


def pack_call(name: str, arguments: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Pack a call of a port's method; RequestError if a number has more than 64 bits."""
    try:
        return [_ENCODER.encode([name, arguments])]
    except OverflowError as error:
        raise RequestError("body", str(error), "numbers of 64 bits are needed") from None


def unpack_call(payload: memoryview) -> tuple[str, dict[str, Any]]:
    """Return the method's name, and its arguments by name."""
    return msgspec.msgpack.decode(payload, type=tuple[str, dict[str, Any]])


def pack_error(error: BaseException) -> list[bytes | memoryview]:
    """Pack any error. Never fails, so that every call gets an answer."""
    if isinstance(error, RequestError):
        value = error.value.item() if isinstance(error.value, np.generic) else error.value
        problem, field = _encodable(error.problem), _encodable(error.field)
        try:
            return [_ENCODER.encode(WireError("RequestError", problem, field, value))]
        except (OverflowError, TypeError, ValueError):
            return [_ENCODER.encode(WireError("RequestError", problem, field, _encodable(repr(value))))]
    kind = type(error).__name__ if isinstance(error, HelmRecError) else ""
    return [_ENCODER.encode(WireError(kind, _encodable(str(error)) or type(error).__name__))]


def _encodable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as surrogates in file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def unpack_error(payload: memoryview) -> Exception:
    """Return the error that the engine raised; RuntimeError for an unexpected failure."""
    if not payload:
        return QueueFull("the answer did not fit the ring between engine and front")
    error = msgspec.msgpack.decode(payload, type=WireError)
    if error.field is not None:
        return RequestError(error.field, error.value, error.message)
    kind = getattr(errors, error.kind, None) if error.kind else None
    if isinstance(kind, type) and issubclass(kind, HelmRecError) and kind is not ServerError:
        return kind(error.message)
    return RuntimeError(error.message)
