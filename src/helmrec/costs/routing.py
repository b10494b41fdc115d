"""Expected milliseconds of one request on one node: the unit of every routing decision.

Compute time grows with new tokens and with the token pairs of attention; bus time with absent rows.
Knows formulas and cost terms, not nodes or reports.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numba

from helmrec.costs.calibrated import CostTerms
from helmrec.costs.learned import StageCosts

_TIE_BREAK_US = 1e-6  # of a token or row while nothing is known: less work wins if all else is equal


class RouterCost(NamedTuple):
    """Cost of serving on the nodes of a cluster. All nodes run the same model on the same device."""

    floor_ms: float  # per step; host time included, as in the next two
    request_ms: float
    token_us: float  # per computed token with its rows, candidates included
    pair_ns: float  # per pair of tokens in attention
    row_us: float  # per absent row
    sorted_row_us: float  # per absent row where absent rows are read in order of address
    sorted_from_rows: float  # number of absent rows from which they are read in order
    requests_per_step: float = 8.0  # requests that share a step's floor on a saturated node

    @classmethod
    def from_calibration(cls, terms: CostTerms, rows_per_token: int, row_bytes: int) -> Self:
        """Sum the terms of a calibration for the rows of a model."""
        row_us = (terms.compute_row_ns + terms.host_row_ns) / 1e3
        return cls(
            floor_ms=terms.compute_floor_ms + terms.host_floor_ms,
            request_ms=terms.intake_ms + terms.host_request_ms,
            token_us=terms.compute_token_us + terms.host_token_us + row_us * rows_per_token,
            pair_ns=terms.compute_pair_ns,
            row_us=row_bytes / (terms.alone_gb_per_s * 1e3),
            sorted_row_us=row_bytes / (terms.sorted_alone_gb_per_s * 1e3),
            sorted_from_rows=terms.sorted_from_rows,
        )

    @classmethod
    def unknown(cls) -> Self:
        """Costs before anything was learned: queues decide, and less work among equal queues."""
        return cls(0.0, 0.0, _TIE_BREAK_US, 0.0, _TIE_BREAK_US, _TIE_BREAK_US, math.inf)

    @classmethod
    def learned(cls, costs: Sequence[StageCosts], rows_per_token: int) -> Self:
        """Sum what engines have learned from their own steps, each term as the mean of all; `unknown` without any."""
        if not costs:
            return cls.unknown()
        mean = StageCosts(*(sum(terms) / len(costs) for terms in zip(*costs, strict=True)))
        row_us = (mean.missed_row_ms + mean.host_missed_row_ms) * 1e3
        return cls(
            floor_ms=mean.host_step_ms + mean.rows_step_ms + mean.compute_step_ms,
            request_ms=mean.host_request_ms,
            token_us=(mean.host_token_ms + mean.token_ms + mean.read_row_ms * rows_per_token) * 1e3,
            pair_ns=mean.pair_ms * 1e6,
            row_us=row_us,
            sorted_row_us=row_us,
            sorted_from_rows=math.inf,
        )


class RequestWork(NamedTuple):
    """Work of a node for one request."""

    resident_tokens: float  # reused
    new_tokens: float
    num_candidates: float
    absent_rows: float


class Stages(NamedTuple):
    """Milliseconds of the two stages of a request in a step of its own."""

    compute_ms: float
    bus_ms: float


@numba.njit(cache=True)
def stages_of(terms: RouterCost, work: RequestWork) -> Stages:
    """Return the time of both stages for this work."""
    new, candidates = work.new_tokens, work.num_candidates
    pairs = new * (work.resident_tokens + new / 2) + candidates * (work.resident_tokens + new)
    compute_ms = (
        terms.floor_ms + terms.request_ms + terms.token_us * (new + candidates) / 1e3 + terms.pair_ns * pairs / 1e6
    )
    is_sorted = work.absent_rows >= terms.sorted_from_rows
    bus_ms = work.absent_rows * (terms.sorted_row_us if is_sorted else terms.row_us) / 1e3
    return Stages(compute_ms, bus_ms)


@numba.njit(cache=True)
def service_ms(terms: RouterCost, stages: Stages) -> float:
    """Return the time a request adds to the queue of a saturated node: stages overlap, requests share the floor."""
    shared_ms = terms.floor_ms * (1 - 1 / terms.requests_per_step)
    return max(stages.compute_ms - shared_ms, stages.bus_ms)


@numba.njit(cache=True)
def expected_ms(terms: RouterCost, stages: Stages, queue_ms: float) -> float:
    """Return the time from arrival to answer.

    Without a queue a request takes the sum of both stages; with a longer queue it approaches the longer one.
    """
    alone_ms, busy_ms = stages.compute_ms + stages.bus_ms, service_ms(terms, stages)
    if queue_ms <= 0:
        return alone_ms
    share = queue_ms / (queue_ms + alone_ms)
    return queue_ms + alone_ms + share * (busy_ms - alone_ms)
