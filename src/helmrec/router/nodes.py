"""The values a routing decision is made from: one request, and all nodes as they look for it at this moment.

One array per fact, one place per node, so that compiled code decides. Knows nothing of how the facts are kept.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.router.sketch import RowSample, Words
from helmrec.types import IntArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class RouteRequest(NamedTuple):
    """What a router needs to know of a request."""

    user: int
    num_tokens: int  # of history, user context included
    num_candidates: int
    rows_per_token: int
    sample: RowSample


class Nodes(NamedTuple):
    """All nodes, seen by one request; the last axis of every array. Whoever decides reads and never writes."""

    ids: IntArray  # a node's for life: hashes are made from it
    is_alive: Flags  # and takes requests
    is_fresh: Flags  # it reported lately; if not, what it reported is not to be used
    queue_ms: Floats  # work before the request, as far as known
    num_waiting: Floats  # requests sent and not answered
    waiting_tokens: Floats  # of those
    alpha: Floats  # NaN if it never said
    row_hit_rate: Floats  # 0..1, NaN if it never said
    resident_tokens: IntArray  # KV of the request's user in the pool
    host_tokens: IntArray  # the same in pool or host tier: at least resident_tokens
    visits: IntArray  # of the user, sent there and not forgotten
    sketch_words: Words  # (words, nodes), as the next two what a SketchTable has
    sketch_threshold: Words
    sketch_fill: Floats

    @property
    def num_nodes(self) -> int:
        return int(self.ids.size)


def blank_nodes(ids: IntArray, num_words: int = 1) -> Nodes:
    """Living nodes nothing is known of."""
    count = ids.size
    return Nodes(
        ids=ids.astype(np.int64),
        is_alive=np.ones(count, np.bool_),
        is_fresh=np.zeros(count, np.bool_),
        queue_ms=np.zeros(count),
        num_waiting=np.zeros(count),
        waiting_tokens=np.zeros(count),
        alpha=np.full(count, np.nan),
        row_hit_rate=np.full(count, np.nan),
        resident_tokens=np.zeros(count, np.int64),
        host_tokens=np.zeros(count, np.int64),
        visits=np.zeros(count, np.int64),
        sketch_words=np.zeros((num_words, count), np.uint64),
        sketch_threshold=np.zeros(count, np.uint64),
        sketch_fill=np.zeros(count),
    )
