"""The self-audit: scores one request in N again without caches and compares."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from helmrec.engine.intake import Prepared

log = logging.getLogger("helmrec.engine")
Scores = NDArray[np.float32]


class Auditor:
    """Audits every N-th request and counts the mismatches."""

    def __init__(self, every: int, tolerance: float, score_uncached: Callable[[Prepared], Scores]) -> None:
        self._every = every  # 0: never
        self._tolerance = tolerance
        self._score_uncached = score_uncached
        self._since_last = 0
        self.audits = 0
        self.mismatches = 0
        self.max_error = 0.0

    def is_due(self, num_requests: int) -> bool:
        """Whether one of the next requests is audited, as far as their scores are finite."""
        return self._every > 0 and self._since_last + num_requests >= self._every

    def audit(self, requests: Sequence[Prepared], scores: Sequence[Scores]) -> None:
        """Audit every N-th of the served requests. A request whose scores are not finite was not served."""
        for request, served in zip(requests, scores, strict=True) if self._every else ():
            if not np.isfinite(served).all():
                continue
            self._since_last += 1
            if self._since_last == self._every:
                self._since_last = 0
                self._compare(request, served)

    def _compare(self, request: Prepared, served: Scores) -> None:
        error = float(np.abs(self._score_uncached(request) - served).max())
        self.audits += 1
        self.max_error = max(self.max_error, error)
        if not error <= self._tolerance:
            self.mismatches += 1
            user_id = request.history.user_id
            log.error("audit: scores of user %s differ by %.3g from an uncached run", user_id, error)
