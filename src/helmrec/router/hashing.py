"""Rendezvous hashing: every user has an order of all nodes, and takes the first that may be taken.

A node that joins takes its share from all others and moves nobody else; one that leaves gives its users to all others.
Knows ids and weights only.
"""

import numba
import numpy as np

from helmrec.memory.sampling import row_hash
from helmrec.router.nodes import Flags, Floats
from helmrec.types import IntArray

NOBODY = -1  # of compiled code only; callers see None


@numba.njit(cache=True)
def rendezvous_scores(user: int, ids: IntArray, weights: Floats) -> Floats:
    """The user's order of all nodes: the lowest comes first. Weights must be above 0."""
    scores = np.empty(ids.size)
    user_word = row_hash(user)
    for i in range(ids.size):
        word = row_hash(int(user_word ^ row_hash(int(~ids[i]))))
        chance = (float(word >> np.uint64(11)) + 0.5) / 2.0**53  # in (0, 1)
        scores[i] = -np.log(chance) / weights[i]
    return scores


@numba.njit(cache=True)
def first_of(scores: Floats, ids: IntArray, may_take: Flags) -> int:
    """Place of the lowest score that may be taken, of equals the lowest id; `NOBODY` if none may."""
    best = NOBODY
    for i in range(ids.size):
        if may_take[i] and (
            best == NOBODY or scores[i] < scores[best] or (scores[i] == scores[best] and ids[i] < ids[best])
        ):
            best = i
    return best


@numba.njit(cache=True)
def rendezvous(user: int, ids: IntArray, weights: Floats, may_take: Flags) -> int:
    """Place of the user's node among `ids`, always the same; over many users, in proportion to the weights.

    `NOBODY` if none may be taken. Weights must be above 0.
    """
    return first_of(rendezvous_scores(user, ids, weights), ids, may_take)


@numba.njit(cache=True)
def within_bound(loads: Floats, is_alive: Flags, factor: float, slack: float) -> Flags:
    """Living nodes whose load is at most `factor` times their mean, and some slack; at least one, if one is alive."""
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
