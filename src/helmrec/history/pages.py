"""The binary format of a history: pages of events and the record of a user. It knows no database.

A page is little-endian words of 64 bits: number of events, chain state before its first event (two words), chain
state after its last (two words), then its columns one after the other. Every page of a user but the last holds
PAGE_EVENTS events. The chain has the store's key. Reading hashes the events again and compares the states, so that
damage is detected.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from helmrec.memory.prefix_hash import ChainKeys, ChainState, HashKey, advance_lanes, begin_chain
from helmrec.types import IntArray, UserId
from helmrec.user_ids import seed_words, store_key, user_of_key

# Four or eight fields of 126 events, with headers, just fit one or two disk pages; 128 of eight would take three.
PAGE_EVENTS = 126
_HEADER_WORDS = 5
_WORD = (1 << 64) - 1
_USER = struct.Struct("<QQQQQ")
_PAGE = struct.Struct(">Q")
PAGE_NUMBER_BYTES = _PAGE.size


class UserRecord(NamedTuple):
    """The position of a user's history."""

    version: int
    first_event: int  # the oldest event kept, first of its page
    end: ChainState  # after the last event
    last_timestamp: int

    def first_of_last(self, num_events: int) -> int:
        """Return the absolute index of the first of the last `num_events` events, or of the oldest event kept."""
        return max(self.first_event, self.version - num_events)


class Page(NamedTuple):
    """Some events in columns, and the chain states around them."""

    before: ChainState
    end: ChainState
    columns: IntArray  # (fields, events)


class Unpacked(NamedTuple):
    """Events of consecutive pages; only the first `num_sound` of them may be used."""

    columns: IntArray  # (fields, events)
    before: ChainState
    end: ChainState
    num_sound: int  # leading events whose hashes match the states


def new_user(key: HashKey, user_id: UserId) -> UserRecord:
    """Return the record of a history before its first event."""
    return UserRecord(0, 0, begin_chain(key, seed_words(user_id)), 0)


def page_key(user_id: UserId, page: int) -> bytes:
    """Return the key of a page: that of its user, then its number. Keys sort by user, then by page."""
    return store_key(user_id) + _PAGE.pack(page)


def is_user_key(key: bytes) -> bool:
    return user_of_key(key) is not None


def is_page_key(key: bytes) -> bool:
    return len(key) > PAGE_NUMBER_BYTES and is_user_key(key[:-PAGE_NUMBER_BYTES])


def pack_user(record: UserRecord) -> bytes:
    return _USER.pack(record.version, record.first_event, *record.end, record.last_timestamp)


def unpack_user(value: bytes | memoryview) -> UserRecord | None:
    """Parse a record; None if these bytes are not a record of a user."""
    if len(value) != _USER.size:
        return None
    version, first_event, first, second, last_timestamp = _USER.unpack(value)
    record = UserRecord(version, first_event, ChainState(first, second), last_timestamp)
    is_sound = record.first_event < record.version and record.first_event % PAGE_EVENTS == 0
    return record if is_sound else None


def pack_page(page: Page) -> bytes:
    num_fields, num_events = page.columns.shape
    words = np.empty(_HEADER_WORDS + num_fields * num_events, "<u8")
    words[:_HEADER_WORDS] = num_events, *page.before, *page.end
    words[_HEADER_WORDS:] = page.columns.reshape(-1).view(np.uint64)
    return words.tobytes()


def unpack_pages(key: HashKey, values: Sequence[bytes | memoryview], num_fields: int, num_events: int) -> Unpacked:
    """Parse `num_events` events from consecutive pages and verify them."""
    columns = np.empty((num_fields, num_events), np.int64)
    joined = b"".join(values)
    flat = np.frombuffer(joined, "<i8", len(joined) // 8)
    num_copied = _copy_columns(flat, columns)
    if not num_copied:
        return Unpacked(columns, ChainState(0, 0), ChainState(0, 0), 0)
    sound = _count_sound(flat, key.keys(num_fields), num_fields, num_copied)
    before = ChainState(int(flat[1]) & _WORD, int(flat[2]) & _WORD)
    return Unpacked(columns, before, ChainState(int(sound.first), int(sound.second)), int(sound.num_events))


@numba.njit(cache=True)
def _copy_columns(flat: IntArray, columns: IntArray) -> int:
    """Copy the pages in `flat` side by side; return the events before the first malformed page."""
    num_fields, num_events = columns.shape
    at = first = 0
    while first < num_events and at + _HEADER_WORDS <= flat.size:
        count = flat[at]
        at += _HEADER_WORDS
        if count != min(PAGE_EVENTS, num_events - first) or at + num_fields * count > flat.size:
            return first
        for field in range(num_fields):
            columns[field, first : first + count] = flat[at : at + count]
            at += count
        first += count
    return first


class _Sound(NamedTuple):
    """Verified leading events."""

    num_events: int
    first: np.uint64  # both lanes of the last verified state
    second: np.uint64


@numba.njit(cache=True)
def _count_sound(flat: IntArray, keys: ChainKeys, num_fields: int, num_events: int) -> _Sound:
    """Count the leading events whose hashes match the states of their pages; return the last such state."""
    at = done = 0
    first, second = np.uint64(flat[1]), np.uint64(flat[2])
    while done < num_events:
        count = flat[at]
        start = at + _HEADER_WORDS
        columns = flat[start : start + num_fields * count].reshape(num_fields, count)
        end_first, end_second = advance_lanes(keys, first, second, columns)
        is_next = np.uint64(flat[at + 1]) == first and np.uint64(flat[at + 2]) == second
        if not is_next or np.uint64(flat[at + 3]) != end_first or np.uint64(flat[at + 4]) != end_second:
            break
        first, second = end_first, end_second
        done += count
        at = start + num_fields * count
    return _Sound(done, first, second)
