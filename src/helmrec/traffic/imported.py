"""From a log of what users did to a trace of what they asked for.

Every visit is a request: it happens at the visit's first event, with a history of all events before it. The first
part of the log is history only, so that the trace does not start with a world of strangers.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import TraceError
from helmrec.traffic.importers import Log
from helmrec.traffic.trace import Catalogue, EmpiricalLaw, Epoch, Trace, lanes_for
from helmrec.types import IntArray


class ImportConfig(Frozen):
    """How a log becomes a trace."""

    source: str = Field("", description="where the log comes from, in words")
    history_share: float = Field(0.2, ge=0, lt=1, description="share of the events that is history only")
    visit_gap_s: float = Field(0, ge=0, description="events no further apart than this are one visit; 0: each its own")
    duration_s: float | None = Field(None, gt=0, description="press the requests into this time; default real time")
    num_candidates: int = Field(100, ge=1)
    seed: int = Field(0, ge=0, lt=2**63, description="of the candidates")


def trace_of_log(log: Log, config: ImportConfig) -> Trace:
    """Items are numbered by popularity, users by first request. Events after a user's last request are dropped."""
    item, counts = _by_popularity(log.item)
    order = np.lexsort((log.timestamp_s, log.user))  # stable: the file's order within a second
    user, timestamp_s = log.user[order], log.timestamp_s[order]
    start_s = int(np.quantile(log.timestamp_s, config.history_share, method="higher"))
    at = _first_of_visits(user, timestamp_s, start_s, config.visit_gap_s)
    at = at[np.argsort(timestamp_s[at], kind="stable")]
    asked = _numbered_by_first(user[at])
    kept, num_new = _appended(user, at, asked)
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
        user=asked,
        num_new=num_new,
        num_candidates=np.full(at.size, min(config.num_candidates, counts.size), np.int32),
        candidate_seed=rng.integers(0, 2**64, at.size, np.uint64),
        phase=np.zeros(at.size, np.int16),
        epoch=np.zeros(at.size, np.int32),
        backlog=np.zeros(int(asked.max()) + 1, np.int32),
        item=item[order][kept],
        action=log.action[order][kept],
        timestamp_s=timestamp_s[kept],
    )


def _by_popularity(item: IntArray) -> tuple[IntArray, IntArray]:
    """Items numbered from the most frequent down, and how often each occurs."""
    counts = np.bincount(item)
    ranked = np.argsort(-counts, kind="stable")
    number = np.empty_like(ranked)
    number[ranked] = np.arange(ranked.size)
    return number[item], counts[ranked]


def _first_of_visits(user: IntArray, timestamp_s: IntArray, start_s: int, gap_s: float) -> IntArray:
    """Places, among events by user and time, of the events that open a visit after the history-only part."""
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


def _appended(user: IntArray, at: IntArray, asked: IntArray) -> tuple[IntArray, NDArray[np.int32]]:
    """Which events are in the trace, by user as numbered there, and how many each request appends.

    `user` is sorted; request r opens at event at[r]. Events of a user before its last opening one are kept.
    """
    user_start = np.searchsorted(user, user[at])
    order = np.lexsort((at, asked))  # requests by user, then place
    previous = np.empty(at.size, np.int64)
    is_first = np.diff(asked[order], prepend=-1) != 0
    previous[order] = np.where(is_first, user_start[order], np.roll(at[order], 1))
    num_new = at - previous
    lengths = num_new[order]
    kept = np.repeat(previous[order], lengths) + _ramps(lengths)
    return kept, num_new.astype(np.int32)


def _ramps(lengths: IntArray) -> IntArray:
    """0, 1, ..., n - 1 for each n of lengths, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _law(counts: IntArray) -> EmpiricalLaw:
    """Counts summed over ranks in steps of a quarter octave."""
    steps = np.unique((2.0 ** np.arange(0, np.log2(counts.size) + 0.25, 0.25)).astype(np.int64))
    ends = np.unique(np.append(steps[steps < counts.size], counts.size))
    mass = np.add.reduceat(counts, np.concatenate(([0], ends[:-1]))) / counts.sum()
    return EmpiricalLaw(ends=tuple(ends.tolist()), mass=tuple(mass.tolist()))
