from dataclasses import replace

import numpy as np
import pytest

from helmrec.calibrate.fit import fit
from helmrec.costs.calibrated import CostTerms
from tests.calibrate.made_up import made_up

TRUE = CostTerms(
    compute_floor_ms=0.25,
    compute_token_us=0.07,
    compute_pair_ns=0.017,
    compute_row_ns=2.5,
    host_floor_ms=0.4,
    host_request_ms=0.09,
    host_token_us=0.04,
    host_row_ns=4.0,
    background_ms=0.1,
    intake_ms=0.14,
    hit_gb_per_s=1_800.0,
    alone_gb_per_s=27.0,
    beside_gb_per_s=27.0 * 0.75,
    sorted_alone_gb_per_s=49.0,
    sorted_beside_gb_per_s=49.0 * 0.75,
    sorted_from_rows=16_384.0,
    beside_slowdown=0.12,
    reload_gb_per_s=38.0,
    reload_floor_ms=0.0,
    reload_exposed=0.8,
)


def test_terms_of_a_known_device_are_found_again() -> None:
    fitted = fit([made_up("dlrmv3", TRUE), made_up("wide", TRUE)])
    for name, value in TRUE._asdict().items():
        assert getattr(fitted.terms, name) == pytest.approx(value, rel=0.02, abs=1e-9), name
    assert all(ratio == pytest.approx(1.0, abs=0.005) for ratio in fitted.ratios.values())
    assert any(case.startswith("wide, ") for case in fitted.ratios)


def test_noise_moves_the_terms_a_little_only() -> None:
    fitted = fit([made_up("dlrmv3", TRUE, noise=0.03), made_up("wide", TRUE, noise=0.03)])
    for name in ("compute_token_us", "compute_pair_ns", "sorted_alone_gb_per_s", "sorted_beside_gb_per_s"):
        assert getattr(fitted.terms, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert np.median(np.abs(np.array(list(fitted.ratios.values())) - 1)) < 0.03


def test_one_shape_lays_what_its_rows_cost_to_its_tokens() -> None:
    terms = fit([made_up("dlrmv3", TRUE)]).terms
    assert terms.compute_row_ns == 0
    assert terms.compute_token_us == pytest.approx(TRUE.compute_token_us + 6 * TRUE.compute_row_ns / 1e3, rel=0.02)
    assert terms.sorted_alone_gb_per_s == pytest.approx(TRUE.sorted_alone_gb_per_s, rel=0.02)


def test_where_steps_run_in_turn_nothing_is_beside_anything() -> None:
    in_turn = TRUE._replace(sorted_from_rows=0.0, alone_gb_per_s=TRUE.sorted_alone_gb_per_s)
    terms = fit([made_up("dlrmv3", in_turn, overlaps=False)]).terms
    assert terms.beside_slowdown == 0
    assert terms.beside_gb_per_s == terms.alone_gb_per_s == terms.sorted_alone_gb_per_s == terms.sorted_beside_gb_per_s
    assert terms.sorted_alone_gb_per_s == pytest.approx(in_turn.sorted_alone_gb_per_s, rel=0.02)


def test_a_step_that_went_wrong_does_not_pull_the_others_along() -> None:
    measured = made_up("dlrmv3", TRUE)
    first = measured.timed[0]
    stalled = replace(first, ends_ms=(first.ends_ms[0] * 20,))
    kept = replace(measured, timed=(stalled, *measured.timed[1:]))
    assert fit([kept]).terms.compute_pair_ns == pytest.approx(TRUE.compute_pair_ns, rel=0.03)
