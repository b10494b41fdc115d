"""Reads tensors from an archive of torch.save without executing its pickle.

The archive is a zip with one pickle, which describes the tensors, and one member of plain bytes for each storage. It
does not know models. The bytes of a tensor are read only when it is requested.
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from helmrec.errors import ModelError
from helmrec.model.inert_pickle import MAX_BYTES, Named, Outside, PickledCall, is_hashed_fast, read_pickle

_STORAGES = {
    Named("torch", "FloatStorage"): torch.float32,
    Named("torch", "HalfStorage"): torch.float16,
    Named("torch", "BFloat16Storage"): torch.bfloat16,
    Named("torch", "DoubleStorage"): torch.float64,
    Named("torch", "LongStorage"): torch.int64,
    Named("torch", "IntStorage"): torch.int32,
    Named("torch", "BoolStorage"): torch.bool,
    Named("torch", "ByteStorage"): torch.uint8,
}
_TENSOR = Named("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = Named("torch._utils", "_rebuild_parameter")
_ORDERED = Named("collections", "OrderedDict")
_SETS = {Named("__builtin__", "set"), Named("builtins", "set")}
_OTHERS = {"torch", "torchrec"}  # packages that other saved data, such as optimiser state, may name
_CHUNK_BYTES = 16 << 20
_MAX_DIRECTORY_BYTES = 4 << 20  # of an archive: some 40,000 storages
_MAX_DIMENSIONS = 16
_MAX_COPIES = 4  # of a storage in the tensors that share it, on average
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, RuntimeError),
    *(ValueError, KeyError, IndexError, OverflowError),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor in an archive."""

    key: str  # of its storage
    dtype: torch.dtype
    storage_size: int  # elements
    first: int  # element of the storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is its whole storage, in order."""
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return not self.first and list(self.stride) == strides and math.prod(self.shape) == self.storage_size


def _is_expected(named: Named) -> bool:
    return named in {_ORDERED, *_SETS} or named.module.split(".")[0] in _OTHERS


