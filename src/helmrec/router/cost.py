"""Expected milliseconds of one request on one node: the unit of every routing decision.

Compute time grows with new tokens and with the token pairs of attention; bus time with absent rows and reloaded KV.
Knows formulas and cost terms, not nodes or reports.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import numba
from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import ConfigError


class RouterCostTerms(NamedTuple):
    """Fields of `RouterCost` as numbers, for compiled code."""

    floor_ms: float
    request_ms: float
    token_us: float
    pair_ns: float
    row_us: float
    sorted_row_us: float
    sorted_from_rows: float
    reload_token_us: float
    reload_floor_ms: float
    requests_per_step: float


class TokenShape(NamedTuple):
    """Rows and bytes per token of the served model."""

    rows_per_token: int
    row_bytes: int
    kv_bytes: int  # all layers


class RouterCost(Frozen):
    """Cost of serving on the nodes of a cluster. All nodes run the same model on the same device."""

    floor_ms: float = Field(ge=0, description="per step; host time included, as in the next two")
    request_ms: float = Field(0.0, ge=0, description="per request")
    token_us: float = Field(ge=0, description="per computed token with its rows, candidates included")
    pair_ns: float = Field(ge=0, description="per pair of tokens in attention")
    row_us: float = Field(ge=0, description="per absent row")
    sorted_row_us: float = Field(ge=0, description="per absent row where absent rows are read in order of address")
    sorted_from_rows: int = Field(ge=0, description="number of absent rows from which they are read in order")
    reload_token_us: float = Field(ge=0, description="per history token whose KV is reloaded from the host")
    reload_floor_ms: float = Field(ge=0, description="per reload")
    requests_per_step: float = Field(8.0, ge=1, description="requests that share a step's floor on a saturated node")

    @classmethod
    def from_calibration(cls, figures: Mapping[str, object], shape: TokenShape) -> Self:
        """Convert the figures of a calibration, given by their names there."""

        def figure(name: str) -> float:
            value = figures.get(name)
            if not isinstance(value, int | float):
                raise ConfigError(f"a calibration must give {name} as a number, got {value!r}")
            return float(value)

        def us_at(num_bytes: int, name: str) -> float:
            if figure(name) <= 0:
                raise ConfigError(f"{name} must be more than 0, got {figure(name)}")
            return num_bytes / (figure(name) * 1e3)

        row_us = (figure("compute_row_ns") + figure("host_row_ns")) / 1e3
        return cls(
            floor_ms=figure("compute_floor_ms") + figure("host_floor_ms"),
            request_ms=figure("intake_ms") + figure("host_request_ms"),
            token_us=figure("compute_token_us") + figure("host_token_us") + row_us * shape.rows_per_token,
            pair_ns=figure("compute_pair_ns"),
            row_us=us_at(shape.row_bytes, "alone_gb_per_s"),
            sorted_row_us=us_at(shape.row_bytes, "sorted_alone_gb_per_s"),
            sorted_from_rows=int(figure("sorted_from_rows")),
            reload_token_us=us_at(shape.kv_bytes, "reload_gb_per_s"),
            reload_floor_ms=figure("reload_floor_ms"),
        )

    def terms(self) -> RouterCostTerms:
        return RouterCostTerms(*(float(getattr(self, name)) for name in RouterCostTerms._fields))


def read_router_cost(path: Path, shape: TokenShape) -> RouterCost:
    """Read a calibration file."""
    try:
        figures = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read calibration {path}: {error}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"a calibration must be an object, got {type(figures).__name__} in {path}")
    return RouterCost.from_calibration(figures, shape)


class RequestWork(NamedTuple):
    """Work of a node for one request."""

    resident_tokens: float  # reused, reloaded ones included
    new_tokens: float
    reloaded_tokens: float
    num_candidates: float
    absent_rows: float


class Stages(NamedTuple):
    """Milliseconds of the two stages of a request in a step of its own."""

    compute_ms: float
    bus_ms: float


@numba.njit(cache=True)
def stages_of(terms: RouterCostTerms, work: RequestWork) -> Stages:
    """Return the time of both stages for this work."""
    new, candidates = work.new_tokens, work.num_candidates
    pairs = new * (work.resident_tokens + new / 2) + candidates * (work.resident_tokens + new)
    compute_ms = (
        terms.floor_ms + terms.request_ms + terms.token_us * (new + candidates) / 1e3 + terms.pair_ns * pairs / 1e6
    )
    is_sorted = work.absent_rows >= terms.sorted_from_rows
    bus_ms = work.absent_rows * (terms.sorted_row_us if is_sorted else terms.row_us) / 1e3
    if work.reloaded_tokens > 0:
        bus_ms += terms.reload_floor_ms + terms.reload_token_us * work.reloaded_tokens / 1e3
    return Stages(compute_ms, bus_ms)


@numba.njit(cache=True)
def service_ms(terms: RouterCostTerms, stages: Stages) -> float:
    """Return the time a request adds to the queue of a saturated node: stages overlap, requests share the floor."""
    shared_ms = terms.floor_ms * (1 - 1 / terms.requests_per_step)
    return max(stages.compute_ms - shared_ms, stages.bus_ms)


@numba.njit(cache=True)
def expected_ms(terms: RouterCostTerms, stages: Stages, queue_ms: float) -> float:
    """Return the time from arrival to answer.

    Without a queue a request takes the sum of both stages; with a longer queue it approaches the longer one.
    """
    alone_ms, busy_ms = stages.compute_ms + stages.bus_ms, service_ms(terms, stages)
    if queue_ms <= 0:
        return alone_ms
    share = queue_ms / (queue_ms + alone_ms)
    return queue_ms + alone_ms + share * (busy_ms - alone_ms)
