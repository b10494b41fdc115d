"""The collector of a process that serves: young collections only, full ones when idle and short."""

import gc
import logging
from collections.abc import Iterator

import pytest

from helmrec.clock import ManualClock
from helmrec.collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector(clock=ManualClock().now)
    yield made
    made.release()


def cycle() -> list[object]:
    itself: list[object] = []
    itself.append(itself)
    return itself


def test_a_collector_that_was_not_taken_over_leaves_everything_as_it_is() -> None:
    before = gc.get_threshold()
    collector = Collector()
    collector.settle()
    collector.when_idle()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_no_full_collection_comes_by_itself(collector: Collector) -> None:
    collector.take_over()
    collector.settle()
    kept = [[i] for i in range(200_000)]
    assert collector.stats().full == 0
    assert collector.stats().young > 10
    assert len(kept) == 200_000


def test_what_exists_when_serving_begins_is_frozen_and_given_back(collector: Collector) -> None:
    before = gc.get_threshold()
    collector.take_over()
    collector.settle()
    assert gc.get_freeze_count() > 1_000
    collector.release()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_garbage_goes_in_a_full_collection_when_idle() -> None:
    clock = ManualClock()
    collector = Collector(clock=clock.now)
    try:
        collector.take_over()
        collector.settle()
        garbage = [cycle() for _ in range(40_000)]
        gc.collect(1)  # they are old now: no young collection finds them
        del garbage
        clock.advance(60)
        collector.when_idle()
        assert collector.stats().full == 1
        assert collector.stats().tracked_objects < 20_000
        clock.advance(60)
        collector.when_idle()  # nothing has been made since
        assert collector.stats().full == 1
    finally:
        collector.release()


def test_a_full_collection_that_would_take_long_is_put_off_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    collector = Collector(full_budget_ms=0.5, clock=clock.now)
    try:
        collector.take_over()
        collector.settle()
        kept = [[i] for i in range(40_000)]
        clock.advance(60)
        with caplog.at_level(logging.WARNING, "helmrec.collector"):
            collector.when_idle()
        assert collector.stats().full == 0
        assert collector.stats().postponed == 1
        assert collector.stats().tracked_objects >= len(kept)
        assert "not run" in caplog.text
    finally:
        collector.release()


def test_a_model_swapped_in_under_load_is_frozen_without_a_collection(collector: Collector) -> None:
    collector.take_over()
    collector.settle()
    kept = [[i] for i in range(5_000)]
    frozen = gc.get_freeze_count()
    collector.settle()
    assert collector.stats().full == 0
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_objects_are_counted_once_a_minute_under_load_without_a_collection() -> None:
    clock = ManualClock()
    collector = Collector(clock=clock.now)
    try:
        collector.take_over()
        collector.settle()
        clock.advance(60)
        collector.when_busy()
        before = collector.stats().tracked_objects
        kept = [[i] for i in range(40_000)]
        clock.advance(30)
        collector.when_busy()
        assert collector.stats().tracked_objects == before, "it is not time yet"
        clock.advance(30)
        collector.when_busy()
        assert collector.stats().tracked_objects >= before + len(kept)
        assert collector.stats().full == 0
    finally:
        collector.release()
