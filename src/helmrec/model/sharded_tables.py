"""Reads embedding tables from a folder of torch.distributed.checkpoint, a shard at a time.

The folder has a pickle, `.metadata`, with the place of each tensor's rows, and files in which each shard is an archive
of torch.save. Nothing pickled is executed. A table is streamed, since it may be larger than memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from helmrec.errors import ModelError
from helmrec.model.inert_pickle import MAX_BYTES, Named, PickledCall, read_pickle
from helmrec.model.torch_zip import StoredTensor, TorchZip

_METADATA = "torch.distributed.checkpoint.metadata"
_SIZE = Named("torch", "Size")
_MAX_SHARDS = 100_000  # of all tables together
_MAX_DIMENSIONS = 16
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_EXPECTED = {
    *(
        Named(_METADATA, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    Named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    Named("torch.serialization", "_get_layout"),
    *(Named("torch", name) for name in ("Size", "float32", "float16", "bfloat16", "strided", "contiguous_format")),
    *(Named("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
    Named("pathlib._local", "PosixPath"),
    Named("collections", "OrderedDict"),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of a table, and where their archive lies."""

    first_row: int
    num_rows: int
    path: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ShardedTable:
    """A table of a folder, its shards in order of rows."""

    name: str  # as saved
    shape: tuple[int, int]
    dtype: torch.dtype
    shards: tuple[Shard, ...]

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of its rows, in order."""
        for shard in self.shards:
            source = _source(shard, self)
            with TorchZip(shard.path.open("rb"), source, shard.start, shard.length) as archive:
                yield from archive.stream(_checked(archive.saved(), shard, self, source))


def read_index(folder: Path) -> dict[str, ShardedTable]:
    """Return every table of the folder, by its saved name; no row is read."""
    path = folder / ".metadata"
    if not path.is_file():
        raise ModelError(f"{folder} is not a folder that torch.distributed.checkpoint wrote: no .metadata")
    tree = read_pickle(_bytes_of(path), str(path), _EXPECTED.__contains__)
    try:
        where = {
            (_text(each.state["fqn"]), _size(each.state["offset"])): info.state
            for each, info in tree.state["storage_data"].items()
        }
        tensors = {_text(name): made.state for name, made in tree.state["state_dict_metadata"].items()}
        if (num_shards := sum(len(state["chunks"]) for state in tensors.values())) > _MAX_SHARDS:
            raise ModelError(f"{path}: at most {_MAX_SHARDS} shards are read, got {num_shards}")
        tables = {name: _table(folder, name, state, where) for name, state in tensors.items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OSError) as error:
        raise ModelError(f"{path}: not understood ({type(error).__name__}: {str(error)[:200]})") from None
    _check_sizes(tables)
    return tables


def _bytes_of(path: Path) -> bytes:
    """Read the bytes of a pickle; stop where it is too large for `read_pickle`."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _check_sizes(tables: Mapping[str, ShardedTable]) -> None:
    """Raise ModelError unless every shard is large enough for its rows, within its file, and overlaps no other."""
    windows: dict[Path, list[tuple[Shard, str]]] = {}
    for table in tables.values():
        row_bytes = table.shape[1] * table.dtype.itemsize
        for shard in table.shards:
            source = _source(shard, table)
            windows.setdefault(shard.path, []).append((shard, source))
            if shard.num_rows * row_bytes > shard.length:
                raise ModelError(
                    f"{source}: {shard.num_rows} rows of {row_bytes} bytes do not fit {shard.length} bytes"
                )
    for path, shards in windows.items():
        end, num_bytes = 0, path.stat().st_size
        for shard, source in sorted(shards, key=lambda each: each[0].start):
            place = f"{shard.length} bytes from {shard.start} on"
            if shard.start + shard.length > num_bytes:
                raise ModelError(f"{source}: {place} go beyond the end of the file, {num_bytes}")
            if shard.start < end:
                raise ModelError(f"{source}: {place} are in part another shard's")
            end = shard.start + shard.length


def _source(shard: Shard, table: ShardedTable) -> str:
    return f"{shard.path} (rows {shard.first_row} on of {table.name[:200]!r})"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is none")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("a size, or a place in a file, is no whole number from 0 on")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """Parse a torch.Size."""
    match value:
        case PickledCall(maker, (list(numbers) | tuple(numbers),)) if (
            maker == _SIZE and len(numbers) <= _MAX_DIMENSIONS
        ):
            return tuple(_whole(number) for number in numbers)
    raise TypeError("a size is none")


def _table(folder: Path, name: str, state: dict[str, Any], where: dict[Any, dict[str, Any]]) -> ShardedTable:
    shape = _size(state["size"])
    if len(shape) != 2:
        raise ModelError(f"{folder}: {name!r} must have two dimensions, got {shape}")
    shards, next_row = [], 0
    for chunk in sorted(state["chunks"], key=lambda each: _size(each.state["offsets"])):
        (first, column), (num, width) = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
        if column or width != shape[1]:
            raise ModelError(f"{folder}: {name!r} is split by columns; only tables split by rows are read")
        if first != next_row:
            raise ModelError(f"{folder}: {name!r}: rows {next_row} to {first} are in no shard, or in two")
        info = where[name, (first, column)]
        path = _inside(folder, _text(info["relative_path"]))
        shards.append(Shard(first, num, path, _whole(info["offset"]), _whole(info["length"])))
        next_row = first + num
    if next_row != shape[0]:
        raise ModelError(f"{folder}: {name!r}: {shape[0]} rows expected, got {next_row}")
    return ShardedTable(name, (shape[0], shape[1]), _dtype(state["properties"]), tuple(shards))


def _dtype(properties: PickledCall) -> torch.dtype:
    return _DTYPES[_text(properties.state[0].name)]


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder; refuse a name that leads out of it."""
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise ModelError(f"{folder}: shard file {name[:200]!r} is missing")
    return path


def _checked(tensor: object, shard: Shard, table: ShardedTable, source: str) -> StoredTensor:
    expected = (shard.num_rows, table.shape[1])
    if not (isinstance(tensor, StoredTensor) and tensor.is_whole):
        raise ModelError(f"{source}: not a plain tensor")
    if tensor.shape != expected or tensor.dtype != table.dtype:
        raise ModelError(f"{source}: {table.dtype} {expected} expected, got {tensor.dtype} {tensor.shape}")
    return tensor
