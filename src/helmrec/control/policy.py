"""What a policy sees, what it answers, and the limits every answer is held to.

Pure: time comes with the window, nothing here moves a page. Knows neither the engine nor the simulator.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from pydantic import Field, model_validator

from helmrec.config import Frozen
from helmrec.memory.miss_curves import JointCurves
from helmrec.memory.stats import PoolStats
from helmrec.steps import Steps, no_steps


@dataclass(frozen=True, slots=True)
class Traffic:
    """What came in and how it was served between two looks. Without requests the rates and times are 0."""

    start_s: float
    end_s: float
    num_requests: int  # answered, or refused
    num_served: int  # of them, those that were answered: caches and their shadows know no others
    hot_user_share: float  # requests by users who came lately, 0..1; an estimate
    mean_ms: float  # from arrival to answer, queue included, as the next two
    p50_ms: float
    p99_ms: float
    slo_ms: float
    slo_satisfaction: float  # requests answered within slo_ms, refused ones not, 0..1
    num_queued: int  # at the end
    compute_busy: float  # share of the time that went into the dense stage of steps, 0..1
    bus_busy: float  # share of the time that went into reading their rows and pages, 0..1
    idle_share: float  # share of the time in which no step that ended by then was under way, 0..1

    @property
    def arrival_rate(self) -> float:
        """Requests per second."""
        return self.num_requests / (self.end_s - self.start_s) if self.end_s > self.start_s else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class WindowStats:
    """All a policy may see of one window. `PoolStats` alone lacks time, load, latency and other splits."""

    traffic: Traffic
    alpha: float  # now
    alpha_target: float  # wanted so far: what a move starts from
    alpha_min: float  # of the pool
    alpha_max: float
    pool_bytes: int
    num_pages: int  # of the pool
    page_tokens: int  # of KV in a page
    resident_rows: int
    kv_pages: int  # that hold K/V
    kv_token_hit_rate: float  # in this window, as all below
    emb_hit_rate: float
    new_tokens_per_request: float  # history tokens computed
    resident_tokens_per_request: float  # history tokens reused
    missed_rows_per_request: float
    curves: JointCurves | None = None  # None while too little is known
    steps: Steps = field(default_factory=no_steps)  # those that ended in this window

    @property
    def half_page(self) -> float:
        """Of the pool: a move by less ends where it began."""
        return 1 / 2 / self.num_pages

    @classmethod
    def between(
        cls, before: PoolStats, after: PoolStats, traffic: Traffic, curves: JointCurves | None, steps: Steps
    ) -> Self:
        """The window between two looks at a pool."""
        served = max(1, traffic.num_served)
        hits, misses = after.row_hits - before.row_hits, after.row_misses - before.row_misses
        reused, total = after.reused_tokens - before.reused_tokens, after.total_tokens - before.total_tokens
        return cls(
            traffic=traffic,
            alpha=after.alpha,
            alpha_target=after.alpha_target,
            alpha_min=after.alpha_min,
            alpha_max=after.alpha_max,
            pool_bytes=after.num_pages * after.page_bytes,
            num_pages=after.num_pages,
            page_tokens=after.page_tokens,
            resident_rows=after.resident_rows,
            kv_pages=after.kv_pages,
            kv_token_hit_rate=reused / max(1, total),
            emb_hit_rate=hits / max(1, hits + misses),
            new_tokens_per_request=(total - reused) / served,
            resident_tokens_per_request=reused / served,
            missed_rows_per_request=misses / served,
            curves=curves,
            steps=steps,
        )


class Move(NamedTuple):
    """A decided change of the boundary: a value, not an action. A named tuple, since making one must take no time."""

    alpha: float  # wanted EMB share of the pool's pages
    reason: str  # for a log line
    expected_gain_ms: float | None = None  # per request, where the policy has a model; negative is a loss


class Policy(Protocol):
    """Looks at a window and may answer with a move."""

    def decide(self, stats: WindowStats) -> Move | None:
        """The wanted split, or None to stay. Called once per window, in order of time."""

    def reset(self) -> None:
        """Forget what was seen: what comes next is another stretch of traffic."""


_EDGE = 0.02  # share of the pool that neither cache is ever left without


class Limits(Frozen):
    """What no policy may exceed."""

    min_alpha: float = Field(_EDGE, ge=0, le=1, description="lowest EMB share asked for")
    max_alpha: float = Field(1 - _EDGE, ge=0, le=1, description="highest EMB share asked for")
    max_step: float = Field(0.10, gt=0, le=1, description="largest change of alpha in one window")

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.max_alpha < self.min_alpha:
            raise ValueError(f"max_alpha must be at least min_alpha ({self.min_alpha}), not {self.max_alpha}")
        return self


class Limited:
    """A policy held to limits. An alpha that starts outside them is led back inside at the same pace."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy = policy
        self.limits = limits

    def decide(self, stats: WindowStats) -> Move | None:
        asked, start = self.policy.decide(stats), stats.alpha_target
        low = max(self.limits.min_alpha, stats.alpha_min)
        high = max(low, min(self.limits.max_alpha, stats.alpha_max))
        if asked is None and low <= start <= high:
            return None
        inside = min(max(start if asked is None else asked.alpha, low), high)
        reach = self.limits.max_step
        allowed = min(max(inside, start - reach), start + reach)
        if allowed == start:
            return None
        if asked is None:
            return Move(allowed, f"back inside {low:.2f}..{high:.2f}")
        if allowed == asked.alpha:
            return asked
        return Move(allowed, f"{asked.reason}; limited from {asked.alpha:.3f}", asked.expected_gain_ms)

    def reset(self) -> None:
        self.policy.reset()
