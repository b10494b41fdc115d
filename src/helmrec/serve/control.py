"""The policy of a served engine: how it runs beside the engine's steps, and how its decisions are shown."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from helmrec.config import EngineConfig
from helmrec.control.explain import describe_move
from helmrec.control.helm import Helm
from helmrec.control.policy import Limited, Policy, Traffic, WindowStats
from helmrec.control.rebalancer import Decision, Look, Mode, Rebalancer, Steered
from helmrec.failures import FailureLog
from helmrec.memory.miss_curves import GRID, JointCurves
from helmrec.policies import make_policy, needs_curves
from helmrec.serve.settings import ServeConfig
from helmrec.steps import Step, Steps
from helmrec.types import UserId

NO_POLICY = "none"  # only admin calls move the boundary
_SHOWN_MOVES = 5


@dataclass(frozen=True, slots=True)
class LayerView:
    """The proposal of one layer of the controller, and its reason."""

    name: str
    alpha: float
    note: str


@dataclass(frozen=True, slots=True)
class MoveView:
    """A move of the boundary."""

    time_s: float  # of the wall clock
    start_alpha: float
    alpha: float
    reason: str


@dataclass(frozen=True, slots=True)
class ControlView:
    """The controller's decision for the last window."""

    policy: str
    mode: str
    asked_alpha: float | None  # None: no move
    reason: str  # empty if it does not move and gives no reason
    expected_gain_ms: float | None
    measured_ms: float | None  # mean latency of the window; None: no answers
    predicted_ms: float | None  # for this window, predicted one window earlier
    last_move: str | None  # its predicted and its realised gain
    layers: list[LayerView]  # in order; the last one decides
    moves: list[MoveView]  # the last few, newest first


class Steering:
    """A policy by name, with the settings it runs under and the moves it made."""

    def __init__(self, name: str, slo_ms: float, tick_s: float = 1.0) -> None:
        self._name = name
        self._policy = make_policy(name)
        self._slo_ms = slo_ms
        self._tick_s = tick_s
        self._moves: deque[MoveView] = deque(maxlen=_SHOWN_MOVES)

    @classmethod
    def of(cls, config: ServeConfig) -> "Steering | None":
        """Make the policy of the settings; None if they name none."""
        return None if config.policy == NO_POLICY else cls(config.policy, config.slo_ms, config.tick_s)

    def warm_up(self) -> None:
        """Compile what the policy compiles on first use: compilation between two steps would delay all requests."""
        scratch = make_policy(self._name)
        for _ in range(2):  # the second window has a prediction to be compared with
            scratch.decide(_made_up_window())

    def rebalancer(self, engine: Steered) -> Rebalancer:
        return Rebalancer(engine, self._policy, self._slo_ms, self._tick_s)

    @property
    def learned(self) -> dict[str, list[float]]:
        """State that the policy learned while serving, to keep over a restart; empty for a policy without any."""
        inner = self._inner
        return inner.learned if isinstance(inner, Helm) else {}

    def relearn(self, learned: Mapping[str, list[float]]) -> None:
        """Restore state that the same policy learned on the same model, pool and device."""
        inner = self._inner
        if isinstance(inner, Helm) and learned:
            inner.relearn(learned)

    @property
    def _inner(self) -> Policy:
        return self._policy.policy if isinstance(self._policy, Limited) else self._policy

    def reset(self) -> None:
        """Reset the policy to its initial state."""
        self._policy.reset()

    def failed_view(self, error: Exception) -> ControlView:
        """Return the view of a policy that has failed."""
        reason = f"the policy failed ({type(error).__name__}: {error}): alpha is frozen until a mode is set"
        return ControlView(self._name, "freeze", None, reason, None, None, None, None, [], list(self._moves))

    def view(self, decision: Decision | None, mode: Mode, now_s: float) -> ControlView:
        """Return the view after a decision, or before the first one in a mode. `now_s` is by the wall clock."""
        move = None if decision is None else decision.move
        if decision is not None and move is not None:
            self._moves.appendleft(MoveView(now_s, decision.window.alpha_target, move.alpha, move.reason))
        reason = "no window has ended yet" if decision is None else "" if move is None else move.reason
        why = None if decision is None else decision.explanation
        return ControlView(
            policy=self._name,
            mode=mode,
            asked_alpha=None if move is None else move.alpha,
            reason="frozen" if mode == "freeze" else reason,
            expected_gain_ms=None if move is None else move.expected_gain_ms,
            measured_ms=None if why is None else why.measured_ms,
            predicted_ms=None if why is None else why.predicted_ms,
            last_move=None if why is None or why.last_move is None else describe_move(why.last_move),
            layers=[] if why is None else [LayerView(one.layer, one.alpha, one.reason) for one in why.proposals],
            moves=list(self._moves),
        )


