"""A policy that goes where a trained predictor says the next window's best split is. Knows no model and no cost."""

from collections import deque
from typing import Protocol

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Move, WindowStats
from helmrec_bench.baselines.features import Floats, features


class Predictor(Protocol):
    """Trained already; the same input gives the same answer."""

    num_windows: int

    def predict(self, inputs: Floats) -> float:
        """The wanted split from `(num_windows, NUM_FEATURES)`, oldest window first."""


class FollowSettings(Frozen):
    """How a predicted split is followed."""

    min_distance: float = Field(0.02, ge=0, le=1, description="distance of alpha below which to stay")
    slew: float = Field(0.05, gt=0, le=1, description="largest change of alpha per window")
    smoothing: float = Field(0.5, gt=0, le=1, description="weight of the newest prediction in the moving average")


class PredictivePolicy:
    """Follows predictions, smoothed, with deadband and slew; stays until enough windows were seen."""

    def __init__(self, predictor: Predictor, settings: FollowSettings | None = None) -> None:
        self.predictor = predictor
        self.settings = settings or FollowSettings()
        self._seen: deque[Floats] = deque(maxlen=predictor.num_windows)
        self._wanted: float | None = None

    def decide(self, stats: WindowStats) -> Move | None:
        if not stats.traffic.num_requests:
            return None
        self._seen.append(features(stats))
        if len(self._seen) < self.predictor.num_windows:
            return None
        predicted = min(max(self.predictor.predict(np.array(self._seen)), 0.0), 1.0)
        last = predicted if self._wanted is None else self._wanted
        self._wanted = last + self.settings.smoothing * (predicted - last)
        distance = self._wanted - stats.alpha_target
        if abs(distance) < self.settings.min_distance:
            return None
        step = float(np.clip(distance, -self.settings.slew, self.settings.slew))
        return Move(stats.alpha_target + step, f"predicted {self._wanted:.3f}")

    def reset(self) -> None:
        self._seen.clear()
        self._wanted = None
