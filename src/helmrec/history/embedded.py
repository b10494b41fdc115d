"""The default store: one folder on this machine, without a server, used by one process.

It combines checks, the writer's thread and the file. A forked child must open its own.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

from helmrec.clock import Clock, MonotonicClock
from helmrec.history.commit import GroupCommit
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema
from helmrec.history.file import HistoryFile, Txn
from helmrec.history.sizes import TableSizes, sizes_of
from helmrec.history.store import HistoryStore
from helmrec.history.users import Append, UserTable, user_of_stored
from helmrec.history.values import Appended, HistoryStats
from helmrec.types import UserId

_USERS_AT_ONCE = 1_024


class EmbeddedHistory(HistoryStore):
    """The store, open for reading and writing."""

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
        super().__init__(str(path), schema, config or HistoryConfig())
        self._file = file = HistoryFile(Path(path), schema, self._config)
        self._users = UserTable(file.tables, file.key, schema.num_fields, self._config.max_events_per_user)
        try:
            file.write(lambda txn: file.note_sizes(txn, schema))
        except BaseException:
            file.close()
            raise
        self._writer = GroupCommit(file, self._config, clock or MonotonicClock())

    def _reading(self, user_id: UserId, num_events: int) -> AbstractContextManager[Txn]:
        return self._file.reading()

    def _submit_append(self, new: Append) -> Future[Appended]:
        return self._writer.submit(lambda txn: self._users.append(txn, new))

    def _submit_delete(self, user_id: UserId) -> Future[bool]:
        """The bytes of the user stay in free pages of the file until these are reused."""
        return self._writer.submit(lambda txn: self._users.delete(txn, user_id), frees=True)

    def _note_sizes(self, schema: EventSchema) -> None:
        self._writer.submit(lambda txn: self._file.note_sizes(txn, schema)).result()

    def user_ids(self) -> Iterator[UserId]:
        start = b""
        while True:
            with self._file.reading() as txn:  # in batches: while a transaction is open, freed pages cannot be reused
                some = self._users.list_keys(txn, start, _USERS_AT_ONCE)
            yield from map(user_of_stored, some)
            if len(some) < _USERS_AT_ONCE:
                return
            start = some[-1] + b"\0"

    def stats(self) -> HistoryStats:
        with self._file.reading() as txn:
            return HistoryStats(txn.stat(self._file.tables.users)["entries"], self._file.used_bytes)

    def sizes(self) -> TableSizes:
        with self._file.reading() as txn:
            return self._file.taken_sizes(txn) or sizes_of(self._schema)

    def ping(self) -> None:
        """Raise HistoryError if the store cannot be read, or was moved or replaced."""
        self._file.check_place()
        self.stats()

    def check(self) -> None:
        self._file.check_index()
        super().check()

    def close(self) -> None:
        self._writer.close()
        self._file.close()
