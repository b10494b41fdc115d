"""Failures of work that must not end serving: each is counted, and logged without flooding the log.

Knows nothing of the work. Whoever catches a failure reports it here and goes on.
"""

import logging
import threading
from collections import Counter

from helmrec.clock import Clock, MonotonicClock

_EVERY_S = 60.0


class FailureLog:
    """Counts failures by the work that failed; logs the first of each at once, then at most one a minute.

    A line in between is not lost: the next one says how many were not logged. Any thread may call it.
    """

    def __init__(self, log: logging.Logger, clock: Clock | None = None, every_s: float = _EVERY_S) -> None:
        self._log = log
        self._clock = clock or MonotonicClock()
        self._every_s = every_s
        self._counts: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, work: str, error: BaseException, message: str = "background work failed") -> None:
        """Count a failure of `work`, and log it with its traceback if it is time."""
        with self._lock:
            self._counts[work] += 1
            now_s = self._clock.now()
            last_s = self._logged_s.get(work)
            if last_s is not None and now_s - last_s < self._every_s:
                self._unlogged[work] += 1
                return
            self._logged_s[work] = now_s
            extra = {"work": work, "failures": self._counts[work], "not_logged": self._unlogged.pop(work, 0)}
        self._log.error("%s: %s", message, work, exc_info=error, extra=extra)

    def count(self, *work: str) -> int:
        """Failures of these so far; of everything, if none is named."""
        with self._lock:
            return sum(self._counts[each] for each in work) if work else self._counts.total()
