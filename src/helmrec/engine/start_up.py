"""How long the parts of a start take, and how far it is."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger("helmrec.engine")
_LOG_EVERY_S = 5.0


class StartUp:
    """Parts of a start, one after the other: logged as each begins, and every few seconds while it goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._logged_s = clock()
        self._part: str | None = None
        self.seconds: dict[str, float] = {}  # of each part that has ended, in order

    def begin(self, part: str) -> None:
        """The part before has ended."""
        self.end()
        self._part, self._began_s = part, self._clock()
        self._logged_s = self._began_s
        log.info("start: %s", part)

    def progress(self, done: int, total: int) -> None:
        """So much of the part is done."""
        now_s = self._clock()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.info("start: %s, %.0f%%", self._part, 100 * done / max(1, total))

    def end(self) -> None:
        if self._part is not None:
            self.seconds[self._part] = self.seconds.get(self._part, 0.0) + self._clock() - self._began_s
            self._part = None

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
