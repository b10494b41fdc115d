"""A row delta: new rows of some tables, or a whole model, with a sequence number, and its form as bytes.

The bytes are a safetensors file: the metadata name the stream, the sequence number, the training step and the tables;
each table has a tensor of ids and one of values. The last tensor is a checksum of all bytes before it. No pickle.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import DeltaCorrupt, RequestError
from helmrec.types import IntArray

FORMAT = "helmrec-row-delta-1"
MAX_DELTA_BYTES = 256 << 20  # of an encoded delta; larger updates are pushed as several deltas
_MAX_HEADER_BYTES = 1 << 20
_CHECKSUM_BYTES = 8
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_VALUES, _DIFFERENCES = "values", "differences"
_METADATA = {"format", "stream", "sequence", "step", "made_s", "parts"}
_MODEL = "model"  # a further one, of a delta that names a model


@dataclass(frozen=True, slots=True, eq=False)
class TablePart:
    """New rows of one table, or differences that are added to its rows."""

    table: str
    ids: IntArray  # (rows,)
    values: NDArray[np.floating]  # (rows, row_dim) of float32 or float16
    is_difference: bool = False

    def __post_init__(self) -> None:
        """Raise RequestError that names field and value."""
        if not self.table:
            raise RequestError("table", self.table, "a name is needed")
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise RequestError("ids", f"{self.ids.dtype} {self.ids.shape}", "a flat array of int64 is needed")
        if self.values.ndim != 2 or len(self.values) != self.ids.size:
            raise RequestError("values", self.values.shape, f"one row for each of {self.ids.size} ids is needed")
        if self.values.dtype not in (np.float32, np.float16):
            raise RequestError("values", str(self.values.dtype), "float32 or float16 is needed")
        ordered = np.sort(self.ids)
        if ordered.size and ordered[0] < 0:
            raise RequestError("ids", int(ordered[0]), "row ids start at 0")
        is_twice = ordered[1:] == ordered[:-1]
        if is_twice.any():
            raise RequestError("ids", int(ordered[is_twice.argmax()]), "each id may be given once")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model folder that all servers of a stream can read, with the version that it must hold."""

    folder: str
    version: int

    def __post_init__(self) -> None:
        """Raise RequestError that names field and value."""
        if not Path(self.folder).is_absolute():
            raise RequestError("folder", self.folder, "an absolute path is needed, the same on every server")
        if type(self.version) is not int or not 0 <= self.version < 2**63:
            raise RequestError("version", self.version, "an integer from 0 on is needed")


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """New rows that become visible together, or a model that replaces weights and rows.

    One without either is a number that an operator has skipped.
    """

    stream: str  # identity of the stream, made by its first producer
    sequence: int  # from 1 on, without gaps
    step: int  # of the training
    made_s: float  # wall clock of the producer
    parts: tuple[TablePart, ...] = ()
    model: NamedModel | None = None

    def __post_init__(self) -> None:
        """Raise RequestError that names field and value."""
        if not self.stream:
            raise RequestError("stream", self.stream, "a name is needed")
        for name, least in (("sequence", 1), ("step", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise RequestError(name, value, f"an integer from {least} on is needed")
        if not np.isfinite(self.made_s):
            raise RequestError("made_s", self.made_s, "a finite number of seconds is needed")
        tables = [part.table for part in self.parts]
        if twice := [table for table in tables if tables.count(table) > 1]:
            raise RequestError("table", twice[0], "each table may be given once in a delta")
        if self.parts and self.model is not None:
            raise RequestError("model", self.model.folder, "a delta has rows or a model, not both")

    @property
    def is_skip(self) -> bool:
        return not self.parts and self.model is None

    @property
    def num_rows(self) -> int:
        return sum(part.ids.size for part in self.parts)


def encode(delta: Delta) -> bytes:
    """Return the bytes of a delta; RequestError if they exceed `MAX_DELTA_BYTES`."""
    arrays: dict[str, NDArray[Any]] = {}
    for i, part in enumerate(delta.parts):
        arrays[f"{i}.ids"] = part.ids.astype("<i8", copy=False)
        arrays[f"{i}.values"] = part.values.astype(part.values.dtype.newbyteorder("<"), copy=False)
    kinds = [[part.table, _DIFFERENCES if part.is_difference else _VALUES] for part in delta.parts]
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "stream": delta.stream,
            "sequence": str(delta.sequence),
            "step": str(delta.step),
            "made_s": repr(float(delta.made_s)),
            "parts": json.dumps(kinds),
        }
    }
    if delta.model is not None:
        header["__metadata__"][_MODEL] = json.dumps([delta.model.folder, delta.model.version])
    names, at = {np.dtype("<i8"): "I64"} | {dtype: name for name, dtype in _DTYPES.items()}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header["checksum"] = {"dtype": "U8", "shape": [_CHECKSUM_BYTES], "data_offsets": [at, at + _CHECKSUM_BYTES]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    body = b"".join((struct.pack("<Q", len(packed)), packed, *(each.tobytes() for each in arrays.values())))
    if len(body) + _CHECKSUM_BYTES > MAX_DELTA_BYTES:
        raise RequestError("values", len(body), f"a delta has at most {MAX_DELTA_BYTES} bytes: push it as several")
    return body + _checksum(body)


def decode(data: bytes | bytearray | memoryview, place: str, expected: int | None = None) -> Delta:
    """Read a delta. `place` names it in errors; `expected` is the sequence number of that place.

    The arrays of the delta are views of `data` if it is writable; else it is copied, since arrays must be writable to
    become tensors. Raises DeltaCorrupt, which says what is wrong and where.
    """
    view = memoryview(data)
    fields = _Fields(np.frombuffer(data, np.uint8).copy().data if view.readonly else view, place, expected)
    metadata = fields.metadata()
    sequence = fields.whole(metadata, "sequence")
    if expected is not None and sequence != expected:
        fields.fail(f"it is stored as delta {expected}, but says it is {sequence}")
    try:
        made_s = float(metadata["made_s"])
    except ValueError:
        fields.fail(f"made_s must be a number, got {metadata['made_s']!r}")
    parts = fields.parts(metadata["parts"])
    try:
        model = fields.model(metadata[_MODEL]) if _MODEL in metadata else None
        return Delta(metadata["stream"], sequence, fields.whole(metadata, "step"), made_s, parts, model)
    except RequestError as error:
        fields.fail(str(error))


def _checksum(body: bytes | memoryview) -> bytes:
    from helmrec.deltas.checksum import xxh64  # noqa: PLC0415 - compiled code, which help does without

    return xxh64(body).to_bytes(_CHECKSUM_BYTES, "little")


class _Fields:
    """The checked parts of an encoded delta."""

    def __init__(self, data: memoryview, place: str, sequence: int | None) -> None:
        self._place, self._sequence = place, sequence
        if len(data) < 8 + _CHECKSUM_BYTES:
            self.fail(f"it has {len(data)} bytes, too few for a delta")
        if len(data) > MAX_DELTA_BYTES:
            self.fail(f"it has {len(data)} bytes, more than the {MAX_DELTA_BYTES} of a delta")
        found, expected = bytes(data[-_CHECKSUM_BYTES:]), _checksum(data[:-_CHECKSUM_BYTES])
        if found != expected:
            self.fail(f"checksum {expected.hex()} expected, got {found.hex()}")
        (num_bytes,) = struct.unpack_from("<Q", data)
        if num_bytes > min(_MAX_HEADER_BYTES, len(data) - 8 - _CHECKSUM_BYTES):
            self.fail(f"its header cannot have {num_bytes} bytes")
        try:
            header = json.loads(bytes(data[8 : 8 + num_bytes]))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            self.fail(f"its header is no JSON ({error})")
        if not isinstance(header, dict):
            self.fail("its header is no JSON object")
        self._header: dict[str, Any] = header
        self._data = data[8 + num_bytes :]
        self._at = 0  # bytes of the data that tensors read so far take

    def fail(self, problem: str) -> NoReturn:
        raise DeltaCorrupt(f"{self._place} is corrupt: {problem}", self._sequence)

    def metadata(self) -> dict[str, str]:
        found = self._header.get("__metadata__")
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            self.fail("__metadata__ must be an object of texts")
        if found.get("format") != FORMAT:
            self.fail(f"format must be {FORMAT!r}, got {found.get('format')!r}")
        if found.keys() - {_MODEL} != _METADATA:
            self.fail(f"metadata must be {sorted(_METADATA)}, got {sorted(found)}")
        return found

    def whole(self, metadata: dict[str, str], name: str) -> int:
        text = metadata[name]
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            self.fail(f"{name} must be an integer, got {text[:40]!r}")
        return int(text)

    def model(self, described: str) -> NamedModel:
        try:
            named = json.loads(described)
        except (json.JSONDecodeError, RecursionError) as error:
            self.fail(f"model is no JSON ({error})")
        match named:
            case [str(folder), int(version)]:
                pass
            case _:
                self.fail(f"model must be [folder, version], got {described[:80]!r}")
        return NamedModel(folder, version)

    def parts(self, described: str) -> tuple[TablePart, ...]:
        try:
            kinds = json.loads(described)
        except (json.JSONDecodeError, RecursionError) as error:
            self.fail(f"parts is no JSON ({error})")
        if not isinstance(kinds, list):
            self.fail(f"parts must be a list, got {described[:80]!r}")
        parts = tuple(self._part(i, kind) for i, kind in enumerate(kinds))
        self._tensor("checksum", ["U8"], 1)
        if self._at != len(self._data):
            self.fail(f"{len(self._data) - self._at} bytes belong to no tensor")
        if len(self._header) != 2 + 2 * len(parts):
            self.fail(f"tensors must be ids and values of {len(parts)} tables and a checksum, got {len(self._header)}")
        return parts

    def _part(self, i: int, kind: object) -> TablePart:
        match kind:
            case [str(table), str(name)] if name in (_VALUES, _DIFFERENCES):
                pass
            case _:
                self.fail(f"parts[{i}] must be [table, 'values' or 'differences'], got {str(kind)[:80]}")
        ids, values = self._tensor(f"{i}.ids", ["I64"], 1), self._tensor(f"{i}.values", list(_DTYPES), 2)
        try:
            return TablePart(table, ids, values, name == _DIFFERENCES)
        except RequestError as error:
            self.fail(f"parts[{i}]: {error}")

    def _tensor(self, name: str, dtypes: Sequence[str], num_dimensions: int) -> NDArray[Any]:
        """Read the next tensor; tensors lie one behind the other in the order of the parts."""
        entry = self._header.get(name)
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self.fail(f"tensor {name!r} is missing or not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in dtypes:
            self.fail(f"tensor {name!r}: dtype must be one of {list(dtypes)}, got {dtype!r}")
        kind = np.dtype({"I64": "<i8", "U8": "u1", "F32": "<f4", "F16": "<f2"}[dtype])
        if not _are_sizes(shape) or len(shape) != num_dimensions:
            self.fail(f"tensor {name!r}: shape must have {num_dimensions} sizes, got {shape!r}")
        num_bytes = kind.itemsize * int(np.prod(shape, dtype=object))
        if offsets != [self._at, self._at + num_bytes] or self._at + num_bytes > len(self._data):
            self.fail(f"tensor {name!r}: {num_bytes} bytes from {self._at} on are expected, got {offsets!r}")
        found = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        array: NDArray[Any] = np.frombuffer(found, kind).reshape(shape)
        return array


def _are_sizes(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**40 for size in shape)
