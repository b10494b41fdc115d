"""Packing of requests, results and calls into bytes between front and engine, without pickle.

Arrays are sent as they are in memory, behind a msgpack header. Both sides decode into fixed types only.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from helmrec import errors
from helmrec.errors import HelmRecError, QueueFull, RequestError, ServerError
from helmrec.types import Ids, PrefillRequest, RankRequest, RankResult, RowPosition, Timing, UserId

_ENCODER = msgspec.msgpack.Encoder()
R = TypeVar("R", RankRequest, PrefillRequest)


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
    NOTICE = 11  # from a keeper: something to do
    PREPARE_AGAIN = 12  # from the engine: the requests were prepared for another one; its own recipe


class Begin(Struct, frozen=True):
    """First message to an engine process: the model's folder, and settings as plain values by name."""

    model: str
    engine: dict[str, Any]
    serve: dict[str, Any]
    follows_log: bool = False  # the front writes the log of row updates


class _WireRequest(Struct, frozen=True, array_like=True):
    """The plain fields of a RankRequest or PrefillRequest, and the arrays that follow the header."""

    arrays: dict[str, tuple[str, int]]  # by field, or "FIELD.TABLE": dtype and number of values, in order
    user_id: UserId
    context: dict[str, int]
    first_event: int
    request_time: int | None = None
    deadline_ms: float | None = None
    num_candidates: int = 0
    budget_ms: float | None = None
    hold_ms: float | None = None


class _WireRequests(Struct, frozen=True, array_like=True):
    came_s: float  # when they arrived, by the monotonic clock of the machine
    requests: list[_WireRequest]


class Received(NamedTuple):
    """Unpacked requests, and the time since they arrived at the front."""

    requests: list[RankRequest]
    spent_ms: float


class PackedCall(NamedTuple):
    """A call of a port's method."""

    name: str
    arguments: dict[str, Any]  # by name


class WireError(Struct, frozen=True):
    """An error of `errors.py` by its class name; an empty name for an unexpected failure."""

    kind: str
    message: str
    field: str | None = None
    value: Any = None


class NotForTheWire(Exception):
    """A request that cannot be packed because it is wrong; an `Intake` names the wrong field."""


_REQUESTS = msgspec.msgpack.Decoder(_WireRequests)
_PREFILL = msgspec.msgpack.Decoder(_WireRequest)
_WireResult = tuple[
    tuple[int, int], int, int, int, int, int, int, Timing, RowPosition
]  # shape of the scores, and all other fields
_RESULTS = msgspec.msgpack.Decoder(list[_WireResult])
_RESULT_FIELDS = [field.name for field in fields(RankResult) if field.name != "scores"]
_IDS = ("items", "actions", "timestamps", "candidates")
_TABLES = ("features", "candidate_features")  # ids by table
_PLAIN = {
    kind: [field.name for field in fields(kind) if field.name not in {*_IDS, *_TABLES}]
    for kind in (RankRequest, PrefillRequest)
}
_HEADER_BYTES = 8
_RESULT_BYTES = 192  # upper bound on the header of one result


def pack_requests(requests: Sequence[RankRequest], spent_ms: float) -> list[bytes | memoryview]:
    """Pack the requests of a call that arrived `spent_ms` ago; NotForTheWire if one could not be unpacked."""
    came_s, lines = time.monotonic() - spent_ms / 1e3, [_lines_of(request) for request in requests]
    headers = [_header(request, arrays) for request, arrays in zip(requests, lines, strict=True)]
    header = _readable(_WireRequests(came_s, headers), _REQUESTS)
    return joined(header, [raw(line) for arrays in lines for line in arrays.values()])


def pack_prefill(request: PrefillRequest) -> list[bytes | memoryview]:
    """Pack a signal; NotForTheWire if it could not be unpacked."""
    lines = _lines_of(request)
    return joined(_readable(_header(request, lines), _PREFILL), [raw(line) for line in lines.values()])


def _lines_of(request: RankRequest | PrefillRequest) -> dict[str, NDArray[np.integer]]:
    """Return all arrays of a request, under the names of the header."""
    lines = {name: _line(getattr(request, name)) for name in _IDS if hasattr(request, name)}
    for name in _TABLES:
        by_table = getattr(request, name, {})  # a signal has no candidates
        if not isinstance(by_table, Mapping):
            raise NotForTheWire(f"{type(by_table).__name__} where values by table name are needed")
        lines |= {f"{name}.{table}": _line(ids) for table, ids in by_table.items()}
    return lines


