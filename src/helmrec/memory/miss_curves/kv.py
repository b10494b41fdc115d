"""Which users' prefixes would be resident at each of several KV shares, by the rules of `KVCache`.

One exact LRU of users per share: users are few beside rows, and whether a first visit is kept because pages are free
anyway differs from share to share, which one reuse distance for all could not tell. Does not know pages by number,
forks or the host tier: a history that changed replaces the one before.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves.lru import OUT, Lines, close_gaps, coldest, join, join_first, make_lines, with_ids

Tokens = NDArray[np.int64]  # (columns,)


class KVState(NamedTuple):
    """Arrays of all shares, for compiled loops."""

    queue: NDArray[np.int32]
    place: NDArray[np.int32]
    ends: NDArray[np.int64]
    held: NDArray[np.int32]  # (users, 2, columns) pages and tokens of each prefix
    pages: NDArray[np.int64]  # (2, columns) pages nobody holds, and how many of them are kept for the next step


class History(NamedTuple):
    """What a visit brings."""

    user: int  # its small id
    num_tokens: int
    unchanged: int  # leading tokens that are as they were at the last visit
    page_tokens: int
    is_kept: bool  # even if that displaces others


class KVShadows:
    """Users in order of their last visit, and their resident tokens for each of `kv_pages`, the pages KV would have."""

    def __init__(self, kv_pages: list[int], batch_pages: int, max_users: int) -> None:
        pages = np.array(kv_pages, np.int64)
        self._kv_pages = pages
        self._max_users = max_users
        self._ids: OrderedDict[int, int] = OrderedDict()  # user -> small id, longest unseen first
        self._visits = [0] * 1_024
        lines = make_lines(pages.size, 1_024, 2 * max_users + 64)
        reserve = np.maximum(1, np.minimum(batch_pages, pages // 4))
        self.state = KVState(*lines, np.zeros((1_024, 2, pages.size), np.int32), np.array([pages, reserve]))

    def resident(self, user: int) -> list[int]:
        """Tokens of this user resident at each share now; nothing of a user not known."""
        id_ = self._ids.get(user)
        return [] if id_ is None else self.state.held[id_, 1].tolist()

    def forgets_for(self, user: int) -> bool:
        """Whether somebody must be forgotten if this user comes."""
        return len(self._ids) == self._max_users and user not in self._ids

    def arrive(self, user: int) -> tuple[int, int]:
        """The small id of this user, and its visits so far, this one included."""
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
            self.state = KVState(*lines, held, self.state.pages)
        return id_

    def check(self, page_tokens: int) -> None:
        pages, tokens = self.state.held[:, 0], self.state.held[:, 1]
        assert np.array_equal(pages.sum(axis=0) + self.state.pages[0], self._kv_pages), "a page is lost"
        assert np.array_equal(self.state.place != OUT, pages > 0), (
            "a prefix without pages is in line, or one with is not"
        )
        assert np.array_equal(-(-tokens // page_tokens), pages), "pages and tokens disagree"
        assert sorted(self._ids.values()) == list(range(len(self._ids))), "two users share an id"


@numba.njit(cache=True)
def serve_history(state: KVState, history: History) -> Tokens:
    """Serve a history at every share; returns the tokens found resident."""
    close_gaps(Lines(state.queue, state.place, state.ends), 1)
    num_columns = state.ends.shape[1]
    found = np.empty(num_columns, np.int64)
    for column in range(num_columns):
        found[column] = _serve_one(state, column, history)
    return found


@numba.njit(cache=True, inline="always")
def _serve_one(state: KVState, column: int, history: History) -> int:
    held, pages, user = state.held, state.pages, history.user
    resident = min(int(held[user, 1, column]), history.unchanged)
    kept_pages = -(-resident // history.page_tokens)
    pages[0, column] += held[user, 0, column] - kept_pages
    state.place[user, column] = OUT  # pinned: the pages it needs are never its own
    needed = -(-history.num_tokens // history.page_tokens) - kept_pages
    _evict(state, column, needed - pages[0, column], history.page_tokens)
    has_room = pages[0, column] - needed >= pages[1, column]
    has_earned = resident > 0 or history.is_kept
    if needed <= pages[0, column] and (has_earned or has_room):
        pages[0, column] -= needed
        held[user, 0, column] = kept_pages + needed
        held[user, 1, column] = history.num_tokens
        if has_earned:
            join(state.queue, state.place, state.ends, column, user)
        else:  # a guest, whose pages nobody else wants yet
            join_first(Lines(state.queue, state.place, state.ends), column, user)
    else:
        pages[0, column] += kept_pages
        held[user, :, column] = 0
    _evict(state, column, pages[1, column] - pages[0, column], history.page_tokens)
    return resident


@numba.njit(cache=True, inline="always")
def _evict(state: KVState, column: int, num_pages: int, page_tokens: int) -> None:
    """Free pages of the coldest users, the tail of a history first."""
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
    state = KVState(*arrays)
    for column in range(state.ends.shape[1]):
        state.pages[0, column] += state.held[user, 0, column]
        state.held[user, :, column] = 0
        state.place[user, column] = OUT
