"""Control of Python's garbage collector, so that it does not delay requests.

A full collection visits every tracked object and stops all threads: for hundreds of milliseconds in a process that
has served for long. A serving process therefore freezes the objects that exist when it is ready, lets only young
objects be collected automatically, and runs full collections when it is idle, if they are expected to be short.
Reference counting frees everything else: serving creates no reference cycles, which tests check.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("helmrec.collector")
_YOUNG_OBJECTS = 5_000  # new objects between two automatic collections: one takes about half a millisecond
_YOUNG_PER_MIDDLE = 5  # so a middle collection visits 25,000 objects at most
_NEVER = 1_000_000_000
_PYTHON_DEFAULT = (700, 10, 10)
_FIRST_NS_PER_OBJECT, _LEAST_NS_PER_OBJECT = 100.0, 20.0  # before a full collection was timed, and at any time
_COUNT_EVERY_S, _COUNT_UNDER_LOAD_EVERY_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """Collections since the process started, and the objects that a full one would visit now."""

    young: int
    full: int
    longest_young_ms: float
    longest_full_ms: float  # of those while serving
    tracked_objects: int  # as last counted, at most a minute ago; frozen ones are not among them
    postponed: int  # full collections that were due and not run because they would have taken too long


class Collector:
    """Controls the collector of this process; `PROCESS` is the only instance. Does nothing until `take_over`."""

    def __init__(self, full_budget_ms: float = 50.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`full_budget_ms`: a full collection that is expected to take longer is not run, even when idle."""
        self._budget_ms = full_budget_ms
        self._clock = clock
        self._ns_per_object = _FIRST_NS_PER_OBJECT
        self._started_s = 0.0
        self._is_serving = False
        self._young = self._full = self._postponed = 0
        self._longest_young_s = self._longest_full_s = 0.0
        self._tracked = self._tracked_after_full = 0
        self._counted_s = -_COUNT_EVERY_S

    @property
    def is_taken_over(self) -> bool:
        return self._follow in gc.callbacks

    def take_over(self) -> None:
        """Turn automatic full collections off, for a process that serves."""
        if not self.is_taken_over:
            gc.callbacks.append(self._follow)
            gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_PER_MIDDLE, _NEVER)

    def release(self) -> None:
        """Undo `take_over` and `settle`."""
        if self.is_taken_over:
            gc.callbacks.remove(self._follow)
            gc.unfreeze()
            gc.set_threshold(*_PYTHON_DEFAULT)
            self._is_serving = False

    def settle(self) -> None:
        """Freeze all existing objects. Garbage is collected first, unless requests are served already."""
        if not self.is_taken_over:
            return
        if not self._is_serving:
            self._tracked = len(gc.get_objects())
            gc.collect()
        gc.freeze()
        self._is_serving = True
        self._tracked = self._tracked_after_full = 0

    def when_idle(self) -> None:
        """Call when idle: count objects every few seconds, and run a full collection if it is due and short."""
        if not self._count_if_due(_COUNT_EVERY_S):
            return
        if self._tracked < self._tracked_after_full + _YOUNG_OBJECTS * _YOUNG_PER_MIDDLE:
            return
        expected_ms = self._tracked * self._ns_per_object / 1e6
        if expected_ms > self._budget_ms:
            self._postponed += 1
            log.warning(
                "a full collection of %d objects is due and would take about %.0f ms, more than %.0f: not run",
                self._tracked,
                expected_ms,
                self._budget_ms,
            )
            return
        gc.collect()
        self._tracked_after_full = self._tracked = len(gc.get_objects())

    def when_busy(self) -> None:
        """Call while serving: count objects once a minute, which takes about a millisecond for 100,000 of them."""
        self._count_if_due(_COUNT_UNDER_LOAD_EVERY_S)

    def _count_if_due(self, every_s: float) -> bool:
        now_s = self._clock()
        if not self._is_serving or now_s - self._counted_s < every_s:
            return False
        self._counted_s = now_s
        self._tracked = len(gc.get_objects())
        return True

    def stats(self) -> CollectorStats:
        return CollectorStats(
            young=self._young,
            full=self._full,
            longest_young_ms=self._longest_young_s * 1e3,
            longest_full_ms=self._longest_full_s * 1e3,
            tracked_objects=self._tracked,
            postponed=self._postponed,
        )

    def _follow(self, phase: str, info: dict[str, int]) -> None:
        """Called by the interpreter before and after each collection."""
        now_s = self._clock()
        if phase == "start":
            self._started_s = now_s
            return
        took_s = now_s - self._started_s
        if info["generation"] == 2:
            if self._tracked:
                self._ns_per_object = max(_LEAST_NS_PER_OBJECT, took_s * 1e9 / self._tracked)
            if self._is_serving:
                self._full += 1
                self._longest_full_s = max(self._longest_full_s, took_s)
        else:
            self._young += 1
            self._longest_young_s = max(self._longest_young_s, took_s)


PROCESS = Collector()
