"""Clocks. They are passed in, so that tests and the simulator control time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since a fixed moment; never decreases."""

    def now(self) -> float: ...


class MonotonicClock:
    """The monotonic clock of the machine."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now_s += seconds
