"""The report that a replica sends to all routers a few times a second, in a few kilobytes.

Contains the fields of `router.state.NodeReport`. Reports are ordered by their number within an incarnation of the
replica; the time of a report is by the replica's own monotonic clock.
"""

import math
from collections import OrderedDict

import msgspec
import numpy as np
from msgspec import Struct

from helmrec.costs.learned import StageCosts
from helmrec.engine.engine import EngineStats
from helmrec.router.sketch import RowSketch
from helmrec.router.state import NodeReport, UserTokens

_MEAN_WEIGHT = 0.2  # of the latest service time in the moving mean


class ReplicaReport(Struct, frozen=True, array_like=True):
    """State of a replica at one moment."""

    taken_s: float  # by the replica's monotonic clock
    queue_ms: float
    num_waiting: int
    waiting_tokens: int
    alpha: float
    pool_tokens: int
    row_hit_rate: float
    users: list[tuple[int, int]]  # users served lately, and the history tokens kept for each
    threshold: int = 0  # of the sketch; 0: no sketch
    fill: float = 0.0
    words: bytes = b""
    incarnation: int = 0  # random number, drawn when the replica starts
    sequence: int = 1  # 1, 2, ... within an incarnation
    costs: StageCosts | None = None  # learned from the replica's own steps; None: from too few

    def node_report(self, node: int, as_of_s: float) -> NodeReport:
        """Convert to the router's type. `as_of_s` is the time of the report by the router's clock."""
        sketch = None
        if self.threshold:
            sketch = RowSketch(np.frombuffer(self.words, np.uint64), np.uint64(self.threshold), self.fill)
        return NodeReport(
            node=node,
            sequence=self.sequence,
            as_of_s=as_of_s,
            queue_ms=self.queue_ms,
            num_waiting=self.num_waiting,
            waiting_tokens=self.waiting_tokens,
            alpha=self.alpha,
            pool_tokens=self.pool_tokens,
            row_hit_rate=self.row_hit_rate,
            sketch=sketch,
            users=tuple(UserTokens(user, tokens) for user, tokens in self.users),
        )


_DECODER = msgspec.msgpack.Decoder(ReplicaReport)


def unpack_report(value: object) -> ReplicaReport | None:
    """Unpack a report; None for anything else, because routing must work without reports."""
    if not isinstance(value, bytes):
        return None
    try:
        report = _DECODER.decode(value)
    except msgspec.DecodeError:
        return None
    return report if _is_sound(report) else None


def _is_sound(report: ReplicaReport) -> bool:
    """Return whether all numbers are finite and in range; the hit rate may be missing (NaN)."""
    counts = (report.queue_ms, report.num_waiting, report.waiting_tokens, report.pool_tokens, report.sequence)
    return (
        all(math.isfinite(each) and each >= 0 for each in counts)
        and math.isfinite(report.taken_s)
        and 0 <= report.alpha <= 1
        and not math.isinf(report.row_hit_rate)
        and math.isfinite(report.fill)
        and 0 <= report.threshold < 1 << 64
        and len(report.words) % 8 == 0
        and (report.costs is None or all(math.isfinite(each) for each in report.costs))
        and all(0 <= user < 1 << 63 and 0 <= tokens < 1 << 63 for user, tokens in report.users)
    )


class ServiceTime:
    """Moving mean of an engine's busy milliseconds per request."""

    def __init__(self) -> None:
        self._num_served, self._busy_s = 0, 0.0
        self._mean_ms = 0.0

    def mean_ms(self, stats: EngineStats) -> float:
        """Update the mean with the engine's counters."""
        num, busy_s = stats.served - self._num_served, stats.busy_s - self._busy_s
        self._num_served, self._busy_s = stats.served, stats.busy_s
        if num > 0:
            self._mean_ms += (_MEAN_WEIGHT if self._mean_ms else 1.0) * (busy_s * 1e3 / num - self._mean_ms)
        return self._mean_ms


class RecentUsers:
    """Users that a replica has served, newest last, with visits and tokens. Bounded."""

    def __init__(self, kept_from_visit: int, max_users: int = 65_536) -> None:
        self._kept_from = kept_from_visit
        self._max_users = max_users
        self._users: OrderedDict[int, tuple[int, int]] = OrderedDict()  # visits, tokens

    def note(self, user: int, num_tokens: int) -> None:
        """Record an answered request of a user."""
        visits, _ = self._users.get(user, (0, 0))
        self._put(user, visits + 1, num_tokens)

    def hold(self, user: int, num_tokens: int) -> None:
        """Record that a history was computed before its rank: it is held whatever admission decides."""
        visits, _ = self._users.get(user, (0, 0))
        self._put(user, max(visits, self._kept_from), num_tokens)

    def _put(self, user: int, visits: int, num_tokens: int) -> None:
        self._users[user] = visits, num_tokens
        self._users.move_to_end(user)
        if len(self._users) > self._max_users:
            self._users.popitem(last=False)

    def forget(self, user: int) -> None:
        self._users.pop(user, None)

    def latest(self, limit: int) -> list[tuple[int, int]]:
        """Return users whose prefix is kept, newest first, with its tokens."""
        kept: list[tuple[int, int]] = []
        for user, (visits, tokens) in reversed(self._users.items()):
            if len(kept) == limit:
                break
            if visits >= self._kept_from:
                kept.append((user, tokens))
        return kept

    def __len__(self) -> int:
        return len(self._users)
