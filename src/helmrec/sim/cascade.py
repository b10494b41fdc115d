"""The cascade around a ranker: retrieval, pre-processing, ranking, and what is known when.

Values and arithmetic only. Whoever replays it sends a signal when retrieval begins and the rank when it ends.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen

FloatArray = NDArray[np.float64]


class CascadeConfig(Frozen):
    """Stages before ranking. RelayGR leaves tens of milliseconds to ranking; the other times are our choice."""

    retrieval_ms: float = Field(50.0, ge=0, description="from the user's coming to its candidates, on average")
    preprocessing_ms: float = Field(20.0, ge=0, description="from the candidates to those that are ranked, on average")
    spread: float = Field(0.4, ge=0, le=1, description="each stage takes its time give or take this share")
    budget_ms: float = Field(50.0, gt=0, description="what ranking may take")

    def rank_times(self, signal_s: FloatArray, rng: np.random.Generator) -> FloatArray:
        """When the ranks of signals that came then are asked for."""
        stages = np.array([self.retrieval_ms, self.preprocessing_ms]) / 1e3
        factor = 1 + self.spread * rng.uniform(-1, 1, (signal_s.size, stages.size))
        return signal_s + (factor * stages).sum(axis=1)
