"""The cost model that baselines predict with: units, the queue, and what overlap changes."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec_bench.baselines.service_cost import ServiceCost, compute_ms, predict, smooth, wait_ms
from tests.control.bowl import COST, TOKENS, Bowl


def test_an_uncached_request_pays_tokens_and_half_of_all_pairs() -> None:
    cost = ServiceCost(token_ms=0.01, pair_ms=1e-6, floor_ms=2.0, missed_row_ms=1.0)
    assert compute_ms(cost, 1_000.0, 1_000.0) == pytest.approx(2 + 10 + 0.5)
    assert compute_ms(cost, 0.0, 1_000.0) == 2.0


def test_the_wait_is_that_of_fixed_service_times_and_poisson_arrivals() -> None:
    """M/D/1 by Lindley's recursion."""
    rng = np.random.default_rng(0)
    gaps_ms = rng.exponential(1_000 / 70, 400_000)
    waits = np.zeros(gaps_ms.size)
    for number in range(1, gaps_ms.size):
        waits[number] = max(0.0, waits[number - 1] + 10 - gaps_ms[number])
    assert wait_ms(np.array([10.0]), 70.0)[0] == pytest.approx(waits.mean(), rel=0.05)


def test_overload_is_finite_and_still_has_a_slope() -> None:
    waits = wait_ms(np.linspace(1, 40, 200), 100.0)
    assert np.all(np.isfinite(waits))
    assert np.all(np.diff(waits) > 0)


def test_the_wait_has_no_step_where_it_becomes_linear() -> None:
    service = np.array([9.4999, 9.5, 9.5001])
    assert np.ptp(wait_ms(service, 100.0)) < 0.05


def test_without_load_both_stages_simply_add_up() -> None:
    stats = Bowl(rate=1).window(0.5)
    predicted = predict(stats, COST)
    assert predicted is not None
    np.testing.assert_allclose(predicted.latency_ms, predicted.compute_ms + predicted.lead_ms, rtol=0.02)


def test_overlap_shortens_the_queue_not_the_lone_request() -> None:
    overlapping = COST.model_copy(update={"is_overlapping": True})
    for rate, is_shorter in ((1, False), (80, True)):
        stats = Bowl(rate=rate).window(0.5)
        both, apart = predict(stats, overlapping), predict(stats, COST)
        assert both is not None
        assert apart is not None
        assert (both.latency_at(0.5) < 0.9 * apart.latency_at(0.5)) == is_shorter


def test_the_host_s_time_comes_before_the_rows() -> None:
    """A host that works for every computed token makes the other stage the slower one, and tokens dearer."""
    stats, busy = Bowl(rate=1).window(0.5), COST.model_copy(update={"host_token_ms": 0.002, "host_floor_ms": 0.3})
    with_host, without = predict(stats, busy), predict(stats, COST)
    assert with_host is not None
    assert without is not None
    np.testing.assert_allclose(with_host.compute_ms, without.compute_ms)
    at = int(np.argmin(np.abs(with_host.alphas - 0.5)))
    added = 0.3 + 0.002 * Bowl().computed(0.5)
    assert with_host.lead_ms[at] - without.lead_ms[at] == pytest.approx(added, rel=1e-6)


def test_load_changes_which_split_is_best() -> None:
    """With overlap, a busy node wants its slower stage short; an idle one wants the sum short."""
    cost = ServiceCost(token_ms=0.001, missed_row_ms=0.0005, is_overlapping=True)
    best = {}
    for rate in (1, 400):
        predicted = predict(Bowl(emb_scale=0.2, kv_scale=0.45, rate=rate).window(0.5), cost)
        assert predicted is not None
        best[rate] = predicted.alphas[np.argmin(predicted.latency_ms)]
    assert abs(best[1] - best[400]) > 0.03


def test_there_is_nothing_to_predict_without_curves_or_requests() -> None:
    stats = Bowl().window(0.5)
    assert predict(replace(stats, curves=None), COST) is None
    assert predict(replace(stats, traffic=replace(stats.traffic, num_requests=0, num_served=0)), COST) is None


def test_the_node_of_these_tests_is_the_model_s_own() -> None:
    stats = Bowl().window(0.4)
    predicted = predict(stats, COST)
    assert predicted is not None
    assert stats.new_tokens_per_request + stats.resident_tokens_per_request == TOKENS
    assert predicted.latency_at(0.4) == pytest.approx(stats.traffic.mean_ms)
    assert predicted.latency_at(0.45) == pytest.approx(Bowl().latency_ms(0.45), rel=0.01)


def test_a_smoothed_curve_is_scipy_s_between_its_ends() -> None:
    """SciPy takes other slopes at the two ends; in between it is the same method."""
    interpolate = pytest.importorskip("scipy.interpolate")
    rng = np.random.default_rng(0)
    for size in (4, 9, 20):
        known_at = np.sort(rng.random(size))
        for known in (np.sort(rng.random(size))[::-1].copy(), rng.random(size), np.ones(size)):
            at = np.linspace(known_at[1], known_at[-2], 200)
            np.testing.assert_allclose(
                smooth(at, known_at, known), interpolate.PchipInterpolator(known_at, known)(at), atol=1e-12
            )


def test_a_smoothed_curve_goes_through_its_points_and_never_beyond_them() -> None:
    known_at, known = np.array([0.1, 0.2, 0.5, 0.9]), np.array([9.0, 3.0, 2.9, 0.0])
    np.testing.assert_allclose(smooth(known_at, known_at, known), known, atol=1e-12)
    fine = smooth(np.linspace(0.1, 0.9, 500), known_at, known)
    assert np.all(np.diff(fine) <= 1e-12)
    assert fine.min() >= 0


def test_two_points_make_a_line() -> None:
    assert smooth(np.array([0.25]), np.array([0.0, 1.0]), np.array([4.0, 0.0])) == pytest.approx(3.0)
