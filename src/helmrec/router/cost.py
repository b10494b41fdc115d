"""Expected milliseconds of one request on one node: the single unit every routing decision is made in.

Compute grows with new tokens and with the pairs attention looks at; the bus brings absent rows and reloaded KV. Knows
formulas and figures, nothing of nodes, queues' reports or who asks.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import numba
from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import ConfigError


class CostTerms(NamedTuple):
    """The figures alone, as compiled code takes them."""

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
    """What a token is made of in the model that is served."""

    rows_per_token: int
    row_bytes: int
    kv_bytes: int  # all layers


class RouterCost(Frozen):
    """What serving costs on the nodes of a cluster. All nodes run the same model on the same device."""

    floor_ms: float = Field(ge=0, description="of a step, whatever it holds; host time included, as in the next two")
    request_ms: float = Field(0.0, ge=0, description="of a request, whatever it holds")
    token_us: float = Field(ge=0, description="per computed token with its rows, candidates too")
    pair_ns: float = Field(ge=0, description="per pair of tokens that attention looks at")
    row_us: float = Field(ge=0, description="per row that is absent")
    sorted_row_us: float = Field(ge=0, description="the same where so many are absent that they are read by address")
    sorted_from_rows: int = Field(ge=0, description="absent rows from which they are")
    reload_token_us: float = Field(ge=0, description="per history token whose KV comes back from the host")
    reload_floor_ms: float = Field(ge=0, description="of any reload")
    requests_per_step: float = Field(8.0, ge=1, description="who share the floor on a saturated node")

    @classmethod
    def from_calibration(cls, figures: Mapping[str, object], shape: TokenShape) -> Self:
        """From the figures of a calibration, by their names there."""

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

    def terms(self) -> CostTerms:
        return CostTerms(*(float(getattr(self, name)) for name in CostTerms._fields))


def read_router_cost(path: Path, shape: TokenShape) -> RouterCost:
    """From a calibration file."""
    try:
        figures = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read calibration {path}: {error}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"a calibration must be an object, got {type(figures).__name__} in {path}")
    return RouterCost.from_calibration(figures, shape)


class Work(NamedTuple):
    """What a node would have to do for a request."""

    resident_tokens: float  # used as they are, reloaded ones included
    new_tokens: float
    reloaded_tokens: float
    num_candidates: float
    absent_rows: float


class Stages(NamedTuple):
    """Milliseconds of the two stages of a request that is alone."""

    compute_ms: float
    bus_ms: float


@numba.njit(cache=True)
def stages_of(terms: CostTerms, work: Work) -> Stages:
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
def service_ms(terms: CostTerms, stages: Stages) -> float:
    """What a request adds to the queue of a saturated node: stages overlap, and steps share their floor."""
    shared_ms = terms.floor_ms * (1 - 1 / terms.requests_per_step)
    return max(stages.compute_ms - shared_ms, stages.bus_ms)


@numba.njit(cache=True)
def expected_ms(terms: CostTerms, stages: Stages, queue_ms: float) -> float:
    """From arrival to answer. A lone request pays both stages; the longer the queue, the more only the longer one."""
    alone_ms, busy_ms = stages.compute_ms + stages.bus_ms, service_ms(terms, stages)
    if queue_ms <= 0:
        return alone_ms
    share = queue_ms / (queue_ms + alone_ms)
    return queue_ms + alone_ms + share * (busy_ms - alone_ms)
