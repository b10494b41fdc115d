"""Designs that were tried: what a network sees, what it may do, and what it is rewarded for."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.control.costs import Floats
from helmrec.control.latency import ALPHAS
from helmrec.control.observation import Sight, Signal
from helmrec.errors import ConfigError
from helmrec.train.fleet import Outcome

REACH = 0.1  # largest change of alpha in a second, as of `Limits`
_NEAR = (-0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2)
_WHOLE = tuple(np.linspace(0.03, 0.9, 10).round(3).tolist())
_WORST = 2.0  # logarithm of latency over the least one, beyond which it is as bad as can be
_ON_CURVES = ("alpha", "gain", "distance", "newest_gain", "newest_distance")
_ALL = tuple(signal.name.lower() for signal in Signal if signal not in (Signal.LOW, Signal.HIGH))


class Actions(NamedTuple):
    """What each action adds to alpha: a step, and shares of the ways to the least of both predicted curves."""

    steps: tuple[float, ...]
    shares: tuple[float, ...]
    newest_shares: tuple[float, ...]

    def targets(self, chosen: NDArray[np.int64], signals: Floats) -> Floats:
        """Where nodes with these signals, (nodes, columns of Signal), are sent."""
        steps, shares, newest_shares = np.array(self)[:, chosen]
        way = shares * signals[:, Signal.DISTANCE] + newest_shares * signals[:, Signal.NEWEST_DISTANCE]
        targets = signals[:, Signal.ALPHA] + np.clip(steps + way, -REACH, REACH)
        return np.clip(targets, ALPHAS[0], ALPHAS[-1])


_STEPS = Actions((-0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1), (0.0,) * 7, (0.0,) * 7)
_WAYS = Actions((0.0, -0.03, 0.03, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.3, 1.0, 0.0, 0.0), (0.0,) * 5 + (0.3, 1.0))


class Design(NamedTuple):
    """`move_cost` is subtracted from the reward per unit of travel."""

    near: tuple[float, ...]
    whole: tuple[float, ...]
    signals: tuple[str, ...]
    actions: Actions
    reward: Literal["expected", "measured", "tail"]
    move_cost: float

    @property
    def sight(self) -> Sight:
        signals = np.array([Signal[name.upper()] for name in self.signals], np.int64)
        return Sight(np.array(self.near, float), np.array(self.whole, float), signals)

    def rewards(self, outcome: Outcome, travel: Floats) -> Floats:
        """One per node; 0 is the best."""
        if self.reward == "expected":
            lost = outcome.expected
        elif self.reward == "measured":
            lost = outcome.measured
        else:
            lost = (outcome.measured + outcome.tail) / 2
        return -np.minimum(lost, _WORST) - self.move_cost * travel


DESIGNS = {
    "curves": Design(_NEAR, (), _ON_CURVES, _STEPS, "expected", 0.0),
    "records": Design(_NEAR, (), _ALL, _STEPS, "measured", 0.05),
    "tails": Design(_NEAR, _WHOLE, _ALL, _STEPS, "tail", 0.05),
    "expected": Design(_NEAR, _WHOLE, _ALL, _STEPS, "expected", 0.05),
    "ways": Design(_NEAR, _WHOLE, _ALL, _WAYS, "expected", 0.05),
}


def design(name: str) -> Design:
    if name not in DESIGNS:
        raise ConfigError(f"design must be one of {', '.join(DESIGNS)}, got {name!r}")
    return DESIGNS[name]
