"""The log of row updates beside a model: appended, checksummed, replayed at start. The model's files stay as they are.

A row of the log has a slot, counted over all updates. One process writes a log (`RowLog`); engines that share it read
what that process appends (`FollowedLog`). An update is in the system's memory when it is appended, and survives the end
of the process; it survives a loss of power once `sync` has returned, which then notes in the header how far the file is
on disk. Damage before that mark is an error; what is incomplete behind it was never acknowledged, and is cut off.
"""

import fcntl
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError, ModelError, RowLogError, RowsNotSynced
from helmrec.types import IntArray

log = logging.getLogger("helmrec.engine")

_HEADER = struct.Struct("<8sqqq")  # magic, version of the model, bytes of a row, rows of the model
_MARK = struct.Struct("<q")  # behind it: so many bytes of the file are on disk
_BEGIN = _HEADER.size + _MARK.size
_RECORD = struct.Struct("<qq16s8s")  # number of rows, first slot, checksum of row ids and values, checksum of these
_MAGIC = b"HRROWS02"
_MOST_SLOTS = 2**31 - 3  # a slot is kept as a negative int32
RowBytes = NDArray[np.uint8]  # (rows, row_bytes)
Take = Callable[[IntArray, IntArray], None]  # called with rows and their slots


class LoggedRows(NamedTuple):
    """One update of a log."""

    rows: IntArray
    values: RowBytes
    end: int  # of the update in the file


class _DamagedLog(Exception):
    """There is no whole update at a place of the file."""


