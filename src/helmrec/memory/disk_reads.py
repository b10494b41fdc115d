"""Reads rows from files in aligned blocks, outside the page cache and outside the interpreter's lock.

Rows of one call that lie in the same or neighbouring blocks are read together. Nothing here knows frames' owners.
"""

import itertools
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.types import IntArray

BLOCK = 4_096
_MOST_BLOCKS = 64  # of a run
_CHUNK_BYTES = 1 << 20  # most that one thread reads before it copies; a run always fits
_FEWEST_RUNS = 8  # that are worth a thread of their own
Bytes = NDArray[np.uint8]

_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class Runs(NamedTuple):
    """Aligned ranges of files, in order."""

    files: IntArray  # numbers of files
    offsets: IntArray
    lengths: IntArray
    needed: IntArray  # bytes up to the end of the last row; a file may end before its last block does
    starts: IntArray  # where each goes in the memory that is read into


class BlockReader(Protocol):
    """Reads runs of files."""

    def add(self, path: Path) -> int:
        """Open a file; return its number."""

    def read(self, runs: Runs, out: Bytes) -> IntArray:
        """Read runs to their places in `out`; return the bytes read of each, or minus the error's number."""

    def close(self) -> None: ...


class FileReader:
    """Reads with `pread` in compiled code. Any thread may read."""

    def __init__(self, mode: Literal["direct", "cached"]) -> None:
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if mode == "direct" else 0)
        self._descriptors = np.empty(0, np.int32)

    def add(self, path: Path) -> int:
        try:
            descriptor = os.open(path, self._flags)
        except OSError as error:
            if self._flags & os.O_DIRECT and not isinstance(error, FileNotFoundError | PermissionError):
                raise ConfigError(
                    f"{path} cannot be read past the page cache ({error.strerror}); "
                    "put it on another file system, or set disk_reads to 'cached'"
                ) from None
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        self._descriptors = np.append(self._descriptors, np.int32(descriptor))
        return self._descriptors.size - 1

    def read(self, runs: Runs, out: Bytes) -> IntArray:
        descriptors = self._descriptors
        assert out.ctypes.data % BLOCK == 0, "memory for direct reads must be aligned"
        found = _read_runs(descriptors, runs, out.ctypes.data)
        for i in np.flatnonzero(found < 0).tolist():  # compiled code does not see the error, so that it is made again
            start, length = int(runs.starts[i]), int(runs.lengths[i])
            try:
                place = out[start : start + length].data
                found[i] = os.preadv(descriptors[runs.files[i]], [place], int(runs.offsets[i]))
            except OSError as error:
                found[i] = -(error.errno or 1)
        return found

    def close(self) -> None:
        for descriptor in self._descriptors.tolist():
            os.close(descriptor)
        self._descriptors = np.empty(0, np.int32)


