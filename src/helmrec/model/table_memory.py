"""The tables of a model in shared memory as bytes: filled from the model's folder, and written row by row.

Knows files, memory and rows, not tensors, so that the process that keeps the tables needs no torch. Files are read
straight into the memory by several threads and leave the page cache behind them; rows of eight bits are rounded there.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.config import FixedRowDtype
from helmrec.errors import ConfigError, ModelError
from helmrec.memory.row_journal import RowBytes, RowJournal, journal_bytes
from helmrec.memory.shared_memory import create_shared, interleave, map_shared, memory_nodes
from helmrec.model.config import ModelConfig
from helmrec.model.folder import TableSpan
from helmrec.types import IntArray, RowPosition

Progress = Callable[[int, int], None]  # called with the bytes done and the total
_JOURNAL_BYTES = 64 << 20  # of rows that change at once; taken when used
_CHUNK_BYTES = 8 << 20
_THREADS = min(8, os.cpu_count() or 1)
_EXPONENT: dict[str, NDArray[np.unsignedinteger]] = {  # bits that are all set in values that are not finite
    "float32": np.array(0x7F80_0000, np.uint32),
    "bfloat16": np.array(0x7F80, np.uint16),
    "float16": np.array(0x7C00, np.uint16),
}


class TableFiles(NamedTuple):
    """Descriptors of the shared memory of one model's tables."""

    rows: int
    journal: int

    @classmethod
    def create(cls, config: ModelConfig, row_dtype: FixedRowDtype = "model") -> "TableFiles":
        """Create empty memory for the tables of a model. row_dtype: of the rows in this memory."""
        rows = create_shared("tables", config.num_rows * _stride(config, row_dtype))
        record_bytes = config.record_bytes(row_dtype)
        return cls(rows, create_shared("journal", journal_bytes(_max_rows(config, record_bytes), record_bytes)))

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)


class TableMemory:
    """Shared tables as one process maps them. The descriptors may be closed afterwards."""

    def __init__(self, config: ModelConfig, files: TableFiles, row_dtype: FixedRowDtype = "model") -> None:
        """row_dtype: of the rows in this memory."""
        stride, record_bytes = _stride(config, row_dtype), config.record_bytes(row_dtype)
        self.num_bytes = config.num_rows * stride
        if (found := os.fstat(files.rows).st_size) != self.num_bytes:
            raise ConfigError(f"shared tables must have {self.num_bytes} bytes for this model, got {found}")
        self.memory = map_shared(files.rows)
        self.journal = RowJournal(map_shared(files.journal), _max_rows(config, record_bytes), record_bytes)
        self.config = config
        self.row_dtype = row_dtype
        every = np.frombuffer(self.memory, np.uint8).reshape(config.num_rows, stride)
        self._rows = every[:, :record_bytes]

    def write(self, rows: IntArray, values: RowBytes) -> None:
        """Write rows. Only `RowJournal.write` and `RowJournal.redo` call it."""
        self._rows[rows] = values

    def load(self, spans: Mapping[str, TableSpan], position: RowPosition, progress: Progress) -> None:
        """Read the tables, unless an earlier keeper has done it; complete an update that it has begun.

        ModelError names a row that is not finite. `position` of a stream of deltas is that of the rows in the files.
        """
        if not self.journal.is_loaded:
            if len(nodes := memory_nodes()) > 1:  # cards of every node read them
                interleave(self.memory, nodes)
            read_tables(self.config, spans, self._rows, progress, self.row_dtype)
            self.journal.note_loaded(position)
        self.journal.redo(self.write)


def read_tables(
    config: ModelConfig,
    spans: Mapping[str, TableSpan],
    rows: RowBytes,
    progress: Progress,
    row_dtype: FixedRowDtype = "model",
) -> None:
    """Read the tables of a model, by name, to `rows`, (all rows, bytes of a stored row), rounded to `row_dtype`.

    Pages of the files leave memory as soon as they are copied. ModelError names a row that is not finite.
    """
    done, total = 0, sum(span.num_rows * span.row_bytes for span in spans.values())
    for name, span in spans.items():
        first = config.offsets[name]
        reader = _Reader(span, rows[first : first + span.num_rows], config.row_dtype, row_dtype)
        with ThreadPoolExecutor(_THREADS) as threads, reader:
            for num_rows, wrong in threads.map(reader.read, _chunks(span)):
                if wrong is not None:
                    threads.shutdown(cancel_futures=True)
                    raise ModelError(f"table {name!r}: row {wrong} holds values that are not finite")
                done += num_rows * span.row_bytes
                progress(done, total)


class _Part(NamedTuple):
    """A part of a table that was read."""

    num_rows: int
    wrong: int | None  # the first row with a value that is not finite


class _Reader:
    """Reads rows of a file into memory. Several threads may call `read`."""

    def __init__(self, span: TableSpan, target: RowBytes, dtype: str, row_dtype: FixedRowDtype) -> None:
        """dtype: of the file; row_dtype: of the rows in memory."""
        self._span = span
        self._target = target
        self._dtype = dtype
        self._row_dtype = row_dtype
        self._exponent = _EXPONENT[dtype]
        self._descriptor = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> None:
        """The file is open."""

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, rows: range) -> _Part:
        span, target = self._span, self._target[rows.start : rows.stop]
        start, num_bytes = span.start + rows.start * span.row_bytes, len(rows) * span.row_bytes
        is_dense = self._row_dtype == "model" and target.strides[0] == span.row_bytes
        place = target if is_dense else np.empty((len(rows), span.row_bytes), np.uint8)
        read_all(self._descriptor, place.reshape(-1).data, start)
        os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)
        if self._row_dtype != "model":
            from helmrec.memory.row_codes import encode_rows  # noqa: PLC0415 - Numba is large, and mostly not needed

            encode_rows(place, self._dtype, self._row_dtype, target)
        elif not is_dense:
            target[:] = place
        return _Part(len(rows), self._first_wrong(rows, place))

    def _first_wrong(self, rows: range, place: RowBytes) -> int | None:
        bits = place.view(self._exponent.dtype) & self._exponent
        if bits.max() < self._exponent:
            return None
        return rows.start + int((bits == self._exponent).any(axis=1).argmax())


def read_all(descriptor: int, place: memoryview, start: int) -> None:
    """Fill `place` from a file; ModelError if the file ends before."""
    done = 0
    while done < len(place):
        num = os.preadv(descriptor, [place[done:]], start + done)
        if num == 0:
            raise ModelError(f"a table's file ends {len(place) - done} bytes early: it was changed while it was read")
        done += num


def _chunks(span: TableSpan) -> Iterator[range]:
    num = max(1, _CHUNK_BYTES // span.row_bytes)
    return (range(start, min(start + num, span.num_rows)) for start in range(0, span.num_rows, num))


def _stride(config: ModelConfig, row_dtype: FixedRowDtype) -> int:
    return config.page_geometry(1, row_dtype=row_dtype).row_stride


def _max_rows(config: ModelConfig, record_bytes: int) -> int:
    """Return the most rows that change at once."""
    return max(1, min(config.num_rows, _JOURNAL_BYTES // (8 + record_bytes)))
