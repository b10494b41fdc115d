"""The log of steps: each is taken once, and of too many the latest."""

import numpy as np
import pytest

from helmrec.steps import Step, StepLog, no_steps, sum_steps
from tests.control.made_up_steps import timed, work_of


def record(number: int) -> tuple[float, ...]:
    """A step whose columns tell its number and their own place."""
    return tuple(100.0 * number + column for column in Step)


def numbers(log: StepLog) -> list[int]:
    return (log.take()[:, Step.BEGIN_S] // 100).astype(int).tolist()


def test_a_new_log_holds_no_step() -> None:
    assert StepLog().take().shape == (0, len(Step))


def test_every_step_is_taken_once_in_the_order_they_ended() -> None:
    log = StepLog(capacity=4)
    taken = []
    for number in range(11):
        log.add(record(number))
        if number % 3 == 1:
            taken.append(numbers(log))
    assert taken == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]
    assert numbers(log) == []


def test_a_log_that_is_just_full_loses_nothing() -> None:
    log = StepLog(capacity=4)
    for number in range(4):
        log.add(record(number))
    assert numbers(log) == [0, 1, 2, 3]


def test_of_more_steps_than_fit_the_latest_are_left() -> None:
    log = StepLog(capacity=4)
    for number in range(7):
        log.add(record(number))
    assert numbers(log) == [3, 4, 5, 6]
    log.add(record(7))
    assert numbers(log) == [7]


def test_a_step_keeps_all_its_columns() -> None:
    log = StepLog()
    log.add(record(3))
    np.testing.assert_array_equal(log.take(), [record(3)])


def test_what_was_taken_does_not_change_when_steps_are_added() -> None:
    log = StepLog(capacity=2)
    for number in range(2):
        log.add(record(number))
    taken = log.take()
    for number in range(2, 4):
        log.add(record(number))
    np.testing.assert_array_equal(taken, [record(0), record(1)])


def test_work_behind_a_step_is_added_to_the_latest() -> None:
    log = StepLog(capacity=2)
    for host_ms in (1.0, 2.0, 3.0):
        log.add((0.0,) * Step.HOST_MS + (host_ms, 0.0, 0.0))
    log.add_host_ms(0.5)
    assert log.take()[:, Step.HOST_MS].tolist() == [2.0, 3.5]


@pytest.mark.parametrize("num", [0, 1, 50])
def test_steps_are_summed_as_columns_are(num: int) -> None:
    steps = timed(work_of(num, np.random.default_rng(num))) if num else no_steps()
    steps[::7, Step.COMPUTE_MS] = np.nan
    found = sum_steps(steps)
    assert found.requests == steps[:, Step.REQUESTS].sum()
    assert found.most_requests == steps[:, Step.REQUESTS].max(initial=0)
    assert found.tokens == steps[:, Step.TOKENS].sum()
    assert found.stages_ms == pytest.approx(np.nansum(steps[:, Step.HOST_MS :]))
