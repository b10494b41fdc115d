"""Operations on the history of one user in a transaction: append, read, drop, check of versions and timestamps."""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from helmrec.errors import HistoryError, RequestError, StaleVersion
from helmrec.history.file import Tables, Txn
from helmrec.history.pages import (
    PAGE_EVENTS,
    Page,
    Unpacked,
    UserRecord,
    new_user,
    pack_page,
    pack_user,
    page_key,
    unpack_pages,
    unpack_user,
)
from helmrec.history.values import Appended, UserState
from helmrec.memory.prefix_hash import ChainState, HashKey, advance
from helmrec.types import IntArray, UserId
from helmrec.user_ids import store_key, user_of_key


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """New events that have been checked."""

    user_id: UserId
    base_version: int
    columns: IntArray  # (fields, events)

    @property
    def num_events(self) -> int:
        return self.columns.shape[1]


def user_of_stored(key: bytes) -> UserId:
    """Return the user of a key of the store; HistoryError if it is none."""
    user = user_of_key(key)
    if user is None:
        raise HistoryError(f"the index is damaged at key {key!r}")
    return user


class UserTable:
    """Histories by user, in transactions of the caller."""

    def __init__(self, tables: Tables, key: HashKey, num_fields: int, keep_events: int) -> None:
        self._tables = tables
        self._key = key
        self._num_fields = num_fields
        self._keep_events = keep_events

    def record(self, txn: Txn, user_id: UserId) -> UserRecord | None:
        value = txn.get(store_key(user_id), db=self._tables.users)
        if value is None:
            return None
        record = unpack_user(value)
        if record is None:
            raise HistoryError(f"the record of user {user_id} is damaged")
        return record

    def state(self, record: UserRecord) -> UserState:
        """Return the public state of a history."""
        seal = self._key.seal(record.end)
        return UserState(record.version, record.first_event, seal, record.last_timestamp)

    def read(self, txn: Txn, user_id: UserId, record: UserRecord, first_event: int) -> Unpacked:
        """Read and verify all events from the page of `first_event` on. `first_event` must still be kept."""
        first_page = first_event // PAGE_EVENTS
        num_events = record.version - first_page * PAGE_EVENTS
        pages = range(first_page, -(-record.version // PAGE_EVENTS))
        values = [txn.get(page_key(user_id, page), b"", db=self._tables.pages) for page in pages]
        found = unpack_pages(self._key, values, self._num_fields, num_events)
        if found.num_sound < num_events:
            at = record.version - num_events + found.num_sound
            raise HistoryError(f"the history of user {user_id} is damaged from event {at} on")
        if found.end != record.end:
            raise HistoryError(f"the history of user {user_id} is damaged: its record and its pages disagree")
        return found

    def append(self, txn: Txn, new: Append) -> Appended:
        """Append events: raise before anything is written, or write all of them."""
        record = self.record(txn, new.user_id) or new_user(self._key, new.user_id)
        if new.base_version != record.version:
            return self._repeated(txn, record, new)
        if new.columns[-1, 0] < record.last_timestamp:
            problem = f"time runs backwards from the last event kept, {record.last_timestamp}"
            raise RequestError("timestamps[0]", int(new.columns[-1, 0]), problem)
        end = self._write_pages(txn, record, new)
        version = record.version + new.num_events
        first_event = self._drop_old(txn, new.user_id, record.first_event, version)
        latest = UserRecord(version, first_event, end, int(new.columns[-1, -1]))
        txn.put(store_key(new.user_id), pack_user(latest), db=self._tables.users)
        return Appended(record.version, version, is_repeat=False)

    def _repeated(self, txn: Txn, record: UserRecord, new: Append) -> Appended:
        """Acknowledge events that are already stored; raise StaleVersion for others."""
        end = new.base_version + new.num_events
        if record.first_event <= new.base_version and end <= record.version:
            kept = self.read(txn, new.user_id, record, new.base_version).columns
            skip = new.base_version % PAGE_EVENTS
            if np.array_equal(kept[:, skip : skip + new.num_events], new.columns):
                return Appended(new.base_version, record.version, is_repeat=True)
        raise StaleVersion(new.user_id, new.base_version, record.version)

    def _write_pages(self, txn: Txn, record: UserRecord, new: Append) -> ChainState:
        """Fill the last page and add others; return the state after the last event."""
        columns, before = new.columns, record.end
        page, in_tail = divmod(record.version, PAGE_EVENTS)
        if in_tail:
            tail = self.read(txn, new.user_id, record, record.version - 1)  # to be written again: verified
            columns = np.concatenate((tail.columns, columns), axis=1)
            before = tail.before
        for first in range(0, columns.shape[1], PAGE_EVENTS):
            some = np.ascontiguousarray(columns[:, first : first + PAGE_EVENTS])
            end = advance(self._key, before, some)
            packed = pack_page(Page(before, end, some))
            txn.put(page_key(new.user_id, page + first // PAGE_EVENTS), packed, db=self._tables.pages)
            before = end
        return before

    def _drop_old(self, txn: Txn, user_id: UserId, first_event: int, version: int) -> int:
        """Drop pages beyond the number of events to keep; return the first event kept."""
        kept_from = max(first_event, (version - self._keep_events) // PAGE_EVENTS * PAGE_EVENTS)
        for page in range(first_event // PAGE_EVENTS, kept_from // PAGE_EVENTS):
            txn.delete(page_key(user_id, page), db=self._tables.pages)
        return kept_from

    def delete(self, txn: Txn, user_id: UserId) -> bool:
        """Delete every page under the user's key, even if its record is damaged."""
        prefix = store_key(user_id)
        with txn.cursor(self._tables.pages) as cursor:
            is_there = cursor.set_range(page_key(user_id, 0))
            while is_there and bytes(cursor.key()[: len(prefix)]) == prefix:
                cursor.delete()
                is_there = bool(cursor.key())
        return txn.delete(prefix, db=self._tables.users)

    def list_keys(self, txn: Txn, start: bytes, limit: int) -> list[bytes]:
        """Return the keys of the first `limit` users from key `start` on."""
        with txn.cursor(self._tables.users) as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return []
            return [bytes(key) for key in islice(cursor.iternext(values=False), limit)]

    def check(self, txn: Txn, user_id: UserId) -> None:
        """Raise HistoryError if the user's history is damaged. A user that does not exist is not."""
        record = self.record(txn, user_id)
        if record is not None:
            found = self.read(txn, user_id, record, record.first_event)
            if record.first_event == 0 and found.before != new_user(self._key, user_id).end:
                raise HistoryError(f"the history of user {user_id} is damaged: it is another user's")
