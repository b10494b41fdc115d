"""Predict the mean latency at every split from recent miss curves and the measured costs of the node's own steps.

The model of a node: requests that come while a step runs are served together by the next (`_latency_ms`).
"""

from dataclasses import dataclass

import numpy as np

from helmrec.control.costs import Floats, StageCosts
from helmrec.control.policy import WindowStats
from helmrec.memory.miss_curves import GRID
from helmrec.steps import Step

ALPHAS: Floats = np.linspace(GRID[0], GRID[-1], 59)
_NEARLY_FULL = 0.97  # load beyond which the formula has no answer
_WAITED = 0.5  # share of the interval it comes in that a request waits for
_WAITED_BESIDE = 0.3  # and more where steps overlap; fitted to simulated nodes


@dataclass(frozen=True, slots=True)
class Bias:
    """What was measured over what the shadow caches promised at the present split."""

    tokens: float = 1.0
    rows: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Per request, at each of ALPHAS."""

    host_ms: Floats
    rows_ms: Floats
    compute_ms: Floats
    mean_ms: Floats  # latency: stages and waits

    def at(self, alpha: float) -> float:
        return float(np.interp(alpha, ALPHAS, self.mean_ms))


@dataclass(frozen=True, slots=True, eq=False)
class RecentWork:
    """Work of recent requests at each of ALPHAS, per request, as the shadow caches saw it."""

    computed_tokens: Floats
    missed_rows: Floats
    read_rows: Floats


def forecast(window: WindowStats, recent: RecentWork, costs: StageCosts, bias: Bias, rate: float) -> Forecast:
    """`rate`: arrivals per second. The window must hold requests."""
    num = window.steps[:, Step.REQUESTS].sum()
    history = window.new_tokens_per_request + window.resident_tokens_per_request
    others = max(0.0, window.steps[:, Step.TOKENS].sum() / num - window.new_tokens_per_request)  # candidates, mostly
    computed = recent.computed_tokens * bias.tokens
    tokens, pairs = others + computed, others * history + computed * history / 2
    host_ms = costs.host_request_ms + costs.host_token_ms * tokens
    rows_ms = costs.read_row_ms * recent.read_rows + costs.missed_row_ms * recent.missed_rows * bias.rows
    compute_ms = costs.token_ms * tokens + costs.pair_ms * pairs
    return Forecast(host_ms, rows_ms, compute_ms, _latency_ms(costs, (host_ms, rows_ms, compute_ms), rate))


def _latency_ms(costs: StageCosts, stages: tuple[Floats, Floats, Floats], rate: float) -> Floats:
    """Mean latency of Poisson arrivals that are served together, step after step.

    A step takes a fixed part and the work of its requests; those are the ones that came during the step before. With a
    load of `rho`, intervals between steps have a mean of fixed / (1 - rho) and a variance of rate E[work^2] / (1 -
    rho^2) times that. A request falls into a long one more likely than into a short one, waits for half of it, and is
    then served together with all who came in it.
    """
    host_ms, rows_ms, compute_ms = stages
    fixed_ms = costs.interval_ms(
        *(np.array([ms]) for ms in (costs.host_step_ms, costs.rows_step_ms, costs.compute_step_ms))
    )
    work_ms = costs.interval_ms(host_ms, rows_ms, compute_ms)
    load = rate / 1e3 * work_ms
    crowding = np.where(load < _NEARLY_FULL, 1 / (1 - np.minimum(load, _NEARLY_FULL)), _tangent(load))
    interval_ms = crowding * (fixed_ms + load * costs.spread * work_ms / (1 + load))
    waited = _WAITED + _WAITED_BESIDE * costs.overlap
    return costs.step_ms + host_ms + rows_ms + compute_ms + (waited + load) * interval_ms


def _tangent(load: Floats) -> Floats:
    """Where a queue would never end, latency goes on growing as it did just before."""
    free = 1 - _NEARLY_FULL
    return 1 / free + (load - _NEARLY_FULL) / free**2
