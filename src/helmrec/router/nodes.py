"""The inputs of a routing decision: one request, and the current state of all nodes.

One array per field and one entry per node, so that the decision can be compiled. Does not know how they are kept.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.router.sketch import RowSample, Words
from helmrec.types import IntArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class RouteRequest(NamedTuple):
    """A request as a router sees it."""

    user: int
    num_tokens: int  # of history, user context included
    num_candidates: int
    rows_per_token: int
    sample: RowSample


class Nodes(NamedTuple):
    """All nodes as they are for one request; nodes are the last axis of every array. Policies must not change it."""

    ids: IntArray  # constant for a node: it is hashed
    is_alive: Flags  # takes requests
    is_fresh: Flags  # has reported lately; if not, its reported values must not be used
    queue_ms: Floats  # estimated work before the request
    num_waiting: Floats  # requests sent and not answered
    waiting_tokens: Floats  # history tokens of those
    row_hit_rate: Floats  # 0..1, NaN if not reported
    resident_tokens: IntArray  # KV of the request's user in the pool
    visits: IntArray  # of the user, as far as remembered
    sketch_words: Words  # (words, nodes); this and the next two are the fields of a SketchTable
    sketch_threshold: Words
    sketch_fill: Floats

    @property
    def num_nodes(self) -> int:
        return int(self.ids.size)


def blank_nodes(ids: IntArray, num_words: int = 1) -> Nodes:
    """Return nodes that are alive and have no state."""
    count = ids.size
    return Nodes(
        ids=ids.astype(np.int64),
        is_alive=np.ones(count, np.bool_),
        is_fresh=np.zeros(count, np.bool_),
        queue_ms=np.zeros(count),
        num_waiting=np.zeros(count),
        waiting_tokens=np.zeros(count),
        row_hit_rate=np.full(count, np.nan),
        resident_tokens=np.zeros(count, np.int64),
        visits=np.zeros(count, np.int64),
        sketch_words=np.zeros((num_words, count), np.uint64),
        sketch_threshold=np.zeros(count, np.uint64),
        sketch_fill=np.zeros(count),
    )
