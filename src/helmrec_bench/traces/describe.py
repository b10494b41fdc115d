"""Statistics of a trace that have been published for real traces: reuse, skew, return times."""

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.model.profiles import profile
from helmrec.traffic.rows import RowReads, candidate_rows, history_rows, row_reads, row_space
from helmrec.traffic.trace import Histories, Trace, index_histories
from helmrec.types import IntArray

_MAX_READS = 30_000_000  # lanes are left out until at most so many reads remain
_SLOPE_FROM = 10  # rank; the head of a popularity curve is not a line, nor its end, where counts are 1 and 2
_SLOPE_MIN_COUNT = 5


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often item rows are read."""

    mean: float  # reads per row that is read at all
    once_rows: float  # share of the rows that are read once
    once_reads: float  # share of the reads that go to rows read once
    hot_reads: float  # share of the reads that go to rows read more than 64 times


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """Statistics of one phase of a trace."""

    name: str
    num_requests: int
    rate: float  # requests per second during the phase
    known_share: float  # requests by users seen before
    median_history: float


@dataclass(frozen=True, slots=True)
class Description:
    """Statistics of a trace. Shares are from 0 to 1; a value is None if the trace is too small."""

    num_requests: int
    num_users: int
    num_items: int
    duration_s: float
    known_share: float
    top_users_share: float  # requests by the busiest 5% of the users
    median_history: float
    p99_history: float
    median_return_s: float | None
    p75_return_s: float | None
    item_slope: float | None  # of log count over log rank, of appended events
    top_items_share: float  # of appended events, by the top 1% of the items seen
    full: Reuse  # without KV: every request reads its whole history
    kept: Reuse  # with all KV cached: requests read new events and candidates
    sample_rate: float  # share of the rows on which reuse was counted
    phases: tuple[PhaseSummary, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """Published statistics of a real trace; None where its authors give none."""

    name: str
    mean_reuse: float | None = None
    once_rows: float | None = None
    once_reads: float | None = None
    hot_reads: float | None = None
    item_slope: float | None = None
    top_items_share: float | None = None
    median_return_s: float | None = None
    p75_return_s: float | None = None


PUBLISHED = (
    Published("Meta 2021", mean_reuse=6.9, once_rows=0.47, once_reads=0.069, hot_reads=0.42),
    Published("Meta 2022", mean_reuse=12.7, once_rows=0.34, hot_reads=0.52),
    Published("news clicks", item_slope=-1.2, top_items_share=0.68, median_return_s=93, p75_return_s=3.4 * 3_600),
)


def describe(trace: Trace) -> Description:
    """Compute the statistics of a trace."""
    histories = index_histories(trace)
    gaps = return_times(trace)
    counts = item_counts(trace)
    reads = _sampled_reads(trace, histories)
    visits = np.sort(np.bincount(trace.user, minlength=1))[::-1]
    median_s, p75_s = np.quantile(gaps, [0.5, 0.75]).tolist() if gaps.size else (None, None)
    return Description(
        num_requests=trace.num_requests,
        num_users=trace.num_users,
        num_items=trace.catalogue.num_items,
        duration_s=trace.duration_s,
        known_share=_mean(histories.visit > 0),
        top_users_share=float(visits[: -(-visits.size // 20)].sum() / max(1, visits.sum())),
        median_history=_quantile(histories.length, 0.5),
        p99_history=_quantile(histories.length, 0.99),
        median_return_s=median_s,
        p75_return_s=p75_s,
        item_slope=_slope(counts, max(_SLOPE_FROM, trace.catalogue.num_lanes)),
        top_items_share=float(counts[: -(-counts.size // 100)].sum() / max(1, counts.sum())),
        full=_reuse(_count_reads(reads, trace.num_new, is_full=True)),
        kept=_reuse(_count_reads(reads, trace.num_new, is_full=False)),
        sample_rate=reads.space.rate,
        phases=tuple(_phase(trace, histories, code) for code in range(len(trace.phase_names))),
    )


def return_times(trace: Trace) -> NDArray[np.float64]:
    """Seconds between consecutive requests of a user, for all users."""
    order = np.argsort(trace.user, kind="stable")
    is_same = np.diff(trace.user[order]) == 0
    return np.diff(trace.time_s[order])[is_same]


def item_counts(trace: Trace) -> IntArray:
    """Occurrences of each item among appended events, most frequent first; items that do not occur are left out."""
    counts = np.bincount(trace.item, minlength=1)
    return np.sort(counts[counts > 0])[::-1].astype(np.int64)


def _sampled_reads(trace: Trace, histories: Histories) -> RowReads:
    total = int(histories.length.sum()) + int(trace.num_candidates.sum())
    item_table_only = profile("kuairand", trace.catalogue.num_items)
    return row_reads(trace, row_space(trace, item_table_only, min(1.0, _MAX_READS / max(1, total))))


def _count_reads(reads: RowReads, num_new: NDArray[np.int32], *, is_full: bool) -> IntArray:
    first = np.zeros_like(reads.length) if is_full else reads.length - num_new
    counts = np.zeros(reads.space.num_kept_rows, np.int64)
    _add_reads(reads, first, np.empty(reads.max_rows, np.int64), counts)
    return counts[counts > 0]


@numba.njit(cache=True)
def _add_reads(reads: RowReads, first: IntArray, rows: IntArray, counts: IntArray) -> None:
    for request in range(first.size):
        for i in range(history_rows(reads, request, first[request], rows)):
            counts[rows[i]] += 1
        for i in range(candidate_rows(reads, request, rows)):
            counts[rows[i]] += 1


def _reuse(counts: IntArray) -> Reuse:
    total, once = max(1, int(counts.sum())), int((counts == 1).sum())
    rows = max(1, counts.size)
    return Reuse(total / rows, once / rows, once / total, float(counts[counts > 64].sum() / total))


def _slope(counts: IntArray, first_rank: int) -> float | None:
    """Least-squares slope over log-spaced ranks, without the head (flat in derived traces) and small counts."""
    ranks = np.unique(np.geomspace(first_rank, max(first_rank + 1, counts.size), 200).astype(np.int64)) - 1
    ranks = ranks[ranks < counts.size]
    ranks = ranks[counts[ranks] >= _SLOPE_MIN_COUNT]
    if ranks.size < 10:
        return None
    return float(np.polyfit(np.log(ranks + 1.0), np.log(counts[ranks]), 1)[0])


def _phase(trace: Trace, histories: Histories, code: int) -> PhaseSummary:
    is_in = trace.phase == code
    return PhaseSummary(
        name=trace.phase_names[code],
        num_requests=int(is_in.sum()),
        rate=_rate(trace, is_in),
        known_share=_mean(histories.visit[is_in] > 0),
        median_history=_quantile(histories.length[is_in], 0.5),
    )


def _rate(trace: Trace, is_in: NDArray[np.bool_]) -> float:
    """Requests per second, from the times between requests of the phase, which may occur more than once."""
    gaps = np.diff(trace.time_s)[is_in[1:] & is_in[:-1]]
    return float(gaps.size / gaps.sum()) if gaps.sum() > 0 else 0.0


def _mean(values: NDArray[np.bool_]) -> float:
    return float(values.mean()) if values.size else 0.0


def _quantile(values: IntArray, q: float) -> float:
    return float(np.quantile(values, q)) if values.size else 0.0
