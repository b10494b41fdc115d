"""Failures that must not end serving are all counted, and few of them logged."""

import logging

import pytest

from helmrec.clock import ManualClock
from helmrec.failures import FailureLog


def test_all_failures_are_counted_and_one_a_minute_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    failures = FailureLog(logging.getLogger("helmrec.test"), clock)
    for second in range(130):
        failures.note("audit", ValueError(f"number {second}"))
        clock.advance(1)
    failures.note("curves", KeyError("another"))
    assert (failures.count("audit"), failures.count("curves"), failures.count()) == (130, 1, 131)
    assert failures.count("audit", "curves") == 131
    assert failures.count("never failed") == 0
    lines = [(record.message, vars(record)["failures"], vars(record)["not_logged"]) for record in caplog.records]
    assert lines == [
        ("background work failed: audit", 1, 0),
        ("background work failed: audit", 61, 59),
        ("background work failed: audit", 121, 59),
        ("background work failed: curves", 1, 0),
    ]
    assert "ValueError: number 120" in caplog.text