class RowLog:
    """A log of one model's rows. It is created by the first update. One process may write it, one thread at a time."""

    def __init__(self, path: Path, version: int, row_bytes: int, num_rows: int) -> None:
        self.path = path
        self._head = _HEADER.pack(_MAGIC, version, row_bytes, num_rows)
        self._version, self.row_bytes, self._num_rows = version, row_bytes, num_rows
        self._descriptor: int | None = None
        self._end = 0  # of the last update in the file
        self._starts = np.zeros(1, np.int64)  # (records + 1,) first slot of each record, and the next slot
        self._places = np.empty(0, np.int64)  # (records,) where the values of each begin
        self._num_records = 0
        self._syncing = threading.Lock()
        self._synced = 0  # bytes of the file that are on disk
        self._is_named = False  # whether the name of the file is on disk
        self._problem: str | None = None  # why no update can be acknowledged any more

    @property
    def num_rows(self) -> int:
        """Rows in the log, updates of one row counted each."""
        return int(self._starts[self._num_records])

    @property
    def num_bytes(self) -> int:
        return self._end

    # Reading.

    def replay(self, take: Take) -> None:
        """Call `take` for each update, in order, if there is a log."""
        if not self.path.exists():
            return
        self._open()
        try:
            self._replay(take)
        except BaseException:
            self.close()
            raise

    def _replay(self, take: Take) -> None:
        with self.path.open("rb") as file:
            if not self._read_head(file):  # its creation was interrupted
                self.discard()
                return
            size = self._read_all(file, take)
        if self._end < size:
            log.warning("%s: an update at byte %d is incomplete and was never acknowledged", self.path, self._end)
            self._write(self._end, b"")

    def _read_all(self, file: BinaryIO, take: Take) -> int:
        """Take all updates; return the size of the file, whose end may hold no whole update."""
        size = os.fstat(file.fileno()).st_size
        if size < self._synced:
            raise ModelError(f"{self.path} is cut short: {self._synced} bytes were acknowledged, and it has {size}")
        while (update := self._next_whole(file, size)) is not None:
            take(update.rows, self._note(update))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return size

    def _next_whole(self, file: BinaryIO, size: int) -> LoggedRows | None:
        """Read the next update; None if there is no whole one. ModelError if one is damaged that was on disk."""
        if self._end == size:
            return None
        try:
            return self._read(file, size)
        except _DamagedLog as damage:
            if self._end < self._synced:
                raise ModelError(f"{self.path} is corrupt at byte {self._end}: {damage}") from None
        return None

    def _read_head(self, file: BinaryIO) -> bool:
        """Read the header and the mark; False if they are not written yet."""
        head = file.read(_BEGIN)
        if len(head) < _BEGIN and self._head.startswith(head[: len(self._head)]):
            return False
        if head[: len(self._head)] != self._head:
            raise ModelError(f"{self.path} {self._difference(head)}; move it away to serve the rows of the model")
        (self._synced,) = _MARK.unpack(head[len(self._head) :])
        self._end = max(self._end, _BEGIN)
        return True

    def _difference(self, head: bytes) -> str:
        if len(head) < _HEADER.size or head[:8] != _MAGIC:
            return "is not a log of row updates of this release"
        _, version, row_bytes, num_rows = _HEADER.unpack(head[: _HEADER.size])
        if version != self._version:
            return f"holds updates of another model (version {version}, not {self._version})"
        return f"holds other rows: {num_rows} of {row_bytes} bytes, not {self._num_rows} of {self.row_bytes}"

    def _read(self, file: BinaryIO, size: int) -> LoggedRows:
        """Read the update behind the last one that was taken."""
        file.seek(self._end)
        head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            raise _DamagedLog("the file ends within an update")
        num, first, found, _ = _RECORD.unpack(head)
        if head != _record_head(num, first, found) or first != self.num_rows:
            raise _DamagedLog("the head of an update is wrong")
        end = self._end + _RECORD.size + num * (8 + self.row_bytes)
        if end > size:
            raise _DamagedLog("the file ends within an update")
        body = file.read(num * (8 + self.row_bytes))
        if _checksum(body) != found:
            raise _DamagedLog("the checksum of an update is wrong")
        rows = np.frombuffer(body, np.int64, num)
        if rows.min() < 0 or rows.max() >= self._num_rows:
            raise ModelError(f"{self.path} is corrupt at byte {self._end}: it names rows that the model does not have")
        return LoggedRows(rows, np.frombuffer(body, np.uint8, offset=8 * num).reshape(num, self.row_bytes), end)

    def _note(self, update: LoggedRows) -> IntArray:
        """Record where an update is; return its slots."""
        if self._num_records == self._places.size:
            room = max(64, self._places.size)
            self._starts = np.concatenate([self._starts, np.zeros(room, np.int64)])
            self._places = np.concatenate([self._places, np.zeros(room, np.int64)])
        first, num = self.num_rows, update.rows.size
        self._places[self._num_records] = update.end - update.values.size
        self._num_records += 1
        self._starts[self._num_records] = first + num
        self._end = update.end
        return np.arange(first, first + num)

    def offsets(self, slots: IntArray) -> IntArray:
        """Return where in the file the values of slots are."""
        record = np.searchsorted(self._starts[: self._num_records + 1], slots, side="right") - 1
        return self._places[record] + (slots - self._starts[record]) * self.row_bytes

    # Writing.

    def append(self, rows: IntArray, values: RowBytes) -> IntArray:
        """Add new values of rows, which survive the end of the process; return their slots."""
        if self._problem is not None:
            raise RowLogError(f"{self._problem}; no row was changed")
        if self.num_rows + rows.size > _MOST_SLOTS:
            raise RowLogError(f"{self.path} is full: it holds {self.num_rows} rows; make a snapshot of the tables")
        body = rows.tobytes() + np.ascontiguousarray(values).tobytes()
        record = _record_head(rows.size, self.num_rows, _checksum(body))
        try:
            if self._descriptor is None:
                self._open()
            if self._end < _BEGIN:  # a header that could not be written is written again
                self.discard()
            self._write(self._end, record + body)
        except OSError as error:
            if self._descriptor is not None:
                with suppress(OSError):
                    self._write(self._end, b"")
            raise RowLogError(f"{self.path} cannot be written: {error.strerror}; no row was changed") from error
        return self._note(LoggedRows(rows, values, self._end + len(record) + len(body)))

    def sync(self) -> None:
        """Wait until all updates appended so far survive a loss of power. Any thread may call it.

        Threads that wait at one time share one write. After a failure the system may count lost pages as written, so
        that nothing can be acknowledged until another process has opened the log.
        """
        end = self._end
        with self._syncing:
            if self._descriptor is None or self._synced >= end:
                return
            if self._problem is None:
                try:
                    self._sync(self._descriptor, self._end)
                except OSError as error:
                    self._problem = f"{self.path} cannot be brought to disk: {error.strerror}"
            if self._problem is not None:
                raise RowsNotSynced(f"{self._problem}; the update is visible, and may be lost with the machine's power")

    def _sync(self, descriptor: int, end: int) -> None:
        if not self._is_named:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            self._is_named = True
        os.fdatasync(descriptor)
        os.pwrite(descriptor, _MARK.pack(end), _HEADER.size)  # on disk with the next update: until then it is too low
        self._synced = end

    def discard(self) -> None:
        """Empty the log, if there is one."""
        self._starts, self._places, self._num_records = np.zeros(1, np.int64), np.empty(0, np.int64), 0
        if self._descriptor is not None:
            with self._syncing:
                self._end = self._synced = 0
                self._write(0, self._head + _MARK.pack(0))
                self._end = _BEGIN

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
        with self._syncing:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class FollowedLog(RowLog):
    """A log that another process writes. `append` takes the update that `next_update` has returned."""

    _next: LoggedRows | None = None

    def next_update(self) -> LoggedRows | None:
        """Return the next update, if the file has all of it: the writer may be writing it now."""
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            is_begun = self._read_head(file)
            self._next = self._next_whole(file, os.fstat(file.fileno()).st_size) if is_begun else None
        return self._next

    def append(self, rows: IntArray, values: RowBytes) -> IntArray:
        """Take the next update, which is in the file; return its slots."""
        update, self._next = self._next, None
        assert update is not None, "an update is not in the log that another process writes"
        assert np.array_equal(update.rows, rows), "another update of the log was to be applied"
        return self._note(update)

    def sync(self) -> None:
        """The process that writes the log does it."""

    def discard(self) -> None:
        """Never called for a stream of deltas, whose engines have logs of their own."""
        raise AssertionError("a log that another process writes cannot be emptied")

    def replay(self, take: Take) -> None:
        if self.path.exists():
            with self.path.open("rb") as file:
                if self._read_head(file):
                    self._read_all(file, take)


def _checksum(body: bytes, digest_size: int = 16) -> bytes:
    return hashlib.blake2b(body, digest_size=digest_size).digest()


def _record_head(num: int, first: int, checksum: bytes) -> bytes:
    head = struct.pack("<qq16s", num, first, checksum)
    return head + _checksum(head, 8)
