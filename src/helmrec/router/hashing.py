"""Rendezvous hashing: each user has an order of all nodes, and goes to the first one that is allowed.

A node that joins takes its share of users from all others, and no other user moves; the users of a node that leaves
are spread over all others. Knows ids and weights only.
"""

import numba
import numpy as np

from helmrec.memory.sampling import row_hash
from helmrec.router.nodes import Flags, Floats
from helmrec.types import IntArray

NO_NODE = -1  # in compiled code only; callers see None


@numba.njit(cache=True)
def rendezvous_scores(user: int, ids: IntArray, weights: Floats) -> Floats:
    """Score all nodes for a user: the lowest score comes first. Weights must be above 0."""
    scores = np.empty(ids.size)
    user_word = row_hash(user)
    for i in range(ids.size):
        word = row_hash(int(user_word ^ row_hash(int(~ids[i]))))
        chance = (float(word >> np.uint64(11)) + 0.5) / 2.0**53  # in (0, 1)
        scores[i] = -np.log(chance) / weights[i]
    return scores


@numba.njit(cache=True)
def first_of(scores: Floats, ids: IntArray, is_allowed: Flags) -> int:
    """Return the index of the lowest score that is allowed, the lowest id among equals; `NO_NODE` if none is."""
    best = NO_NODE
    for i in range(ids.size):
        if is_allowed[i] and (
            best == NO_NODE or scores[i] < scores[best] or (scores[i] == scores[best] and ids[i] < ids[best])
        ):
            best = i
    return best


@numba.njit(cache=True)
def rendezvous(user: int, ids: IntArray, weights: Floats, is_allowed: Flags) -> int:
    """Return the index of the user's node among `ids`: constant per user, and in proportion to the weights over many.

    `NO_NODE` if none is allowed. Weights must be above 0.
    """
    return first_of(rendezvous_scores(user, ids, weights), ids, is_allowed)


@numba.njit(cache=True)
def within_bound(loads: Floats, is_alive: Flags, factor: float, slack: float) -> Flags:
    """Flag nodes that are alive and whose load is at most `factor` times the mean plus `slack`.

    All nodes that are alive are flagged if no load is within the bound.
    """
    total, count = 0.0, 0
    for i in range(loads.size):
        if is_alive[i]:
            total += loads[i]
            count += 1
    bound = factor * total / max(1, count) + slack
    allowed = np.empty(loads.size, np.bool_)
    found = False
    for i in range(loads.size):
        allowed[i] = is_alive[i] and loads[i] <= bound
        found |= allowed[i]
    return allowed if found else is_alive
