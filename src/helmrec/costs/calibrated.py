"""The cost of a step on a measured device, in milliseconds of compute, bus and host.

A step has two stages: the bus stage loads missed rows and KV pages, the compute stage uses them. Stages of different
steps overlap: a single request takes the sum of both, a saturated node the longer one per step. This module holds
measured terms and formulas; it knows no caches, queues or clocks.
"""

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numba
from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import ConfigError


class CostTerms(NamedTuple):
    """The measured terms alone, for compiled code."""

    compute_floor_ms: float
    compute_token_us: float
    compute_pair_ns: float
    compute_row_ns: float
    host_floor_ms: float
    host_request_ms: float
    host_token_us: float
    host_row_ns: float
    background_ms: float
    intake_ms: float
    hit_gb_per_s: float
    alone_gb_per_s: float
    beside_gb_per_s: float
    sorted_alone_gb_per_s: float
    sorted_beside_gb_per_s: float
    sorted_from_rows: float
    beside_slowdown: float
    reload_gb_per_s: float
    reload_floor_ms: float
    reload_exposed: float


class CostModel(Frozen):
    """A calibration of a device. `sources` says where each term was measured."""

    name: str = Field(min_length=1, description="name in reports")
    device: str = Field(min_length=1)
    shape: str = Field(min_length=1, description="model profile to which the compute terms were fitted")
    compute_floor_ms: float = Field(ge=0, description="per step, independent of its content")
    compute_token_us: float = Field(ge=0, description="per computed token without its rows: MLPs, products, head")
    compute_pair_ns: float = Field(ge=0, description="per pair of tokens in attention, all layers")
    compute_row_ns: float = Field(ge=0, description="per row of the computed tokens, hit or miss")
    host_floor_ms: float = Field(ge=0, description="host time of a step: plan, layout, launch, commit")
    host_request_ms: float = Field(ge=0, description="host time per request of a step")
    host_token_us: float = Field(ge=0, description="host time per computed token; without rows")
    host_row_ns: float = Field(ge=0, description="host time per row of the computed tokens")
    background_ms: float = Field(ge=0, description="host time of a step between its results and the next plan")
    intake_ms: float = Field(ge=0, description="checking and hashing one request, before it queues")
    hit_gb_per_s: float = Field(gt=0, description="resident rows read from the pool")
    alone_gb_per_s: float = Field(gt=0, description="missed rows in arrival order, while nothing else runs")
    beside_gb_per_s: float = Field(gt=0, description="the same while another step computes")
    sorted_alone_gb_per_s: float = Field(gt=0, description="missed rows in order of address")
    sorted_beside_gb_per_s: float = Field(gt=0)
    sorted_from_rows: int = Field(ge=0, description="misses of a step from which they are read in order of address")
    beside_slowdown: float = Field(ge=0, description="share by which reading rows slows compute")
    reload_gb_per_s: float = Field(gt=0, description="KV pages from the host")
    reload_floor_ms: float = Field(ge=0, description="per transfer of pages")
    reload_exposed: float = Field(ge=0, le=1, description="share of a reload before its step can compute")
    sources: dict[str, str] = Field(description="term -> where it was measured")
    made: dict[str, str] = Field(default_factory=dict, description="command, commit, date and versions")
    fit: dict[str, float] = Field(default_factory=dict, description="kind of work -> predicted over measured time")

    def terms(self) -> CostTerms:
        """The terms, for compiled code."""
        return CostTerms(*(float(getattr(self, name)) for name in CostTerms._fields))

    @property
    def unexplained(self) -> list[str]:
        """Terms without a source."""
        return [name for name in CostTerms._fields if not self.sources.get(name)]


def load_cost(path: Path) -> CostModel:
    """Read a calibration; unknown keys and terms without a source are errors."""
    try:
        cost = CostModel(**json.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"cannot read calibration {path}: {error}") from None
    if cost.unexplained:
        raise ConfigError(f"{path}: sources must name every term, missing {', '.join(cost.unexplained)}")
    return cost


@cache
def default_cost() -> CostModel:
    """The committed calibration of an H200."""
    with resources.as_file(resources.files("helmrec.costs") / "calibrations" / "h200.json") as path:
        return load_cost(path)


class ComputeWork(NamedTuple):
    """What a step computes."""

    num_tokens: int
    num_pairs: float
    num_rows: float  # of its tokens


@numba.njit(cache=True)
def compute_ms(terms: CostTerms, work: ComputeWork) -> float:
    """Time of the compute stage of a step while nothing else runs."""
    token_ms = terms.compute_token_us * work.num_tokens / 1e3
    attention_ms, row_ms = terms.compute_pair_ns * work.num_pairs / 1e6, terms.compute_row_ns * work.num_rows / 1e6
    return terms.compute_floor_ms + token_ms + attention_ms + row_ms


@numba.njit(cache=True)
def host_ms(terms: CostTerms, num_requests: int, num_tokens: int, num_rows: float) -> float:
    """Time of the host for a step before the device can start it."""
    token_ms, row_ms = terms.host_token_us * num_tokens / 1e3, terms.host_row_ns * num_rows / 1e6
    return terms.host_floor_ms + terms.host_request_ms * num_requests + token_ms + row_ms


@numba.njit(cache=True)
def reload_ms(terms: CostTerms, num_bytes: float, bus_speed: float) -> float:
    """Time to load KV pages from the host. `bus_speed` is 1 unless a fault slows the bus."""
    return 0.0 if num_bytes == 0 else terms.reload_floor_ms + num_bytes / (terms.reload_gb_per_s * bus_speed * 1e6)


class BusLoad(NamedTuple):
    """Rows that one step reads."""

    hit_bytes: float
    miss_bytes: float
    num_missed: float


@numba.njit(cache=True)
def rows_ms(terms: CostTerms, load: BusLoad, beside_ms: float, bus_speed: float) -> float:
    """Time to read a step's rows while another step computes for the first `beside_ms`."""
    hit_ms = load.hit_bytes / (terms.hit_gb_per_s * 1e6)
    is_sorted = load.num_missed >= terms.sorted_from_rows
    alone = terms.sorted_alone_gb_per_s if is_sorted else terms.alone_gb_per_s
    beside = terms.sorted_beside_gb_per_s if is_sorted else terms.beside_gb_per_s
    bytes_beside = beside * bus_speed * 1e6 * beside_ms
    if load.miss_bytes <= bytes_beside:
        return hit_ms + load.miss_bytes / (beside * bus_speed * 1e6)
    return hit_ms + beside_ms + (load.miss_bytes - bytes_beside) / (alone * bus_speed * 1e6)


@numba.njit(cache=True)
def tokens_ms(terms: CostTerms, start: int, end: int, rows_per_token: int) -> float:
    """Compute time that tokens [start, end) of a history add to a step."""
    num = end - start
    return (
        compute_ms(terms, ComputeWork(num, num * (start + end) / 2, float(num * rows_per_token)))
        - terms.compute_floor_ms
    )
