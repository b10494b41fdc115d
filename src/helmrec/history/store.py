"""History stores: the contract of all, and the methods that all kinds share.

A user's history only grows at its end. Its version is the number of events it ever had, which is also the
absolute index of the next one. A kind of store adds transactions over its own database.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Self

import numpy as np

from helmrec.errors import HistoryError
from helmrec.history.config import HistoryConfig
from helmrec.history.events import MAX_ID, Events, EventSchema, NewEvents, check_whole, to_columns, to_events
from helmrec.history.file import Txn
from helmrec.history.pages import PAGE_EVENTS
from helmrec.history.sizes import TableSizes
from helmrec.history.users import Append, UserTable
from helmrec.history.values import Appended, HistoryStats, UserState
from helmrec.types import UserId
from helmrec.user_ids import check_user_id


class HistoryStore(ABC):
    """Durable events of many users. Every method may be called from any thread."""

    _users: UserTable

    def __init__(self, place: str, schema: EventSchema, config: HistoryConfig) -> None:
        """`place` is the name of the store in errors."""
        self._place = place
        self._schema = schema
        self._config = config

    def submit(self, user_id: UserId, base_version: int, events: NewEvents) -> Future[Appended]:
        """Append events to a history that has `base_version` events; the future is the acknowledgement.

        The same events sent again with the same base are acknowledged again and kept once. Otherwise the future
        raises StaleVersion if the history has another version, and RequestError if time would run backwards.
        RequestError is raised at once for events that are wrong in themselves, QueueFull if too many wait.
        """
        user_id = check_user_id(user_id)
        check_whole("base_version", base_version)
        columns = to_columns(self._schema, events, self._config.max_append_events)
        return self._submit_append(Append(user_id, int(base_version), columns))

    def append(self, user_id: UserId, base_version: int, events: NewEvents) -> Appended:
        """Append events and wait for the acknowledgement."""
        return self.submit(user_id, base_version, events).result()

    def submit_delete(self, user_id: UserId) -> Future[bool]:
        """Delete a user; False if there was none. A later append starts again at version 0."""
        return self._submit_delete(check_user_id(user_id))

    def delete(self, user_id: UserId) -> bool:
        """Delete a user and wait for it; False if there was none."""
        return self.submit_delete(user_id).result()

    def read_last(self, user_id: UserId, num_events: int) -> Events:
        """Return the last events, at most this many; for an unknown user none, at version 0."""
        user_id = check_user_id(user_id)
        check_whole("num_events", num_events)
        with self._reading(user_id, int(num_events)) as txn:
            record = self._users.record(txn, user_id)
            if record is None or not num_events:
                empty = np.empty((self._schema.num_fields, 0), np.int64)
                return to_events(self._schema, 0 if record is None else record.version, empty)
            first_event = record.first_of_last(num_events)
            found = self._users.read(txn, user_id, record, first_event)
        return to_events(self._schema, first_event, found.columns[:, first_event % PAGE_EVENTS :])

    def state(self, user_id: UserId) -> UserState | None:
        """None if the user is unknown."""
        user_id = check_user_id(user_id)
        with self._reading(user_id, 0) as txn:
            record = self._users.record(txn, user_id)
        return None if record is None else self._users.state(record)

    def follow(self, schema: EventSchema) -> None:
        """Check later events against the tables of another model.

        Raise TablesTooSmall, and change nothing, if a table is smaller than in `sizes()`; HistoryError if the fields
        differ.
        """
        if schema.feature_names != self._schema.feature_names:
            raise HistoryError(f"{self._place} keeps {self._schema.field_names}, not {schema.field_names}")
        self._note_sizes(schema)
        self._schema = schema  # events checked before are also within the larger limits

    def check(self) -> None:
        """Read everything; raise HistoryError if any history or the index is damaged."""
        for user_id in self.user_ids():
            with self._reading(user_id, MAX_ID) as txn:
                self._users.check(txn, user_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def sizes(self) -> TableSizes:
        """Return the largest table sizes, by field, under which any process appended events."""

    @abstractmethod
    def stats(self) -> HistoryStats: ...

    @abstractmethod
    def ping(self) -> None:
        """Raise HistoryUnavailable, or another HistoryError, if the store cannot be read now."""

    @abstractmethod
    def user_ids(self) -> Iterator[UserId]:
        """Yield all users: numbers ascending, then strings, by length.

        Users added or removed during the iteration may or may not be included.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish all submitted work, then close the store. Closing twice is allowed."""

    @abstractmethod
    def _submit_append(self, new: Append) -> Future[Appended]: ...

    @abstractmethod
    def _submit_delete(self, user_id: UserId) -> Future[bool]: ...

    @abstractmethod
    def _reading(self, user_id: UserId, num_events: int) -> AbstractContextManager[Txn]:
        """Return a transaction that reads at least the record and the last events of one user."""

    @abstractmethod
    def _note_sizes(self, schema: EventSchema) -> None:
        """Record these table sizes; raise TablesTooSmall if events were appended under larger ones.

        A store without users drops the sizes recorded before.
        """
