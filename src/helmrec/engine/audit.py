"""The self-audit: one request in N is scored again without caches and compared."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared

log = logging.getLogger("helmrec.engine")
Scores = NDArray[np.float32]
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # what a dtype's rounding explains


class Auditor:
    """Counts requests, picks every N-th, and keeps what came of it."""

    def __init__(self, every: int, tolerance: float, score_plainly: Callable[[Prepared], Scores]) -> None:
        self._every = every  # 0: never
        self._tolerance = tolerance
        self._score_plainly = score_plainly
        self._since_last = 0
        self.audits = 0
        self.mismatches = 0
        self.max_error = 0.0

    def look_at(self, requests: Sequence[Prepared], scores: Sequence[Scores]) -> None:
        """Audit those of the served requests whose turn it is. One whose scores are not finite was not served."""
        for request, served in zip(requests, scores, strict=True) if self._every else ():
            if not np.isfinite(served).all():
                continue
            self._since_last += 1
            if self._since_last == self._every:
                self._since_last = 0
                self._compare(request, served)

    def _compare(self, request: Prepared, served: Scores) -> None:
        error = float(np.abs(self._score_plainly(request) - served).max())
        self.audits += 1
        self.max_error = max(self.max_error, error)
        if not error <= self._tolerance:
            self.mismatches += 1
            user_id = request.history.user_id
            log.error("audit: scores of user %d differ by %.3g from an uncached run", user_id, error)
