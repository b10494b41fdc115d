"""Which prefixes earn their pages. One-time users must not flush returning ones."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Visit:
    """What is known of a user when the fate of a new prefix is decided."""

    count: int  # visits so far, this one included
    idle_s: float | None  # since the visit before; None on the first
    num_tokens: int
    room: bool  # pages are free: keeping it displaces nobody
    coldest_idle_s: float  # how long the prefix next in line for eviction has been idle


class KVAdmission(Protocol):
    def admits(self, visit: Visit) -> bool: ...


class AdmitEveryPrefix:
    def admits(self, visit: Visit) -> bool:
        return True


class SecondVisit:
    """Keep what is seen again; a first visit may use pages that are free anyway."""

    def admits(self, visit: Visit) -> bool:
        return visit.room or visit.count >= 2


class ExpectedBenefit:
    """Keep a prefix whose expected saving per byte beats that of the prefix it would displace.

    Saved work per token grows with length (attention is quadratic) while bytes grow linearly; the chance of
    a return before eviction is judged by the user's own gap against the idle time of the coldest resident.
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
    """Of models whose K/V serve one request and no other."""

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
    count: int
    last_s: float | None


class VisitLog:
    """Visits of the latest users, whether or not they hold pages; bounded, oldest forgotten first."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._seen: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def record(self, user_id: int, now: float) -> EarlierVisits:
        """Count this visit; return what is known, this visit's count included and its time not."""
        count, last_s = self._seen.pop(user_id, (0, None))
        self._seen[user_id] = (count + 1, now)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return EarlierVisits(count + 1, last_s)

    def forget(self, user_id: int) -> None:
        self._seen.pop(user_id, None)
