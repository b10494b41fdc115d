"""Who moves a served engine's boundary, and what it may be shown to want."""

import tomllib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helmrec.config import EngineConfig
from helmrec.control.by_name import make_policy, needs_curves
from helmrec.control.policy import Limited, Policy
from helmrec.control.rebalancer import Decision, Mode, Rebalancer, Steered
from helmrec.control.service_cost import ServiceCost
from helmrec.errors import ConfigError
from helmrec.serve.settings import ServeConfig

_SHOWN_MOVES = 5


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


class Steering:
    """A policy by name, and how to show it."""

    def __init__(self, name: str, slo_ms: float, tick_s: float = 1.0, cost: ServiceCost | None = None) -> None:
        self._name = name
        self._policy = make_policy(name, cost)
        self._slo_ms = slo_ms
        self._tick_s = tick_s
        self._moves: deque[MoveView] = deque(maxlen=_SHOWN_MOVES)

    @classmethod
    def of(cls, config: ServeConfig) -> "Steering | None":
        """As the settings say; None if nobody is to move the boundary."""
        if config.policy is None:
            return None
        cost = None if config.policy_cost is None else read_cost(Path(config.policy_cost))
        return cls(config.policy, config.slo_ms, config.tick_s, cost)

    def rebalancer(self, engine: Steered) -> Rebalancer:
        return Rebalancer(engine, self._policy, self._slo_ms, self._tick_s)

    @property
    def learned(self) -> tuple[float, ...]:
        """What the policy learned online, to be kept over a restart; nothing of one that learns nothing."""
        weights = getattr(self._inner, "residual_weights", ())
        return tuple(float(weight) for weight in weights)

    def relearn(self, learned: tuple[float, ...]) -> None:
        """Give back what was learned, if it is of this policy's shape."""
        if learned and len(learned) == len(self.learned):
            setattr(self._inner, "residual_weights", np.array(learned))  # noqa: B010 - only some policies have it

    @property
    def _inner(self) -> Policy:
        return self._policy.policy if isinstance(self._policy, Limited) else self._policy

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
            layers=list(layers_of(self._policy)),
            moves=list(self._moves),
        )


def seen_by(policy: str | None, engine: EngineConfig) -> EngineConfig:
    """The engine's settings, with miss curves where the policy looks at them."""
    if policy is None or not needs_curves(policy):
        return engine
    return engine.model_copy(update={"miss_curves": True})


def layers_of(policy: Policy) -> Iterable[LayerView]:
    """What each layer of a policy said last; nothing of a policy without layers, or that has said nothing yet."""
    told = getattr(getattr(policy, "policy", policy), "explanation", None)  # `policy.policy`: what limits hold
    if told is None:
        return
    yield LayerView("base", told.base_alpha, f"step {told.base_step:+.2f}")
    yield LayerView("residual", told.base_alpha + told.residual, f"{told.residual:+.4f} learned online")
    is_calm = told.burst == "calm"
    note = "calm" if is_calm else f"{told.burst}, about {told.burst_left_s:.0f} s left"
    yield LayerView("burst", None if is_calm else told.burst_alpha, note)
    note = "adapting is put aside" if told.is_aside else "best constant lately"
    yield LayerView("guardrail", told.static_alpha, note)


def read_cost(path: Path) -> ServiceCost:
    """Service costs from a TOML file, a line per coefficient."""
    try:
        return ServiceCost(**tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"policy_cost cannot be read ({error}), got {str(path)!r}") from None
