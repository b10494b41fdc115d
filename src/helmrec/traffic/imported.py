"""Converts a log of user events to a trace of requests.

Every visit becomes a request at the time of its first event, with all events before it as history. The first part of
the log is history only, so that the trace does not start with new users alone.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import TraceError
from helmrec.traffic.importers import Log
from helmrec.traffic.trace import Catalogue, EmpiricalLaw, Epoch, Trace
from helmrec.traffic.workload import lanes_for
from helmrec.types import IntArray


class ImportConfig(Frozen):
    """Settings of the conversion from a log to a trace."""

    source: str = Field("", description="where the log comes from")
    history_share: float = Field(0.2, ge=0, lt=1, description="share of the events that are history only")
    visit_gap_s: float = Field(0, ge=0, description="greatest gap between events of a visit; 0: each is one")
    duration_s: float | None = Field(None, gt=0, description="compress the requests into this time; default: real time")
    num_candidates: int = Field(100, ge=1)
    seed: int = Field(0, ge=0, lt=2**63, description="of the candidates")


def trace_of_log(log: Log, config: ImportConfig) -> Trace:
    """Convert a log. Items are numbered by popularity, users by first request; events after the last are dropped."""
    item, counts = _by_popularity(log.item)
    order = np.lexsort((log.timestamp_s, log.user))  # stable: the file's order within a second
    user, timestamp_s = log.user[order], log.timestamp_s[order]
    start_s = int(np.quantile(log.timestamp_s, config.history_share, method="higher"))
    at = _first_of_visits(user, timestamp_s, start_s, config.visit_gap_s)
    at = at[np.argsort(timestamp_s[at], kind="stable")]
    users = _numbered_by_first(user[at])
    kept, num_new = _appended(user, at, users)
    time_s = (timestamp_s[at] - start_s).astype(np.float64)
    if config.duration_s is not None and time_s[-1] > 0:
        time_s *= config.duration_s / time_s[-1]
    rng = np.random.Generator(np.random.PCG64(config.seed))
    return Trace(
        catalogue=Catalogue(
            source=config.source,
            num_items=counts.size,
            num_lanes=lanes_for(counts.size),
            num_actions=log.num_actions,
            start_time_s=start_s,
            laws=(_law(counts),),
            epochs=(Epoch(),),
        ),
        phase_names=("imported",),
        time_s=time_s,
        user=users,
        num_new=num_new,
        num_candidates=np.full(at.size, min(config.num_candidates, counts.size), np.int32),
        candidate_seed=rng.integers(0, 2**64, at.size, np.uint64),
        phase=np.zeros(at.size, np.int16),
        epoch=np.zeros(at.size, np.int32),
        backlog=np.zeros(int(users.max()) + 1, np.int32),
        item=item[order][kept],
        action=log.action[order][kept],
        timestamp_s=timestamp_s[kept],
    )


def _by_popularity(item: IntArray) -> tuple[IntArray, IntArray]:
    """Items numbered by falling frequency, and the number of occurrences of each."""
    counts = np.bincount(item)
    ranked = np.argsort(-counts, kind="stable")
    number = np.empty_like(ranked)
    number[ranked] = np.arange(ranked.size)
    return number[item], counts[ranked]


def _first_of_visits(user: IntArray, timestamp_s: IntArray, start_s: int, gap_s: float) -> IntArray:
    """Indices, among events by user and time, of the first events of visits after the history-only part."""
    is_new_user = np.diff(user, prepend=-1) != 0
    opens = is_new_user | (np.diff(timestamp_s, prepend=0) > gap_s) if gap_s else np.ones(user.size, np.bool_)
    at = np.flatnonzero(opens & (timestamp_s >= start_s))
    if not at.size:
        raise TraceError(f"no visit begins after the history-only part, which ends at {start_s}")
    return at


def _numbered_by_first(user: IntArray) -> IntArray:
    _, first, inverse = np.unique(user, return_index=True, return_inverse=True)
    number = np.empty(first.size, np.int64)
    number[np.argsort(first)] = np.arange(first.size)
    return number[inverse]


def _appended(user: IntArray, at: IntArray, users: IntArray) -> tuple[IntArray, NDArray[np.int32]]:
    """Indices of the events in the trace, ordered by `users`, and the number of events that each request appends.

    `user` is sorted; request r begins at event at[r]. Events of a user before its last request are used.
    """
    user_start = np.searchsorted(user, user[at])
    order = np.lexsort((at, users))  # requests by user, then position
    previous = np.empty(at.size, np.int64)
    is_first = np.diff(users[order], prepend=-1) != 0
    previous[order] = np.where(is_first, user_start[order], np.roll(at[order], 1))
    num_new = at - previous
    lengths = num_new[order]
    kept = np.repeat(previous[order], lengths) + _ramps(lengths)
    return kept, num_new.astype(np.int32)


def _ramps(lengths: IntArray) -> IntArray:
    """0, 1, ..., n - 1 for each n of `lengths`, concatenated."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _law(counts: IntArray) -> EmpiricalLaw:
    """The popularity law with counts summed over steps of a quarter octave."""
    steps = np.unique((2.0 ** np.arange(0, np.log2(counts.size) + 0.25, 0.25)).astype(np.int64))
    ends = np.unique(np.append(steps[steps < counts.size], counts.size))
    mass = np.add.reduceat(counts, np.concatenate(([0], ends[:-1]))) / counts.sum()
    return EmpiricalLaw(ends=tuple(ends.tolist()), mass=tuple(mass.tolist()))
