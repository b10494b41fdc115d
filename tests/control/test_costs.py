"""Costs are learned from steps, of whatever device runs them."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from helmrec.control.costs import Estimator, StageCosts
from helmrec.steps import Step, no_steps
from tests.control.made_up_steps import COSTS, timed, work_of

STAGES = (Step.HOST_MS, Step.ROWS_MS, Step.COMPUTE_MS)


def learned(*windows: np.ndarray) -> StageCosts:
    estimator = Estimator()
    for steps in windows:
        estimator.update(steps)
    assert estimator.costs is not None
    return estimator.costs


def test_exact_steps_give_the_exact_costs() -> None:
    found = learned(timed(work_of(300, np.random.default_rng(0))))
    for name, value in asdict(replace(COSTS, spread=found.spread)).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.01, abs=1e-9), name


def test_steps_that_vary_by_a_tenth_give_stages_within_a_twentieth() -> None:
    rng = np.random.default_rng(1)
    steps = timed(work_of(600, rng))
    for stage in STAGES:
        steps[:, stage] *= 1 + 0.1 * rng.standard_normal(len(steps))
    found, fresh = learned(steps), work_of(200, rng)
    here, there = timed(fresh, found), timed(fresh)
    for stage in STAGES:
        assert here[:, stage].sum() == pytest.approx(there[:, stage].sum(), rel=0.05), stage


def test_nothing_is_known_before_there_are_steps_enough() -> None:
    estimator = Estimator()
    estimator.update(no_steps())
    estimator.update(timed(work_of(10, np.random.default_rng(2))))
    assert estimator.costs is None


def test_work_that_never_came_costs_nothing_and_spoils_nothing() -> None:
    found = learned(timed(work_of(300, np.random.default_rng(3), pages=0)))
    assert found.reloaded_page_ms == 0
    assert found.missed_row_ms == pytest.approx(COSTS.missed_row_ms, rel=0.01)


def test_steps_with_a_stage_that_was_not_timed_are_left_out() -> None:
    steps = timed(work_of(300, np.random.default_rng(4)))
    steps[::3, Step.ROWS_MS] = np.nan
    assert learned(steps).missed_row_ms == pytest.approx(COSTS.missed_row_ms, rel=0.01)


def test_a_device_that_becomes_twice_as_slow_is_noticed() -> None:
    rng = np.random.default_rng(5)
    slow = replace(COSTS, token_ms=2 * COSTS.token_ms, missed_row_ms=2 * COSTS.missed_row_ms)
    found = learned(*[timed(work_of(500, rng)) for _ in range(4)], *[timed(work_of(500, rng), slow) for _ in range(40)])
    assert found.token_ms == pytest.approx(slow.token_ms, rel=0.05)
    assert found.missed_row_ms == pytest.approx(slow.missed_row_ms, rel=0.05)


def test_no_term_is_negative_whatever_is_measured() -> None:
    rng = np.random.default_rng(6)
    steps = work_of(100, rng)
    for stage in STAGES:
        steps[:, stage] = rng.exponential(5.0, len(steps))
    steps[:, Step.END_S] = np.cumsum(rng.exponential(0.01, len(steps)))
    assert min(asdict(learned(steps)).values()) >= 0


def test_overlap_is_found_where_there_is_one() -> None:
    steps = work_of(300, np.random.default_rng(7))
    assert learned(timed(steps)).overlap < 1e-6
    assert learned(timed(steps, replace(COSTS, overlap=1.0))).overlap > 0.6


def test_pauses_between_steps_are_no_part_of_it() -> None:
    steps = timed(work_of(300, np.random.default_rng(8)), gap_s=0.01)
    assert learned(steps).overlap < 1e-6


@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_how_unequal_requests_are_is_found_in_steps_of_several(spread: float) -> None:
    rng = np.random.default_rng(9)
    steps = work_of(2_000, rng, pages=0)
    for line in steps:
        num = int(line[Step.REQUESTS])
        tokens = np.full(num, 3_000.0) if spread == 1 else rng.exponential(3_000.0, num)
        line[Step.TOKENS], line[Step.PAIRS] = tokens.sum(), 0
        line[Step.ROWS_READ] = line[Step.ROWS_MISSED] = 0
    costs = replace(COSTS, host_request_ms=0.0)
    assert learned(timed(steps, costs)).spread == pytest.approx(spread, rel=0.1)
