"""What could have been had, in hindsight: the best constant split, and the best path if moving costs.

Takes sweeps as plain arrays, one cost per window and split, each from a run that kept that split throughout. So a
window's cost supposes caches that had settled there; what it takes to settle is what `switching_costs` prices.
Average sweeps over seeds first: the least of noisy costs flatters.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A path over the splits of a sweep and what it costs."""

    index: Ints  # (windows,) into the sweep's splits
    alpha: Floats  # (windows,)
    running: float  # sum over windows
    switching: float  # sum over moves


class SwitchPrices(Frozen):
    """What a page costs that changes hands, in ms of work on the node."""

    pool_bytes: float = Field(gt=0, description="bytes both caches share")
    rewarm_ms_per_byte: float = Field(ge=0, description="compute that fills a byte KV has won with prefixes again")
    refill_ms_per_byte: float = Field(ge=0, description="bus time that fills a byte EMB has won with rows")
    load: float = Field(0.0, ge=0, lt=1, description="load of the node: extra work delays others by 1/(1-load)")


def switching_costs(alphas: Floats, prices: SwitchPrices) -> Floats:
    """(from, to): what the cache that wins memory must do before it is as good as one born at that size."""
    won_by_emb = (alphas[None, :] - alphas[:, None]) * prices.pool_bytes
    refill = np.maximum(0, won_by_emb) * prices.refill_ms_per_byte
    rewarm = np.maximum(0, -won_by_emb) * prices.rewarm_ms_per_byte
    return (refill + rewarm) / (1 - prices.load)


def best_static(costs: Floats, alphas: Floats) -> Plan:
    """The one split that would have cost least over all windows."""
    at = int(costs.sum(axis=0).argmin())
    return _plan(np.full(costs.shape[0], at), costs, alphas, switching=0.0)


def cheapest_path(costs: Floats, alphas: Floats, switching: Floats, start: int | None = None) -> Plan:
    """The path of least running and switching cost together, by dynamic programming over windows and splits.

    `switching` is (from, to), or (windows, from, to) if what a move costs depends on when it is made: entry w prices
    the move into window w. Units are those of `costs`. With `start` the first window may have to be moved into too.
    """
    num_windows, num_alphas = costs.shape
    prices = np.broadcast_to(switching, (num_windows, num_alphas, num_alphas))
    so_far = np.zeros(num_alphas) if start is None else prices[0, start].copy()
    so_far += costs[0]
    came_from = np.zeros((num_windows, num_alphas), np.int64)
    for window in range(1, num_windows):
        ways = so_far[:, None] + prices[window]
        came_from[window] = ways.argmin(axis=0)
        so_far = ways.min(axis=0) + costs[window]
    path = np.empty(num_windows, np.int64)
    path[-1] = so_far.argmin()
    for window in range(num_windows - 1, 0, -1):
        path[window - 1] = came_from[window, path[window]]
    before = np.concatenate((path[:1] if start is None else [start], path[:-1]))
    moved = prices[np.arange(num_windows), before, path]
    paid = float(moved.sum() - (moved[0] if start is None else 0.0))
    return _plan(path, costs, alphas, switching=paid)


def _plan(index: Ints, costs: Floats, alphas: Floats, switching: float) -> Plan:
    running = float(costs[np.arange(index.size), index].sum())
    return Plan(index=index, alpha=alphas[index], running=running, switching=switching)
