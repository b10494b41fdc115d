"""Positions, ages and time features of tokens relative to the query, for models whose `query_frame` is set.

Pure NumPy over small arrays; it knows neither rows nor pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.model.config import QueryFrame
from helmrec.types import IntArray

_PI = 3.14  # the value that published checkpoints were trained with


class Query(NamedTuple):
    """The properties of a request that all its tokens depend on."""

    time_s: int
    num_context: int
    num_events: int
    num_candidates: int


@dataclass(frozen=True, slots=True, eq=False)
class QueryArrays:
    """One entry per request."""

    context_gaps: IntArray  # time bucket of context tokens
    context_kept: NDArray[np.float32]  # (requests, context tables or 1) 1, or 0 where context rows read as zeros
    lengths: IntArray  # what attention is divided by: all tokens of the request
    clocks: NDArray[np.float32]  # (requests, 2 * cycles)


def query_arrays(frame: QueryFrame, num_buckets: int, queries: Sequence[Query]) -> QueryArrays:
    times, num_context, num_events, num_candidates = np.array(queries, np.int64).reshape(-1, len(Query._fields)).T
    return QueryArrays(
        context_gaps=age_buckets(frame, num_buckets, times),  # context has no time, which counts as time 0
        context_kept=_context_kept(frame, num_context, num_events + num_candidates),
        lengths=num_context + num_events + num_candidates,
        clocks=_clocks(frame, times),
    )


def _context_kept(frame: QueryFrame, num_context: IntArray, num_tokens: IntArray) -> NDArray[np.float32]:
    """Compare tokens with the fewest events, table by table. num_context is the same for all requests of a model."""
    fewest = np.asarray(frame.min_context_events, np.int64)
    if fewest.size == 1:
        fewest = np.broadcast_to(fewest, (int(num_context.max(initial=0)),))
    return (num_tokens[:, None] >= fewest).astype(np.float32)


def latest_window(first_event: int, num_events: int, window: int) -> int:
    """Return the absolute index of the first event of the latest window; nothing cached fixes its position."""
    return max(first_event, first_event + num_events - window)


def places(frame: QueryFrame, steps_back: IntArray) -> IntArray:
    """Return entries of the position table."""
    return np.minimum(steps_back, frame.num_positions - 1)


def age_buckets(frame: QueryFrame, num_buckets: int, ages_s: IntArray) -> IntArray:
    """Return time buckets of ages, in single precision as published: rounding may reach the next bucket."""
    roots = np.sqrt(ages_s.astype(np.float32) / np.float32(frame.bucket_s))
    return np.minimum(roots.astype(np.int64), num_buckets - 1)


def _clocks(frame: QueryFrame, times_s: IntArray) -> NDArray[np.float32]:
    """Return cosine and sine of the elapsed share of each period."""
    hands = [times_s // c.unit_s % c.num_units / c.num_units * 2 * _PI for c in frame.cycles]
    columns = [part(hand) for hand in hands for part in (np.cos, np.sin)]
    return np.stack(columns, axis=1).astype(np.float32) if columns else np.empty((times_s.size, 0), np.float32)
