"""Costs are learned from steps, of whatever device runs them."""

import numpy as np
import pytest

from helmrec.costs.learned import Estimator, StageCosts, add_steps
from helmrec.costs.least_squares import fit
from helmrec.steps import Step, no_steps
from tests.control.made_up_steps import COSTS, timed, work_of

STAGES = (Step.HOST_MS, Step.ROWS_MS, Step.COMPUTE_MS)
WORK = (
    (Step.REQUESTS, Step.TOKENS, Step.ROWS_MISSED),
    (Step.ROWS_READ, Step.ROWS_MISSED, Step.PAGES_RELOADED),
    (Step.TOKENS, Step.PAIRS),
)


def learned(*windows: np.ndarray) -> StageCosts:
    estimator = Estimator()
    for steps in windows:
        estimator.update(steps)
    assert estimator.costs is not None
    return estimator.costs


def test_exact_steps_give_the_exact_costs() -> None:
    found = learned(timed(work_of(300, np.random.default_rng(0))))
    for name, value in COSTS._asdict().items():
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


def test_host_time_of_missed_rows_is_not_laid_to_tokens() -> None:
    slow = COSTS._replace(host_missed_row_ms=50 * COSTS.host_missed_row_ms)
    found = learned(timed(work_of(300, np.random.default_rng(12)), slow))
    assert found.host_missed_row_ms == pytest.approx(slow.host_missed_row_ms, rel=0.01)
    assert found.host_token_ms == pytest.approx(slow.host_token_ms, rel=0.01)


def test_steps_with_a_stage_that_was_not_timed_are_left_out() -> None:
    steps = timed(work_of(300, np.random.default_rng(4)))
    steps[::3, Step.ROWS_MS] = np.nan
    assert learned(steps).missed_row_ms == pytest.approx(COSTS.missed_row_ms, rel=0.01)


def test_a_device_that_becomes_twice_as_slow_is_noticed() -> None:
    rng = np.random.default_rng(5)
    slow = COSTS._replace(token_ms=2 * COSTS.token_ms, missed_row_ms=2 * COSTS.missed_row_ms)
    found = learned(*[timed(work_of(500, rng)) for _ in range(4)], *[timed(work_of(500, rng), slow) for _ in range(40)])
    assert found.token_ms == pytest.approx(slow.token_ms, rel=0.05)
    assert found.missed_row_ms == pytest.approx(slow.missed_row_ms, rel=0.05)


def test_no_term_is_negative_whatever_is_measured() -> None:
    rng = np.random.default_rng(6)
    steps = work_of(100, rng)
    for stage in STAGES:
        steps[:, stage] = rng.exponential(5.0, len(steps))
    steps[:, Step.END_S] = np.cumsum(rng.exponential(0.01, len(steps)))
    assert min(learned(steps)) >= 0


def test_overlap_is_the_share_of_steps_launched_while_another_was_under_way() -> None:
    rng = np.random.default_rng(7)
    apart, overlapping = timed(work_of(300, rng)), timed(work_of(300, rng), COSTS._replace(overlap=1.0))
    assert learned(apart).overlap == 0
    assert learned(overlapping).overlap > 0.99
    overlapping[:, Step.BEGIN_S : Step.REQUESTS] += apart[-1, Step.END_S]
    assert 0.45 < learned(np.concatenate((apart, overlapping))).overlap < 0.55


def test_steps_with_pauses_between_them_do_not_overlap() -> None:
    steps = timed(work_of(300, np.random.default_rng(8)), gap_s=0.01)
    assert learned(steps).overlap == 0


def test_an_estimator_that_goes_on_from_another_one_is_that_one() -> None:
    rng = np.random.default_rng(9)
    first, second = Estimator(), Estimator()
    first.update(timed(work_of(200, rng)))
    second.relearn(first.learned)
    assert second.costs == first.costs is not None
    steps = timed(work_of(50, rng), COSTS._replace(token_ms=2 * COSTS.token_ms))
    for estimator in (first, second):
        estimator.update(steps)
    assert second.costs == first.costs
    assert second.learned == first.learned


def test_what_is_too_little_to_know_costs_is_too_little_after_a_restart() -> None:
    first, second = Estimator(), Estimator()
    first.update(timed(work_of(20, np.random.default_rng(10))))
    second.relearn(first.learned)
    assert second.costs is None
    second.update(timed(work_of(20, np.random.default_rng(11))))
    assert second.costs is not None


def added_plainly(
    steps: np.ndarray, half_life: float, terms: np.ndarray, moments: np.ndarray, targets: np.ndarray
) -> tuple[float, ...]:
    """The plain twin of `add_steps`."""
    steps = steps[np.isfinite(steps[:, STAGES]).all(axis=1)]
    keep = 2.0 ** (-len(steps) / half_life)
    moments *= keep
    targets *= keep
    for place, stage in enumerate(STAGES):
        work = np.zeros((len(steps), targets.shape[1]))
        work[:, 0], work[:, 1 : 1 + len(WORK[place])] = 1, steps[:, WORK[place]]
        took_ms, expected_ms = steps[:, stage], work @ terms[place]
        scale_ms = np.where(expected_ms > 0, np.maximum(expected_ms, took_ms / 2), took_ms)
        weight = 1 / np.maximum(scale_ms, 1e-3) ** 2
        moments[place] += (work.T * weight) @ work
        targets[place] += work.T @ (weight * steps[:, stage])
    num_overlapped = np.count_nonzero(steps[1:, Step.BEGIN_S] < steps[:-1, Step.END_S])
    return float(len(steps)), float(num_overlapped), keep


@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize("num", [0, 1, 50])
def test_steps_are_added_as_plain_sums_are(num: int, is_fitted: bool) -> None:
    rng = np.random.default_rng(num)
    steps = timed(work_of(num, rng)) if num else no_steps()
    steps[::7, Step.COMPUTE_MS] = np.nan
    steps[::5, Step.HOST_MS] = 0.0
    before = rng.random((len(STAGES), 4, 4)), rng.random((len(STAGES), 4))
    terms = rng.random((len(STAGES), 4)) * is_fitted
    ours, plain = ([one.copy() for one in before] for _ in range(2))
    assert add_steps(steps, 100.0, terms, *ours) == pytest.approx(added_plainly(steps, 100.0, terms, *plain))
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other)


def fitted_plainly(moments: np.ndarray, target: np.ndarray, ridge: float) -> np.ndarray:
    """The plain twin of `fit`."""
    scale = np.sqrt(moments.diagonal())
    used, terms = np.flatnonzero(scale > 0), np.zeros(scale.size)
    while used.size:
        scaled = moments[np.ix_(used, used)] / np.outer(scale[used], scale[used]) + ridge * np.eye(used.size)
        fitted = np.linalg.solve(scaled, target[used] / scale[used])
        if (fitted >= 0).all():
            terms[used] = fitted / scale[used]
            break
        used = used[fitted >= 0]
    return terms


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_equals_its_plain_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.uniform(0, 1, (50, 4)) * (1.0, 300.0, 1e5, seed % 3)  # every third without any work of the last kind
    target = work @ rng.normal(1.0, 1.5, 4) + rng.normal(0, 0.1, 50)  # some terms are negative
    moments, products = work.T @ work, work.T @ target
    assert np.allclose(fit(moments, products, 1e-6), fitted_plainly(moments, products, 1e-6))
