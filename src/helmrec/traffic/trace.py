"""A trace: the user and time of each request, the events appended before it, and the seed of its candidates.

This module defines the value in memory and its invariants; files, generators and importers are elsewhere.

Large parts are derived, not stored:
- A user's *backlog* (its history before its first request) is stored as a length. Event j of it is a hash of
  (catalogue seed, user, j), so a user with a single request and 6,700 events takes four bytes.
- The candidates of a request are a hash of its `candidate_seed`, drawn from the popularity of its `epoch`.
- Feature rows are a hash of the item (`rows.py`).

Items are numbered by popularity (0 is the most popular at epoch 0). Item i lies in *lane* i mod `num_lanes`, and a
derived history or candidate set visits the lanes in turn. So every lane gets the same traffic and is a fair sample of
the rows, and reading the events of some lanes costs only those events. The disadvantage: the items of a *block*
(`num_lanes` consecutive ones) are drawn equally often, so the first few hundred ranks are flat.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, Self

import numba
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from helmrec.config import Frozen
from helmrec.errors import TraceError
from helmrec.types import IntArray


class ZipfLaw(Frozen):
    """Popularity of the item at rank k (from 0) is the integral of (x + shift)^-exponent from k to k + 1."""

    kind: Literal["zipf"] = "zipf"
    exponent: float = Field(ge=0, le=4)
    shift: float = Field(1.0, gt=0, description="flattens the head: ranks well below it are equally popular")


class EmpiricalLaw(Frozen):
    """Popularity counted in real data: a share `mass[i]` of all draws goes to ranks [ends[i-1], ends[i])."""

    kind: Literal["empirical"] = "empirical"
    ends: tuple[int, ...] = Field(min_length=1)
    mass: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_a_distribution(self) -> Self:
        if len(self.ends) != len(self.mass) or any(a >= b for a, b in zip((0, *self.ends), self.ends, strict=False)):
            raise ValueError("ends must rise and be as many as mass")
        if min(self.mass) < 0 or not sum(self.mass) > 0:
            raise ValueError("mass must not be negative and must not all be zero")
        return self


Law = Annotated[ZipfLaw | EmpiricalLaw, Field(discriminator="kind")]


class Epoch(Frozen):
    """The popularity during a period. Blocks are runs of `num_lanes` consecutive items."""

    law: int = Field(0, ge=0, description="index into the catalogue's laws")
    drift_blocks: int = Field(0, ge=0, description="blocks of new items that entered at the top since epoch 0")
    flash_share: float = Field(0.0, ge=0, le=1, description="share of draws that go to the flash items")
    flash_first: int = Field(0, ge=0, description="first block of the flash items")
    flash_blocks: int = Field(1, ge=1)


class Catalogue(Frozen):
    """Everything from which histories, candidates and rows of a trace are derived. Stored in the file's metadata."""

    source: str = Field("", description="where the trace comes from")
    num_items: int = Field(ge=1)
    num_lanes: int = Field(256, ge=1, description="parts of the row space that can be simulated alone")
    num_actions: int = Field(4, ge=1, le=256)
    seed: int = Field(0, ge=0, lt=2**63, description="of backlogs")
    start_time_s: int = Field(1_700_000_000, ge=0, description="wall clock at time 0 of the trace")
    backlog_gap_s: int = Field(600, ge=1, description="mean time between two events of a backlog")
    laws: tuple[Law, ...] = Field(min_length=1)
    epochs: tuple[Epoch, ...] = Field(min_length=1, description="epoch 0 is also what backlogs are drawn from")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.num_lanes & (self.num_lanes - 1):
            raise ValueError(f"num_lanes must be a power of two, not {self.num_lanes}")
        if self.num_items < self.num_lanes:
            raise ValueError(f"num_items must be at least num_lanes ({self.num_lanes})")
        for epoch in self.epochs:
            if epoch.law >= len(self.laws):
                raise ValueError(f"an epoch names law {epoch.law}, there are {len(self.laws)}")
        return self

    @cached_property
    def num_blocks(self) -> int:
        """Complete blocks. Only their items are drawn, so up to num_lanes - 1 items at the end are not."""
        return self.num_items // self.num_lanes


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of time, and the events appended between them.

    Users are numbered from 0 without gaps. A user's history at request r is its backlog followed by its own
    events up to and including those appended just before r. `num_new` counts events appended since the user's
    previous request; at its first request that includes the backlog.
    """

    catalogue: Catalogue
    phase_names: tuple[str, ...]
    time_s: NDArray[np.float64]  # (requests,) from 0, never falling
    user: IntArray  # (requests,)
    num_new: NDArray[np.int32]  # (requests,)
    num_candidates: NDArray[np.int32]  # (requests,)
    candidate_seed: NDArray[np.uint64]  # (requests,)
    phase: NDArray[np.int16]  # (requests,) index into phase_names
    epoch: NDArray[np.int32]  # (requests,) index into catalogue.epochs
    backlog: NDArray[np.int32]  # (users,) derived events before the first request of each user
    item: IntArray  # (events,) own events, by user, then time: a user's own events are one slice
    action: NDArray[np.uint8]  # (events,)
    timestamp_s: IntArray  # (events,) wall clock

    @property
    def num_requests(self) -> int:
        return self.time_s.size

    @property
    def num_users(self) -> int:
        return self.backlog.size

    @property
    def duration_s(self) -> float:
        return float(self.time_s[-1]) if self.num_requests else 0.0

    def check(self) -> None:
        """Raise TraceError, naming the field and the value seen, if this is not a trace."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("catalogue", "phase_names")}
        for name, length in _LENGTHS.items():
            sizes = {columns[column].size for column in name.split()}
            if len(sizes) > 1:
                raise TraceError(f"{name} must be equally long, got {length} of {sorted(sizes)}")
        _within("user", self.user, self.num_users)
        _within("phase", self.phase, len(self.phase_names))
        _within("epoch", self.epoch, len(self.catalogue.epochs))
        _within("item", self.item, self.catalogue.num_items)
        _within("action", self.action, self.catalogue.num_actions)
        for name in ("num_new", "num_candidates", "backlog", "timestamp_s"):
            _within(name, columns[name], None)
        if not (np.isfinite(self.time_s).all() and (np.diff(self.time_s, prepend=0.0) >= 0).all()):
            raise TraceError(f"time_s must start at 0 or later and never fall, got {self.time_s[:4]}...")
        self._check_events(index_histories(self))

    def _check_events(self, histories: "Histories") -> None:
        own_start, num_own = histories.own_start, np.diff(histories.own_start)
        if own_start[-1] != self.item.size or (num_own < 0).any():
            raise TraceError(f"num_new must add up to backlogs and events, got {self.item.size} events")
        if np.count_nonzero(histories.visit == 0) != self.num_users:
            raise TraceError(f"every user must have at least one request, got {self.num_users} backlogs")
        falls = np.diff(self.timestamp_s) < 0
        falls[own_start[(own_start > 0) & (own_start < self.item.size)] - 1] = False  # where another user begins
        if falls.any():
            at = int(np.flatnonzero(falls)[0]) + 1
            raise TraceError(f"timestamp_s must not fall within a user, got {self.timestamp_s[at]} at event {at}")
        after_backlog = self.timestamp_s[own_start[:-1][(num_own > 0) & (self.backlog > 0)]]
        if (after_backlog < self.catalogue.start_time_s).any():
            raise TraceError(f"events after a backlog must not lie before start_time_s, got {after_backlog.min()}")


