"""Bodies that are wrong, each in one way, drawn from a seed. Everything `wrong_*` makes must be refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.serve.cases import events_body, infer_binary, infer_json, rank_body, rank_requests, tensors_of

Rng = np.random.Generator
RANK, INFER, EVENTS = "/v1/rank", "/v2/models/tiny/infer", "/v1/events"
EVENT_LISTS = ("items", "actions", "timestamps")
LISTS = (*EVENT_LISTS, "candidates")
NOT_IDS: tuple[Any, ...] = (
    -1,
    1 << 63,
    1 << 64,
    -(1 << 70),
    10**400,
    1.5,
    1e300,
    "1",
    "",
    None,
    True,
    [],
    [1],
    {},
    {"a": 1},
)
NOT_USERS = (*(value for value in NOT_IDS if not isinstance(value, str)), "", "ä" * 129)
NOT_LISTS: tuple[Any, ...] = (0, 7, -1, 1.5, "123", None, False, {}, {"0": 1}, [[1]], [None])
TENSORS = tensors_of(rank_requests(1))


@dataclass(frozen=True)
class Sent:
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def pick(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _text(body: Any) -> bytes:
    return json.dumps(body).encode()


def _drop(rng: Rng, body: dict[str, Any]) -> None:
    del body[
        pick(rng, [name for name in body if name != "base_version"])
    ]  # the model has tables for all: each is needed


def _add_unknown(rng: Rng, body: dict[str, Any]) -> None:
    body[f"field-{rng.integers(1 << 30)}"] = pick(rng, NOT_IDS)


def _spoil_list(rng: Rng, body: dict[str, Any]) -> None:
    body[pick(rng, _lists(body))] = pick(rng, NOT_LISTS)


def _lists(body: dict[str, Any]) -> tuple[str, ...]:
    return LISTS if "candidates" in body else EVENT_LISTS


def _spoil_id(rng: Rng, body: dict[str, Any]) -> None:
    values = body[pick(rng, _lists(body))]
    values[int(rng.integers(len(values)))] = pick(rng, NOT_IDS)


def _lengthen(rng: Rng, body: dict[str, Any]) -> None:
    body[pick(rng, _lists(body))].extend([99] * int(rng.integers(1, 50)))


def _shorten(rng: Rng, body: dict[str, Any]) -> None:
    body[pick(rng, _lists(body))].pop()


def _spoil_table(rng: Rng, body: dict[str, Any]) -> None:
    tables = body[pick(rng, ("features", "candidate_features", "context"))]
    name = pick(rng, list(tables))
    if rng.random() < 0.3:
        tables[f"table-{rng.integers(1 << 30)}"] = tables.pop(name)
    else:
        tables[name] = pick(rng, NOT_IDS)


def _spoil_scalar(rng: Rng, body: dict[str, Any]) -> None:
    name, wrong = pick(rng, (("user_id", NOT_USERS), ("first_event", NOT_IDS), ("deadline_ms", (0, -1, "1", [], True))))
    body[name] = pick(rng, wrong)


def _turn_back_time(rng: Rng, body: dict[str, Any]) -> None:
    if rng.random() < 0.5:
        body["timestamps"].reverse()
    else:
        body["request_time"] = int(rng.integers(body["timestamps"][-1]))


RANK_FAULTS: tuple[Callable[[Rng, dict[str, Any]], None], ...] = (
    _drop, _add_unknown, _spoil_list, _spoil_id, _lengthen, _shorten, _spoil_table, _spoil_scalar, _turn_back_time,
)  # fmt: skip


def wrong_rank(rng: Rng) -> Sent:
    if rng.random() < 0.1:
        whole = _text(rank_body())
        return Sent(RANK, whole[: int(rng.integers(len(whole)))])
    body = copy.deepcopy(rank_body())
    pick(rng, RANK_FAULTS)(rng, body)
    return Sent(RANK, _text(body))


def _spoil_base(rng: Rng, body: dict[str, Any]) -> None:
    name, wrong = pick(rng, (("user_id", NOT_USERS), ("base_version", NOT_IDS)))
    body[name] = pick(rng, wrong)


EVENTS_FAULTS = (_drop, _add_unknown, _spoil_list, _spoil_id, _lengthen, _shorten, _spoil_base)


def wrong_events(rng: Rng) -> Sent:
    whole = _text(events_body(0))
    if rng.random() < 0.1:
        return Sent(EVENTS, whole[: int(rng.integers(len(whole)))])
    body = json.loads(whole)
    pick(rng, EVENTS_FAULTS)(rng, body)
    return Sent(EVENTS, _text(body))


def wrong_infer_json(rng: Rng) -> Sent:
    body = infer_json(TENSORS)
    _spoil_tensor(rng, body["inputs"])
    if rng.random() < 0.1:
        whole = _text(body)
        return Sent(INFER, whole[: int(rng.integers(len(whole)))])
    return Sent(INFER, _text(body))


def _spoil_tensor(rng: Rng, inputs: list[dict[str, Any]]) -> None:
    at = int(rng.integers(len(inputs)))
    tensor, num = inputs[at], inputs[at]["shape"][0]
    name = pick(rng, ("name", "shape", "datatype", "data", "drop", "twice", "ids"))
    if name == "drop":
        del inputs[at]
    elif name == "twice":
        inputs.append(tensor)
    elif name == "ids":
        tensor["data"] = [*tensor["data"][:-1], pick(rng, NOT_IDS)]
    else:
        wrong: dict[str, tuple[Any, ...]] = {
            "name": ("SHOES", "", 7, None),
            "shape": ([], [num + 1], [num, 1], [-num], [1 << 62], "1", None, [1.5], [[num]]),
            "datatype": ("FP32", "BOOL", "BYTES", "int64", "", None, 64),
            "data": (None, [], "1", [[1]] * num, [1] * (num + 1), {}),
        }
        tensor[name] = pick(rng, wrong[name])


def wrong_infer_binary(rng: Rng) -> Sent:
    kind = pick(rng, ("cut", "pad", "header", "size", "width", "value", "length"))
    sent = infer_binary(TENSORS)
    length = int(sent.headers["inference-header-content-length"])
    if kind == "cut":
        return Sent(INFER, sent.body[: int(rng.integers(len(sent.body)))], sent.headers)
    if kind == "pad":
        return Sent(INFER, sent.body + rng.bytes(int(rng.integers(1, 64))), sent.headers)
    if kind == "header":
        other = pick(
            rng, (0, 1, length - 1, length + 1, len(sent.body), len(sent.body) + 1, -1, 1 << 70, "x", "", "1.0")
        )
        return Sent(INFER, sent.body, {"inference-header-content-length": str(other)})
    if kind in {"value", "length"}:
        name = pick(rng, list(TENSORS) if kind == "value" else ("LENGTHS", "NUM_CANDIDATES"))
        spoiled = {each: values.copy() for each, values in TENSORS.items()}
        spoiled[name][-1] = pick(rng, (-1, -(1 << 63)) if kind == "value" else (0, 1 << 40, (1 << 63) - 1))
        remade = infer_binary(spoiled)
        return Sent(INFER, remade.body, remade.headers)
    header = json.loads(sent.body[:length])
    tensor = pick(rng, header["inputs"])
    if kind == "size":
        size = tensor["parameters"]["binary_data_size"]
        tensor["parameters"]["binary_data_size"] = pick(
            rng, (size + 8, size - 8, size + 1, 0, -1, 1 << 62, "8", None, 1.5)
        )
    else:
        tensor["datatype"] = pick(rng, ("INT8", "UINT16", "INT32", "FP64", "BYTES"))
    text = _text(header)
    return Sent(INFER, text + sent.body[length:], {"inference-header-content-length": str(len(text))})


BINARY = infer_binary(TENSORS)
GOOD = (
    Sent(RANK, _text(rank_body())),
    Sent(INFER, _text(infer_json(TENSORS))),
    Sent(INFER, BINARY.body, BINARY.headers),
)


def damaged(rng: Rng) -> Sent:
    """A good body with a few bytes changed, cut out or put in; now and then it is still good."""
    good = pick(rng, GOOD)
    body = bytearray(good.body)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(len(body)))
        body[at : at + int(rng.integers(3))] = rng.bytes(int(rng.integers(3)))
    return Sent(good.path, bytes(body), good.headers)
