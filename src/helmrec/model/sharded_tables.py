"""Embedding tables out of a folder that torch.distributed.checkpoint wrote, a shard at a time.

The folder has a pickle, `.metadata`, which says which rows of which tensor lie where in which file, and files in which
each shard is an archive of torch.save. Nothing pickled is run. A table is streamed: it may be larger than memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from helmrec.errors import ModelError
from helmrec.model.inert_pickle import Made, Named, read_pickle
from helmrec.model.torch_zip import StoredTensor, TorchZip, Window

_METADATA = "torch.distributed.checkpoint.metadata"
_SIZE = Named("torch", "Size")
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
        """Its rows, from the first to the last, as bytes."""
        for shard in self.shards:
            source = f"{shard.path} (rows {shard.first_row} on of {self.name!r})"
            window = BufferedReader(Window(shard.path, shard.start, shard.length))
            with TorchZip(window, source) as archive:
                yield from archive.stream(_checked(archive.saved(), shard, self, source))


def read_index(folder: Path) -> dict[str, ShardedTable]:
    """Every table of the folder, by the name it was saved under; no row is read."""
    path = folder / ".metadata"
    if not path.is_file():
        raise ModelError(f"{folder} is not a folder that torch.distributed.checkpoint wrote: no .metadata")
    tree = read_pickle(path.read_bytes(), str(path), _EXPECTED.__contains__)
    try:
        where = {(each.state["fqn"], _size(each.state["offset"])): info.state for each, info in _items(tree)}
        tensors = tree.state["state_dict_metadata"]
        return {name: _table(folder, name, made.state, where) for name, made in tensors.items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path}: not understood ({type(error).__name__}: {error})") from None


def _items(tree: Made) -> list[tuple[Made, Made]]:
    return list(tree.state["storage_data"].items())


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size, as the pickle has it."""
    if not (isinstance(value, Made) and value.maker == _SIZE and all(isinstance(n, int) for n in value.args[0])):
        raise TypeError("a size is none")
    return tuple(value.args[0])


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
        shards.append(Shard(first, num, _inside(folder, info["relative_path"]), info["offset"], info["length"]))
        next_row = first + num
    if next_row != shape[0]:
        raise ModelError(f"{folder}: {name!r}: {shape[0]} rows expected, got {next_row}")
    return ShardedTable(name, (shape[0], shape[1]), _dtype(state["properties"]), tuple(shards))


def _dtype(properties: Made) -> torch.dtype:
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[properties.state[0].name]


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder: a name that leads out of it is refused."""
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise ModelError(f"{folder}: shard file {name!r} is missing")
    return path


def _checked(tensor: object, shard: Shard, table: ShardedTable, source: str) -> StoredTensor:
    expected = (shard.num_rows, table.shape[1])
    if not (isinstance(tensor, StoredTensor) and tensor.is_whole):
        raise ModelError(f"{source}: not a plain tensor")
    if tensor.shape != expected or tensor.dtype != table.dtype:
        raise ModelError(f"{source}: {table.dtype} {expected} expected, got {tensor.dtype} {tensor.shape}")
    return tensor
