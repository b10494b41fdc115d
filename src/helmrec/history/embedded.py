"""The default store: one folder on this machine, no server to install, one process that writes.

Ties checking, the writer's thread and the file together; `EmbeddedReader` is the same store seen from another
process. A forked child must open its own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from helmrec.clock import Clock, MonotonicClock
from helmrec.errors import HistoryError, RequestError
from helmrec.history.commit import GroupCommit
from helmrec.history.config import HistoryConfig
from helmrec.history.events import MAX_ID, Events, EventSchema, NewEvents, to_columns, to_events
from helmrec.history.file import HistoryFile
from helmrec.history.pages import PAGE_EVENTS
from helmrec.history.sizes import TableSizes, sizes_of
from helmrec.history.store import Appended, UserState
from helmrec.history.users import Append, UserTable

_USERS_AT_ONCE = 1_024


@dataclass(frozen=True, slots=True)
class HistoryStats:
    """What a store holds and takes."""

    num_users: int
    num_pages: int
    used_bytes: int  # how far the file reaches
    map_bytes: int  # how far it may reach before it has to be mapped anew


class EmbeddedReader:
    """The store, read only, for a process beside the one that writes: it sees what the writer has acknowledged."""

    def __init__(self, path: Path | str, schema: EventSchema, config: HistoryConfig | None = None) -> None:
        """Raise HistoryError if there is no store at `path`, or not one for these fields and this secret."""
        config = config or HistoryConfig()
        self._view(HistoryFile(Path(path), schema, config, readonly=True), schema, config)

    def _view(self, file: HistoryFile, schema: EventSchema, config: HistoryConfig) -> None:
        self._file = file
        self._schema = schema
        self._users = UserTable(file.tables, file.key, schema.num_fields, config.max_events_per_user)

    def read_last(self, user_id: int, num_events: int) -> Events:
        """The last events, at most this many; none, at version 0, of an unknown user."""
        _check_whole("num_events", num_events)
        return self._read(user_id, lambda version: version - num_events)

    def read_from(self, user_id: int, first_event: int) -> Events:
        """The events from this absolute index on that are still kept."""
        _check_whole("first_event", first_event)
        return self._read(user_id, lambda _: first_event)

    def _read(self, user_id: int, start: Callable[[int], int]) -> Events:
        """Events from `start(version)` on, or from the oldest that is kept."""
        _check_whole("user_id", user_id)
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
        _check_whole("user_id", user_id)
        with self._file.reading() as txn:
            record = self._users.record(txn, user_id)
        return None if record is None else self._users.state(record)

    def user_ids(self) -> Iterator[int]:
        """All users, ascending. Those that come or go meanwhile may be seen or not."""
        start = 0
        while start <= MAX_ID:
            with self._file.reading() as txn:  # a few at a time: while a view is held, no freed page is used again
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
        """The largest tables, by field, under which events were taken."""
        with self._file.reading() as txn:
            return self._file.taken_sizes(txn) or sizes_of(self._schema)

    def ping(self) -> None:
        """Raise HistoryError if the store cannot be read now, or is not where it was."""
        self._file.check_place()
        with self._file.reading() as txn:
            self._users.sizes(txn)

    def check(self) -> None:
        """Read everything; raise HistoryError if any history, or the way to it, is damaged."""
        self._file.check_index()
        for user_id in self.user_ids():
            with self._file.reading() as txn:
                self._users.check(txn, user_id)

    def close(self) -> None:
        """Let go of the file. Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EmbeddedHistory(EmbeddedReader):
    """The store, open for reading and writing. `HistoryStore` says what its methods promise."""

    def __init__(
        self,
        path: Path | str,
        schema: EventSchema,
        config: HistoryConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open the store at `path`, or make one. Raise HistoryError if it is foreign, damaged or in use.

        TablesTooSmall if it took events for larger tables than these.
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
        _check_whole("user_id", user_id)
        _check_whole("base_version", base_version)
        columns = to_columns(self._schema, events, self._config.max_append_events)
        new = Append(user_id, base_version, columns)
        return self._writer.submit(lambda txn: self._users.append(txn, new))

    def append(self, user_id: int, base_version: int, events: NewEvents) -> Appended:
        return self.submit(user_id, base_version, events).result()

    def submit_delete(self, user_id: int) -> Future[bool]:
        """Forget a user; False if there was none. Its bytes stay in unused parts of the file until reused."""
        _check_whole("user_id", user_id)
        return self._writer.submit(lambda txn: self._users.delete(txn, user_id), frees=True)

    def delete(self, user_id: int) -> bool:
        return self.submit_delete(user_id).result()

    def follow(self, schema: EventSchema) -> None:
        if schema.feature_names != self._schema.feature_names:
            raise HistoryError(f"{self._file.path} keeps {self._schema.field_names}, not {schema.field_names}")
        self._writer.submit(lambda txn: self._file.note_sizes(txn, schema)).result()
        self._schema = schema  # what was checked before it is within the larger limits, too

    @property
    def num_commits(self) -> int:
        """Transactions so far; fewer than appends where appends shared one."""
        return self._writer.num_commits

    def close(self) -> None:
        self._writer.close()
        super().close()


def _check_whole(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= MAX_ID:
        raise RequestError(field, value, f"an integer from 0 to {MAX_ID} is needed")
