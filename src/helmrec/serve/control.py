"""Who moves a served engine's boundary, and what it may be shown to want."""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helmrec.config import EngineConfig
from helmrec.control.by_name import make_policy, needs_curves
from helmrec.control.explain import Explanation
from helmrec.control.helm import HelmPolicy
from helmrec.control.policy import Limited, Policy
from helmrec.control.rebalancer import Decision, Look, Mode, Rebalancer, Steered
from helmrec.control.service_cost import ServiceCost
from helmrec.failures import FailureLog
from helmrec.memory.miss_curves import JointCurves
from helmrec.serve.settings import ServeConfig
from helmrec.sim.cost import default_cost, load_cost
from helmrec.sim.node_config import NodeConfig
from helmrec.sim.scenario import mean_service_cost
from helmrec.steps import Steps, no_steps

_SHOWN_MOVES = 5
_REHEARSED = 6  # windows


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of a controller: the split it wants, and why."""

    name: str
    alpha: float | None  # None: it has no wish of its own now
    note: str


@dataclass(frozen=True, slots=True)
class MoveView:
    """A move that was made."""

    time_s: float  # of the wall clock
    start_alpha: float
    alpha: float
    reason: str


@dataclass(frozen=True, slots=True)
class ControlView:
    """What a controller did with the window that ended last."""

    policy: str
    mode: str
    asked_alpha: float | None  # None: to stay
    reason: str  # empty where it stays without one
    expected_gain_ms: float | None
    layers: list[LayerView]
    moves: list[MoveView]  # the last few, newest first


class _Untouched:
    """An engine that may be looked at."""

    def __init__(self, engine: Steered) -> None:
        self._engine = engine

    @property
    def queue_length(self) -> int:
        return self._engine.queue_length

    def stats(self) -> Look:
        return self._engine.stats()

    def curves(self) -> JointCurves | None:
        return self._engine.curves()

    def take_steps(self) -> Steps:
        """None: what is taken here, nobody else would see."""
        return no_steps()

    def move_alpha(self, alpha: float) -> None:
        """It stays."""


class Steering:
    """A policy by name, and how to show it."""

    def __init__(self, name: str, slo_ms: float, tick_s: float = 1.0, cost: ServiceCost | None = None) -> None:
        self._name = name
        self._cost = cost
        self._policy = make_policy(name, cost)
        self._slo_ms = slo_ms
        self._tick_s = tick_s
        self._moves: deque[MoveView] = deque(maxlen=_SHOWN_MOVES)

    @classmethod
    def of(cls, config: ServeConfig, node: NodeConfig) -> "Steering | None":
        """As the settings say; None if nobody is to move the boundary."""
        if config.policy is None:
            return None
        path = config.policy_cost
        calibration = default_cost() if path is None else load_cost(Path(path))
        cost = mean_service_cost(calibration, node, node.model.window / 2, node.model.max_candidates / 2)
        return cls(config.policy, config.slo_ms, config.tick_s, cost)

    def rebalancer(self, engine: Steered) -> Rebalancer:
        return Rebalancer(engine, self._policy, self._slo_ms, self._tick_s)

    def rehearse(self, engine: Steered) -> None:
        """Have another policy of this name look at a few windows, so that what it compiles is compiled by then."""
        other = Rebalancer(_Untouched(engine), make_policy(self._name, self._cost), self._slo_ms, self._tick_s)
        other.mode = "freeze"
        for tick in range(_REHEARSED):
            for user in range(8):
                other.record(user, self._slo_ms)
            other.tick(2.0 * tick * self._tick_s)

    @property
    def learned(self) -> tuple[float, ...]:
        """What the policy learned online, to be kept over a restart; nothing of one that learns nothing."""
        inner = self._inner
        return tuple(inner.learned.tolist()) if isinstance(inner, HelmPolicy) else ()

    def relearn(self, learned: tuple[float, ...]) -> None:
        """Give back what was learned, if it is of this policy's shape."""
        inner = self._inner
        if isinstance(inner, HelmPolicy) and len(learned) == inner.learned.size and np.isfinite(learned).all():
            inner.learned = np.array(learned)

    @property
    def _inner(self) -> Policy:
        return self._policy.policy if isinstance(self._policy, Limited) else self._policy

    def reset(self) -> None:
        """Have the policy forget what it has seen."""
        self._policy.reset()

    def failed_view(self, error: Exception) -> ControlView:
        """What to show of a policy that has failed."""
        reason = f"the policy failed ({type(error).__name__}: {error}): alpha is frozen until a mode is set"
        return ControlView(self._name, "freeze", None, reason, None, [], list(self._moves))

    def view(self, decision: Decision | None, mode: Mode, now_s: float) -> ControlView:
        """What to show after a decision, or before the first in a mode. `now_s` is the wall clock's."""
        move = None if decision is None else decision.move
        if decision is not None and move is not None:
            self._moves.appendleft(MoveView(now_s, decision.window.alpha_target, move.alpha, move.reason))
        reason = "no window has ended yet" if decision is None else "" if move is None else move.reason
        return ControlView(
            policy=self._name,
            mode=mode,
            asked_alpha=None if move is None else move.alpha,
            reason="frozen" if mode == "freeze" else reason,
            expected_gain_ms=None if move is None else move.expected_gain_ms,
            layers=[] if decision is None or decision.explanation is None else layers_of(decision.explanation),
            moves=list(self._moves),
        )


