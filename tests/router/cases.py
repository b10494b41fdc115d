"""Requests, nodes and costs that routing tests share."""

from typing import Any

import numpy as np

from helmrec.costs.routing import RouterCost
from helmrec.router.nodes import Nodes, RouteRequest, blank_nodes
from helmrec.router.sketch import RowSample, build_sketch, no_sample
from helmrec.types import IntArray

NUM_BITS = 1 << 12
COST = RouterCost(
    floor_ms=0.5,
    request_ms=0.0,
    token_us=0.2,
    pair_ns=0.02,
    row_us=0.04,
    sorted_row_us=0.02,
    sorted_from_rows=16_384.0,
)


def request(user: int = 7, num_tokens: int = 4_000, sample: RowSample | None = None, **fields: Any) -> RouteRequest:
    settings = {"num_candidates": 500, "rows_per_token": 6, **fields}
    return RouteRequest(user, num_tokens, sample=sample or no_sample(), **settings)


def fresh_nodes(count: int, **columns: Any) -> Nodes:
    """Idle nodes that have just reported half of all rows to hit, but for the columns given."""
    nodes = blank_nodes(np.arange(count), NUM_BITS // 64)
    known = {"is_fresh": np.ones(count, np.bool_), "row_hit_rate": np.full(count, 0.5)}
    given = {name: np.asarray(value, getattr(nodes, name).dtype) for name, value in columns.items()}
    return nodes._replace(**known | given)


def holding(nodes: Nodes, rows: dict[int, IntArray]) -> Nodes:
    """The same nodes with sketches of these resident rows, by place."""
    words, threshold, fill = nodes.sketch_words.copy(), nodes.sketch_threshold.copy(), nodes.sketch_fill.copy()
    for place, resident in rows.items():
        words[:, place], threshold[place], fill[place] = build_sketch(resident, NUM_BITS)
    return nodes._replace(sketch_words=words, sketch_threshold=threshold, sketch_fill=fill)
