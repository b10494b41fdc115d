"""Leases on prefixes that are computed ahead, and the share of time spent on computing ahead."""

import heapq
import math
import secrets
from typing import NamedTuple

from helmrec.engine.relay.trigger import SHARE_S
from helmrec.types import Lease, UserId


class _Held(NamedTuple):
    lease: Lease
    num_pages: int
    promised_s: float  # compute time that is promised and not yet spent
    number: int  # counts all leases granted


_SPARE_ENDS = 64  # entries of ended leases that may stay in the heap


class Leases:
    """At most one lease per user, each at most `max_hold_ms` long."""

    def __init__(self, max_hold_ms: float = math.inf) -> None:
        self._max_hold_ms = max_hold_ms
        self._by_user: dict[UserId, _Held] = {}
        self._ends: list[tuple[float, int, UserId]] = []  # heap of end time, number and user
        self._num_granted = 0
        self.held_pages = 0
        self.promised_s = 0.0
        self.used = 0  # leases whose rank request arrived in time
        self.expired = 0
        self.lost = 0  # leases whose prefix was evicted while it was computed

    def __len__(self) -> int:
        return len(self._by_user)

    def __contains__(self, user_id: object) -> bool:
        return user_id in self._by_user

    @property
    def users(self) -> list[UserId]:
        return list(self._by_user)

    def is_held(self, lease: Lease) -> bool:
        """Whether this lease has not ended. Its user may have a newer one."""
        held = self._by_user.get(lease.user_id)
        return held is not None and held.lease is lease

    def grant(self, user_id: UserId, num_pages: int, now_s: float, hold_ms: float, promised_s: float = 0.0) -> Lease:
        """Grant a lease for `hold_ms`, or for the longest allowed time if that is shorter."""
        assert user_id not in self._by_user, "a user has at most one lease"
        granted_ms = min(hold_ms, self._max_hold_ms)
        expires_s = now_s + granted_ms / 1e3
        lease = Lease(secrets.token_hex(8), user_id, expires_s, granted_ms, is_shortened=granted_ms < hold_ms)
        self._num_granted += 1
        self._by_user[user_id] = _Held(lease, num_pages, promised_s, self._num_granted)
        heapq.heappush(self._ends, (expires_s, self._num_granted, user_id))
        self.held_pages += num_pages
        self.promised_s += promised_s
        return lease

    def end_promise(self, user_id: UserId) -> None:
        """Set the promised compute time of a user to zero: its whole prefix is resident."""
        held = self._by_user.get(user_id)
        if held is not None:
            self.promised_s -= held.promised_s
            self._by_user[user_id] = held._replace(promised_s=0.0)

    def use(self, user_id: UserId) -> None:
        """End the lease of a user whose rank request has arrived."""
        self.used += self._end(user_id)

    def drop(self, user_id: UserId) -> None:
        """End the lease of a user that is forgotten, or whose prefix could not be computed."""
        self._end(user_id)

    def lose(self, user_id: UserId) -> None:
        """End the lease of a user whose prefix was evicted because the pool became too small."""
        self.lost += self._end(user_id)

    def expire(self, now_s: float) -> list[UserId]:
        """End the leases whose time is over; return their users."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            _, number, user_id = heapq.heappop(self._ends)
            held = self._by_user.get(user_id)
            if held is not None and held.number == number:
                self._end(user_id)
                ended.append(user_id)
        self.expired += len(ended)
        return ended

    def _end(self, user_id: UserId) -> bool:
        held = self._by_user.pop(user_id, None)
        if held is not None:
            self.held_pages -= held.num_pages
            self.promised_s -= held.promised_s
            self._forget_ends()
        return held is not None

    def _forget_ends(self) -> None:
        """Remove entries of ended leases once they are the larger part of the heap."""
        if len(self._ends) > 2 * len(self._by_user) + _SPARE_ENDS:
            numbers = {held.number for held in self._by_user.values()}
            self._ends = [end for end in self._ends if end[1] in numbers]
            heapq.heapify(self._ends)

    def check(self) -> None:
        """Assert that pages, promised time and the heap agree with the leases."""
        assert self.held_pages == sum(held.num_pages for held in self._by_user.values()), "held pages are miscounted"
        promised_s = sum(held.promised_s for held in self._by_user.values())
        assert abs(self.promised_s - promised_s) < 1e-9, "promised time is miscounted"
        numbers = {number for _, number, _ in self._ends}
        assert all(held.number in numbers for held in self._by_user.values()), "a lease would never end"
        assert len(self._ends) <= 2 * len(self._by_user) + _SPARE_ENDS, "entries of ended leases pile up"


class ComputeShare:
    """The share of recent time spent on something, with exponential decay over about a second."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._at_s = -math.inf

    def add(self, now_s: float, busy_s: float) -> None:
        """Add busy time that ended now."""
        self._busy_s = self.share(now_s) * SHARE_S + busy_s
        self._at_s = now_s

    def share(self, now_s: float) -> float:
        """The share of recent time."""
        return self._busy_s * math.exp(-max(0.0, now_s - self._at_s) / SHARE_S) / SHARE_S
