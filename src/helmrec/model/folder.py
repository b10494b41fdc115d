"""Model folders: config.json, dense weights and tables in safetensors. Never pickle: a model must not run code.

Layout: config.json (the model's shape, and size and checksum of every file), dense.safetensors,
tables/NAME.safetensors with one tensor `rows` each, perhaps precision.json (`precision.py`). This module reads and
checks files without torch.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from helmrec.config import Frozen
from helmrec.errors import ConfigError, ModelError
from helmrec.model.config import ModelConfig, TableConfig

DENSE = "dense.safetensors"
VERIFY_BYTES = 256 << 20  # larger files are checksummed only with `verify`: reading them takes minutes
_CHUNK_BYTES = 16 << 20
_MAX_MANIFEST_BYTES = 16 << 20
_MAX_HEADER_BYTES = 1 << 20
_LENGTH_BYTES = 8  # of a safetensors header's length, before it
SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
Progress = Callable[[int], None]  # called with the number of further bytes done


class FileRecord(Frozen):
    """Size and checksum of a file."""

    bytes: int
    blake2b: str


class Manifest(Frozen):
    """The content of config.json."""

    model: ModelConfig
    files: dict[str, FileRecord]

    @property
    def version(self) -> int:
        """Fingerprint of shape and weights; KV of one version is never reused with another."""
        digest = hashlib.blake2b(self.model_dump_json().encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def table_file(name: str) -> str:
    return f"tables/{name}.safetensors"


class TableSpan(NamedTuple):
    """Where the rows of a table are in its file, one after the other."""

    path: Path
    start: int  # of the first row
    num_rows: int
    row_bytes: int


def find_rows(folder: Path, table: TableConfig, config: ModelConfig) -> TableSpan:
    """Read the header of a table's file; ModelError unless it holds the rows that the configuration says."""
    path = folder / table_file(table.name)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a valid safetensors file: its header has {length} bytes")
        header = file.read(length)
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        entry, start = tensors["rows"], _LENGTH_BYTES + length
        found = (list(tensors), entry["dtype"], list(entry["shape"]), entry["data_offsets"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a valid safetensors file: {error!r}") from None
    num_bytes = table.num_rows * config.row_bytes
    shape, dtype = [table.num_rows, config.row_dim], SAFETENSORS_DTYPE[config.row_dtype]
    if found != (["rows"], dtype, shape, [0, num_bytes]) or path.stat().st_size != start + num_bytes:
        raise ModelError(
            f"{path}: one tensor `rows` of {dtype} {shape} is needed, got {found[0]} of {found[1]} {found[2]}"
        )
    return TableSpan(path, start, table.num_rows, config.row_bytes)


def read_manifest(folder: Path) -> Manifest:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a model folder: {'it is a file' if folder.exists() else 'it does not exist'}"
        )
    if not path.is_file():
        pickled = [p.name for p in folder.glob("*") if p.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}]
        hint = f"; found {pickled[0]!r}, but pickled weights are never loaded: a pickle can run code" if pickled else ""
        raise ModelError(f"{folder} is not a model folder: no config.json{hint}; helmrec.model.save_model writes one")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ModelError(f"{path}: at most {_MAX_MANIFEST_BYTES} bytes are read, got {path.stat().st_size}")
    try:
        manifest = Manifest(**json.loads(path.read_text()))
    except RecursionError:
        raise ModelError(f"{path}: nested too deeply") from None
    except (ConfigError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from error
    wanted = {DENSE, *(table_file(table.name) for table in manifest.model.tables)}
    if missing := wanted - manifest.files.keys():
        raise ModelError(f"{path}: files lists no {sorted(missing)[0]!r}")
    return manifest


def check_file(path: Path, record: FileRecord, *, verify: bool, progress: Progress) -> None:
    """Raise ModelError if a file is missing, pickled, of another size or, with `verify`, of another checksum."""
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    size = path.stat().st_size
    if _looks_pickled(path, size):
        raise ModelError(f"{path} holds pickled weights; only safetensors are loaded, since a pickle can run code")
    if size != record.bytes:
        raise ModelError(f"{path} is truncated or replaced: {record.bytes} bytes expected, got {size}")
    if verify and (found := checksum(path, progress)) != record.blake2b:
        raise ModelError(f"{path} is corrupt: checksum {record.blake2b} expected, got {found}")


def _looks_pickled(path: Path, size: int) -> bool:
    """Whether a file is a pickle or a zip of torch.save. As safetensors, either has an impossible header length."""
    with path.open("rb") as file:
        start = file.read(8)
    has_magic = start[:1] == b"\x80" or start[:4] == b"PK\x03\x04"
    return has_magic and int.from_bytes(start, "little") > size


def checksum(path: Path, progress: Progress) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for chunk in _chunks(path):
        digest.update(chunk)
        progress(len(chunk))
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
