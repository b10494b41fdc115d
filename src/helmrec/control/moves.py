"""A record of every move: what it was predicted to gain, and what came of it once its bytes had turned over.

Gains are in stage time per request, which does not depend on how many arrive.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from helmrec.control.latency import Prediction, value_at
from helmrec.control.layers import JUDGED_S, SETTLED
from helmrec.control.policy import WindowStats
from helmrec.steps import sum_steps


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """Steps of the boundary that followed each other without a pause are one move."""

    time_s: float  # when it began
    start: float
    alpha: float
    layer: str  # that asked for it
    predicted_gain_ms: float
    realised_gain_ms: float | None = None  # None: not known yet, or traffic changed or it moved on before it was


class MoveLog:
    """Follows every move until its gain is known, or until the next one begins."""

    def __init__(self) -> None:
        self._before_ms = self._stage_ms = math.nan  # before the move that is judged, and recently
        self._moved_s = -math.inf
        self._gains_ms = np.zeros(2)  # realised and predicted; each judged move halves those before
        self.last: MoveRecord | None = None

    def note(self, window: WindowStats) -> None:
        """Take a window in: the last move is judged when it has settled and been served from for a while."""
        now_s, steps = window.traffic.end_s, sum_steps(window.steps)
        if steps.requests:
            took_ms = steps.stages_ms / steps.requests
            weight = 2.0 ** (-(now_s - window.traffic.start_s) / JUDGED_S)
            self._stage_ms = took_ms if math.isnan(self._stage_ms) else took_ms + weight * (self._stage_ms - took_ms)
        is_due = now_s - self._moved_s > 2 * JUDGED_S and abs(window.alpha - window.alpha_target) <= SETTLED
        if is_due and self.last is not None and math.isfinite(self._before_ms):
            gain_ms = self._before_ms - self._stage_ms
            self._gains_ms = self._gains_ms / 2 + (gain_ms, self.last.predicted_gain_ms)
            self.last = replace(self.last, realised_gain_ms=gain_ms)
            self._before_ms = math.nan

    def begin(self, window: WindowStats, alpha: float, layer: str, newest: Prediction) -> None:
        """The boundary is sent to `alpha`."""
        now_s, start = window.traffic.end_s, window.alpha_target
        if self.last is not None and now_s - self._moved_s <= JUDGED_S / 2:
            time_s, start = self.last.time_s, self.last.start
        else:
            time_s, self._before_ms = now_s, self._stage_ms
        self._moved_s = now_s
        here_ms, there_ms = value_at(newest.stages_ms, start), value_at(newest.stages_ms, alpha)
        self.last = MoveRecord(time_s, start, alpha, layer, here_ms - there_ms)

    @property
    def realised_share(self) -> float | None:
        """Realised over predicted gain of late moves; None: no gain was predicted and judged."""
        realised_ms, predicted_ms = self._gains_ms.tolist()
        return realised_ms / predicted_ms if predicted_ms > 0 else None

    @property
    def idle_since_s(self) -> float:
        """When the boundary was moved last."""
        return self._moved_s
