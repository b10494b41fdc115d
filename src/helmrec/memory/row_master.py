"""The row master: every embedding row in host memory; rows of all tables share one id space.

For a CPU the tables are used in place, perhaps as memory-mapped files: updates then stay in private pages and do not
change the file. For a card, or if rows are rounded, they are read or copied into one buffer, locked for a card, whose
kernels read it over the bus. Several engines of a host share one buffer, which another process has filled and writes.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.codes import NAN_EXPONENT
from helmrec.errors import ConfigError, ModelError
from helmrec.kernels.row_codec import RowCodec
from helmrec.kernels.row_gather import MAX_ROWS
from helmrec.memory.row_codes import encode_rows

Progress = Callable[[int, int], None]  # called with the bytes done and the total

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 256 << 20
_CODED_BYTES = 8 << 20  # of rows that one thread rounds at a time
_THREADS = min(8, os.cpu_count() or 1)
_MAPPED = 2  # cudaHostRegisterMapped


class HostRows(Protocol):
    """Rows in host memory: all of them (`RowMaster`), or those that steps read, with the others on disk."""

    @property
    def is_shared(self) -> bool:
        """Whether other engines read the same memory: then only its keeper may write it."""

    @property
    def rows(self) -> Tensor:
        """What kernels read, (any, codec.width), by row or by frame."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""

    @property
    def codec(self) -> RowCodec:
        """How it stores rows."""

    def gather(self, rows: NDArray[np.int64]) -> Tensor:
        """Return rows as they are stored, (rows, codec.width)."""

    def update(self, rows: NDArray[np.int64], values: Tensor) -> None:
        """Write new rows, as they are stored."""

    def close(self) -> None:
        """A card may not read the memory any more."""


class LockedBuffer:
    """Host memory in huge pages. Fill `data`, then `lock` it, so that a card can read it over the bus."""

    def __init__(self, num_bytes: int, shared: mmap.mmap | None = None) -> None:
        """Take anonymous memory, or use `shared`, which begins with these bytes."""
        self.is_shared = shared is not None
        memory = _anonymous(num_bytes) if shared is None else shared
        memory.madvise(mmap.MADV_DONTFORK)  # a fork would have to copy locked memory
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = 0 if self.is_shared else -whole.data_ptr() % _HUGE_PAGE
        self.data = whole[start : start + num_bytes]
        self._unlock: weakref.finalize[[int], LockedBuffer] | None = None

    def rows(self, codec: RowCodec) -> Tensor:  # (rows, codec.width)
        """Return the buffer as stored rows."""
        dtype = codec.stored_dtype
        return self.data.view(dtype).view(-1, codec.stride // dtype.itemsize)[:, : codec.width]

    def lock(self) -> None:
        """Register the memory with the driver."""
        runtime, address = _cuda_runtime(), self.data.data_ptr()
        if error := int(runtime.cudaHostRegister(address, self.data.nbytes, _MAPPED)):
            raise ConfigError(
                f"{self.data.nbytes} bytes cannot be locked in host memory for the card "
                f"(CUDA error {error}); free memory, or allow more locked memory (ulimit -l)"
            )
        self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)

    def close(self) -> None:
        """Unlock the memory; it is freed with the last tensor that views it."""
        if self._unlock is not None:
            self._unlock()


def check_host_room(num_bytes: int) -> None:
    """Raise ConfigError if the host does not give so much memory. None is kept."""
    _anonymous(num_bytes).close()


