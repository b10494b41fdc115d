"""Admission policies of the KV cache. Prefixes of one-time users must not evict those of returning users."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

LINEAR_TOKENS = 2_048  # length of a history at which attention costs as much as the linear parts
MOST_VISITORS = 1 << 16  # users whose visits are counted


@dataclass(frozen=True, slots=True)
class Visit:
    """What a policy knows of a user when it decides about a new prefix."""

    count: int  # visits so far, this one included
    idle_s: float | None  # since the visit before; None on the first
    num_tokens: int
    room: bool  # pages are free: keeping the prefix evicts no other
    coldest_idle_s: float  # idle time of the prefix that would be evicted next


KVAdmission = Callable[[Visit], bool]  # decides which new prefixes stay in the cache


def admit_always(visit: Visit) -> bool:
    """Admit every prefix."""
    return True


def second_visit(visit: Visit) -> bool:
    """Admit the prefix of a user's second visit; of a first visit only while pages are free."""
    return visit.room or visit.count >= 2


def expected_benefit(visit: Visit) -> bool:
    """Admit a prefix whose expected saving per byte exceeds that of the prefix it would evict.

    Saved work per token grows with length (attention is quadratic) while bytes grow linearly; the chance of
    a return before eviction is estimated from the user's own gap and the idle time of the coldest resident.
    """
    if visit.room or visit.idle_s is None:
        return visit.room
    return (1 + visit.num_tokens / LINEAR_TOKENS) * visit.coldest_idle_s >= visit.idle_s


def admit_never(visit: Visit) -> bool:
    """Admit no prefix, for models whose K/V are valid for one request only."""
    return False


KV_ADMISSIONS: dict[str, KVAdmission] = {
    "always": admit_always,
    "second-visit": second_visit,
    "benefit": expected_benefit,
    "never": admit_never,
}


@dataclass(frozen=True, slots=True)
class EarlierVisits:
    """A user's visits so far."""

    count: int
    last_s: float | None


class VisitLog:
    """Counts the visits of the most recent users, with or without resident pages; drops the oldest users first."""

    def __init__(self, limit: int = MOST_VISITORS) -> None:
        self._limit = limit
        self._seen: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def record(self, user_id: int, now: float) -> EarlierVisits:
        """Count this visit; return the count with it, and the time of the visit before."""
        count, last_s = self._seen.pop(user_id, (0, None))
        self._seen[user_id] = (count + 1, now)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return EarlierVisits(count + 1, last_s)

    def forget(self, user_id: int) -> None:
        self._seen.pop(user_id, None)