def _header(request: RankRequest | PrefillRequest, lines: Mapping[str, NDArray[np.integer]]) -> _WireRequest:
    arrays = {name: (line.dtype.str, line.size) for name, line in lines.items()}
    return _WireRequest(arrays, **{name: _plain(name, getattr(request, name)) for name in _PLAIN[type(request)]})


def _plain(name: str, value: Any) -> Any:
    """Convert NumPy integers to Python integers, and milliseconds to floats: they may have more than 64 bits."""
    if isinstance(value, Mapping):
        return {table: _plain(name, each) for table, each in value.items()}
    if name.endswith("_ms") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return int(value) if isinstance(value, np.integer) else value


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


def raw(line: NDArray[np.integer]) -> bytes | memoryview:
    """Return the memory of an array."""
    return line.data.cast("B") if line.size else b""


def unpack_requests(payload: memoryview) -> Received:
    """Unpack requests. Their arrays are views of the payload."""
    header, at = split_header(payload)
    sent, requests = _REQUESTS.decode(header), []
    for each in sent.requests:
        requests.append(_unpacked(RankRequest, each, payload, at))
        at += sum(np.dtype(dtype).itemsize * num for dtype, num in each.arrays.values())
    return Received(requests, (time.monotonic() - sent.came_s) * 1e3)


def unpack_prefill(payload: memoryview) -> PrefillRequest:
    """Unpack a signal. Its arrays are views of the payload."""
    header, at = split_header(payload)
    return _unpacked(PrefillRequest, _PREFILL.decode(header), payload, at)


def _unpacked(kind: type[R], sent: _WireRequest, payload: memoryview, at: int) -> R:
    """Return the request of a header whose arrays begin at `at`."""
    values: dict[str, Any] = {name: getattr(sent, name) for name in _PLAIN[kind]}
    for name, (dtype, num) in sent.arrays.items():
        line = np.frombuffer(payload, np.dtype(dtype), num, at) if num else np.empty(0, np.int64)
        at += line.nbytes
        field, _, table = name.partition(".")
        if table:
            values.setdefault(field, {})[table] = line
        else:
            values[field] = line
    return kind(**values)


def pack_results(results: Sequence[RankResult]) -> list[bytes | memoryview]:
    headers = [(each.scores.shape, *(getattr(each, name) for name in _RESULT_FIELDS)) for each in results]
    return joined(_ENCODER.encode(headers), [np.ascontiguousarray(each.scores).tobytes() for each in results])


def results_bytes(requests: Sequence[RankRequest], num_tasks: int) -> int:
    """Return an upper bound on the bytes of the answer to a call."""
    return sum(_RESULT_BYTES + 4 * num_tasks * len(request.candidates) for request in requests)


def unpack_results(payload: memoryview) -> list[RankResult]:
    """Unpack results. Scores are copies, independent of the payload."""
    header, at = split_header(payload)
    headers: list[Any] = _RESULTS.decode(header)
    sizes = [shape[0] * shape[1] * 4 for shape, *_ in headers]
    return [
        RankResult(np.frombuffer(payload[start:end], np.float32).reshape(shape).copy(), *others)
        for (shape, *others), (start, end) in zip(headers, pairwise(accumulate(sizes, initial=at)), strict=True)
    ]


def joined(header: bytes, blobs: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the header's length, the header padded to a multiple of eight bytes, then the arrays."""
    filled = header + b"\0" * (-len(header) % 8)
    return [len(header).to_bytes(_HEADER_BYTES, "little"), filled, *blobs]


def split_header(payload: memoryview) -> tuple[memoryview, int]:
    """Return the header, and the offset of the first array."""
    length = int.from_bytes(payload[:_HEADER_BYTES], "little")
    return payload[_HEADER_BYTES : _HEADER_BYTES + length], _HEADER_BYTES + length + -length % 8


def pack_call(name: str, arguments: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Pack a call of a port's method; RequestError if a number has more than 64 bits."""
    try:
        return [_ENCODER.encode([name, arguments])]
    except OverflowError as error:
        raise RequestError("body", str(error), "numbers of 64 bits are needed") from None


def unpack_call(payload: memoryview) -> PackedCall:
    return msgspec.msgpack.decode(payload, type=PackedCall)


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