def _anonymous(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no room in host memory for {num_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # huge pages are faster, but optional
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


class RowMaster:
    """Every row of every table, by table offset."""

    def __init__(
        self, tables: Mapping[str, Tensor], buffer: LockedBuffer | None = None, codec: RowCodec | None = None
    ) -> None:
        """Use the tables in place; updates write to them.

        `buffer` is the memory they fill, if it is one buffer; `codec` says how they store rows, if not as they are.
        """
        self.tables = dict(tables)
        self._tables = list(tables.values())
        self.codec = codec or RowCodec(self._tables[0].shape[1], self._tables[0].dtype)
        sizes = [table.shape[0] for table in self._tables]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._buffer = buffer

    @classmethod
    def locked(
        cls, tables: Mapping[str, Tensor], progress: Progress = lambda done, total: None, code: str | None = None
    ) -> "RowMaster":
        """Copy the tables to locked memory, which a card can read until `close`. `code`: as `copied`."""
        master = cls.copied(tables, progress, code)
        master.lock()
        return master

    @classmethod
    def copied(
        cls, tables: Mapping[str, Tensor], progress: Progress = lambda done, total: None, code: str | None = None
    ) -> "RowMaster":
        """Copy the tables into one buffer. code: eight bits to which rows are rounded; None: they stay as they are."""
        first = next(iter(tables.values()))
        codec = RowCodec(first.shape[1], first.dtype, code)
        master = cls.empty({name: table.shape[0] for name, table in tables.items()}, codec)
        _fill(master, tables, progress)
        return master

    @classmethod
    def empty(cls, sizes: Mapping[str, int], codec: RowCodec) -> "RowMaster":
        """Take one buffer for tables of these sizes, to be filled."""
        num_rows = sum(sizes.values())
        if num_rows > MAX_ROWS:
            raise ConfigError(f"a card serves at most {MAX_ROWS} rows over all tables, got {num_rows}")
        return cls.over(LockedBuffer(num_rows * codec.stride), sizes, codec)

    @classmethod
    def over(cls, buffer: LockedBuffer, sizes: Mapping[str, int], codec: RowCodec) -> "RowMaster":
        """Use a buffer of all rows, table after table."""
        rows = buffer.rows(codec)
        return cls(dict(zip(sizes, rows.split(list(sizes.values())), strict=True)), buffer, codec)

    @property
    def is_shared(self) -> bool:
        """Whether other engines read the same memory: then only its keeper may write it."""
        return self._buffer is not None and self._buffer.is_shared

    def lock(self) -> None:
        """Let a card read the rows, until `close`."""
        assert self._buffer is not None, "only one buffer can be locked"
        self._buffer.lock()

    @property
    def rows(self) -> Tensor:  # (rows, codec.width) on the host
        """All rows of a copied master in one strided view, for kernels."""
        assert self._buffer is not None, "only a copied master is one buffer"
        return self._buffer.rows(self.codec)

    @property
    def row_bytes(self) -> NDArray[np.uint8]:  # (rows, bytes of a stored row)
        """All stored rows of a master that is one buffer, as bytes."""
        assert self._buffer is not None, "only a copied master is one buffer"
        every = self._buffer.data.numpy().reshape(int(self._starts[-1]), -1)
        return every[:, : self.codec.width * self.codec.stored_dtype.itemsize]

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def gather(self, rows: NDArray[np.int64]) -> Tensor:  # (rows, codec.width)
        out = torch.empty((rows.size, self.codec.width), dtype=self.codec.stored_dtype)
        for table, start, where in self._by_table(rows):
            out[where] = table[torch.from_numpy(rows[where] - start)]
        return out

    def update(self, rows: NDArray[np.int64], values: Tensor) -> None:
        """Write new rows. A card that reads this memory writes it by itself (`DeviceRowStage.write`)."""
        for table, start, where in self._by_table(rows):
            table[torch.from_numpy(rows[where] - start)] = values[where]

    def close(self) -> None:
        """Unlock the memory: a card may not read it any more; `gather` and `update` still work."""
        if self._buffer is not None:
            self._buffer.close()

    def _by_table(self, rows: NDArray[np.int64]) -> list[tuple[Tensor, int, NDArray[np.int64]]]:
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        found = np.unique(owner).tolist()
        return [(self._tables[i], int(self._starts[i]), np.flatnonzero(owner == i)) for i in found]


def _fill(master: RowMaster, tables: Mapping[str, Tensor], progress: Progress) -> None:
    """Store the rows of tables in a master; ModelError if a value is not finite."""
    codec, done, total = master.codec, 0, sum(table.nbytes for table in tables.values())
    is_coded = codec.code is not None
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, table in tables.items():
            part_rows = max(1, (_CODED_BYTES if is_coded else _CHUNK_BYTES) // (table.shape[1] * table.itemsize))
            sources, targets, first = table.split(part_rows), master.tables[name].split(part_rows), 0
            store = partial(_store, codec)
            stored = threads.map(store, sources, targets) if is_coded else map(store, sources, targets)
            for source, wrong in zip(sources, stored, strict=True):
                if wrong is not None:
                    threads.shutdown(cancel_futures=True)
                    raise non_finite_row(f"table {name!r}", first + wrong)
                first += len(source)
                done += source.nbytes
                progress(done, total)


def _store(codec: RowCodec, source: Tensor, target: Tensor) -> int | None:
    """Store rows; return the first with a value that is not finite."""
    if codec.code is None:
        target.copy_(source)
        return first_non_finite(source)
    encode_on_host(source, codec, target)
    wrong = np.flatnonzero(target[:, codec.dim].numpy() == NAN_EXPONENT)
    return int(wrong[0]) if wrong.size else None


def encode_on_host(rows: Tensor, codec: RowCodec, out: Tensor) -> None:
    """Write the records of rows, (rows, dim) of the codec's dtype, to `out`, in this thread alone."""
    assert codec.code is not None, "rows that are stored as they are have no records"
    if not len(rows):  # torch cannot view them as bytes
        return
    values = rows.contiguous().view(torch.uint8).numpy()
    encode_rows(values, str(codec.dtype).removeprefix("torch."), codec.code, out.numpy())


def encoded_on_host(rows: Tensor, codec: RowCodec) -> Tensor:  # (rows, codec.width)
    out = torch.empty((len(rows), codec.width), dtype=torch.uint8)
    encode_on_host(rows, codec, out)
    return out


def first_non_finite(rows: Tensor) -> int | None:
    """Return the first row with a non-finite value. Without one, it takes one pass and allocates nothing."""
    if not rows.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(rows)):  # NaN wins either way
        return None
    middle = len(rows) // 2
    if not middle:
        return 0
    before = first_non_finite(rows[:middle])
    if before is not None:
        return before
    after = first_non_finite(rows[middle:])
    assert after is not None
    return middle + after


def non_finite_row(table: str, row: int) -> ModelError:
    return ModelError(f"{table}: row {row} holds values that are not finite")