_LENGTHS = {
    "time_s user num_new num_candidates candidate_seed phase epoch": "requests",
    "item action timestamp_s": "events",
}


def _within(name: str, values: NDArray[np.integer], limit: int | None) -> None:
    if not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or (limit is not None and high >= limit):
        bounds = "at least 0" if limit is None else f"from 0 to {limit - 1}"
        raise TraceError(f"{name} must be {bounds}, got {low if low < 0 else high}")


class Histories(NamedTuple):
    """The position and length of each request's history; compiled code can use it."""

    own_start: IntArray  # (users + 1,) own events of user u are [own_start[u], own_start[u + 1])
    length: IntArray  # (requests,) events in the user's history at this request, with backlog and new ones
    visit: NDArray[np.int32]  # (requests,) number of earlier requests of the user
    is_last: NDArray[np.bool_]  # (requests,) whether it is the user's last request


def index_histories(trace: Trace) -> Histories:
    """Index the histories of all requests."""
    length, visit, total = _accumulate(trace.user, trace.num_new, trace.num_users)
    own_start = np.zeros(trace.num_users + 1, np.int64)
    np.cumsum(total - trace.backlog, out=own_start[1:])
    is_last = np.zeros(trace.num_requests, np.bool_)
    last = np.zeros(trace.num_users, np.int64)
    last[trace.user] = np.arange(trace.num_requests)  # of repeated indices the last assignment stays
    is_last[last] = True
    return Histories(own_start, length, visit, is_last)


@numba.njit(cache=True)
def _accumulate(
    user: IntArray, num_new: NDArray[np.int32], num_users: int
) -> tuple[IntArray, NDArray[np.int32], IntArray]:
    length, visit = np.empty(user.size, np.int64), np.empty(user.size, np.int32)
    total, seen = np.zeros(num_users, np.int64), np.zeros(num_users, np.int32)
    for r in range(user.size):
        u = user[r]
        total[u] += num_new[r]
        length[r] = total[u]
        visit[r] = seen[u]
        seen[u] += 1
    return length, visit, total
