"""Designs that were tried: what a network sees, and what it is rewarded for."""

from typing import Literal, NamedTuple

import numpy as np

from helmrec.errors import ConfigError
from helmrec.ppo.observation import Sight, Signal
from helmrec.types import FloatArray
from helmrec_bench.train.fleet import FleetOutcome

STEPS = (-0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1)  # of alpha in a second; `Limits` allows no larger ones
_NEAR = (-0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2)
_WHOLE = tuple(np.linspace(0.03, 0.9, 10).round(3).tolist())
_WORST = 2.0  # logarithm of latency over the least one, beyond which it is as bad as can be
_ON_CURVES = ("alpha", "gain", "distance", "newest_gain", "newest_distance")
_ALL = tuple(signal.name.lower() for signal in Signal if signal not in (Signal.LOW, Signal.HIGH))


class Design(NamedTuple):
    """`move_cost` is subtracted from the reward per unit of travel."""

    near: tuple[float, ...]
    whole: tuple[float, ...]
    signals: tuple[str, ...]
    reward: Literal["expected", "measured", "tail"]
    move_cost: float

    @property
    def sight(self) -> Sight:
        signals = np.array([Signal[name.upper()] for name in self.signals], np.int64)
        return Sight(np.array(self.near, float), np.array(self.whole, float), signals)

    def rewards(self, outcome: FleetOutcome, travel: FloatArray) -> FloatArray:
        """One per node; 0 is the best."""
        if self.reward == "expected":
            lost = outcome.expected
        elif self.reward == "measured":
            lost = outcome.measured
        else:
            lost = (outcome.measured + outcome.tail) / 2
        return -np.minimum(lost, _WORST) - self.move_cost * travel


DESIGNS = {
    "curves": Design(_NEAR, (), _ON_CURVES, "expected", 0.0),
    "records": Design(_NEAR, (), _ALL, "measured", 0.05),
    "tails": Design(_NEAR, _WHOLE, _ALL, "tail", 0.05),
    "expected": Design(_NEAR, _WHOLE, _ALL, "expected", 0.05),
}


def design(name: str) -> Design:
    if name not in DESIGNS:
        raise ConfigError(f"design must be one of {', '.join(DESIGNS)}, got {name!r}")
    return DESIGNS[name]
