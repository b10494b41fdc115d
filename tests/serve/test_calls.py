"""Calls in the log: errors one by one, refusals of a server that starts or is overloaded summed up."""

import logging
from typing import Any

import pytest

from helmrec.serve.calls import CallLog


@pytest.fixture(autouse=True)
def _at_level_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "helmrec.serve")


def conclude(calls: CallLog, status: int, route: str = "/v1/rank") -> None:
    calls.conclude(calls.request_id(""), "POST", route, status, 0.001)


def shown(records: list[logging.LogRecord]) -> list[tuple[Any, ...]]:
    return [(vars(each)["route"], vars(each)["status"], vars(each).get("not_logged", 0)) for each in records]


def test_refusals_are_logged_once_in_ten_seconds_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    counted, now_s = list[int](), [0.0]
    calls = CallLog(lambda route, status, seconds, cause: counted.append(status), lambda: now_s[0])
    for second in range(25):
        now_s[0] = float(second)
        conclude(calls, 503)
        if second == 3:
            conclude(calls, 503, "/v1/prefill")
    assert shown(caplog.records) == [
        ("/v1/rank", 503, 0),
        ("/v1/prefill", 503, 0),
        ("/v1/rank", 503, 9),
        ("/v1/rank", 503, 9),
    ]
    assert len(counted) == 26, "every call is counted"


def test_other_errors_are_logged_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    calls = CallLog(lambda *_: None, lambda: 0.0)
    for status in (400, 400, 500, 500):
        conclude(calls, status)
    assert [status for _, status, _ in shown(caplog.records)] == [400, 400, 500, 500]


def test_all_refusals_are_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "helmrec.serve")
    calls = CallLog(lambda *_: None, lambda: 0.0)
    for _ in range(3):
        conclude(calls, 429)
    assert len(caplog.records) == 3
