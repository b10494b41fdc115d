"""The log of row updates beside a model: appended, checksummed, replayed at start. The model's files stay as they are.

A row of the log has a slot, counted over all updates. A record that is incomplete at the end of the file belongs to an
update that was never acknowledged, and is cut off; any other damage is an error.
"""

import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError, ModelError, RowLogError
from helmrec.types import IntArray

log = logging.getLogger("helmrec.engine")

_HEADER = struct.Struct("<8sqqq")  # magic, version of the model, bytes of a row, rows of the model
_RECORD = struct.Struct("<qq16s8s")  # number of rows, first slot, checksum of row ids and values, checksum of these
_MAGIC = b"HRROWS01"
_MOST_SLOTS = 2**31 - 3  # a slot is kept as a negative int32
RowBytes = NDArray[np.uint8]  # (rows, row_bytes)


class RowLog:
    """A log of one model's rows. It is created by the first update. One process may write it."""

    def __init__(self, path: Path, version: int, row_bytes: int, num_rows: int) -> None:
        self.path = path
        self._head = _HEADER.pack(_MAGIC, version, row_bytes, num_rows)
        self._version, self.row_bytes, self._num_rows = version, row_bytes, num_rows
        self._descriptor: int | None = None
        self._end = 0  # of the file
        self._starts = np.zeros(1, np.int64)  # (records + 1,) first slot of each record, and the next slot
        self._places = np.empty(0, np.int64)  # (records,) where the values of each begin
        self._num_records = 0

    @property
    def num_rows(self) -> int:
        """Rows in the log, updates of one row counted each."""
        return int(self._starts[self._num_records])

    @property
    def num_bytes(self) -> int:
        return self._end

    def replay(self, take: Callable[[IntArray, IntArray], None]) -> None:
        """Call `take` with rows and their slots for each update, in order, if there is a log."""
        if not self.path.exists():
            return
        self._open()
        try:
            self._replay(take)
        except BaseException:
            self.close()
            raise

    def _replay(self, take: Callable[[IntArray, IntArray], None]) -> None:
        with self.path.open("rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size and self._head.startswith(head):  # its creation was interrupted
                self.discard()
                return
            if head != self._head:
                raise ModelError(f"{self.path} {self._difference(head)}; move it away to serve the rows of the model")
            self._end, size = _HEADER.size, os.fstat(file.fileno()).st_size
            while self._end < size and self._take_record(file, size, take):
                pass
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if self._end < size:
            log.warning("%s: an update at byte %d is incomplete and was never acknowledged", self.path, self._end)
            self._write(self._end, b"")

    def _difference(self, head: bytes) -> str:
        if len(head) < _HEADER.size or head[:8] != _MAGIC:
            return "is not a log of row updates"
        _, version, row_bytes, num_rows = _HEADER.unpack(head)
        if version != self._version:
            return f"holds updates of another model (version {version}, not {self._version})"
        return f"holds other rows: {num_rows} of {row_bytes} bytes, not {self._num_rows} of {self.row_bytes}"

    def _take_record(self, file: BinaryIO, size: int, take: Callable[[IntArray, IntArray], None]) -> bool:
        """Read the next record; False if the file ends before it does."""
        head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            return False
        num, first, found, _ = _RECORD.unpack(head)
        if head != _record_head(num, first, found) or first != self.num_rows:
            raise ModelError(f"{self.path} is corrupt at byte {self._end}")
        end = self._end + _RECORD.size + num * (8 + self.row_bytes)
        if end > size:
            return False
        body = file.read(num * (8 + self.row_bytes))
        if _checksum(body) != found:
            if end == size:
                return False
            raise ModelError(f"{self.path} is corrupt at byte {self._end}: the checksum of an update is wrong")
        rows = np.frombuffer(body, np.int64, num)
        if rows.min() < 0 or rows.max() >= self._num_rows:
            raise ModelError(f"{self.path} is corrupt at byte {self._end}: it names rows that the model does not have")
        take(rows, self._note(num, self._end + _RECORD.size + 8 * num, end))
        return True

    def append(self, rows: IntArray, values: RowBytes) -> IntArray:
        """Add new values of rows, which survive the end of the process; return their slots."""
        if self.num_rows + rows.size > _MOST_SLOTS:
            raise RowLogError(f"{self.path} is full: it holds {self.num_rows} rows; make a snapshot of the tables")
        body = rows.tobytes() + np.ascontiguousarray(values).tobytes()
        record = _record_head(rows.size, self.num_rows, _checksum(body))
        try:
            if self._descriptor is None:
                self._open()
                self.discard()
            self._write(self._end, record + body)
        except OSError as error:
            if self._descriptor is not None:
                with suppress(OSError):
                    self._write(self._end, b"")
            raise RowLogError(f"{self.path} cannot be written: {error.strerror}; no row was changed") from error
        place = self._end + _RECORD.size + 8 * rows.size
        return self._note(rows.size, place, place + values.size)

    def _note(self, num: int, place: int, end: int) -> IntArray:
        """Record where an update is; return its slots."""
        if self._num_records == self._places.size:
            room = max(64, self._places.size)
            self._starts = np.concatenate([self._starts, np.zeros(room, np.int64)])
            self._places = np.concatenate([self._places, np.zeros(room, np.int64)])
        first = self.num_rows
        self._places[self._num_records] = place
        self._num_records += 1
        self._starts[self._num_records] = first + num
        self._end = end
        return np.arange(first, first + num)

    def offsets(self, slots: IntArray) -> IntArray:
        """Return where in the file the values of slots are."""
        record = np.searchsorted(self._starts[: self._num_records + 1], slots, side="right") - 1
        return self._places[record] + (slots - self._starts[record]) * self.row_bytes

    def discard(self) -> None:
        """Empty the log, if there is one."""
        self._starts, self._places, self._num_records = np.zeros(1, np.int64), np.empty(0, np.int64), 0
        if self._descriptor is not None:
            self._write(0, self._head)
            self._end = len(self._head)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"{self.path} is in use by another engine; give this one another row_log") from None

    def _write(self, at: int, data: bytes) -> None:
        """Write to this place, which is then followed by nothing else."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, at)
        left = memoryview(data)
        while left:
            num = os.pwrite(self._descriptor, left, at)
            left, at = left[num:], at + num

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _checksum(body: bytes, digest_size: int = 16) -> bytes:
    return hashlib.blake2b(body, digest_size=digest_size).digest()


def _record_head(num: int, first: int, checksum: bytes) -> bytes:
    head = struct.pack("<qq16s", num, first, checksum)
    return head + _checksum(head, 8)
