"""The server's activity second by second, for the dashboard: samples, each the difference of two views of the engine.

Does not know how views and answers are made. Time is passed in.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from msgspec import Struct

from helmrec.memory.ledger import Owner
from helmrec.memory.stats import PoolStats
from helmrec.serve.port import EngineView

_KEPT = 3_600
_KEPT_LATENCIES = 1 << 14  # of one interval; with more answers, percentiles are those of the last ones
_RECENT = 10
_MAX_CELLS = 2_048
_ON_PATH = ("row-miss", "kv-reload")  # a request waits for these bytes
_OFF_PATH = ("row-refill", "kv-save")


class Sample(Struct, frozen=True):
    """Activity in an interval of about a second. Shares and times are null if there was nothing to measure."""

    number: int
    time_s: float
    span_s: float
    answered: int
    refused: int
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    slo_share: float | None
    queue_length: int
    busy: float
    alpha: float
    alpha_target: float
    fill: float | None  # share of the slots of EMB pages that hold a row
    row_hit_rate: float | None
    token_reuse_rate: float | None
    on_path_bytes: int
    off_path_bytes: int
    inside_bytes: int
    measured_ms: float | None  # mean latency of the controller's last window
    predicted_ms: float | None  # as the controller predicted it one window earlier
    errors: dict[str, int] = {}  # of all calls but probes, by cause


class Recent(Struct, frozen=True):
    """Ranking calls of about the last ten seconds. Shares and times are null if there were none."""

    rate: float
    refused_rate: float
    p50_ms: float | None
    p99_ms: float | None
    slo_share: float | None
    errors: dict[str, int] = {}  # of all calls but probes, by cause


class PageMap(Struct, frozen=True):
    """The pool as a row of cells. A cell represents adjacent pages, by the owner of most of them."""

    cells: str  # one digit per cell: 0 free, 1 embedding rows, 2 KV, 3 draining
    pages_per_cell: int

    @classmethod
    def of(cls, owners: bytes) -> "PageMap":
        pages = np.frombuffer(owners, np.uint8)
        per_cell = max(1, -(-pages.size // _MAX_CELLS))
        num_cells = -(-pages.size // per_cell)
        votes = np.zeros((num_cells, len(Owner)), np.int64)
        np.add.at(votes, (np.arange(pages.size) // per_cell, pages), 1)
        return cls("".join(map(str, votes.argmax(axis=1).tolist())), per_cell)


@dataclass(slots=True)
class _Interval:
    """Outcomes of the ranking calls between two views. Memory is bounded."""

    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_LATENCIES))
    answered: int = 0
    in_time: int = 0  # of those answered
    refused: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by cause
    span_s: float = 0.0


class Samples:
    """The samples of the last hour."""

    def __init__(self, slo_ms: float) -> None:
        self._slo_ms = slo_ms
        self._ring: deque[Sample] = deque(maxlen=_KEPT)
        self._number = 0
        self._before: tuple[float, EngineView] | None = None
        self._late: deque[_Interval] = deque(maxlen=_RECENT)
        self._now = _Interval()
        self.errors: Counter[str] = Counter()  # since the start, by cause

    def count(self, status: int, seconds: float) -> None:
        """Count the answer to a ranking call."""
        if status == 200:
            latency_ms = seconds * 1e3
            self._now.latencies_ms.append(latency_ms)
            self._now.answered += 1
            self._now.in_time += latency_ms <= self._slo_ms
        elif status in {429, 503}:
            self._now.refused += 1
        elif status >= 500:
            self._now.failed += 1

    def count_error(self, cause: str) -> None:
        """Count an error of any call."""
        self._now.errors[cause] += 1
        self.errors[cause] += 1

    def add(self, now_s: float, view: EngineView) -> None:
        """Add the sample of the interval since the last view. The first view only begins an interval."""
        before, self._before = self._before, (now_s, view)
        interval, self._now = self._now, _Interval()
        if before is None or now_s <= before[0] or view.stats.steps < before[1].stats.steps:
            return  # the engine was replaced
        self._number += 1
        span_s, old, new = now_s - before[0], before[1].stats, view.stats
        interval.span_s = span_s
        self._late.append(interval)
        p50_ms, p99_ms = _percentiles(interval.latencies_ms)
        control = view.control
        self._ring.append(
            Sample(
                number=self._number,
                time_s=now_s,
                span_s=span_s,
                answered=interval.answered,
                refused=interval.refused,
                failed=interval.failed,
                p50_ms=p50_ms,
                p99_ms=p99_ms,
                slo_share=_within([interval]),
                queue_length=new.queue_length,
                busy=min(1.0, (new.busy_s - old.busy_s) / span_s),
                alpha=new.pool.alpha,
                alpha_target=new.pool.alpha_target,
                fill=new.pool.resident_rows / new.pool.row_capacity if new.pool.row_capacity else None,
                row_hit_rate=_share(old.pool, new.pool, "row_hits", "row_hits", "row_misses"),
                token_reuse_rate=_share(old.pool, new.pool, "reused_tokens", "total_tokens"),
                on_path_bytes=_grown(old.pool, new.pool, _ON_PATH),
                off_path_bytes=_grown(old.pool, new.pool, _OFF_PATH),
                inside_bytes=_grown(old.pool, new.pool, None),
                measured_ms=None if control is None else control.measured_ms,
                predicted_ms=None if control is None else control.predicted_ms,
                errors=dict(interval.errors),
            )
        )

    def recent(self) -> Recent:
        late = list(self._late)
        span_s = max(1e-9, sum(each.span_s for each in late))
        latencies = [ms for each in late for ms in each.latencies_ms]
        p50_ms, p99_ms = _percentiles(latencies)
        return Recent(
            rate=sum(each.answered for each in late) / span_s,
            refused_rate=sum(each.refused for each in late) / span_s,
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            slo_share=_within(late),
            errors=dict(sum((each.errors for each in late), Counter())),
        )

    def after(self, number: int, most: int = _KEPT) -> list[Sample]:
        """Return the newest samples with a higher number, oldest first; at most so many."""
        num = min(most, max(0, self._number - number), len(self._ring))
        return list(islice(self._ring, len(self._ring) - num, None))


def _percentiles(latencies_ms: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return P50 and P99; None for no latencies."""
    if not latencies_ms:
        return None, None
    p50, p99 = np.percentile(list(latencies_ms), (50, 99)).tolist()
    return p50, p99


def _within(intervals: Sequence[_Interval]) -> float | None:
    """Return the share of calls answered in time. Refused and failed ones count as late."""
    num_calls = sum(each.answered + each.refused + each.failed for each in intervals)
    in_time = sum(each.in_time for each in intervals)
    return in_time / num_calls if num_calls else None


def _share(old: PoolStats, new: PoolStats, part: str, *whole: str) -> float | None:
    """Return the share of one counter in the sum of others, as they grew."""
    grown = {name: getattr(new, name) - getattr(old, name) for name in (part, *whole)}
    total = sum(grown[name] for name in whole)
    return grown[part] / total if total else None


def _grown(old: PoolStats, new: PoolStats, causes: tuple[str, ...] | None) -> int:
    """Return the bytes moved for these causes; None: for all causes that do not use the bus, inside the pool."""
    wanted = new.bytes_by_cause.keys() - {*_ON_PATH, *_OFF_PATH} if causes is None else causes
    return sum(new.bytes_by_cause.get(cause, 0) - old.bytes_by_cause.get(cause, 0) for cause in wanted)