@numba.njit(cache=True, nogil=True)
def _read_runs(descriptors: NDArray[np.int32], runs: Runs, address: int) -> IntArray:
    found = np.zeros(runs.files.size, np.int64)
    for i in range(found.size):
        while found[i] < runs.needed[i]:
            at = address + runs.starts[i] + found[i]
            left = runs.lengths[i] - found[i]
            num = _pread(descriptors[runs.files[i]], np.uint64(at), np.uint64(left), runs.offsets[i] + found[i])
            if num < 0:
                found[i] = -1
                break
            found[i] += num
            if num == 0 or num % BLOCK:  # the end of the file, since a direct read ends early only there
                break
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Runs that hold rows, and where in them each row is."""

    runs: Runs
    order: IntArray  # of the rows by place
    run_of: IntArray  # (rows,) of the rows in this order
    at: IntArray  # (rows,) offset of the row in its run


def plan_reads(files: IntArray, offsets: IntArray, row_bytes: int) -> ReadPlan:
    """Plan reading rows at these places of files."""
    order = np.lexsort((offsets, files))
    return ReadPlan(*_plan(files[order], offsets[order], row_bytes, order))


@numba.njit(cache=True, nogil=True)
def _plan(
    files: IntArray, offsets: IntArray, row_bytes: int, order: IntArray
) -> tuple[Runs, IntArray, IntArray, IntArray]:
    num, size = 0, files.size
    of, begins, lengths, needed, starts = np.empty((5, size), np.int64)
    run_of, at = np.empty((2, size), np.int64)
    for i in range(size):
        begin, end = offsets[i] // BLOCK * BLOCK, offsets[i] + row_bytes
        aligned = -(-end // BLOCK) * BLOCK
        last = num - 1
        joins = num > 0 and of[last] == files[i] and begin <= begins[last] + lengths[last]
        if not joins or aligned - begins[last] > max(_MOST_BLOCKS * BLOCK, aligned - begin):
            starts[num] = 0 if num == 0 else starts[last] + lengths[last]
            of[num], begins[num], lengths[num] = files[i], begin, 0
            last = num
            num += 1
        lengths[last] = max(lengths[last], aligned - begins[last])
        needed[last] = end - begins[last]
        run_of[i], at[i] = last, offsets[i] - begins[last]
    runs = Runs(of[:num].copy(), begins[:num].copy(), lengths[:num].copy(), needed[:num].copy(), starts[:num].copy())
    return runs, order, run_of, at


class ReadEnd(NamedTuple):
    """How a read of rows ended."""

    is_read: NDArray[np.bool_]  # (rows,)
    problem: str | None  # of the first row that was not read
    num_bytes: int  # read from files


class _Progress:
    """Parts of one read that are not done."""

    def __init__(self, num_rows: int, num_parts: int) -> None:
        self.lock = threading.Lock()
        self.is_read = np.zeros(num_rows, np.bool_)
        self.problem: str | None = None
        self.num_bytes = 0
        self.left = num_parts


class DiskReads:
    """Reads rows to memory with several threads."""

    def __init__(self, reader: BlockReader, row_bytes: int, num_threads: int) -> None:
        self._reader = reader
        self._row_bytes = row_bytes
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="helmrec-disk")
        self._own = threading.local()
        self._names: list[str] = []

    def add(self, path: Path) -> int:
        """Open a file; return its number."""
        number = self._reader.add(path)
        self._names.append(str(path))
        return number

    def start(
        self, files: IntArray, offsets: IntArray, targets: IntArray, memory: Bytes, on_end: Callable[[ReadEnd], None]
    ) -> None:
        """Read rows at places of files to `memory[targets]`, (any, stride); a thread then calls `on_end`."""
        plan = plan_reads(files, offsets, self._row_bytes)
        parts = self._parts(plan.runs)
        progress = _Progress(files.size, len(parts) - 1)
        for first, end in itertools.pairwise(parts):
            self._threads.submit(self._read_part, plan, (first, end), targets, memory, progress, on_end)

    def _parts(self, runs: Runs) -> list[int]:
        """Split runs into parts for threads, by size."""
        num_runs = runs.files.size
        most = max(_FEWEST_RUNS, -(-num_runs // self._num_threads))
        parts = [0]
        for i in range(1, num_runs):
            first = parts[-1]
            if i - first >= most or runs.starts[i] + runs.lengths[i] - runs.starts[first] > _CHUNK_BYTES:
                parts.append(i)
        return [*parts, num_runs]

    def _read_part(
        self,
        plan: ReadPlan,
        part: tuple[int, int],
        targets: IntArray,
        memory: Bytes,
        progress: _Progress,
        on_end: Callable[[ReadEnd], None],
    ) -> None:
        first, end = part
        rows = slice(*np.searchsorted(plan.run_of, part).tolist())
        of, num_bytes, problem = plan.order[rows], 0, None
        try:
            runs = Runs(*(each[first:end] for each in plan.runs))
            runs = runs._replace(starts=runs.starts - runs.starts[0])
            out = self._memory(int(runs.starts[-1] + runs.lengths[-1]))
            found = self._reader.read(runs, out)
            is_good, num_bytes = found >= runs.needed, int(np.maximum(found, 0).sum())
            problem = None if is_good.all() else self._explain(runs, found, int(np.argmin(is_good)))
            run_of = plan.run_of[rows] - first
            good = is_good[run_of]
            _copy_rows(out, runs.starts[run_of][good] + plan.at[rows][good], memory, targets[of[good]], self._row_bytes)
        except Exception as error:  # a thread of the pool has no caller: the request must learn of it
            good, problem = np.zeros(of.size, np.bool_), f"{type(error).__name__}: {error}"
        with progress.lock:
            progress.is_read[of] = good
            progress.problem = progress.problem or problem
            progress.num_bytes += num_bytes
            progress.left -= 1
            is_last = not progress.left
        if is_last:
            on_end(ReadEnd(progress.is_read, progress.problem, progress.num_bytes))

    def _explain(self, runs: Runs, found: IntArray, i: int) -> str:
        place = f"{self._names[runs.files[i]]} at byte {runs.offsets[i]}"
        if found[i] < 0:
            return f"{place}: {os.strerror(-int(found[i]))}"
        return f"{place}: only {found[i]} of {runs.needed[i]} bytes could be read"

    def _memory(self, num_bytes: int) -> Bytes:
        """Aligned memory of this thread."""
        size = max(_CHUNK_BYTES, num_bytes)
        own: Bytes | None = getattr(self._own, "memory", None)
        if own is None or own.size < size:
            own = self._own.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        return own

    def close(self) -> None:
        """End the threads after the reads that were started, then close the files."""
        self._threads.shutdown()
        self._reader.close()


@numba.njit(cache=True, nogil=True)
def _copy_rows(source: Bytes, at: IntArray, memory: Bytes, targets: IntArray, row_bytes: int) -> None:
    for i in range(at.size):
        memory[targets[i], :row_bytes] = source[at[i] : at[i] + row_bytes]
