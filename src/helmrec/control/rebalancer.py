"""The one that acts: at every tick it shows a policy the window that ended and aims the boundary where it says.

A tick comes early if requests come much faster than they did: a burst is not left to itself for a whole window. This is
the one control loop, of engines and simulated nodes. It knows a pool, never tensors; time comes in from outside.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from helmrec.control.explain import Explanation
from helmrec.control.policy import Limited, Limits, Move, Policy, Traffic, WindowStats
from helmrec.control.static import Static, StaticSettings
from helmrec.errors import ConfigError
from helmrec.memory.miss_curves import JointCurves
from helmrec.memory.stats import PoolStats
from helmrec.steps import Step, Steps, busy_share, idle_share
from helmrec.types import IntArray, UserId

log = logging.getLogger("helmrec.control")
Mode = Literal["adaptive", "static", "freeze"]
_REMEMBERED_USERS = 1 << 15  # at least; at most twice as many
LOOK_EVERY = 0.25  # share of a tick between two looks at the queue; no window is shorter
_ROUNDING = 1e-9  # share of a tick by which sums of times may be short of it
_EARLY_DEVIATIONS = 5.0  # of a Poisson count, by which arrivals must be more than expected
_RATE_WEIGHT = 0.3  # of the newest window in the rate that is expected


class Look(Protocol):
    """What a look at a steered engine shows."""

    @property
    def pool(self) -> PoolStats: ...

    @property
    def queue_length(self) -> int: ...


class Steered(Protocol):
    """An engine, or a simulated node."""

    @property
    def queue_length(self) -> int:
        """As `stats` tells, and quickly: it is looked at several times per window."""

    def stats(self) -> Look: ...

    def curves(self) -> JointCurves | None: ...

    def take_steps(self) -> Steps:
        """Steps that ended since the last call."""

    def move_alpha(self, alpha: float) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A window, and what was made of it."""

    window: WindowStats
    move: Move | None
    explanation: Explanation | None = None  # of a policy that has layers


class _Answers(NamedTuple):
    user_ids: list[UserId]
    latency_ms: NDArray[np.float64]  # (requests,) NaN: refused


