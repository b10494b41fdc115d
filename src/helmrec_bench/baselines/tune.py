"""The one way every baseline is tuned: random search with the same number of trials over a stated space."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from helmrec.control.policy import Policy
from helmrec.errors import ConfigError

Value = float | int | str
Settings = Mapping[str, Value]


class Uniform(NamedTuple):
    """A number anywhere between two."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


class LogUniform(NamedTuple):
    """A positive number whose magnitude is as likely anywhere between two."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(np.exp(rng.uniform(np.log(self.low), np.log(self.high))))


class Whole(NamedTuple):
    """A whole number from low to high, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


class OneOf(NamedTuple):
    """One of some values."""

    values: tuple[Value, ...]

    def draw(self, rng: np.random.Generator) -> Value:
        return self.values[int(rng.integers(len(self.values)))]


Space = Mapping[str, Uniform | LogUniform | Whole | OneOf]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of policy: what may be tuned of it, and how one is made."""

    name: str
    space: Space
    build: Callable[[Settings], Policy]  # settings left out keep their defaults


@dataclass(frozen=True, slots=True)
class TunedTrial:
    settings: Settings
    loss: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best of all trials, the first of which were the defaults."""

    best: TunedTrial
    trials: tuple[TunedTrial, ...]


def tune(family: Family, loss: Callable[[Policy], float], budget: int, rng: np.random.Generator) -> Tuned:
    """Judge the defaults and `budget - 1` random settings by `loss`, lower is better.

    A loss that is not a number counts as infinite: a policy that breaks its node must not win.
    """
    if budget < 1:
        raise ConfigError(f"budget must be at least 1, got {budget}")
    drawn = [{name: range_.draw(rng) for name, range_ in family.space.items()} for _ in range(budget - 1)]
    if not family.space:
        drawn = []  # nothing to tune: one trial says it all
    trials = tuple(TunedTrial(settings, _judged(loss(family.build(settings)))) for settings in ({}, *drawn))
    return Tuned(min(trials, key=lambda trial: trial.loss), trials)


def _judged(loss: float) -> float:
    return float("inf") if np.isnan(loss) else float(loss)
