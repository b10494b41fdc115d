"""Ranking requests as tensors of the Open Inference Protocol: flat ids of all users, and lengths per user.

Pure: takes bytes and returns values. Binary tensors are views of the body, not copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from helmrec.errors import RequestError
from helmrec.history.events import Events, NewEvents
from helmrec.model.config import ModelConfig
from helmrec.serve.bodies import decode
from helmrec.serve.routes import MODEL_VERSION
from helmrec.serve.string_tensors import BYTES, listed_strings, pack_strings, unpack_strings
from helmrec.types import RankRequest, RankResult, UserId

SCORES = "SCORES"
USER_IDS = "USER_IDS"  # integers, or strings as BYTES
EVENT_INPUTS = ("ITEMS", "ACTIONS", "TIMESTAMPS")
OPTIONAL_INPUTS = ("FIRST_EVENTS", "REQUEST_TIMES")
_DTYPES = {
    f"{kind}{bits}": np.dtype(f"<{letter}{bits // 8}")
    for kind, letter in (("INT", "i"), ("UINT", "u"))
    for bits in (8, 16, 32, 64)
}
MAX_USERS = 1_024  # of one call
Tensor = NDArray[Any]  # of integers; of Python strings where users are


class TensorParameters(Struct, frozen=True):
    binary_data_size: Annotated[int, Meta(ge=0)] | None = None


class InputTensor(Struct, frozen=True, omit_defaults=True):
    """A flat tensor of integers or strings: values are in `data`, or in `binary_data_size` bytes after the JSON."""

    name: str
    shape: list[Annotated[int, Meta(ge=0)]]
    datatype: str
    parameters: TensorParameters = TensorParameters()
    data: list[int | str] | None = None


class OutputParameters(Struct, frozen=True):
    binary_data: bool | None = None


class RequestedOutput(Struct, frozen=True):
    name: str
    parameters: OutputParameters = OutputParameters()


class InferParameters(Struct, frozen=True):
    binary_data_output: bool = False
    timeout: Annotated[int, Meta(gt=0, description="microseconds")] | None = None


class InferBody(Struct, frozen=True):
    """An inference request; tensors may follow the JSON as bytes (Inference-Header-Content-Length)."""

    inputs: list[InputTensor]
    id: str = ""
    parameters: InferParameters = InferParameters()
    outputs: list[RequestedOutput] = []

    @property
    def deadline_ms(self) -> float | None:
        return None if self.parameters.timeout is None else self.parameters.timeout / 1e3

    @property
    def wants_binary(self) -> bool:
        """Whether scores are returned as bytes: as the output says, else as the request says."""
        wanted = [output.parameters.binary_data for output in self.outputs]
        return wanted[0] if wanted and wanted[0] is not None else self.parameters.binary_data_output


class OutputTensor(Struct, frozen=True, omit_defaults=True):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[float] | None = None


class InferAnswer(Struct, frozen=True, omit_defaults=True):
    """Scores of all candidates, concatenated; `parameters` says how they were computed."""

    model_name: str
    outputs: list[OutputTensor]
    parameters: dict[str, int]
    id: str = ""
    model_version: str = ""


_DECODER = msgspec.json.Decoder(InferBody)


class ValueFields(NamedTuple):
    """Names of the fields that hold the values of tensor {i}, for errors."""

    raw: str = "inputs[{i}].parameters.binary_data_size"
    listed: str = "inputs[{i}].data"


_OVER_HTTP = ValueFields()


@dataclass(frozen=True, slots=True)
class Inference:
    """A decoded inference request."""

    body: InferBody
    tensors: dict[str, Tensor]


def read_inference(body: bytes, header_length: str | None) -> Inference:
    """Decode an inference request and its tensors; RequestError names the wrong field and its value."""
    json_bytes = _json_bytes(header_length, len(body))
    parsed = decode(_DECODER, memoryview(body)[:json_bytes])
    check_outputs([output.name for output in parsed.outputs])
    return Inference(parsed, tensors_by_name(parsed.inputs, _binary(parsed.inputs, body, json_bytes)))


def check_outputs(names: Sequence[str]) -> None:
    """Raise RequestError unless the outputs asked for are those of the model."""
    for i, name in enumerate(names):
        if name != SCORES or i:
            raise RequestError(f"outputs[{i}].name", name, f"the only output is {SCORES}")


def tensors_by_name(
    inputs: Sequence[InputTensor], raw: Sequence[memoryview | bytes | None], fields: ValueFields = _OVER_HTTP
) -> dict[str, Tensor]:
    """Return all tensors by name. Those with bytes in `raw` are views of them; the values of others are in `data`."""
    tensors: dict[str, Tensor] = {}
    for i, (tensor, given) in enumerate(zip(inputs, raw, strict=True)):
        if tensor.name in tensors:
            raise RequestError(f"inputs[{i}].name", tensor.name, "each tensor may be given once")
        tensors[tensor.name] = _values(i, tensor, given, fields)
    return tensors


def _binary(inputs: list[InputTensor], body: bytes, offset: int) -> list[memoryview | None]:
    """Return the bytes of binary tensors, which follow each other from `offset` to the end of the body."""
    whole, found = memoryview(body), list[memoryview | None]()
    for i, tensor in enumerate(inputs):
        num_bytes = tensor.parameters.binary_data_size
        if num_bytes is not None and tensor.data is not None:
            raise RequestError(f"inputs[{i}].data", len(tensor.data), "values come as data or as bytes, not as both")
        if num_bytes is not None and num_bytes > len(body) - offset:
            problem = f"{len(body) - offset} bytes are left in the body"
            raise RequestError(f"inputs[{i}].parameters.binary_data_size", num_bytes, problem)
        found.append(None if num_bytes is None else whole[offset : offset + num_bytes])
        offset += num_bytes or 0
    if offset != len(body):
        raise RequestError("body", len(body), f"JSON and tensors take {offset} bytes")
    return found


def _json_bytes(header_length: str | None, body_bytes: int) -> int:
    if header_length is None:
        return body_bytes
    if header_length.isdecimal() and len(header_length) < 20 and int(header_length) <= body_bytes:
        return int(header_length)
    problem = f"a number of bytes within the body of {body_bytes} is needed"
    raise RequestError("inference-header-content-length", header_length[:100], problem)


def _values(i: int, tensor: InputTensor, raw: memoryview | bytes | None, fields: ValueFields) -> Tensor:
    if tensor.datatype == BYTES and tensor.name == USER_IDS:
        return _strings(i, tensor, raw, fields)
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        kinds = ", ".join((*_DTYPES, *([BYTES] if tensor.name == USER_IDS else [])))
        raise RequestError(f"inputs[{i}].datatype", tensor.datatype, f"one of {kinds} is needed")
    if len(tensor.shape) != 1 or tensor.shape[0] < 0:
        raise RequestError(f"inputs[{i}].shape", tensor.shape, "a flat tensor is needed")
    (num,) = tensor.shape
    if raw is None:
        return _listed(fields.listed.format(i=i), tensor, num, dtype)
    if len(raw) != num * dtype.itemsize:
        problem = f"bytes of {num} values of {tensor.datatype} are needed, {num * dtype.itemsize}"
        raise RequestError(fields.raw.format(i=i), len(raw), problem)
    return np.frombuffer(raw, dtype) if num else np.empty(0, dtype)


def _strings(i: int, tensor: InputTensor, raw: memoryview | bytes | None, fields: ValueFields) -> Tensor:
    if raw is None:
        values = listed_strings(fields.listed.format(i=i), tensor.data or [])
    else:
        values = unpack_strings(fields.raw.format(i=i), bytes(raw))
    if tensor.shape != [values.size]:
        raise RequestError(f"inputs[{i}].shape", tensor.shape, f"[{values.size}] is needed for so many strings")
    return values


def _listed(field: str, tensor: InputTensor, num: int, dtype: "np.dtype[Any]") -> Tensor:
    if tensor.data is None or len(tensor.data) != num:
        seen = None if tensor.data is None else len(tensor.data)
        raise RequestError(field, seen, f"as many values as the shape says are needed, {num}")
    texts = [value for value in tensor.data if isinstance(value, str)]
    if texts:
        raise RequestError(field, texts[0][:100], f"integers are needed in a tensor of {tensor.datatype}")
    try:
        return np.array(tensor.data, dtype)
    except OverflowError:
        widest = max(tensor.data, key=lambda value: abs(int(value)))
        raise RequestError(field, widest, f"integers that fit {tensor.datatype} are needed") from None


class TensorNames:
    """Names of the input tensors of one model."""

    def __init__(self, model: ModelConfig) -> None:
        extra = [table.name for table in model.features[1:]]
        context = [table.name for table in (*model.user_context, *model.request_context)]
        self.features = {f"features.{name}": name for name in extra}
        self.candidate_features = {f"candidate_features.{name}": name for name in extra}
        self.context = {f"context.{name}": name for name in context}
        self.per_event = (*EVENT_INPUTS, *self.features)
        self.per_candidate = ("CANDIDATES", *self.candidate_features)
        self.per_request = ("USER_IDS", "LENGTHS", "NUM_CANDIDATES", *self.context)
        self.required = (*self.per_request, *self.per_event, *self.per_candidate)

    def users_without_events(self, tensors: dict[str, Tensor]) -> list[UserId] | None:
        """Return the users of a call without tensors of events, which uses stored histories; None for other calls.

        Raise RequestError, before any history is read, if the call is wrong regardless of what is stored.
        """
        if tensors.keys() & {"LENGTHS", "FIRST_EVENTS", *self.per_event}:
            return None
        return self._users(tensors, is_stored=True)

    def _users(self, tensors: dict[str, Tensor], *, is_stored: bool) -> list[UserId]:
        self._check(tensors, is_stored=is_stored)
        users: list[UserId] = tensors["USER_IDS"].tolist()
        if len(users) > MAX_USERS:
            raise RequestError("USER_IDS", len(users), f"at most {MAX_USERS} users may be asked for in one call")
        return users

    def requests(
        self, tensors: dict[str, Tensor], deadline_ms: float | None, stored: Sequence[Events] | None = None
    ) -> list[RankRequest]:
        """Return one request per user. Their ids are views of the tensors.

        `stored`: the histories of `users_without_events`.
        """
        users = self._users(tensors, is_stored=stored is not None)
        histories: Sequence[Events | _SentEvents] = self._sent(tensors) if stored is None else stored
        candidates = _bounds("NUM_CANDIDATES", tensors["NUM_CANDIDATES"], "CANDIDATES", tensors["CANDIDATES"].size)
        request_times = tensors["REQUEST_TIMES"].tolist() if "REQUEST_TIMES" in tensors else [None] * len(users)
        contexts = {name: tensors[tensor].tolist() for tensor, name in self.context.items()}
        return [
            RankRequest(
                user_id=user_id,
                items=history.items,
                actions=history.actions,
                timestamps=history.timestamps,
                candidates=tensors["CANDIDATES"][candidate],
                features=history.features,
                candidate_features={
                    name: tensors[tensor][candidate] for tensor, name in self.candidate_features.items()
                },
                context={name: values[i] for name, values in contexts.items()},
                first_event=history.first_event,
                request_time=request_times[i],
                deadline_ms=deadline_ms,
            )
            for i, (user_id, history, candidate) in enumerate(zip(users, histories, candidates, strict=True))
        ]

    def _sent(self, tensors: dict[str, Tensor]) -> list["_SentEvents"]:
        events = _bounds("LENGTHS", tensors["LENGTHS"], "ITEMS", tensors["ITEMS"].size)
        firsts = tensors["FIRST_EVENTS"].tolist() if "FIRST_EVENTS" in tensors else [0] * len(events)
        return [
            _SentEvents(
                items=tensors["ITEMS"][event],
                actions=tensors["ACTIONS"][event],
                timestamps=tensors["TIMESTAMPS"][event],
                features={name: tensors[tensor][event] for tensor, name in self.features.items()},
                first_event=first_event,
            )
            for event, first_event in zip(events, firsts, strict=True)
        ]

    def _check(self, tensors: dict[str, Tensor], *, is_stored: bool) -> None:
        """Raise RequestError unless all tensors are present, none is unknown, and related ones have equal lengths."""
        if unknown := tensors.keys() - {*self.required, *OPTIONAL_INPUTS}:
            raise RequestError("inputs", min(unknown), f"the model takes {', '.join(self.required)}")
        of_events = {"LENGTHS", *self.per_event} if is_stored else set()
        if missing := [name for name in self.required if name not in tensors and name not in of_events]:
            raise RequestError("inputs", sorted(tensors), f"{missing[0]} is needed")
        optional = [name for name in OPTIONAL_INPUTS if name in tensors]
        for group in ((*self.per_request, *optional), self.per_event, self.per_candidate):
            names = [name for name in group if name not in of_events]
            if not names:
                continue
            num = tensors[names[0]].size
            for name in names:
                if tensors[name].size != num:
                    raise RequestError(name, tensors[name].size, f"as many values as {names[0]} has are needed, {num}")
        if not tensors["USER_IDS"].size:
            raise RequestError("USER_IDS", 0, "at least one user is needed")


@dataclass(frozen=True, slots=True, eq=False)
class _SentEvents(NewEvents):
    """A history sent with a call."""

    first_event: int = 0


def _bounds(name: str, lengths: Tensor, of_name: str, num: int) -> list[slice]:
    """Return the slice of each request's values; RequestError if the lengths do not add up to `num`."""
    values = lengths.tolist()  # Python integers: a sum of forged lengths must not overflow
    if min(values) < 0:
        raise RequestError(name, min(values), "lengths are not negative")
    if sum(values) != num:
        raise RequestError(name, sum(values), f"lengths add up to the values of {of_name}, {num}")
    return [slice(start, end) for start, end in pairwise(accumulate(values, initial=0))]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A body; its first `json_bytes` bytes are JSON, or all of it if that is None."""

    body: bytes
    json_bytes: int | None


def encode_request(request: RankRequest, names: TensorNames) -> Encoded:
    """Encode a call of one request with binary tensors, as a client sends it."""
    tensors: dict[str, Any] = {
        **({} if isinstance(request.user_id, str) else {USER_IDS: [request.user_id]}),
        "LENGTHS": [len(request.items)],
        "NUM_CANDIDATES": [len(request.candidates)],
        "FIRST_EVENTS": [request.first_event],
        "ITEMS": request.items,
        "ACTIONS": request.actions,
        "TIMESTAMPS": request.timestamps,
        "CANDIDATES": request.candidates,
        **{tensor: request.features[name] for tensor, name in names.features.items()},
        **{tensor: request.candidate_features[name] for tensor, name in names.candidate_features.items()},
        **{tensor: [request.context[name]] for tensor, name in names.context.items()},
    }
    blobs = {name: np.asarray(values, "<i8").tobytes() for name, values in tensors.items()}
    inputs = [InputTensor(name, [len(blob) // 8], "INT64", TensorParameters(len(blob))) for name, blob in blobs.items()]
    if isinstance(request.user_id, str):
        blobs = {USER_IDS: pack_strings([request.user_id]), **blobs}
        inputs.insert(0, InputTensor(USER_IDS, [1], BYTES, TensorParameters(len(blobs[USER_IDS]))))
    header = msgspec.json.encode(InferBody(inputs, parameters=InferParameters(binary_data_output=True)))
    return Encoded(b"".join((header, *blobs.values())), len(header))


def encode_answer(inference: InferBody, model_name: str, results: list[RankResult]) -> Encoded:
    """Encode the answer to an inference request."""
    scored = Scored.of(results)
    is_binary = inference.wants_binary
    output = OutputTensor(
        name=SCORES,
        datatype="FP32",
        shape=list(scored.scores.shape),
        parameters={"binary_data_size": scored.scores.nbytes} if is_binary else {},
        data=None if is_binary else scored.scores.ravel().tolist(),
    )
    header = msgspec.json.encode(InferAnswer(model_name, [output], scored.totals, inference.id, MODEL_VERSION))
    return Encoded(header + scored.scores.tobytes(), len(header)) if is_binary else Encoded(header, None)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The scores of all requests of a call, concatenated, and how they were computed."""

    scores: NDArray[np.float32]  # (candidates, tasks)
    totals: dict[str, int]

    @classmethod
    def of(cls, results: list[RankResult]) -> "Scored":
        counts = ("reused_tokens", "computed_tokens", "row_hits", "row_misses")
        totals = {name: sum(getattr(result, name) for result in results) for name in counts}
        earliest = min((result.row_position for result in results), key=lambda at: (at.sequence, at.offset))
        totals |= {"row_sequence": earliest.sequence, "row_offset": earliest.offset}
        return cls(np.concatenate([result.scores for result in results], dtype="<f4"), totals)
