"""The one that acts: at every tick it shows a policy the window that ended and aims the boundary where it says.

A tick comes early if requests come much faster than they did: a burst is not left to itself for a whole window. Knows a
pool that can be looked at and moved, never tensors or requests. Time comes in from outside.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from helmrec.control.explain import Explanation
from helmrec.control.policy import Limited, Limits, Move, Policy, Traffic, WindowStats
from helmrec.control.static import Static, StaticSettings
from helmrec.errors import ConfigError
from helmrec.memory.miss_curves import JointCurves
from helmrec.memory.stats import PoolStats

log = logging.getLogger("helmrec.control")
Mode = Literal["adaptive", "static", "freeze"]
_REMEMBERED_USERS = 1 << 16
_EARLIEST = 0.25  # share of a tick before which none comes
_EARLY_EVERY = 0.05  # share of a tick between two looks at the queue
_EARLY_DEVIATIONS = 5.0  # of a Poisson count, by which arrivals must be more than expected
_RATE_WEIGHT = 0.3  # of the newest window in the rate that is expected


class Look(Protocol):
    """What a look at a steered engine shows."""

    @property
    def pool(self) -> PoolStats: ...

    @property
    def queue_length(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Seconds it was at work since the start."""


class Steered(Protocol):
    """An engine, or whatever else has a boundary."""

    def stats(self) -> Look: ...

    def curves(self) -> JointCurves | None: ...

    def move_alpha(self, alpha: float) -> None: ...


class _Answer(NamedTuple):
    user_id: int
    latency_ms: float | None  # None: it was refused


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A window, and what was made of it."""

    window: WindowStats
    move: Move | None
    explanation: Explanation | None = None  # of a policy that has layers


class Rebalancer:
    """Asks a policy once per `tick_s`. Answers may be recorded from any thread; `tick` is one caller's.

    `mode` may be set at any time: adaptive follows the policy; static goes to `static_alpha`, or, where that is not
    given, to the best constant the policy's guardrail knows, and stays; freeze leaves the boundary where it is.
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
        self._static_alpha = static_alpha
        self._on_decision = on_decision
        limits = policy.limits if isinstance(policy, Limited) else Limits()
        self._to_static = Limited(policy, limits)  # whichever constant it is told to go to
        self._answers: deque[_Answer] = deque()
        self._users: OrderedDict[int, None] = OrderedDict()  # who came lately, longest unseen first
        self._before = steered.stats()
        self._start_s: float | None = None
        self._rate: float | None = None  # arrivals per second that are expected
        self._looked_s = -np.inf  # when the queue was looked at last
        self.mode: Mode = "adaptive"

    def record(self, user_id: int, latency_ms: float | None) -> None:
        """A request was answered, or refused."""
        self._answers.append(_Answer(user_id, latency_ms))

    def tick(self, now_s: float) -> Decision | None:
        """Look and act if a window has ended; None if not. Frozen, it looks and does not act."""
        if self._start_s is None:
            self._start_s = now_s
        if now_s - self._start_s < self._tick_s and not self._is_early(now_s):
            return None
        window = self._look(now_s)
        move = self._decide(window)
        explanation = _explanation(self._policy) if self.mode == "adaptive" else None
        if move is not None:
            alpha = min(max(move.alpha, window.alpha_min), window.alpha_max)
            self._steered.move_alpha(alpha)
            told = move.reason if explanation is None else explanation.line()
            log.info("alpha %.3f -> %.3f: %s", window.alpha_target, alpha, told)
        decision = Decision(window, move, explanation)
        self._on_decision(decision)
        return decision

    def _decide(self, window: WindowStats) -> Move | None:
        if self.mode == "adaptive":
            return self._policy.decide(window)
        _unlimited(self._policy).decide(window)  # else it would misjudge what it sees once it may move again
        if self.mode == "freeze":
            return None
        alpha, explained = self._static_alpha, _explanation(self._policy)
        if alpha is None and explained is not None and explained.static_alpha == explained.static_alpha:
            alpha = explained.static_alpha
        if alpha is None:
            return None
        self._to_static.policy = Static(StaticSettings(alpha=alpha))
        return self._to_static.decide(window)

    def _is_early(self, now_s: float) -> bool:
        """Whether so many requests came in this part of a window that it should not be waited for the rest.

        Those in the queue count: a node that is saturated answers no faster, however many come.
        """
        assert self._start_s is not None
        passed_s = now_s - self._start_s
        if self._rate is None or passed_s < _EARLIEST * self._tick_s:
            return False
        if now_s - self._looked_s < _EARLY_EVERY * self._tick_s:
            return False
        self._looked_s = now_s
        expected = self._rate * passed_s
        arrived = self._arrived(len(self._answers), self._steered.stats())
        return arrived > expected + _EARLY_DEVIATIONS * (expected + 1) ** 0.5

    def _arrived(self, num_answers: int, now: Look) -> int:
        return max(0, num_answers + now.queue_length - self._before.queue_length)

    def _look(self, now_s: float) -> WindowStats:
        after = self._steered.stats()
        window = WindowStats.between(self._before.pool, after.pool, self._traffic(now_s, after), self._steered.curves())
        self._before, self._start_s = after, now_s
        return window

    def _traffic(self, now_s: float, after: Look) -> Traffic:
        assert self._start_s is not None
        answers = [self._answers.popleft() for _ in range(len(self._answers))]
        rate = self._arrived(len(answers), after) / (now_s - self._start_s)
        self._rate = rate if self._rate is None else self._rate + _RATE_WEIGHT * (rate - self._rate)
        returning = sum(self._has_come_lately(answer.user_id) for answer in answers)
        served = [answer.latency_ms for answer in answers if answer.latency_ms is not None]
        p50_ms, p99_ms = np.percentile(served, (50, 99)) if served else (0.0, 0.0)
        return Traffic(
            start_s=self._start_s,
            end_s=now_s,
            num_requests=len(answers),
            num_served=len(served),
            hot_user_share=returning / max(1, len(answers)),
            mean_ms=float(np.mean(served)) if served else 0.0,
            p50_ms=float(p50_ms),
            p99_ms=float(p99_ms),
            slo_ms=self._slo_ms,
            slo_satisfaction=sum(ms <= self._slo_ms for ms in served) / max(1, len(answers)),
            num_queued=after.queue_length,
            compute_busy=min(1.0, (after.busy_s - self._before.busy_s) / (now_s - self._start_s)),
            bus_busy=0.0,  # an engine does not know how fast its bus is
        )

    def _has_come_lately(self, user_id: int) -> bool:
        has_come = user_id in self._users
        self._users[user_id] = None
        self._users.move_to_end(user_id)
        if len(self._users) > _REMEMBERED_USERS:
            self._users.popitem(last=False)
        return has_come


def _explanation(policy: Policy) -> Explanation | None:
    """What a policy with layers said last, limits or not."""
    told = getattr(_unlimited(policy), "explanation", None)
    return told if isinstance(told, Explanation) else None


def _unlimited(policy: Policy) -> Policy:
    return policy.policy if isinstance(policy, Limited) else policy
