"""The prefixes that would be resident at each of several KV shares, with one `PrefixBook` for each share.

A single reuse distance for all shares is not enough: whether a first visit is kept because pages are free differs
between shares. Forks and the host tier are left out, so a changed history replaces the previous one.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.jit import NONE
from helmrec.memory.kv_admission import VisitCount, reserved_pages
from helmrec.memory.links import Links
from helmrec.memory.prefix_book import (
    SHORT,
    Kv,
    KVRules,
    P,
    PrefixBook,
    check_book,
    commit,
    evict,
    find_prefix,
    make_book,
    plan,
    truncate,
)
from helmrec.types import IntArray, UserId

_ONLY_WINDOW = 0
_NO_TIME = 0.0  # neither rule that is simulated looks at times


class KVShadowState(NamedTuple):
    """The books of all shares, for compiled loops: each array has one more dimension, the share."""

    rules: IntArray  # (3,) the fields of `KVRules`
    counts: IntArray
    prefix: IntArray
    links: Links
    last_use_s: NDArray[np.float64]
    head: NDArray[np.int32]
    spare: NDArray[np.int32]


class HistoryVisit(NamedTuple):
    """The history of one request."""

    user: int  # its small id
    num_tokens: int
    unchanged: int  # leading tokens equal to those of the last visit
    num_visits: int  # of the user, this one included


class KVShadows:
    """Resident prefixes for each of `kv_pages`, the number of KV pages at each share."""

    def __init__(self, kv_pages: list[int], batch_pages: int, max_users: int, rules: KVRules) -> None:
        assert rules.max_forks == 1, "a user has one history here"
        self._kv_pages = kv_pages
        self._max_users = max_users
        self._ids: OrderedDict[UserId, int] = OrderedDict()  # user -> small id, longest unseen first
        self._visits = np.zeros(max_users, np.int64)
        num_slots = 1 + min(max_users, max(kv_pages))  # one for the history that is served
        books = [make_book(num_pages, max_users, num_slots) for num_pages in kv_pages]
        for book, num_pages in zip(books, kv_pages, strict=True):
            book.counts[Kv.RESERVE] = reserved_pages(num_pages, batch_pages)
        self.state = KVShadowState(np.array(rules), *(np.stack(arrays) for arrays in zip(*books, strict=True)))

    def forgets_for(self, user: UserId) -> bool:
        """Whether a visit of this user makes another user be forgotten."""
        return len(self._ids) == self._max_users and user not in self._ids

    def arrive(self, user: UserId) -> tuple[int, int]:
        """Count a visit; return the small id of the user and its number of visits."""
        id_ = self._ids.get(user)
        if id_ is None:
            id_ = self._ids[user] = self._new_id()
        else:
            self._ids.move_to_end(user)
        self._visits[id_] += 1
        return id_, int(self._visits[id_])

    def _new_id(self) -> int:
        if len(self._ids) < self._max_users:
            return len(self._ids)
        _, id_ = self._ids.popitem(last=False)
        _forget(tuple(self.state), id_)
        self._visits[id_] = 0
        return id_

    def check(self) -> None:
        """Assert the invariants of books and ids."""
        for column, num_pages in enumerate(self._kv_pages):
            check_book(_book.py_func(self.state, column), _rules.py_func(self.state), num_pages)
        assert sorted(self._ids.values()) == list(range(len(self._ids))), "two users share an id"


@numba.njit(cache=True)
def serve_history(state: KVShadowState, history: HistoryVisit) -> IntArray:
    """Serve a history at every share; return the resident tokens found at each."""
    num_columns = state.counts.shape[0]
    found = np.empty(num_columns, np.int64)
    for column in range(num_columns):
        found[column] = _serve_one(_book(state, column), _rules(state), history)
    return found


@numba.njit(cache=True, inline="always")
def _book(state: KVShadowState, column: int) -> PrefixBook:
    return PrefixBook(
        state.counts[column],
        state.prefix[column],
        state.links[column],
        state.last_use_s[column],
        state.head[column],
        state.spare[column],
    )


@numba.njit(cache=True, inline="always")
def _rules(state: KVShadowState) -> KVRules:
    return KVRules(state.rules[0], state.rules[1], state.rules[2])


@numba.njit(cache=True)
def _serve_one(book: PrefixBook, rules: KVRules, history: HistoryVisit) -> int:
    """Serve a history as a step of its own. One that is longer than the share changes nothing."""
    slot = find_prefix(book, history.user, _ONLY_WINDOW)
    if slot != NONE and book.prefix[slot, P.TOKENS] > history.unchanged:
        truncate(book, rules, slot, history.unchanged)
    served = plan(book, rules, history.user, _ONLY_WINDOW, history.num_tokens)
    if served.slot == SHORT:
        slot = find_prefix(book, history.user, _ONLY_WINDOW)
        return 0 if slot == NONE else book.prefix[slot, P.TOKENS]
    commit(book, rules, served, history.num_tokens, _NO_TIME, VisitCount(history.num_visits, _NO_TIME))
    evict(book, rules, book.counts[Kv.RESERVE] - book.counts[Kv.FREE])
    return served.resident


@numba.njit(cache=True)
def _forget(arrays: tuple[Any, ...], user: int) -> None:
    state = KVShadowState(*arrays)
    for column in range(state.counts.shape[0]):
        book = _book(state, column)
        slot = find_prefix(book, user, _ONLY_WINDOW)
        if slot != NONE:
            truncate(book, _rules(state), slot, 0)
