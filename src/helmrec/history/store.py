"""The interface of history stores.

A user's history only grows at its end. Its version is the number of events it ever had, which is also the
absolute index of the next one.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from helmrec.history.events import Events, EventSchema, NewEvents
from helmrec.history.sizes import TableSizes


@dataclass(frozen=True, slots=True)
class Appended:
    """The acknowledgement of an append: its events are stored."""

    first_event: int  # absolute index of the first of them
    version: int  # of the user, now
    is_repeat: bool  # they were stored already, by an append whose acknowledgement was lost


@dataclass(frozen=True, slots=True)
class UserState:
    """The position of a user's history."""

    version: int
    first_event: int  # the oldest event still kept
    seal: int  # hash of the user and all events, keyed by the store: equal seals, equal histories
    last_timestamp: int


class HistoryStore(Protocol):
    """Durable events of many users. Every method may be called from any thread."""

    def submit(self, user_id: int, base_version: int, events: NewEvents) -> Future[Appended]:
        """Append events to a history that has `base_version` events; the future is the acknowledgement.

        The same events sent again with the same base are acknowledged again and kept once. Otherwise the future
        raises StaleVersion if the history has another version, and RequestError if time would run backwards.
        RequestError is raised at once for events that are wrong in themselves, QueueFull if too many wait.
        """

    def append(self, user_id: int, base_version: int, events: NewEvents) -> Appended:
        """Append events and wait for the acknowledgement."""

    def submit_delete(self, user_id: int) -> Future[bool]:
        """Delete a user; False if there was none. A later append starts again at version 0."""

    def read_last(self, user_id: int, num_events: int) -> Events:
        """Return the last events, at most this many; for an unknown user none, at version 0."""

    def read_from(self, user_id: int, first_event: int) -> Events:
        """Return the events from this absolute index on that are still kept."""

    def state(self, user_id: int) -> UserState | None:
        """None if the user is unknown."""

    def delete(self, user_id: int) -> bool:
        """Delete a user and wait for it; False if there was none."""

    def sizes(self) -> TableSizes:
        """Return the largest table sizes, by field, under which any process appended events."""

    def follow(self, schema: EventSchema) -> None:
        """Check later events against the tables of another model.

        Raise TablesTooSmall, and change nothing, if a table is smaller than in `sizes()`; HistoryError if the fields
        differ.
        """

    def ping(self) -> None:
        """Raise HistoryUnavailable, or another HistoryError, if the store cannot be read now."""

    def user_ids(self) -> Iterator[int]:
        """Yield all users, ascending. Users added or removed during the iteration may or may not be included."""

    def check(self) -> None:
        """Read everything; raise HistoryError if any history is damaged."""

    def close(self) -> None:
        """Finish all submitted work, then close the store. Closing twice is allowed."""
