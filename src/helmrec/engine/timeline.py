"""Timelines: when the stages of a step began and ended, by the clock or by events in streams of a card.

Nothing here waits for the device: events are read after their step has ended. It does not know what a stage does.
"""

from collections.abc import Callable
from enum import IntEnum
from math import nan
from typing import NamedTuple

import torch

from helmrec.clock import Clock

STEPS_IN_FLIGHT = 2  # steps that run at once, at most
TIMELINES = STEPS_IN_FLIGHT + 1  # used in turn; that of the step that ended last is read until the next one has ended


class Mark(IntEnum):
    """Points in a step, each marked in the stream whose work it delimits."""

    LOADING = 0  # loads of pages from the host begin
    LOADED = 1
    READING = 2  # reads of rows begin
    READ = 3
    COMPUTING = 4  # the rows have been read
    EMBEDDED = 5  # rows are needed no longer
    WAITING = 6  # for pages from the host
    RESUMED = 7
    ENDED = 8


_NUM_MARKS = len(Mark)


class StageTimes(NamedTuple):
    """Milliseconds of the stages of a step; NaN where a stage was not timed."""

    host_ms: float  # planning, layout and launch
    rows_ms: float  # reading rows and pages; time in which both are read counts once
    compute_ms: float  # after its rows were read, without the wait for its pages


class Timeline:
    """The marks of one step by the clock: its stages run in the caller's thread, one after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = [nan] * _NUM_MARKS
        self._began_s = self._left_s = nan

    def begin(self, began_s: float) -> None:
        """Start a new step, on which the host has worked since `began_s`."""
        self._began_s, self._left_s = began_s, nan
        self._at_s = [nan] * _NUM_MARKS

    def leave_host(self) -> None:
        """Mark the end of the host's work on the step."""
        self._left_s = self._clock.now()

    def mark(self, mark: Mark, stream: torch.cuda.Stream | None = None) -> None:
        """Mark a point in a stream, after the work enqueued so far; None is the current stream."""
        self._at_s[mark] = self._clock.now()

    def stages(self, *, has_loads: bool) -> StageTimes:
        """Return the times of the stages, once the step has ended. has_loads: it loaded pages from the host."""
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
        """Return the time of the host, without the loads of pages, which it did itself."""
        return (self._left_s - self._began_s) * 1e3 - load_ms

    def _ms(self, begin: Mark, end: Mark) -> float:
        return (self._at_s[end] - self._at_s[begin]) * 1e3


class DeviceTimeline(Timeline):
    """The marks of one step by reused events on a card; its host stage by the clock."""

    def __init__(self, clock: Clock, make_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        super().__init__(clock)
        make_event = make_event or _make_event
        self._events = [make_event() for _ in Mark]
        self._is_marked = [False] * _NUM_MARKS  # in this step

    def begin(self, began_s: float) -> None:
        self._began_s, self._left_s = began_s, nan
        self._is_marked = [False] * _NUM_MARKS

    def mark(self, mark: Mark, stream: torch.cuda.Stream | None = None) -> None:
        self._events[mark].record(stream)
        self._is_marked[mark] = True

    def event(self, mark: Mark) -> torch.cuda.Event:
        """Return the event of a mark, for streams to wait for; it is recorded again by a later step."""
        return self._events[mark]

    def _host_ms(self, load_ms: float) -> float:
        """Return the time of the host, which only launched the loads."""
        return (self._left_s - self._began_s) * 1e3

    def _ms(self, begin: Mark, end: Mark) -> float:
        """Return the time between two marks of a step that has ended; NaN if one was not marked."""
        if not (self._is_marked[begin] and self._is_marked[end]):
            return nan
        return self._events[begin].elapsed_time(self._events[end])


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
