"""The LMDB file of a history store: checked when opened, grown automatically, written by one process.

It knows transactions, sizes and locks; `users.py` knows the content.
"""

import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import lmdb

from helmrec.errors import DiskFull, HistoryError, HistoryFull, HistoryUnavailable
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema
from helmrec.history.identity import Found, check_identity, describe, make_key
from helmrec.history.pages import is_page_key, is_user_key
from helmrec.history.sizes import TableSizes, check_sizes, pack_sizes, sizes_of, unpack_sizes
from helmrec.memory.prefix_hash import SECRET_BYTES, HashKey

T = TypeVar("T")
Txn: TypeAlias = "lmdb.Transaction[memoryview]"

_DESCRIPTION = b"helmrec-history"
_OWN_SECRET = b"helmrec-history-key"
_DATA = "data.mdb"
_LOCK = "writer.lock"
_SIZES = b"helmrec-history-sizes"
_HEADROOM_BYTES = 16 << 20
_TRIED_BYTES = 1 << 16
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Tables(NamedTuple):
    """The two databases of the file."""

    users: lmdb._Database
    pages: lmdb._Database


class HistoryFile:
    """The open file. A process that forks must open it after the fork."""

    def __init__(self, path: Path, schema: EventSchema, config: HistoryConfig) -> None:
        """Raise HistoryError if `path` is foreign, damaged, of other fields, or another process writes to it."""
        self.path = path
        self._config = config
        self._no_growth = threading.Lock()  # the map must not grow while a transaction of this process reads it
        _check_place(path)
        self._lock: int | None = _take_writer_lock(path)
        self._env: lmdb.Environment | None = None
        try:
            with self._lmdb_errors():
                self._env = self._open()
                self._inode = _inode(path)
                was_short = _fill_up(self._env, path)
                self.key = self._identify(schema)
                self.tables = Tables(
                    self._env.open_db(b"users", create=False), self._env.open_db(b"pages", create=False)
                )
            if was_short:
                self.check_index()
        except BaseException:
            self.close()
            raise

    def _open(self) -> lmdb.Environment:
        env = lmdb.open(
            str(self.path),
            map_size=min(self._config.map_bytes, self._config.max_bytes),
            sync=self._config.sync == "commit",
            readahead=False,  # users come in no order
            max_dbs=2,
        )
        env.reader_check()  # release the pages of readers that were killed
        return env

    def _identify(self, schema: EventSchema) -> HashKey:
        """Check the identity of the file, or write it if the file is new; return its key."""
        with self.env.begin() as txn:
            found, is_empty = Found(txn.get(_DESCRIPTION), txn.get(_OWN_SECRET)), txn.stat()["entries"] == 0
        if found.description is not None:
            return check_identity(self.path, found, schema, self._config.secret)
        if not is_empty:
            raise HistoryError(f"{self.path} holds a database that is not a history store")
        own_secret = secrets.token_bytes(SECRET_BYTES) if self._config.secret is None else None
        key = make_key(self.path, self._config.secret, own_secret)
        with self.env.begin(write=True) as txn:
            self.env.open_db(b"users", txn)
            self.env.open_db(b"pages", txn)
            txn.put(_DESCRIPTION, describe(schema, key, self._config.secret))
            if own_secret is not None:
                txn.put(_OWN_SECRET, own_secret)
        return key

    def taken_sizes(self, txn: Txn) -> TableSizes | None:
        """Return the largest table sizes under which events were appended; None if an old release made the store."""
        value = txn.get(_SIZES)
        return None if value is None else unpack_sizes(value, str(self.path))

    def note_sizes(self, txn: Txn, schema: EventSchema) -> None:
        """Record these table sizes; raise TablesTooSmall if events were appended under larger ones.

        A store without users drops the sizes recorded before.
        """
        taken = (self.taken_sizes(txn) or {}) if txn.stat(self.tables.users)["entries"] else {}
        check_sizes(taken, schema, str(self.path))
        if taken != sizes_of(schema):
            txn.put(_SIZES, pack_sizes(sizes_of(schema)))

    @property
    def env(self) -> lmdb.Environment:
        if self._env is None:
            raise HistoryError(f"{self.path} is closed")
        return self._env

    @property
    def map_bytes(self) -> int:
        return self.env.info()["map_size"]

    @property
    def used_bytes(self) -> int:
        """Bytes of the file, with free pages inside it."""
        return (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"]

    @contextmanager
    def reading(self) -> Iterator[Txn]:
        """Open a read transaction. Keep it short: meanwhile freed pages are not reused and the map does not grow."""
        with self._no_growth, self._lmdb_errors(), self.env.begin(buffers=True) as txn:
            yield txn

    def check_place(self) -> None:
        """Raise HistoryUnavailable if the file was removed or replaced: later writes to it would be lost."""
        try:
            found = _inode(self.path)
        except OSError as error:
            raise HistoryUnavailable(f"{self.path} cannot be found any more ({error.strerror})") from None
        if found != self._inode:
            raise HistoryUnavailable(f"{self.path} was replaced while it was open")

    def write(self, work: Callable[[Txn], T], *, may_exceed: bool = False) -> T:
        """Do `work` in one transaction and commit it. It runs again from the start if the map had to grow.

        `may_exceed` is for work that frees more than it takes but needs some room first: it may use a few pages
        beyond `max_bytes`.
        """
        with self._lmdb_errors():
            self.check_place()
            while True:
                try:
                    with self.env.begin(write=True, buffers=True) as txn:
                        done = work(txn)
                    break
                except lmdb.MapFullError:
                    self._grow(may_exceed=may_exceed)
            if self.map_bytes > self._config.max_bytes:
                with self._no_growth:
                    self.env.set_mapsize(self._config.max_bytes)  # LMDB keeps it at least as large as the file
        return done

    def _grow(self, *, may_exceed: bool) -> None:
        old = self.map_bytes
        new = old + _HEADROOM_BYTES if may_exceed else min(2 * old, self._config.max_bytes)
        if new <= old:
            raise HistoryFull(f"{self.path} has reached max_bytes, {self._config.max_bytes}")
        with self._no_growth:
            self.env.set_mapsize(new)

    def check_index(self) -> None:
        """Raise HistoryError unless all counted keys exist, are keys of users and pages, and are in order."""
        with self.reading() as txn:
            _check_keys(txn, self.tables.users, is_user_key)
            _check_keys(txn, self.tables.pages, is_page_key)

    def sync(self) -> None:
        """Force everything committed to the disk."""
        with self._lmdb_errors():
            self.env.sync(True)

    def close(self) -> None:
        """Write all committed data to the disk, then close file and lock. Closing twice is allowed."""
        with self._no_growth:
            env, self._env = self._env, None
        if env is not None:
            with self._lmdb_errors():
                env.sync(True)
                env.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _lmdb_errors(self) -> Iterator[None]:
        """Convert errors of LMDB to errors of this package that name the path."""
        try:
            yield
        except lmdb.MapFullError:
            raise
        except (lmdb.Error, OSError) as error:
            kind = DiskFull if _is_disk_full(error, self.path / _DATA) else HistoryError
            raise kind(f"{self.path}: {error}") from error


def _is_disk_full(error: Exception, data: Path) -> bool:
    """Whether LMDB failed because the disk is full. It reports a partial write as an I/O error: then try a write."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    if isinstance(error, lmdb.DiskError) or any(os.strerror(number) in str(error) for number in _NO_ROOM):
        return True
    return os.strerror(errno.EIO) in str(error) and not _has_room_at_end(data)


def _has_room_at_end(data: Path) -> bool:
    """Try to write past the end of the file, then truncate it again. Only the writing process may call it."""
    try:
        with data.open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                written = file.write(bytes(_TRIED_BYTES)) or 0
                os.fsync(file.fileno())
            finally:
                file.truncate(end)
    except OSError as error:
        return error.errno not in _NO_ROOM
    return written == _TRIED_BYTES


def _inode(path: Path) -> tuple[int, int]:
    """Return the device and inode of the data file."""
    found = (path / _DATA).stat()
    return found.st_dev, found.st_ino


def _check_place(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise HistoryError(f"{path} is not a folder")
    if not (path / _DATA).exists() and path.exists() and any(p.name != _LOCK for p in path.iterdir()):
        raise HistoryError(f"{path} holds other files and no history store")


def _take_writer_lock(path: Path) -> int:
    """Take a lock that the kernel releases when this process ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HistoryError(f"{path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise HistoryError(f"{path} is open for writing elsewhere; there can be one writer") from None
    return lock


def _fill_up(env: lmdb.Environment, path: Path) -> bool:
    """Extend the file to its last page, since reading a map beyond the end of its file kills the process.

    Return whether it was shorter: a copy may be incomplete, or the last pages were never written.
    """
    page_bytes = env.stat()["psize"]
    end = (env.info()["last_pgno"] + 1) * page_bytes
    size = (path / _DATA).stat().st_size
    if size >= end:
        return False
    if size % page_bytes:
        raise HistoryError(f"{path} is cut short: {size} bytes of {end}")
    os.truncate(path / _DATA, end)
    return True


def _check_keys(txn: Txn, table: lmdb._Database, is_key: Callable[[bytes], bool]) -> None:
    last, num_keys = b"", 0
    with txn.cursor(table) as cursor:
        for key in cursor.iternext(values=False):
            if not is_key(bytes(key)) or bytes(key) <= last:
                raise HistoryError(f"the index is damaged at key {bytes(key)!r}")
            last = bytes(key)
            num_keys += 1
    if num_keys != txn.stat(table)["entries"]:
        raise HistoryError(f"the index is damaged: {num_keys} keys of {txn.stat(table)['entries']} are there")
