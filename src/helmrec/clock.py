"""Where time comes from: passed in, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment, never running backwards."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now_s += seconds
