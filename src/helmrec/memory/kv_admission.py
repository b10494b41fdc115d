"""Admission policies of the KV cache. Prefixes of one-time users must not evict those of returning users."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Visit:
    """What a policy knows of a user when it decides about a new prefix."""

    count: int  # visits so far, this one included
    idle_s: float | None  # since the visit before; None on the first
    num_tokens: int
    room: bool  # pages are free: keeping the prefix evicts no other
    coldest_idle_s: float  # idle time of the prefix that would be evicted next


class KVAdmission(Protocol):
    """Decides which new prefixes stay in the cache."""

    def admits(self, visit: Visit) -> bool: ...


class AdmitEveryPrefix:
    """Admits every prefix."""

    def admits(self, visit: Visit) -> bool:
        return True


class SecondVisit:
    """Admits the prefix of a user's second visit; of a first visit only while pages are free."""

    def admits(self, visit: Visit) -> bool:
        return visit.room or visit.count >= 2


class ExpectedBenefit:
    """Admits a prefix whose expected saving per byte exceeds that of the prefix it would evict.

    Saved work per token grows with length (attention is quadratic) while bytes grow linearly; the chance of
    a return before eviction is estimated from the user's own gap and the idle time of the coldest resident.
    """

    def __init__(self, linear_tokens: int = 2_048) -> None:
        self._linear_tokens = linear_tokens  # length at which attention costs as much as the linear parts

    def admits(self, visit: Visit) -> bool:
        if visit.room:
            return True
        if visit.idle_s is None:
            return False
        saving = 1 + visit.num_tokens / self._linear_tokens
        return saving * visit.coldest_idle_s >= visit.idle_s


class AdmitNever:
    """Admits no prefix, for models whose K/V are valid for one request only."""

    def admits(self, visit: Visit) -> bool:
        return False


def make_kv_admission(name: str) -> KVAdmission:
    makers: dict[str, Callable[[], KVAdmission]] = {
        "always": AdmitEveryPrefix,
        "second-visit": SecondVisit,
        "benefit": ExpectedBenefit,
        "never": AdmitNever,
    }
    return makers[name]()


@dataclass(frozen=True, slots=True)
class EarlierVisits:
    """A user's visits so far."""

    count: int
    last_s: float | None


class VisitLog:
    """Counts the visits of the most recent users, with or without resident pages; drops the oldest users first."""

    def __init__(self, limit: int = 1 << 16) -> None:
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
