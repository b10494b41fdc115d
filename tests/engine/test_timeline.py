"""Stages of a step by the clock, and by events that happen when a test says so."""

from math import isnan, nan
from typing import Any

import pytest

from helmrec.clock import ManualClock
from helmrec.engine.timeline import DeviceTimeline, Mark, StageTimes, Timeline


class FakeEvent:
    """An event of a card whose time is a test's."""

    at_ms = nan

    def record(self, stream: Any) -> None:
        """The stream stands for the time at which the card comes to the event."""
        self.at_ms = stream

    def elapsed_time(self, last: "FakeEvent") -> float:
        return last.at_ms - self.at_ms


def on_a_card(times_ms: dict[Mark, float], clock: ManualClock | None = None) -> DeviceTimeline:
    """A step whose marks the card comes to at these times."""
    timeline = DeviceTimeline(clock or ManualClock(), make_event=FakeEvent)  # type: ignore[arg-type]
    timeline.begin(0.0)
    for mark, at_ms in times_ms.items():
        timeline.mark(mark, at_ms)  # type: ignore[arg-type]
    timeline.leave_host()
    return timeline


PLAIN = {Mark.READING: 10.0, Mark.READ: 14.0, Mark.COMPUTING: 15.0, Mark.ENDED: 22.0}


def with_loads(begin_ms: float, end_ms: float, waits_ms: float = 0.0) -> StageTimes:
    """The plain step, beside it pages that come from the host."""
    pages = {Mark.LOADING: begin_ms, Mark.LOADED: end_ms, Mark.WAITING: 16.0, Mark.RESUMED: 16.0 + waits_ms}
    return on_a_card(PLAIN | pages).stages(has_loads=True)


def by_the_clock(clock: ManualClock, timeline: Timeline, *, has_loads: bool) -> StageTimes:
    """A step that spends 1 ms on the host, 2 on each load, 4 on rows and 8 on compute."""
    timeline.begin(clock.now())
    if has_loads:
        timeline.mark(Mark.LOADING)
        clock.advance(2e-3)
        timeline.mark(Mark.LOADED)
    clock.advance(1e-3)
    timeline.leave_host()
    timeline.mark(Mark.READING)
    clock.advance(4e-3)
    timeline.mark(Mark.READ)
    timeline.mark(Mark.COMPUTING)
    if has_loads:
        timeline.mark(Mark.WAITING)
        timeline.mark(Mark.RESUMED)
    clock.advance(8e-3)
    timeline.mark(Mark.ENDED)
    return timeline.stages(has_loads=has_loads)


def test_by_the_clock_each_stage_has_its_own_time() -> None:
    clock = ManualClock(100.0)
    timeline = Timeline(clock)
    assert by_the_clock(clock, timeline, has_loads=False) == pytest.approx((1, 4, 8))
    assert by_the_clock(clock, timeline, has_loads=True) == pytest.approx((1, 6, 8)), "loading is no work of the host"
    assert by_the_clock(clock, timeline, has_loads=False) == pytest.approx((1, 4, 8)), "nothing is left of a step"


def test_by_the_clock_a_stage_that_was_not_marked_is_not_a_number() -> None:
    clock = ManualClock()
    timeline = Timeline(clock)
    by_the_clock(clock, timeline, has_loads=False)
    timeline.begin(clock.now())
    timeline.leave_host()
    stages = timeline.stages(has_loads=False)
    assert stages.host_ms == 0
    assert isnan(stages.rows_ms)
    assert isnan(stages.compute_ms)


def test_on_a_card_rows_and_compute_are_between_their_events() -> None:
    assert on_a_card(PLAIN).stages(has_loads=False) == (0, 4, 7)


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "rows_ms"),
    [
        (2.0, 5.0, 7.0),
        (2.0, 12.0, 12.0),
        (2.0, 20.0, 18.0),
        (11.0, 13.0, 4.0),
        (12.0, 17.0, 7.0),
        (16.0, 18.0, 6.0),
    ],
    ids=["before", "into the rows", "around the rows", "within the rows", "past the rows", "after"],
)
def test_time_in_which_pages_and_rows_came_counts_once(begin_ms: float, end_ms: float, rows_ms: float) -> None:
    assert with_loads(begin_ms, end_ms).rows_ms == pytest.approx(rows_ms)


def test_waiting_for_pages_is_not_computing() -> None:
    assert with_loads(2.0, 19.0, waits_ms=3.0).compute_ms == pytest.approx(4)


@pytest.mark.parametrize("missing", [Mark.READING, Mark.READ, Mark.LOADING, Mark.LOADED])
def test_a_row_stage_with_an_event_that_did_not_happen_is_not_a_number(missing: Mark) -> None:
    marks = PLAIN | {Mark.LOADING: 1.0, Mark.LOADED: 2.0, Mark.WAITING: 16.0, Mark.RESUMED: 16.0}
    stages = on_a_card({mark: at_ms for mark, at_ms in marks.items() if mark != missing}).stages(has_loads=True)
    assert isnan(stages.rows_ms)
    assert stages.compute_ms == 7


def test_events_of_the_step_before_are_not_those_of_this_one() -> None:
    timeline = on_a_card(PLAIN)
    events = list(timeline._events)
    timeline.begin(0.0)
    assert isnan(timeline.stages(has_loads=False).rows_ms)
    assert timeline._events == events, "the same events serve step after step"