class _CurvesMayFail:
    """An engine whose miss curves are None for a window in which computing them failed."""

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
    """Runs a policy on a served engine. Failures of the policy do not affect the engine's steps.

    After a failure alpha is frozen and the policy does not run until a mode is set; then it starts from its initial
    state. `tick` is called by one thread, the other methods by any.
    """

    def __init__(self, steering: Steering, engine: Steered, failures: FailureLog, now_s: float) -> None:
        """`failures` counts under "controller" and "miss curves". `now_s` is by the wall clock."""
        self._steering = steering
        self._engine = _CurvesMayFail(engine, failures)
        self._failures = failures
        self._rebalancer = steering.rebalancer(self._engine)
        self._is_failed = False
        self.view = steering.view(None, "adaptive", now_s)

    def record(self, user_id: UserId, latency_ms: float | None) -> None:
        """Record an answered request, or a refused one (None)."""
        if not self._is_failed:  # without ticks, recorded requests would pile up
            self._rebalancer.record(user_id, latency_ms)

    def tick(self, now_s: float, wall_s: float) -> None:
        """If a window has ended, run the policy and move the boundary as it decides."""
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
            self._steering.warm_up()
        except Exception as error:
            self._freeze(error)

    def set_mode(self, mode: Mode, wall_s: float) -> None:
        """Set the mode. A policy that has failed is reset and runs again."""
        if self._is_failed:
            self._steering.reset()
            self._rebalancer = self._steering.rebalancer(self._engine)
            self._is_failed = False
        self._rebalancer.mode = mode
        self.view = self._steering.view(None, mode, wall_s)

    def inherit(self, old: "Controller") -> None:
        """Take over the mode of another controller."""
        self._rebalancer.mode = old._rebalancer.mode

    def relearn(self, old: "Controller") -> None:
        """Take over the learned state of a controller of the same model, pool and device."""
        try:
            self._steering.relearn(old._steering.learned)
        except Exception as error:
            self._failures.note("controller", error, "the learned state of the policy is lost")

    def _freeze(self, error: Exception) -> None:
        self._is_failed = True
        self._failures.note("controller", error, "the policy failed and alpha is frozen until a mode is set")
        self.view = self._steering.failed_view(error)


def with_curves(policy: str, engine: EngineConfig) -> EngineConfig:
    """Return the engine's settings, with miss curves if the policy uses them."""
    if policy == NO_POLICY or not needs_curves(policy):
        return engine
    return engine.model_copy(update={"miss_curves": True})


def _made_up_window() -> WindowStats:
    """A second with enough steps and curves for a decision, in arrays of the same types as those of an engine."""
    num_steps, splits, half = 64, np.array(GRID), np.full(len(GRID), 0.5)
    splits.flags.writeable = half.flags.writeable = False  # else loops would be compiled again for an engine's curves
    steps = np.ones((num_steps, len(Step)))
    steps[:, Step.END_S] = np.arange(num_steps)
    traffic = Traffic(0.0, 1.0, num_steps, num_steps, 0.5, 1.0, 1.0, 1.0, 80.0, 1.0, 0, 0.5, 0.5, 0.0)
    curves = JointCurves(splits, 1e3, half, half, half, half, half, half)
    return WindowStats(traffic, 0.5, 0.5, 0.0, 1.0, 1 << 20, 64, 16, 512, 32, 0.5, 0.5, 1.0, 1.0, 1.0, curves, steps)