class _CurvesMayFail:
    """A steered engine whose miss curves are absent for one window when they fail."""

    def __init__(self, engine: Steered, failures: FailureLog) -> None:
        self._engine = engine
        self._failures = failures

    @property
    def queue_length(self) -> int:
        return self._engine.queue_length

    def stats(self) -> Look:
        return self._engine.stats()

    def curves(self) -> JointCurves | None:
        try:
            return self._engine.curves()
        except Exception as error:
            self._failures.note("miss curves", error)
            return None

    def take_steps(self) -> Steps:
        return self._engine.take_steps()

    def move_alpha(self, alpha: float) -> None:
        self._engine.move_alpha(alpha)


class Controller:
    """Runs a policy on a served engine. No failure of the policy reaches the engine's steps.

    After a failure alpha stays where it is: the policy is not asked again until a mode is set, and then starts anew.
    `tick` is one thread's; the other calls may come from any.
    """

    def __init__(self, steering: Steering, engine: Steered, failures: FailureLog, now_s: float) -> None:
        """`failures` counts under "controller" and "miss curves". `now_s` is the wall clock's."""
        self._steering = steering
        self._engine = _CurvesMayFail(engine, failures)
        self._failures = failures
        self._rebalancer = steering.rebalancer(self._engine)
        self._is_failed = False
        self.view = steering.view(None, "adaptive", now_s)

    def record(self, user_id: int, latency_ms: float | None) -> None:
        """A request was answered, or refused (None)."""
        if not self._is_failed:  # else nobody would take it out again
            self._rebalancer.record(user_id, latency_ms)

    def tick(self, now_s: float, wall_s: float) -> None:
        """Ask the policy if a window has ended, and move the boundary if it says so."""
        if self._is_failed:
            return
        rebalancer = self._rebalancer
        try:
            decision = rebalancer.tick(now_s)
            if decision is not None:
                self.view = self._steering.view(decision, rebalancer.mode, wall_s)
        except Exception as error:
            self._freeze(error)

    def warm_up(self) -> None:
        """Compile what the policy compiles on first use, before the first window."""
        try:
            self._steering.rehearse(self._engine)
        except Exception as error:
            self._freeze(error)

    def set_mode(self, mode: Mode, wall_s: float) -> None:
        """Follow the policy, a constant, or nobody; a policy that has failed is asked again, from the beginning."""
        if self._is_failed:
            self._steering.reset()
            self._rebalancer = self._steering.rebalancer(self._engine)
            self._is_failed = False
        self._rebalancer.mode = mode
        self.view = self._steering.view(None, mode, wall_s)

    def inherit(self, old: "Controller") -> None:
        """Begin with the mode of another controller and with what its policy has learned."""
        self._rebalancer.mode = old._rebalancer.mode
        try:
            self._steering.relearn(old._steering.learned)
        except Exception as error:
            self._failures.note("controller", error, "what the policy had learned is lost")

    def _freeze(self, error: Exception) -> None:
        self._is_failed = True
        self._failures.note("controller", error, "the policy failed and alpha is frozen until a mode is set")
        self.view = self._steering.failed_view(error)


def seen_by(policy: str | None, engine: EngineConfig) -> EngineConfig:
    """The engine's settings, with miss curves where the policy looks at them."""
    if policy is None or not needs_curves(policy):
        return engine
    return engine.model_copy(update={"miss_curves": True})


def layers_of(told: Explanation) -> list[LayerView]:
    """What each layer of a decision said."""
    is_calm = told.burst == "calm"
    dwell = "calm" if is_calm else f"{told.burst}, about {told.burst_left_s:.0f} s left"
    guard = "adapting is put aside" if told.is_aside else "best constant lately"
    return [
        LayerView("base", _known(told.base_alpha), f"step {told.base_step:+.2f}"),
        LayerView("residual", _known(told.base_alpha + told.residual), f"{told.residual:+.4f} learned online"),
        LayerView("burst", None if is_calm else _known(told.burst_alpha), dwell),
        LayerView("guardrail", _known(told.static_alpha), guard),
    ]


def _known(alpha: float) -> float | None:
    """Layers that know nothing yet say NaN."""
    return None if math.isnan(alpha) else alpha
