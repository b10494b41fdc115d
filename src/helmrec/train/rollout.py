"""Runs through lessons in which every second is seen from many splits: what distillation learns from."""

from dataclasses import dataclass, replace

import numpy as np

from helmrec.control.features import STEPS
from helmrec.control.network import NUM_HIDDEN, BasePolicy, as_layers, forward, join_layers
from helmrec.control.outlook import Crowding, Floats
from helmrec.control.policy import Move, WindowStats
from helmrec.sim.simulate import simulate
from helmrec.train.labels import FINE, costs_to_go, place_of
from helmrec.train.lessons import Lesson
from helmrec.train.observer import Observer

_VIEWS = 8  # splits each second is seen from, beside the one that was
_WARM_TICKS = 15


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Features, and what each step costs beyond the best one, in seconds' worth of cost."""

    features: Floats  # (examples, features)
    regrets: Floats  # (examples, STEPS)

    @staticmethod
    def joined(parts: "list[Examples]") -> "Examples":
        return Examples(
            np.concatenate([part.features for part in parts]), np.concatenate([part.regrets for part in parts])
        )


class Recorder:
    """A base on its own, shown recorded curves, that now and then takes a step at random and notes what it saw."""

    def __init__(self, lesson: Lesson, base: BasePolicy, rng: np.random.Generator, chance: float) -> None:
        self._lesson = lesson
        self._base = base
        self._rng = rng
        self._chance = chance
        self._observer = Observer(lesson.ground.service, base.crowding)
        self._costs = costs_to_go(lesson)
        self.seen: list[tuple[Floats, Floats]] = []

    def decide(self, stats: WindowStats) -> Move | None:
        tick = min(round(stats.traffic.end_s), len(self._lesson.curves)) - 1
        if not self._observer.observe(replace(stats, curves=self._lesson.curves[tick])):
            return None
        here = min(max(stats.alpha_target, FINE[0]), FINE[-1])
        features = self._observer.features(here)
        if _WARM_TICKS <= tick < self._costs.shape[0] - 5:
            others = self._rng.choice(FINE, _VIEWS, replace=False)
            for alpha in (here, *others):
                costs = self._costs[tick, place_of(np.array(alpha))]
                self.seen.append((self._observer.features(float(alpha)), costs - costs.min()))
        step = STEPS[int(self._rng.integers(len(STEPS)))] if self._rng.random() < self._chance else self._step(features)
        return Move(min(max(here + step, FINE[0]), FINE[-1]), "lesson")

    def _step(self, features: Floats) -> float:
        scores, hidden = np.zeros(len(STEPS)), np.zeros((2, NUM_HIDDEN))
        forward.py_func(as_layers.py_func(self._base.weights), features, hidden, scores)
        return STEPS[int(scores.argmax())]

    def reset(self) -> None:
        """One run each."""


def record(lesson: Lesson, base: BasePolicy, seed: int, chance: float = 0.3) -> Examples:
    """One run through a lesson from a split at random."""
    rng = np.random.default_rng(seed)
    recorder = Recorder(lesson, base, rng, chance)
    ground = lesson.ground
    simulate(ground.trace, ground.born_at(float(rng.choice(FINE))), ground.cost, recorder)
    features, regrets = zip(*recorder.seen, strict=True)
    return Examples(np.array(features), np.array(regrets))


def base_of(arrays: dict[str, Floats], crowding: Crowding) -> BasePolicy:
    return BasePolicy(join_layers(arrays), crowding, {})
