"""The prefixes that would be resident at each of several KV shares, by the rules of `KVCache`.

Each share has an exact LRU order of users. A single reuse distance for all shares is not enough: whether a first visit
is kept because pages are free differs between shares. Pages are counted, not identified; forks and the host tier are
left out, so a changed history replaces the previous one.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves.lru import OUT, Lines, close_gaps, coldest, join, join_first, make_lines, with_ids

Tokens = NDArray[np.int64]  # (columns,)


class KVShadowState(NamedTuple):
    """Arrays of all shares, for compiled loops."""

    queue: NDArray[np.int32]
    place: NDArray[np.int32]
    ends: NDArray[np.int64]
    held: NDArray[np.int32]  # (users, 2, columns) pages and tokens of each prefix
    pages: NDArray[np.int64]  # (2, columns) free pages, and how many of them are reserved for the next step


class HistoryVisit(NamedTuple):
    """The history of one request."""

    user: int  # its small id
    num_tokens: int
    unchanged: int  # leading tokens equal to those of the last visit
    page_tokens: int
    is_kept: bool  # even if that displaces others


class KVShadows:
    """Users in LRU order and their resident tokens, for each of `kv_pages`, the number of KV pages at each share."""

    def __init__(self, kv_pages: list[int], batch_pages: int, max_users: int) -> None:
        pages = np.array(kv_pages, np.int64)
        self._kv_pages = pages
        self._max_users = max_users
        self._ids: OrderedDict[int, int] = OrderedDict()  # user -> small id, longest unseen first
        self._visits = [0] * 1_024
        lines = make_lines(pages.size, 1_024, 2 * max_users + 64)
        reserve = np.maximum(1, np.minimum(batch_pages, pages // 4))
        self.state = KVShadowState(*lines, np.zeros((1_024, 2, pages.size), np.int32), np.array([pages, reserve]))

    def forgets_for(self, user: int) -> bool:
        """Whether a visit of this user makes another user be forgotten."""
        return len(self._ids) == self._max_users and user not in self._ids

    def arrive(self, user: int) -> tuple[int, int]:
        """Count a visit; return the small id of the user and its number of visits."""
        id_ = self._ids.get(user)
        if id_ is None:
            id_ = self._new_id()
            self._ids[user] = id_
        else:
            self._ids.move_to_end(user)
        self._visits[id_] += 1
        return id_, self._visits[id_]

    def _new_id(self) -> int:
        if len(self._ids) == self._max_users:
            _, id_ = self._ids.popitem(last=False)
            _forget(tuple(self.state), id_)
            self._visits[id_] = 0
            return id_
        id_ = len(self._ids)
        if id_ == len(self._visits):
            self._visits += [0] * id_
            lines = with_ids(Lines(*self.state[:3]), 2 * id_)
            held = np.pad(self.state.held, ((0, id_), (0, 0), (0, 0)))
            self.state = KVShadowState(*lines, held, self.state.pages)
        return id_

    def check(self, page_tokens: int) -> None:
        """Assert the invariants of pages, tokens and ids."""
        pages, tokens = self.state.held[:, 0], self.state.held[:, 1]
        assert np.array_equal(pages.sum(axis=0) + self.state.pages[0], self._kv_pages), "a page is lost"
        assert np.array_equal(self.state.place != OUT, pages > 0), (
            "a prefix without pages is in the LRU order, or one with pages is not"
        )
        assert np.array_equal(-(-tokens // page_tokens), pages), "pages and tokens disagree"
        assert sorted(self._ids.values()) == list(range(len(self._ids))), "two users share an id"


@numba.njit(cache=True)
def serve_history(state: KVShadowState, history: HistoryVisit) -> Tokens:
    """Serve a history at every share; return the resident tokens found at each."""
    close_gaps(Lines(state.queue, state.place, state.ends), 1)
    num_columns = state.ends.shape[1]
    found = np.empty(num_columns, np.int64)
    for column in range(num_columns):
        found[column] = _serve_one(state, column, history)
    return found


@numba.njit(cache=True, inline="always")
def _serve_one(state: KVShadowState, column: int, history: HistoryVisit) -> int:
    held, pages, user = state.held, state.pages, history.user
    resident = min(int(held[user, 1, column]), history.unchanged)
    kept_pages = -(-resident // history.page_tokens)
    pages[0, column] += held[user, 0, column] - kept_pages
    state.place[user, column] = OUT  # pinned: its own pages are not evicted for it
    needed = -(-history.num_tokens // history.page_tokens) - kept_pages
    _evict(state, column, needed - pages[0, column], history.page_tokens)
    has_room = pages[0, column] - needed >= pages[1, column]
    is_admitted = resident > 0 or history.is_kept
    if needed <= pages[0, column] and (is_admitted or has_room):
        pages[0, column] -= needed
        held[user, 0, column] = kept_pages + needed
        held[user, 1, column] = history.num_tokens
        if is_admitted:
            join(state.queue, state.place, state.ends, column, user)
        else:  # probationary: the first to be evicted
            join_first(Lines(state.queue, state.place, state.ends), column, user)
    else:
        pages[0, column] += kept_pages
        held[user, :, column] = 0
    _evict(state, column, pages[1, column] - pages[0, column], history.page_tokens)
    return resident


@numba.njit(cache=True, inline="always")
def _evict(state: KVShadowState, column: int, num_pages: int, page_tokens: int) -> None:
    """Free pages of the coldest users, the tail of each history first."""
    while num_pages > 0:
        user = coldest(state.queue, state.place, state.ends, column)
        if user == OUT:
            return
        dropped = min(int(state.held[user, 0, column]), num_pages)
        left = int(state.held[user, 0, column]) - dropped
        state.held[user, 0, column] = left
        state.held[user, 1, column] = min(int(state.held[user, 1, column]), left * page_tokens)
        state.pages[0, column] += dropped
        num_pages -= dropped
        if not left:
            state.place[user, column] = OUT


@numba.njit(cache=True)
def _forget(arrays: tuple[Any, ...], user: int) -> None:
    state = KVShadowState(*arrays)
    for column in range(state.ends.shape[1]):
        state.pages[0, column] += state.held[user, 0, column]
        state.held[user, :, column] = 0
        state.place[user, column] = OUT
