"""What requests would wait for at every split: late miss curves through the node's own measured costs.

The model of a node: requests that come while a step runs are served together by the next. Each step takes its fixed
parts and its requests' work; a request waits for part of the step before its own, and then for all of its own.
"""

from dataclasses import dataclass

import numpy as np

from helmrec.control.costs import Floats, StageCosts
from helmrec.control.policy import WindowStats
from helmrec.memory.miss_curves import GRID
from helmrec.steps import Step

ALPHAS: Floats = np.linspace(GRID[0], GRID[-1], 59)
_CYCLES = 10  # steps after which a queue that grows is judged; fitted to simulated nodes, as the next
_WAITED = 0.35  # share of the step before that a request waits for


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
class Late:
    """What the latest requests would have found at each of ALPHAS, per request."""

    computed_tokens: Floats
    missed_rows: Floats
    read_rows: Floats


def forecast(window: WindowStats, late: Late, costs: StageCosts, bias: Bias, rate: float) -> Forecast:
    """`rate`: arrivals per second. The window must hold requests."""
    num = window.steps[:, Step.REQUESTS].sum()
    history = window.new_tokens_per_request + window.resident_tokens_per_request
    others = max(0.0, window.steps[:, Step.TOKENS].sum() / num - window.new_tokens_per_request)  # candidates, mostly
    computed = late.computed_tokens * bias.tokens
    tokens, pairs = others + computed, others * history + computed * history / 2
    host_ms = costs.host_request_ms + costs.host_token_ms * tokens
    rows_ms = costs.read_row_ms * late.read_rows + costs.missed_row_ms * late.missed_rows * bias.rows
    compute_ms = costs.token_ms * tokens + costs.pair_ms * pairs
    return Forecast(host_ms, rows_ms, compute_ms, _latency_ms(costs, (host_ms, rows_ms, compute_ms), rate))


def _latency_ms(costs: StageCosts, stages: tuple[Floats, Floats, Floats], rate: float) -> Floats:
    """How many requests share a step grows from cycle to cycle; where it never stops, latency is high, not endless."""
    host_ms, rows_ms, compute_ms = stages
    sharing = np.ones_like(host_ms)
    for _ in range(_CYCLES):
        step_ms = (
            costs.host_step_ms + sharing * host_ms,
            costs.rows_step_ms + sharing * rows_ms,
            costs.compute_step_ms + sharing * compute_ms,
        )
        interval_ms = costs.interval_ms(*step_ms)
        sharing = 1 + rate / 1e3 * interval_ms
    return step_ms[0] + step_ms[1] + step_ms[2] + _WAITED * interval_ms
