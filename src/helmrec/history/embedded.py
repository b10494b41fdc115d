"""The default store: one folder on this machine, without a server, written by one process.

It combines checks, the writer's thread and the file; `EmbeddedReader` opens the same store read-only from another
process. A forked child must open its own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from helmrec.clock import Clock, MonotonicClock
from helmrec.errors import HistoryError
from helmrec.history.commit import GroupCommit
from helmrec.history.config import HistoryConfig
from helmrec.history.events import MAX_ID, Events, EventSchema, NewEvents, check_whole, to_columns, to_events
from helmrec.history.file import HistoryFile
from helmrec.history.pages import PAGE_EVENTS
from helmrec.history.sizes import TableSizes, sizes_of
from helmrec.history.store import Appended, UserState
from helmrec.history.users import Append, UserTable

_USERS_AT_ONCE = 1_024


@dataclass(frozen=True, slots=True)
class HistoryStats:
    """The size of a store."""

    num_users: int
    num_pages: int
    used_bytes: int  # of the file, with free pages inside it
    map_bytes: int  # of the memory map, which the file may fill before it is remapped


class EmbeddedReader:
    """The store, opened read-only next to the process that writes; it sees all acknowledged events."""

    def __init__(self, path: Path | str, schema: EventSchema, config: HistoryConfig | None = None) -> None:
        """Raise HistoryError if there is no store at `path`, or not one for these fields and this secret."""
        config = config or HistoryConfig()
        self._view(HistoryFile(Path(path), schema, config, readonly=True), schema, config)

    def _view(self, file: HistoryFile, schema: EventSchema, config: HistoryConfig) -> None:
        self._file = file
        self._schema = schema
        self._users = UserTable(file.tables, file.key, schema.num_fields, config.max_events_per_user)

    def read_last(self, user_id: int, num_events: int) -> Events:
        """Return the last events, at most this many; for an unknown user none, at version 0."""
        check_whole("num_events", num_events)
        return self._read(user_id, lambda version: version - num_events)

    def read_from(self, user_id: int, first_event: int) -> Events:
        """Return the events from this absolute index on that are still kept."""
        check_whole("first_event", first_event)
        return self._read(user_id, lambda _: first_event)

    def _read(self, user_id: int, start: Callable[[int], int]) -> Events:
        """Return the events from `start(version)` on, or from the oldest kept event."""
        check_whole("user_id", user_id)
        with self._file.reading() as txn:
            record = self._users.record(txn, user_id)
            version = 0 if record is None else record.version
            first_event = version if record is None else max(record.first_event, start(version))
            if record is None or first_event >= version:
                empty = np.empty((self._schema.num_fields, 0), np.int64)
                return to_events(self._schema, version, empty)
            found = self._users.read(txn, user_id, record, first_event)
        skip = first_event % PAGE_EVENTS
        return to_events(self._schema, first_event, found.columns[:, skip:])

    def state(self, user_id: int) -> UserState | None:
        """None if the user is unknown."""
        check_whole("user_id", user_id)
        with self._file.reading() as txn:
            record = self._users.record(txn, user_id)
        return None if record is None else self._users.state(record)

    def user_ids(self) -> Iterator[int]:
        """Yield all users, ascending. Users added or removed during the iteration may or may not be included."""
        start = 0
        while start <= MAX_ID:
            with self._file.reading() as txn:  # in batches: while a transaction is open, freed pages cannot be reused
                some = self._users.list_ids(txn, start, _USERS_AT_ONCE)
            yield from some
            if len(some) < _USERS_AT_ONCE:
                return
            start = some[-1] + 1

    def stats(self) -> HistoryStats:
        with self._file.reading() as txn:
            sizes = self._users.sizes(txn)
        return HistoryStats(sizes.num_users, sizes.num_pages, self._file.used_bytes, self._file.map_bytes)

    def sizes(self) -> TableSizes:
        """Return the largest table sizes, by field, under which events were appended."""
        with self._file.reading() as txn:
            return self._file.taken_sizes(txn) or sizes_of(self._schema)

    def ping(self) -> None:
        """Raise HistoryError if the store cannot be read, or was moved or replaced."""
        self._file.check_place()
        with self._file.reading() as txn:
            self._users.sizes(txn)

    def check(self) -> None:
        """Read everything; raise HistoryError if any history or the index is damaged."""
        self._file.check_index()
        for user_id in self.user_ids():
            with self._file.reading() as txn:
                self._users.check(txn, user_id)

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EmbeddedHistory(EmbeddedReader):
    """The store, open for reading and writing. `HistoryStore` documents the contract of its methods."""

    def __init__(
        self,
        path: Path | str,
        schema: EventSchema,
        config: HistoryConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open the store at `path`, or make one. Raise HistoryError if it is foreign, damaged or in use.

        Raises TablesTooSmall if it holds events of larger tables than these.
        """
        self._config = config or HistoryConfig()
        self._view(HistoryFile(Path(path), schema, self._config, readonly=False), schema, self._config)
        try:
            self._file.write(lambda txn: self._file.note_sizes(txn, schema))
        except BaseException:
            self._file.close()
            raise
        self._writer = GroupCommit(self._file, self._config, clock or MonotonicClock())

    def submit(self, user_id: int, base_version: int, events: NewEvents) -> Future[Appended]:
        check_whole("user_id", user_id)
        check_whole("base_version", base_version)
        columns = to_columns(self._schema, events, self._config.max_append_events)
        new = Append(user_id, base_version, columns)
        return self._writer.submit(lambda txn: self._users.append(txn, new))

    def append(self, user_id: int, base_version: int, events: NewEvents) -> Appended:
        return self.submit(user_id, base_version, events).result()

    def submit_delete(self, user_id: int) -> Future[bool]:
        """Delete a user; False if there was none. The bytes stay in free pages of the file until these are reused."""
        check_whole("user_id", user_id)
        return self._writer.submit(lambda txn: self._users.delete(txn, user_id), frees=True)

    def delete(self, user_id: int) -> bool:
        return self.submit_delete(user_id).result()

    def follow(self, schema: EventSchema) -> None:
        if schema.feature_names != self._schema.feature_names:
            raise HistoryError(f"{self._file.path} keeps {self._schema.field_names}, not {schema.field_names}")
        self._writer.submit(lambda txn: self._file.note_sizes(txn, schema)).result()
        self._schema = schema  # events checked before are also within the larger limits

    @property
    def num_commits(self) -> int:
        """Transactions so far; fewer than appends where appends shared one."""
        return self._writer.num_commits

    def close(self) -> None:
        self._writer.close()
        super().close()
