"""The host tier for KV: full pages kept in DRAM, found by their user and the chain state at their end.

A page's state covers all tokens before it, so one lookup per page verifies it. A page is never given to another user.
Bookkeeping only: which host slot holds which page, which page is evicted when the tier is full, and whether reloading
a page is cheaper than computing it again. It does not know tensors or devices.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from helmrec.costs.reload import ReloadCosts
from helmrec.costs.steps import StepCosts
from helmrec.memory.prefix_hash import States
from helmrec.types import UserId


class HostPage(NamedTuple):
    """A page held on the host."""

    slot: int
    epoch: int  # the oldest row epoch among its tokens and all tokens before them, which it was computed from


class PageKey(NamedTuple):
    """A full page in the pool that may be saved."""

    user_id: UserId
    state: int  # the chain state at its end
    page: int
    epoch: int


class PageSave(NamedTuple):
    """Copy page `page` to host slot `slot`."""

    page: int
    slot: int


class KVHostTier:
    """Bookkeeping of `num_slots` host pages with least-recently-used eviction.

    It keeps arrays by slot and no object per page, since a tier may hold a million pages.
    """

    def __init__(self, num_slots: int, policy: str = "measured") -> None:
        self.costs = ReloadCosts(StepCosts())
        self.policy = policy
        self.saved_pages = 0
        self.reloaded_pages = 0
        self.evicted_pages = 0
        self.clear(num_slots)

    def clear(self, num_slots: int) -> None:
        """Drop all pages; use the first `num_slots` slots from now on."""
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # chain state -> slot, coldest first
        self._user = np.full(num_slots, None, object)  # whose page each slot holds
        self._hash = np.zeros(num_slots, np.int64)  # of that user, to find all pages of a user; users are compared too
        self._state = np.zeros(num_slots, np.uint64)
        self._epoch = np.zeros(num_slots, np.int64)  # see `HostPage`
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return self._user.size

    @property
    def num_pages(self) -> int:
        return len(self._slot_of)

    def find(self, user_id: UserId, states: States, first: int, page_tokens: int) -> list[HostPage]:
        """Return the consecutive pages held, from page `first` of a user's history on."""
        found: list[HostPage] = []
        if not self._slot_of:
            return found
        for end in range((first + 1) * page_tokens, states.size + 1, page_tokens):
            state = int(states[end - 1])
            slot = self._held(user_id, state)
            if slot is None:
                break
            self._slot_of.move_to_end(state)
            found.append(HostPage(slot, int(self._epoch[slot])))
        return found

    def _held(self, user_id: UserId, state: int) -> int | None:
        """Return the slot of this user's page; None if there is none, or if it belongs to another user."""
        slot = self._slot_of.get(state)
        return slot if slot is not None and self._user[slot] == user_id else None

    def is_worth_it(self, start: int, end: int, num_pages: int) -> bool:
        """Whether to reload these pages, which hold tokens [start, end) of a history, rather than compute them."""
        return self.policy == "always" or (
            self.policy == "measured" and self.costs.prefers_reload(start, end, num_pages)
        )

    def save(self, key: PageKey) -> PageSave | None:
        """Assign a host slot to a page; None if there is no tier or the page is held with no older rows."""
        if not self.num_slots:
            return None
        slot = self._held(key.user_id, key.state)
        if slot is not None and self._epoch[slot] >= key.epoch:
            return None
        if slot is None:
            self._drop([other] if (other := self._slot_of.get(key.state)) is not None else [])
            slot = self._take_slot()
        self._slot_of[key.state] = slot
        self._slot_of.move_to_end(key.state)
        self._user[slot], self._hash[slot] = key.user_id, hash(key.user_id)
        self._state[slot], self._epoch[slot] = key.state, key.epoch
        self.saved_pages += 1
        return PageSave(key.page, slot)

    def discard(self, user_id: UserId, states: Iterable[int]) -> None:
        """Drop a user's pages that end in these states."""
        self._drop([slot for state in states if (slot := self._held(user_id, state)) is not None])

    def withdraw(self, saves: Sequence[PageSave]) -> None:
        """Drop pages whose copy has failed."""
        self._drop([save.slot for save in saves if self._user[save.slot] is not None])

    def forget(self, user_id: UserId) -> None:
        """Drop all pages of a user."""
        same_hash = np.flatnonzero(self._hash == hash(user_id)).tolist()
        self._drop([slot for slot in same_hash if self._user[slot] == user_id])

    def _drop(self, slots: list[int]) -> None:
        for slot in slots:
            del self._slot_of[int(self._state[slot])]
            self._user[slot] = None
        self._free.extend(slots)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self.evicted_pages += 1
        return self._slot_of.popitem(last=False)[1]

    def check(self) -> None:
        slots = [*self._free, *self._slot_of.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a host slot is lost or held twice"
        assert all(int(self._state[slot]) == state for state, slot in self._slot_of.items()), "a slot has another state"
        assert sum(user is not None for user in self._user) == self.num_pages, "a free slot has a user"
