"""What a history store promises, wherever it keeps its data.

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
    """An acknowledgement: these events are kept."""

    first_event: int  # absolute index of the first of them
    version: int  # of the user, now
    is_repeat: bool  # they were there already, from an append whose acknowledgement got lost


@dataclass(frozen=True, slots=True)
class UserState:
    """Where a user's history stands."""

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
        """`submit`, and wait."""

    def submit_delete(self, user_id: int) -> Future[bool]:
        """Forget a user; False if there was none. A later append starts again at version 0."""

    def read_last(self, user_id: int, num_events: int) -> Events:
        """The last events, at most this many; none, at version 0, of an unknown user."""

    def read_from(self, user_id: int, first_event: int) -> Events:
        """The events from this absolute index on that are still kept: what is new to someone who knows the rest."""

    def state(self, user_id: int) -> UserState | None:
        """None if the user is unknown."""

    def delete(self, user_id: int) -> bool:
        """`submit_delete`, and wait."""

    def sizes(self) -> TableSizes:
        """The largest tables, by field, under which events were taken, by any process that writes the store."""

    def follow(self, schema: EventSchema) -> None:
        """Hold the limits of another model's tables against events from now on.

        Raise TablesTooSmall, and change nothing, if a table is smaller than `sizes()` says; HistoryError if the fields
        are others.
        """

    def ping(self) -> None:
        """Raise HistoryUnavailable, or another HistoryError, if the store cannot be read now."""

    def user_ids(self) -> Iterator[int]:
        """All users, ascending. Those that come or go meanwhile may be seen or not."""

    def check(self) -> None:
        """Read everything; raise HistoryError if any history is damaged."""

    def close(self) -> None:
        """Finish what was submitted, then let go of the data. Closing twice is fine."""
