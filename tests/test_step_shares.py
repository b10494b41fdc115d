"""Shares of a stretch of time that steps took."""

import numpy as np
import pytest

from helmrec.steps import Step, Steps, busy_share, idle_share, latest, no_steps


def spans(*begin_and_end_s: tuple[float, float]) -> Steps:
    steps = np.zeros((len(begin_and_end_s), len(Step)))
    steps[:, [Step.BEGIN_S, Step.END_S]] = np.array(begin_and_end_s).reshape(-1, 2)
    return steps


@pytest.mark.parametrize(
    ("steps", "idle"),
    [
        (no_steps(), 1.0),
        (spans((10.0, 12.0)), 0.0),
        (spans((10.2, 10.4)), 0.9),
        (spans((9.0, 10.5), (11.5, 13.0)), 0.5),
        (spans((10.1, 10.5), (10.4, 10.6)), 0.75),
        (spans((10.4, 10.6), (10.1, 10.9)), 0.6),
        (spans((8.0, 9.0), (12.5, 13.0)), 1.0),
    ],
)
def test_idle_is_what_no_step_covers(steps: Steps, idle: float) -> None:
    assert idle_share(steps, 10.0, 12.0) == pytest.approx(idle)


def test_a_stage_that_was_not_timed_adds_nothing_and_no_stage_takes_longer_than_there_was() -> None:
    steps = spans((0.0, 1.0), (1.0, 2.0))
    steps[:, Step.ROWS_MS] = [300.0, np.nan]
    assert busy_share(steps, Step.ROWS_MS, 2.0) == pytest.approx(0.15)
    assert busy_share(steps, Step.ROWS_MS, 0.1) == 1.0
    assert busy_share(no_steps(), Step.ROWS_MS, 1.0) == 0.0


def test_of_more_steps_than_a_ring_holds_the_latest_are_there() -> None:
    ring = np.zeros((4, len(Step)))
    for number in range(11):
        ring[number % 4, Step.END_S] = number
    assert latest(ring, 9, 11)[:, Step.END_S].tolist() == [9, 10]
    assert latest(ring, 2, 11)[:, Step.END_S].tolist() == [7, 8, 9, 10]
    assert latest(ring, 11, 11).shape == (0, len(Step))