class Rebalancer:
    """Asks a policy once per `tick_s`, and more often in a burst.

    Answers may be recorded one by one from any thread; `tick` is one caller's.

    `mode` may be set at any time: adaptive follows the policy; static goes to `static_alpha`, or, where that is not
    given, to the split it began with, and stays; freeze leaves the boundary where it is.
    """

    def __init__(
        self,
        steered: Steered,
        policy: Policy,
        slo_ms: float,
        tick_s: float = 1.0,
        static_alpha: float | None = None,
        on_decision: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        if not tick_s > 0:
            raise ConfigError(f"tick_s must be more than 0, got {tick_s:g}")
        if static_alpha is not None and not 0 <= static_alpha <= 1:
            raise ConfigError(f"static_alpha must be between 0 and 1, got {static_alpha:g}")
        self._steered = steered
        self._policy = policy
        self._slo_ms = slo_ms
        self._tick_s = tick_s
        self._on_decision = on_decision
        limits = policy.limits if isinstance(policy, Limited) else Limits()
        self._before = steered.stats()
        alpha = self._before.pool.alpha_target if static_alpha is None else static_alpha
        self._to_static = Limited(Static(StaticSettings(alpha=alpha)), limits)
        self._answers: deque[tuple[UserId, float]] = deque()  # user, latency in ms; NaN: it was refused
        self._bulks: list[_Answers] = []  # others, recorded together
        self._users, self._older_users = set[UserId](), set[UserId]()  # who came lately
        self._origin_s: float | None = None  # when the first window began; ticks are counted from there
        self._start_s = self._due_s = 0.0  # when this window began, and when it ends at the latest
        self._looked_s = 0.0  # when the queue was looked at last
        self._rate: float | None = None  # arrivals per second that are expected
        self.mode: Mode = "adaptive"

    def record(self, user_id: UserId, latency_ms: float | None) -> None:
        """A request was answered, or refused."""
        self._answers.append((user_id, np.nan if latency_ms is None else latency_ms))

    def record_all(self, user_ids: IntArray, latency_ms: NDArray[np.float64]) -> None:
        """Requests were answered, or refused (NaN). For the caller of `tick`; `latency_ms` must not change later."""
        assert user_ids.size == latency_ms.size, "a latency for each"
        self._bulks.append(_Answers(user_ids.tolist(), latency_ms))

    def tick(self, now_s: float) -> Decision | None:
        """Look and act if a window has ended; None if not. Frozen, it looks and does not act.

        The first call begins the first window, and windows end a whole number of ticks later. An early tick ends one in
        between; the window after it lasts until the end of the same tick. `now_s` is of the clock that times steps.
        """
        if self._origin_s is None:
            self._origin_s = now_s
            self._begin_window(now_s)
            self._before = self._steered.stats()
            self._steered.take_steps()  # those that ended before the first window belong to none
        if now_s < self._due_s - _ROUNDING * self._tick_s and not self._is_early(now_s):
            return None
        window = self._look(now_s)
        move = self._decide(window)
        explanation = _explanation(self._policy) if self.mode == "adaptive" else None
        alpha = window.alpha_target if move is None else min(max(move.alpha, window.alpha_min), window.alpha_max)
        move = move if abs(alpha - window.alpha_target) >= window.half_page else None
        if move is not None:
            self._steered.move_alpha(alpha)
            if log.isEnabledFor(logging.INFO):
                reason = move.reason if explanation is None else explanation.line()
                log.info("alpha %.3f -> %.3f: %s", window.alpha_target, alpha, reason)
        decision = Decision(window, move, explanation)
        self._on_decision(decision)
        return decision

    def _decide(self, window: WindowStats) -> Move | None:
        if self.mode == "adaptive":
            return self._policy.decide(window)
        _unlimited(self._policy).decide(window)  # else it would misjudge what it sees once it may move again
        if self.mode == "freeze":
            return None
        return self._to_static.decide(window)

    def _is_early(self, now_s: float) -> bool:
        """Whether so many requests came in this part of a window that it should not be waited for the rest.

        Those in the queue count: a node that is saturated answers no faster, however many come.
        """
        if self._rate is None or now_s - self._looked_s < (LOOK_EVERY - _ROUNDING) * self._tick_s:
            return False
        self._looked_s = now_s
        expected = self._rate * (now_s - self._start_s)
        num_answers = len(self._answers) + sum(len(bulk.user_ids) for bulk in self._bulks)
        arrived = self._arrived(num_answers, self._steered.queue_length)
        return arrived > expected + _EARLY_DEVIATIONS * math.sqrt(expected + 1)

    def _arrived(self, num_answers: int, queue_length: int) -> int:
        return max(0, num_answers + queue_length - self._before.queue_length)

    def _begin_window(self, now_s: float) -> None:
        assert self._origin_s is not None
        self._start_s = self._looked_s = now_s
        num_ticks = math.ceil((now_s - self._origin_s) / self._tick_s + LOOK_EVERY - _ROUNDING)
        self._due_s = self._origin_s + num_ticks * self._tick_s

    def _look(self, now_s: float) -> WindowStats:
        after, steps = self._steered.stats(), self._steered.take_steps()
        traffic = self._traffic(now_s, after, steps)
        window = WindowStats.between(self._before.pool, after.pool, traffic, self._steered.curves(), steps)
        self._before = after
        self._begin_window(now_s)
        return window

    def _traffic(self, now_s: float, after: Look, steps: Steps) -> Traffic:
        start_s, span_s = self._start_s, now_s - self._start_s
        user_ids, latency_ms = self._take_answers()
        rate = self._arrived(len(user_ids), after.queue_length) / span_s
        self._rate = rate if self._rate is None else self._rate + _RATE_WEIGHT * (rate - self._rate)
        served = latency_ms[~np.isnan(latency_ms)]
        p50_ms, p99_ms = np.quantile(served, (1 / 2, 0.99)).tolist() if served.size else (0.0, 0.0)
        return Traffic(
            start_s=start_s,
            end_s=now_s,
            num_requests=len(user_ids),
            num_served=served.size,
            hot_user_share=self._hot_share(user_ids),
            mean_ms=float(served.mean()) if served.size else 0.0,
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            slo_ms=self._slo_ms,
            slo_satisfaction=np.count_nonzero(served <= self._slo_ms) / max(1, len(user_ids)),
            num_queued=after.queue_length,
            compute_busy=busy_share(steps, Step.COMPUTE_MS, span_s),
            bus_busy=busy_share(steps, Step.ROWS_MS, span_s),
            idle_share=idle_share(steps, start_s, now_s),
        )

    def _take_answers(self) -> _Answers:
        singles = [self._answers.popleft() for _ in range(len(self._answers))]
        bulks, self._bulks = self._bulks, []
        user_ids = [user_id for user_id, _ in singles]
        for bulk in bulks:
            user_ids += bulk.user_ids
        latency_ms = np.array([ms for _, ms in singles], np.float64)
        return _Answers(user_ids, np.concatenate([latency_ms, *(bulk.latency_ms for bulk in bulks)]))

    def _hot_share(self, user_ids: list[UserId]) -> float:
        """Share of these requests whose user had come before, lately; then remember their users."""
        users = set(user_ids)
        num_new = len(users - self._users - self._older_users)
        self._users |= users
        if len(self._users) >= _REMEMBERED_USERS:
            self._older_users, self._users = self._users, set()
        return 1 - num_new / len(user_ids) if user_ids else 0.0


def _explanation(policy: Policy) -> Explanation | None:
    """What a policy with layers said last, limits or not."""
    found = getattr(_unlimited(policy), "explanation", None)
    return found if isinstance(found, Explanation) else None


def _unlimited(policy: Policy) -> Policy:
    return policy.policy if isinstance(policy, Limited) else policy
