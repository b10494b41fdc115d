"""Progress and duration of the phases of an engine's start."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger("helmrec.engine")
_LOG_EVERY_S = 5.0
COMPILED = "compiled at the first start, for about half a minute in all, and kept"  # a note on phases


class StartUp:
    """Times the phases of a start; logs the beginning of each, and its progress every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._logged_s = clock()
        self._phase: str | None = None
        self.seconds: dict[str, float] = {}  # by phase that has ended, in order

    def begin(self, phase: str, note: str = "") -> None:
        """End the current phase, if any, and begin the next. `note` says in the log why it may take long."""
        self.end()
        self._phase, self._began_s = phase, self._clock()
        self._logged_s = self._began_s
        log.info("start: %s%s", phase, f" ({note})" if note else "")

    def progress(self, done: int, total: int) -> None:
        """Log the progress of the current phase, at most every few seconds."""
        now_s = self._clock()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.info("start: %s, %.0f%%", self._phase, 100 * done / max(1, total))

    def end(self) -> None:
        """End the current phase, if any."""
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + self._clock() - self._began_s
            self._phase = None

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
