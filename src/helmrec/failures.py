"""Counts and logs failures of work that must not end serving, without flooding the log.

It does not know the work: the code that catches a failure reports it here and continues.
"""

import logging
import threading
from collections import Counter

from helmrec.clock import Clock, MonotonicClock

_EVERY_S = 60.0


class FailureLog:
    """Counts failures by kind of work; logs the first of each kind at once, then at most one a minute.

    Each line contains the number of failures that were not logged before it. Any thread may call it.
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
        """Count a failure of `work`, and log it with its traceback at most once a minute."""
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
        """Return the number of failures of the named work, or of all work if none is named."""
        with self._lock:
            return sum(self._counts[each] for each in work) if work else self._counts.total()
