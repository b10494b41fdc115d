"""The row master: every embedding row in host memory; rows of all tables share one id space.

For a CPU the tables are used in place, perhaps as memory-mapped files: updates then stay in private pages and do not
change the file. For a card they are read or copied into one locked buffer that kernels read over the bus. Several
engines of a host share one buffer, which another process has filled and writes.
"""

import contextlib
import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.errors import ConfigError, ModelError
from helmrec.kernels.row_gather import MAX_ROWS

Progress = Callable[[int, int], None]  # called with the bytes done and the total

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 256 << 20
_ALIGN_ROW = 16  # a card reads 16 bytes at a time
_MAPPED = 2  # cudaHostRegisterMapped


class HostRows(Protocol):
    """Rows in host memory: all of them (`RowMaster`), or those that steps read, with the others on disk."""

    @property
    def is_shared(self) -> bool:
        """Whether other engines read the same memory: then only its keeper may write it."""

    @property
    def rows(self) -> Tensor:
        """What kernels read, (any, row_dim), by row or by frame."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""

    @property
    def row_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def gather(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the values of rows, (rows, row_dim)."""

    def update(self, rows: NDArray[np.int64], values: Tensor) -> None:
        """Write new values of rows."""

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

    def rows(self, row_dim: int, stride: int, dtype: torch.dtype) -> Tensor:  # (rows, row_dim)
        """Return the buffer as rows of `stride` bytes."""
        return self.data.view(dtype).view(-1, stride // dtype.itemsize)[:, :row_dim]

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

    def __init__(self, tables: Mapping[str, Tensor], buffer: LockedBuffer | None = None) -> None:
        """Use the tables in place; updates write to them. `buffer` is the memory they fill, if it is one buffer."""
        self.tables = dict(tables)
        self._tables = list(tables.values())
        sizes = [table.shape[0] for table in self._tables]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._buffer = buffer

    @classmethod
    def locked(cls, tables: Mapping[str, Tensor], progress: Progress = lambda done, total: None) -> "RowMaster":
        """Copy the tables to locked memory, which a card can read until `close`."""
        master = cls.copied(tables, progress)
        master.lock()
        return master

    @classmethod
    def copied(cls, tables: Mapping[str, Tensor], progress: Progress = lambda done, total: None) -> "RowMaster":
        """Copy the tables into one buffer."""
        first = next(iter(tables.values()))
        master = cls.empty({name: table.shape[0] for name, table in tables.items()}, first)
        copy_tables(tables, master.tables, progress)
        return master

    @classmethod
    def empty(cls, sizes: Mapping[str, int], like: Tensor) -> "RowMaster":
        """Take one buffer for tables of these sizes, to be filled. `like`: as `over`."""
        num_rows = sum(sizes.values())
        if num_rows > MAX_ROWS:
            raise ConfigError(f"a card serves at most {MAX_ROWS} rows over all tables, got {num_rows}")
        stride = -(-like.shape[1] * like.itemsize // _ALIGN_ROW) * _ALIGN_ROW
        return cls.over(LockedBuffer(num_rows * stride), sizes, like)

    @classmethod
    def over(cls, buffer: LockedBuffer, sizes: Mapping[str, int], like: Tensor) -> "RowMaster":
        """Use a buffer of all rows, table after table. `like` has the dtype of rows, and their width."""
        stride = buffer.data.nbytes // sum(sizes.values())
        rows = buffer.rows(like.shape[1], stride, like.dtype)
        return cls(dict(zip(sizes, rows.split(list(sizes.values())), strict=True)), buffer)

    @property
    def is_shared(self) -> bool:
        """Whether other engines read the same memory: then only its keeper may write it."""
        return self._buffer is not None and self._buffer.is_shared

    def lock(self) -> None:
        """Let a card read the rows, until `close`."""
        assert self._buffer is not None, "only one buffer can be locked"
        self._buffer.lock()

    @property
    def rows(self) -> Tensor:  # (rows, row_dim) on the host
        """All rows of a copied master in one strided view, for kernels."""
        assert self._buffer is not None, "only a copied master is one buffer"
        return self._buffer.rows(self.row_dim, self._tables[0].stride(0) * self.dtype.itemsize, self.dtype)

    @property
    def row_bytes(self) -> NDArray[np.uint8]:  # (rows, row_bytes)
        """All rows of a master that is one buffer, as bytes."""
        assert self._buffer is not None, "only a copied master is one buffer"
        every = self._buffer.data.numpy().reshape(int(self._starts[-1]), -1)
        return every[:, : self.row_dim * self.dtype.itemsize]

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    @property
    def row_dim(self) -> int:
        return self._tables[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._tables[0].dtype

    def gather(self, rows: NDArray[np.int64]) -> Tensor:  # (rows, row_dim)
        out = torch.empty((rows.size, self.row_dim), dtype=self.dtype)
        for table, start, where in self._by_table(rows):
            out[where] = table[torch.from_numpy(rows[where] - start)]
        return out

    def update(self, rows: NDArray[np.int64], values: Tensor) -> None:
        """Write new values of rows. A card that reads this memory writes it by itself (`DeviceRowStage.write`)."""
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


def copy_tables(tables: Mapping[str, Tensor], copies: Mapping[str, Tensor], progress: Progress) -> None:
    """Copy tables to others of the same shape; ModelError if a value is not finite."""
    done, total = 0, sum(table.nbytes for table in tables.values())
    for name, table in tables.items():
        chunk_rows, first = max(1, _CHUNK_BYTES // (table.shape[1] * table.itemsize)), 0
        for source, target in zip(table.split(chunk_rows), copies[name].split(chunk_rows), strict=True):
            target.copy_(source)
            if (row := first_non_finite(source)) is not None:
                raise non_finite_row(f"table {name!r}", first + row)
            first += len(source)
            done += source.nbytes
            progress(done, total)


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
