import itertools

import pytest

from helmrec.costs.calibrated import ComputeWork, compute_ms, default_cost, host_ms
from helmrec.costs.learned import StageCosts
from helmrec.costs.routing import (
    RequestWork,
    RouterCost,
    Stages,
    expected_ms,
    service_ms,
    stages_of,
)
from tests.router.cases import COST


def test_compute_is_the_published_formula() -> None:
    new, resident, candidates = 300, 3_700, 500
    pairs = new * (resident + new / 2) + candidates * (new + resident)
    by_hand = 0.5 + 0.2e-3 * (new + candidates) + 0.02e-6 * pairs
    assert stages_of(COST, RequestWork(resident, new, candidates, 0)) == pytest.approx(Stages(by_hand, 0.0))


def test_the_bus_brings_absent_rows() -> None:
    assert stages_of(COST, RequestWork(1_000, 0, 0, 10_000)).bus_ms == pytest.approx(10_000 * 0.04e-3)
    assert stages_of(COST, RequestWork(0, 0, 0, 20_000)).bus_ms == pytest.approx(20_000 * 0.02e-3)


def test_a_lone_request_pays_both_stages_and_a_saturated_node_the_longer() -> None:
    stages = Stages(compute_ms=2.0, bus_ms=3.0)
    assert expected_ms(COST, stages, 0.0) == 5.0
    assert service_ms(COST, stages) == 3.0
    assert service_ms(COST, Stages(2.0, 0.5)) == pytest.approx(2.0 - 0.5 * 7 / 8), "eight requests share the floor"
    assert expected_ms(COST, stages, 1e6) - 1e6 == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize("stages", [Stages(2.0, 3.0), Stages(0.5, 0.0), Stages(0.7, 12.0)])
def test_a_longer_queue_is_never_a_sooner_answer(stages: Stages) -> None:
    expected = [expected_ms(COST, stages, queue_ms / 10) for queue_ms in range(500)]
    assert all(later > sooner for sooner, later in itertools.pairwise(expected))


def test_a_calibration_gives_the_costs_of_the_simulator() -> None:
    calibration = default_cost()
    terms, theirs = RouterCost.from_calibration(calibration.terms(), 6, 1_024), calibration.terms()
    new, resident, candidates, missed = 700, 6_000, 2_048, 5_000
    ours = stages_of(terms, RequestWork(resident, new, candidates, missed))
    pairs = new * (resident + new / 2) + candidates * (resident + new)
    tokens = new + candidates
    step_ms = compute_ms(theirs, ComputeWork(tokens, pairs, tokens * 6.0)) + host_ms(theirs, 1, tokens, tokens * 6.0)
    assert ours.compute_ms == pytest.approx(step_ms + theirs.intake_ms)
    rows_ms = missed * 1_024 / (theirs.alone_gb_per_s * 1e6)
    assert ours.bus_ms == pytest.approx(rows_ms)


def stage_costs(**terms: float) -> StageCosts:
    return StageCosts(**dict.fromkeys(StageCosts._fields, 0.0) | terms)


def test_learned_costs_are_the_sum_of_what_steps_took() -> None:
    slow = stage_costs(host_step_ms=1.0, rows_step_ms=0.5, compute_step_ms=2.5, host_request_ms=0.25, overlap=1.0)
    fast = stage_costs(token_ms=2e-3, host_token_ms=4e-3, read_row_ms=1e-3, pair_ms=1e-6, missed_row_ms=6e-3)
    fast = fast._replace(host_missed_row_ms=2e-3)
    cost = RouterCost.learned([slow, fast], rows_per_token=3)
    assert cost.floor_ms == pytest.approx(2.0), "of two engines, the mean"
    assert cost.request_ms == pytest.approx(0.125)
    assert cost.token_us == pytest.approx((2 + 4 + 3) / 2)
    assert cost.pair_ns == pytest.approx(0.5)
    assert cost.row_us == cost.sorted_row_us == pytest.approx(4.0)
    assert stages_of(cost, RequestWork(0, 0, 0, 1_000_000)).bus_ms == pytest.approx(4_000.0), "never in another order"


def test_before_anything_is_learned_no_device_is_assumed() -> None:
    cost = RouterCost.learned([], rows_per_token=3)
    assert cost == RouterCost.unknown()
    large = RequestWork(resident_tokens=0, new_tokens=14_000, num_candidates=2_048, absent_rows=400_000)
    stages = stages_of(cost, large)
    assert expected_ms(cost, stages, 0.0) < 1e-3, "any queue counts more"
    assert stages.compute_ms > stages_of(cost, large._replace(resident_tokens=7_000, new_tokens=7_000)).compute_ms > 0
