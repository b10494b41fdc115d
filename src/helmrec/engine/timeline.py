"""When the stages of a step began and ended: by the clock, or by events where they run in streams of a card.

Nothing here waits for the device: events are read after their step has ended. It does not know what a stage does.
"""

from collections.abc import Callable
from enum import IntEnum
from math import nan
from typing import NamedTuple

import torch

from helmrec.clock import Clock

STEPS_IN_FLIGHT = 2  # so many timelines are used in turn


class Mark(IntEnum):
    """Points in a step, each marked in the stream whose work it limits."""

    LOADING = 0  # pages begin to come from the host
    LOADED = 1
    READING = 2  # rows begin to be read
    READ = 3
    COMPUTING = 4  # the rows are there
    WAITING = 5  # for pages from the host
    RESUMED = 6
    ENDED = 7


class StageTimes(NamedTuple):
    """Milliseconds of the stages of a step; NaN where a stage was not timed."""

    host_ms: float  # choosing, laying out and launching it, without waits for steps before it
    rows_ms: float  # reading rows and pages; while both were read, time counts once
    compute_ms: float  # from when its rows were there, without the wait for its pages


class Timeline:
    """Marks of one step by the clock: its stages run in the caller's thread, one after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = [nan] * len(Mark)
        self._began_s = self._left_s = nan
        self._waited_s = 0.0

    def begin(self, began_s: float) -> None:
        """Forget the step before; the host has worked on this one since `began_s`."""
        self._began_s, self._left_s, self._waited_s = began_s, nan, 0.0
        self._at_s = [nan] * len(Mark)

    def leave_host(self) -> None:
        """The host has done its part."""
        self._left_s = self._clock.now()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event of another step; the wait is no work on this one."""
        start_s = self._clock.now()
        event.synchronize()
        self._waited_s += self._clock.now() - start_s

    def mark(self, mark: Mark, stream: torch.cuda.Stream | None = None) -> None:
        """What was enqueued in the stream comes before this point, what follows after it; None is the current one."""
        self._at_s[mark] = self._clock.now()

    def stages(self, *, has_loads: bool) -> StageTimes:
        """How long they took, once the step has ended. has_loads: pages came from the host for it."""
        rows_ms, compute_ms = self._ms(Mark.READING, Mark.READ), self._ms(Mark.COMPUTING, Mark.ENDED)
        load_ms = 0.0
        if has_loads:
            load_ms = self._ms(Mark.LOADING, Mark.LOADED)
            first_ms = self._ms(Mark.LOADING, Mark.READING)  # from the first page to the first row
            both_ms = min(load_ms, first_ms + rows_ms) - max(0.0, first_ms)
            rows_ms += load_ms - max(0.0, both_ms)
            compute_ms -= self._ms(Mark.WAITING, Mark.RESUMED)
        return StageTimes(self._host_ms(load_ms), rows_ms, compute_ms)

    def _host_ms(self, load_ms: float) -> float:
        """The host itself loaded the pages, which is no work of its own stage."""
        return (self._left_s - self._began_s - self._waited_s) * 1e3 - load_ms

    def _ms(self, begin: Mark, end: Mark) -> float:
        return (self._at_s[end] - self._at_s[begin]) * 1e3


class DeviceTimeline(Timeline):
    """Marks of one step by events on a card; its host stage by the clock. The same events serve step after step."""

    def __init__(self, clock: Clock, make_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        super().__init__(clock)
        make_event = make_event or _make_event
        self._events = [make_event() for _ in Mark]
        self._marked: set[Mark] = set()  # in this step

    def begin(self, began_s: float) -> None:
        super().begin(began_s)
        self._marked.clear()

    def mark(self, mark: Mark, stream: torch.cuda.Stream | None = None) -> None:
        self._events[mark].record(stream)
        self._marked.add(mark)

    def _host_ms(self, load_ms: float) -> float:
        """The host only launched the loads."""
        return (self._left_s - self._began_s - self._waited_s) * 1e3

    def _ms(self, begin: Mark, end: Mark) -> float:
        """NaN if one of the two was not marked, or has not come yet."""
        if begin not in self._marked or end not in self._marked:
            return nan
        first, last = self._events[begin], self._events[end]
        return first.elapsed_time(last) if first.query() and last.query() else nan


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
