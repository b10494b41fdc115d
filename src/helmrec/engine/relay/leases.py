"""Who holds a prefix until its rank, and how much time goes into computing ahead. Bookkeeping; time comes in."""

import heapq
import math
import secrets
from typing import NamedTuple

from helmrec.engine.relay.trigger import SHARE_S
from helmrec.types import Lease


class _Held(NamedTuple):
    lease: Lease
    num_pages: int
    promised_s: float  # of computing that has not been done
    number: int  # of all ever granted


_SPARE_ENDS = 64  # ends of leases that are over may stay in the heap until there are so many


class Leases:
    """One lease a user at most, none longer than `max_hold_ms`."""

    def __init__(self, max_hold_ms: float = math.inf) -> None:
        self._max_hold_ms = max_hold_ms
        self._by_user: dict[int, _Held] = {}
        self._ends: list[tuple[float, int, int]] = []  # a heap: when, which, whose
        self._num_granted = 0
        self.held_pages = 0
        self.promised_s = 0.0
        self.used = 0  # whose rank came in time
        self.expired = 0
        self.lost = 0  # whose prefix did not stay in the pool while it was computed

    def __len__(self) -> int:
        return len(self._by_user)

    def __contains__(self, user_id: object) -> bool:
        return user_id in self._by_user

    @property
    def users(self) -> list[int]:
        return list(self._by_user)

    def is_held(self, lease: Lease) -> bool:
        """Whether this very lease lasts; its user may have another one by now."""
        held = self._by_user.get(lease.user_id)
        return held is not None and held.lease is lease

    def grant(self, user_id: int, num_pages: int, now_s: float, hold_ms: float, promised_s: float = 0.0) -> Lease:
        """Hold what a user has for as long as was asked for, or as long as may be; the lease says which."""
        assert user_id not in self._by_user, "a user has one lease"
        granted_ms = min(hold_ms, self._max_hold_ms)
        expires_s = now_s + granted_ms / 1e3
        lease = Lease(secrets.token_hex(8), user_id, expires_s, granted_ms, is_shortened=granted_ms < hold_ms)
        self._num_granted += 1
        self._by_user[user_id] = _Held(lease, num_pages, promised_s, self._num_granted)
        heapq.heappush(self._ends, (expires_s, self._num_granted, user_id))
        self.held_pages += num_pages
        self.promised_s += promised_s
        return lease

    def keep_promise(self, user_id: int) -> None:
        """All that was to be computed for a user is there."""
        held = self._by_user.get(user_id)
        if held is not None:
            self.promised_s -= held.promised_s
            self._by_user[user_id] = held._replace(promised_s=0.0)

    def use(self, user_id: int) -> None:
        """The rank has come: what was held for it is a prefix like any other from now on."""
        self.used += self._end(user_id)

    def drop(self, user_id: int) -> None:
        """What was to be held could not be computed, or its user is forgotten."""
        self._end(user_id)

    def lose(self, user_id: int) -> None:
        """What was computed did not stay: the pool has become too small for it."""
        self.lost += self._end(user_id)

    def expire(self, now_s: float) -> list[int]:
        """End what has lasted long enough; returns whose leases those were."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            _, number, user_id = heapq.heappop(self._ends)
            held = self._by_user.get(user_id)
            if held is not None and held.number == number:
                self._end(user_id)
                ended.append(user_id)
        self.expired += len(ended)
        return ended

    def _end(self, user_id: int) -> bool:
        held = self._by_user.pop(user_id, None)
        if held is not None:
            self.held_pages -= held.num_pages
            self.promised_s -= held.promised_s
            self._forget_ends()
        return held is not None

    def _forget_ends(self) -> None:
        """Drop ends of leases that are over, once they are the larger part of the heap."""
        if len(self._ends) > 2 * len(self._by_user) + _SPARE_ENDS:
            numbers = {held.number for held in self._by_user.values()}
            self._ends = [end for end in self._ends if end[1] in numbers]
            heapq.heapify(self._ends)

    def check(self) -> None:
        assert self.held_pages == sum(held.num_pages for held in self._by_user.values()), "held pages are miscounted"
        promised_s = sum(held.promised_s for held in self._by_user.values())
        assert abs(self.promised_s - promised_s) < 1e-9, "promised time is miscounted"
        numbers = {number for _, number, _ in self._ends}
        assert all(held.number in numbers for held in self._by_user.values()), "a lease would never end"
        assert len(self._ends) <= 2 * len(self._by_user) + _SPARE_ENDS, "ends of leases that are over pile up"


class ComputeShare:
    """The share of late time that went into something: of about a second, which fades."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._at_s = -math.inf

    def add(self, now_s: float, busy_s: float) -> None:
        self._busy_s = self.share(now_s) * SHARE_S + busy_s
        self._at_s = now_s

    def share(self, now_s: float) -> float:
        return self._busy_s * math.exp(-max(0.0, now_s - self._at_s) / SHARE_S) / SHARE_S
