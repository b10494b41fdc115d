"""The rules of the KV cache: whose prefix is admitted, whose is kept, which is evicted first, what is kept free.

A prefix is admitted if it is worth evicting another for it: prefixes of one-time users must not evict those of
returning users. One that is not admitted stays on probation while pages are free, and is the first to be evicted.
The engine's cache, the simulated node and the estimates of other splits all follow these functions.
"""

from collections import OrderedDict
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from helmrec.jit import rule
from helmrec.types import UserId

LINEAR_TOKENS = 2_048  # length of a history at which attention costs as much as the linear parts
MOST_VISITORS = 1 << 16  # users whose visits are counted


class Admission(IntEnum):
    """Which new prefixes are admitted."""

    ALWAYS = 0
    SECOND_VISIT = 1
    BENEFIT = 2
    NEVER = 3  # for models whose K/V are valid for one request only


# As numbers: compiled code that gets a member of an enumeration among its settings runs at half the speed.
ADMISSIONS = {
    "always": int(Admission.ALWAYS),
    "second-visit": int(Admission.SECOND_VISIT),
    "benefit": int(Admission.BENEFIT),
    "never": int(Admission.NEVER),
}


class VisitCount(NamedTuple):
    """How often a user has visited, and how long ago the visit before was."""

    num: int  # this visit included
    gap_s: float  # 0 on the first visit


NO_VISIT = VisitCount(0, 0.0)


@rule
def is_admitted(admission: int, visits: VisitCount, num_tokens: int, coldest_idle_s: float) -> bool:
    """Whether a prefix of `num_tokens` is worth evicting the coldest one, idle for `coldest_idle_s`.

    By benefit: saved work per token grows with length (attention is quadratic) while bytes grow linearly; the chance of
    a return before eviction is estimated from the user's own gap and the idle time of the coldest prefix.
    """
    if admission in (Admission.ALWAYS, Admission.NEVER) or visits.num < 2:
        return admission == Admission.ALWAYS
    if admission == Admission.SECOND_VISIT:
        return True
    return (1 + num_tokens / LINEAR_TOKENS) * coldest_idle_s >= visits.gap_s


@rule
def idle_s(is_probationary: bool, last_use_s: float, now_s: float) -> float:
    """Idle time of a prefix that may be evicted. One on probation is given up for any that is admitted."""
    return np.inf if is_probationary else now_s - last_use_s


@rule
def has_room(admission: int, num_free: int, reserve: int) -> bool:
    """Whether a prefix that is not admitted may stay on probation: the pages left are enough for the next step."""
    return admission != Admission.NEVER and num_free >= reserve


@rule
def is_evicted_last(is_probationary: bool, is_ahead: bool) -> bool:
    """At which end of the eviction order a prefix stands once used. Computed ahead of a request, it is needed soon."""
    return is_ahead or not is_probationary


@rule
def reserved_pages(kv_pages: int, batch_pages: int) -> int:
    """Pages kept free for the next step, so that one-time users evict no prefix of others.

    A quarter of KV at most: on a small pool a larger reserve would evict the prefixes that it protects.
    """
    return max(1, min(batch_pages, kv_pages // 4))


class VisitLog:
    """Counts the visits of the most recent users, with or without resident pages; drops the oldest users first."""

    def __init__(self, limit: int = MOST_VISITORS) -> None:
        self._limit = limit
        self._seen: OrderedDict[UserId, tuple[int, float]] = OrderedDict()

    def record(self, user_id: UserId, now: float) -> VisitCount:
        """Count this visit."""
        count, last_s = self._seen.pop(user_id, (0, now))
        self._seen[user_id] = (count + 1, now)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return VisitCount(count + 1, now - last_s)

    def forget(self, user_id: UserId) -> None:
        self._seen.pop(user_id, None)