class TorchZip:
    """An open archive; `close` also closes the file."""

    def __init__(self, file: BinaryIO, source: str, start: int = 0, length: int | None = None) -> None:
        """`start`, `length`: the bytes of the file that are the archive; by default all."""
        self._source = source
        self._file = file
        self._num_bytes = file.seek(0, os.SEEK_END) - start if length is None else length
        opening = _Range(file, start, self._num_bytes)
        try:
            self._zip = zipfile.ZipFile(opening)
        except _DAMAGED as error:
            file.close()
            raise ModelError(f"{source} is not an archive that torch.save wrote ({error})") from None
        opening.max_bytes = None
        try:
            self._check_members()
            self._saved = self._open()
        except ModelError:
            self.close()
            raise

    def _check_members(self) -> None:
        """Check that all members are uncompressed and together at most as large as the file, so that none overlap."""
        members = self._zip.infolist()
        if packed := [each for each in members if each.compress_type != zipfile.ZIP_STORED]:
            raise ModelError(f"{self._source}: {packed[0].filename[:100]!r} must be plain bytes, got a packed member")
        total = sum(max(each.file_size, each.compress_size) for each in members)
        if total > self._num_bytes:
            raise ModelError(f"{self._source}: a file of {self._num_bytes} bytes claims to hold {total}")

    def _open(self) -> Any:
        source = self._source
        pickles = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ModelError(f"{source} is not an archive that torch.save wrote: {len(pickles)} pickles in it")
        self._root = pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        if order in self._zip.namelist() and self._read(order) != b"little":
            raise ModelError(f"{source}: its numbers are not little-endian")
        return read_pickle(self._read(pickles[0]), source, _is_expected)

    @classmethod
    def open(cls, path: Path) -> "TorchZip":
        try:
            return cls(path.open("rb"), str(path))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        self._zip.close()
        self._file.close()

    def __enter__(self) -> "TorchZip":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def saved(self, *keys: str) -> Any:
        """Return the saved value, or the part under these keys: plain values, and a `StoredTensor` per tensor."""
        value = self._saved
        for key in keys:
            if isinstance(value, PickledCall) and value.maker == _ORDERED:
                value = value.items or {}
            if not isinstance(value, dict) or key not in value:
                raise ModelError(f"{self._source}: nothing was saved under {key!r}")
            value = value[key]
        return self._understand(value)

    def tensors(self, *keys: str) -> dict[str, StoredTensor]:
        """Return the tensors of a saved dictionary, or of the one under these keys if there is one."""
        value = self._saved
        for key in keys:
            items = value.items if isinstance(value, PickledCall) else value
            value = items.get(key) if isinstance(items, dict) else None
        items = value.items if isinstance(value, PickledCall) else value
        found = {name: self._tensor_of(each) for name, each in items.items()} if isinstance(items, dict) else {}
        return {name: tensor for name, tensor in found.items() if tensor is not None and isinstance(name, str)}

    def _tensor_of(self, value: Any) -> StoredTensor | None:
        try:
            made = self._understand(value)
        except ModelError:
            return None
        return made if isinstance(made, StoredTensor) else None

    def read_all(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Read tensors, each storage once. ModelError if tensors that share storages are far larger than the file."""
        total = sum(tensor.num_bytes for tensor in tensors.values())
        if total > _MAX_COPIES * self._num_bytes:
            raise ModelError(f"{self._source}: a file of {self._num_bytes} bytes claims tensors of {total}")
        by_storage: dict[tuple[str, torch.dtype, int], list[str]] = {}
        for name, tensor in tensors.items():
            by_storage.setdefault((tensor.key, tensor.dtype, tensor.storage_size), []).append(name)
        found: dict[str, Tensor] = {}
        for names in by_storage.values():
            storage = self._storage(tensors[names[0]])
            found |= {name: self._view(storage, tensors[name]).clone() for name in names}
        return {name: found[name] for name in tensors}

    def _storage(self, tensor: StoredTensor) -> Tensor:
        data = bytearray(b"".join(self.stream(tensor)))
        return torch.frombuffer(data, dtype=tensor.dtype) if data else torch.empty(0, dtype=tensor.dtype)

    def _view(self, storage: Tensor, tensor: StoredTensor) -> Tensor:
        try:
            return storage.as_strided(tensor.shape, tensor.stride, tensor.first)
        except (RuntimeError, OverflowError, TypeError) as error:
            reason = str(error).splitlines()[0][:200]
            raise ModelError(f"{self._source}: a tensor of storage {tensor.key!r} cannot be made ({reason})") from None

    def stream(self, tensor: StoredTensor) -> Iterator[bytes]:
        """Yield the bytes of its whole storage in parts."""
        name = f"{self._root}data/{tensor.key}"
        expected = tensor.storage_size * tensor.dtype.itemsize
        try:
            member = self._zip.getinfo(name)
        except KeyError:
            raise ModelError(f"{self._source}: storage {tensor.key!r} is missing") from None
        if member.file_size != expected:
            raise ModelError(
                f"{self._source}: storage {tensor.key!r} must be {expected} plain bytes, got {member.file_size}"
            )
        try:
            with self._zip.open(name) as data:
                while part := data.read(_CHUNK_BYTES):
                    yield part
        except _DAMAGED as error:
            raise ModelError(f"{self._source}: storage {tensor.key!r} is damaged ({error})") from None

    def _read(self, name: str) -> bytes:
        """Read a small member."""
        if self._zip.getinfo(name).file_size > MAX_BYTES:
            raise ModelError(f"{self._source}: {name!r} must be at most {MAX_BYTES} bytes")
        try:
            return self._zip.read(name)
        except _DAMAGED as error:
            raise ModelError(f"{self._source}: {name!r} is damaged ({error})") from None

    def _understand(self, value: Any) -> Any:
        """Convert recorded calls to values. `read_pickle` has bounded the depth and size of the tree."""
        if isinstance(value, Named):
            return value
        if isinstance(value, dict):
            return {key: self._understand(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._understand(each) for each in value)
        return self._made(value) if isinstance(value, PickledCall) else value

    def _made(self, made: PickledCall) -> Any:
        if made.maker == _ORDERED:
            return self._understand(made.items or {})
        if made.maker == _TENSOR:
            return self._tensor(made.args)
        match made.args:
            case (first, *_) if made.maker == _PARAMETER:
                return self._understand(first)
            case (list(members),) if made.maker in _SETS and all(map(is_hashed_fast, members)):
                return set(members)
        raise ModelError(f"{self._source}: {made.maker} with {len(made.args)} arguments stands where a value should")

    def _tensor(self, args: tuple[Any, ...]) -> StoredTensor:
        """Parse a tensor; every part is checked, since the file is not trusted."""
        match args:
            case (
                Outside(("storage", Named() as kind, str(key), str(), int(size))),
                int(first),
                tuple(shape),
                tuple(stride),
                *_,
            ):
                numbers = (size, first, *shape, *stride)
                is_sound = kind in _STORAGES and all(isinstance(each, int) and each >= 0 for each in numbers)
                if is_sound and len(shape) == len(stride) <= _MAX_DIMENSIONS:
                    return self._within(StoredTensor(key, _STORAGES[kind], size, first, shape, stride))
        raise ModelError(f"{self._source}: a tensor is described in a way that makes no sense")

    def _within(self, tensor: StoredTensor) -> StoredTensor:
        """Check that a tensor lies in its storage and has at most as many elements.

        Else strides of 0 would allow a tensor of any size over four bytes.
        """
        most, num = tensor.storage_size, math.prod(tensor.shape)
        if max(num, _end(tensor)) > most:
            raise ModelError(
                f"{self._source}: a tensor of {num} elements, {tensor.shape} with strides {tensor.stride}, "
                f"does not fit its storage {tensor.key[:100]!r} of {most}"
            )
        return tensor


class _Range:
    """A range of bytes of a file, as `zipfile` reads it. One read is bounded while `max_bytes` is set."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start, self._length, self._at = start, length, 0
        self.max_bytes: int | None = _MAX_DIRECTORY_BYTES

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        num = left if size < 0 else min(size, left)
        if self.max_bytes is not None and num > self.max_bytes:
            raise ValueError(f"its directory is larger than {self.max_bytes} bytes")
        self._file.seek(self._start + self._at)
        data = self._file.read(num)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")  # as a file does, which `zipfile` expects
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True


def _end(tensor: StoredTensor) -> int:
    """Return the index after the last element of the storage that the tensor uses."""
    if 0 in tensor.shape:
        return tensor.first
    return tensor.first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True)) + 1
