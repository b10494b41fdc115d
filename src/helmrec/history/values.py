"""Answers of a history store."""

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class HistoryStats:
    """The size of a store."""

    num_users: int
    used_bytes: int  # of the file, with free pages inside it, or of the whole Redis server
