"""A delta is read back as it was written, and every damage is named."""

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from helmrec.deltas.checksum import xxh64
from helmrec.deltas.delta import Delta, NamedModel, TablePart, decode, encode
from helmrec.errors import DeltaCorrupt, RequestError
from tests.deltas.places import delta, part, same

Header = dict[str, Any]


def test_a_delta_is_read_back() -> None:
    half = TablePart("category", np.array([2], np.int64), np.ones((1, 3), np.float16))
    for each in (delta(1), delta(2**62, part(1), half), delta(3, part(1, num_rows=0)), Delta("s", 7, 0, 0.5)):
        assert same(decode(encode(each), "x", each.sequence), each)
    assert decode(encode(delta(1, part(1, add=True))), "x").parts[0].is_difference
    model = NamedModel("/models/second", 2**62)
    assert decode(encode(Delta("s", 7, 0, 0.5, model=model)), "x").model == model


def test_other_tools_can_read_it() -> None:
    whole = safetensors.numpy.load(encode(delta(1)))
    assert np.array_equal(whole["0.ids"], part(1).ids)
    assert np.array_equal(whole["0.values"], part(1).values)


def test_every_flipped_byte_is_found() -> None:
    data = encode(delta(1))
    for at in range(len(data)):
        with pytest.raises(DeltaCorrupt, match=r"^here is corrupt: "):
            decode(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :], "here")


def test_every_truncation_is_found() -> None:
    data = encode(delta(1))
    for size in range(len(data)):
        with pytest.raises(DeltaCorrupt) as caught:
            decode(data[:size], "here", 1)
        assert caught.value.sequence == 1


def signed(body: bytes) -> bytes:
    return body + xxh64(body).to_bytes(8, "little")


def changed(change: Callable[[Header], object]) -> bytes:
    """A delta with another header and a right checksum, as a wrong producer would write it."""
    data = encode(delta(1))
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    change(header)
    packed = json.dumps(header).encode()
    return signed(struct.pack("<Q", len(packed)) + packed + data[8 + size : -8])


def meta(name: str, value: Any) -> Callable[[Header], object]:
    return lambda header: header["__metadata__"].__setitem__(name, value)


def tensor(name: str, field: str, value: Any) -> Callable[[Header], object]:
    return lambda header: header[name].__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (meta("format", "other"), "format must be"),
        (meta("sequence", "-1"), "sequence must be an integer, got '-1'"),
        (meta("sequence", "0"), "sequence: an integer from 1 on"),
        (meta("step", "x"), "step must be an integer"),
        (meta("made_s", "soon"), "made_s must be a number, got 'soon'"),
        (meta("made_s", "inf"), "made_s: a finite number"),
        (meta("stream", ""), "stream: a name is needed"),
        (meta("parts", "{"), "parts is no JSON"),
        (meta("parts", "3"), "parts must be a list"),
        (meta("parts", '[["item", "other"]]'), r"parts\[0\] must be"),
        (meta("parts", '[["item", "values"], ["item", "values"]]'), "tensor '1.ids' is missing"),
        (meta("parts", "[]"), "tensor 'checksum': 8 bytes from 0 on are expected"),
        (meta("more", "1"), "metadata must be"),
        (meta("model", "{"), "model is no JSON"),
        (meta("model", '["/m"]'), r"model must be \[folder, version\]"),
        (meta("model", '["m", 1]'), "folder: an absolute path is needed"),
        (meta("model", '["/m", -1]'), "version: an integer from 0 on is needed"),
        (meta("model", '["/m", 1]'), "model: a delta has rows or a model, not both"),
        (meta("step", 3), "__metadata__ must be an object of texts"),
        (lambda header: header.pop("__metadata__"), "__metadata__ must be"),
        (lambda header: header.pop("0.ids"), "tensor '0.ids' is missing"),
        (lambda header: header.__setitem__("0.more", {}), "a checksum, got"),
        (tensor("0.ids", "dtype", "I32"), r"tensor '0.ids': dtype must be one of \['I64'\], got 'I32'"),
        (tensor("0.values", "dtype", "I8"), "tensor '0.values': dtype must be"),
        (tensor("0.values", "shape", [12]), r"tensor '0.values': shape must have 2 sizes, got \[12\]"),
        (tensor("0.values", "shape", [4, -3]), "shape must have 2 sizes"),
        (tensor("0.values", "shape", [3, 4]), "values: one row for each of 4 ids"),
        (tensor("0.ids", "data_offsets", [0, 8]), r"32 bytes from 0 on are expected, got \[0, 8\]"),
    ],
)
def test_what_a_wrong_producer_writes_is_named(change: Callable[[Header], object], named: str) -> None:
    with pytest.raises(DeltaCorrupt, match=named):
        decode(changed(change), "here")


def test_headers_that_are_none_are_named() -> None:
    for header, named in ((b"[]", "no JSON object"), (b"\xff", "no JSON"), (b"[" * 100_000, "no JSON")):
        with pytest.raises(DeltaCorrupt, match=named):
            decode(signed(struct.pack("<Q", len(header)) + header), "here")
    with pytest.raises(DeltaCorrupt, match="header cannot have"):
        decode(signed(struct.pack("<Q", 1 << 60)), "here")


def test_a_delta_under_another_number_is_corrupt() -> None:
    with pytest.raises(DeltaCorrupt, match="stored as delta 2, but says it is 1"):
        decode(encode(delta(1)), "here", 2)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TablePart("", np.zeros(0, np.int64), np.zeros((0, 1), np.float32)), "table: a name"),
        (lambda: TablePart("item", np.zeros(1, np.int32), np.zeros((1, 1), np.float32)), "ids: .* int64"),
        (lambda: TablePart("item", np.array([1, 1]), np.zeros((2, 1), np.float32)), "ids: each id may be given once"),
        (lambda: TablePart("item", np.array([-1]), np.zeros((1, 1), np.float32)), "ids: row ids start at 0, got -1"),
        (lambda: TablePart("item", np.array([1]), np.zeros((1, 1), np.int8)), "values: float32 or float16"),
        (lambda: delta(1, part(1), part(2)), "each table may be given once in a delta, got 'item'"),
        (lambda: delta(0), "sequence: an integer from 1 on is needed, got 0"),
    ],
)
def test_a_wrong_delta_is_not_made(make: Callable[[], object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        make()
