"""What windows say of other splits: fast loops against plain twins, and the newest part of the curves."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec.control.helm import new_memory, views
from helmrec.control.outlook import (
    NUM_SPLITS,
    Crowding,
    O,
    Outlook,
    Split,
    Terms,
    at_split,
    begin_outlook,
    blend_weights,
    count_arrivals,
    latency_ms,
    look,
)
from helmrec.control.policy import WindowStats
from helmrec.control.service_cost import with_host_tier
from helmrec.control.window import Seen, seen
from helmrec.memory.miss_curves import JointCurves
from tests.control.bowl import COST, GRID, TOKENS, Bowl

TERMS = Terms.of(COST, Crowding(), half_life_requests=4_096)


def outlook_for(stats: WindowStats) -> Outlook:
    assert stats.curves is not None
    alphas = stats.curves.alphas
    found = views.py_func(new_memory(alphas.size), alphas.size).outlook
    begin_outlook(found, alphas)
    return found


def take(outlook: Outlook, stats: WindowStats, terms: Terms = TERMS) -> None:
    assert stats.curves is not None
    curves = stats.curves
    count_arrivals(outlook, Seen(*seen(stats)))
    look(outlook, terms, Seen(*seen(stats)), curves.computed_tokens_per_request, curves.missed_rows_per_request)


def test_a_window_is_handed_over_field_by_field() -> None:
    stats = Bowl().window(0.4, start_s=7)
    window = Seen(*seen(stats))
    assert (window.start_s, window.end_s, window.alpha_target, window.mean_ms) == (7, 8, 0.4, stats.traffic.mean_ms)
    assert stats.curves is not None
    assert window.weight == stats.curves.num_requests
    assert window.missed_rows == stats.missed_rows_per_request


@pytest.mark.parametrize("is_overlapping", [True, False])
def test_the_table_is_that_of_a_plain_loop(is_overlapping: bool) -> None:
    stats = Bowl().window(0.5)
    outlook = outlook_for(stats)
    cost = COST.model_copy(update={"is_overlapping": is_overlapping})
    take(outlook, stats, Terms.of(cost, Crowding(), 4_096))
    curves = stats.curves
    assert curves is not None
    blend = blend_weights(outlook.splits[Split.ALPHA], curves.alphas)
    computed = np.maximum(blend @ curves.computed_tokens_per_request, 0)
    missed = np.maximum(blend @ curves.missed_rows_per_request, 0)
    compute = COST.floor_ms + computed * COST.token_ms
    lead = missed * COST.missed_row_ms
    np.testing.assert_allclose(outlook.splits[Split.COMPUTE], compute)
    np.testing.assert_allclose(outlook.splits[Split.LEAD], lead)
    pressure = 20 / 1e3 * (np.hypot(compute, lead) if is_overlapping else compute + lead)
    crowding = Crowding()
    growth = (1 + crowding.first * pressure + crowding.second * pressure**2) ** 4
    np.testing.assert_allclose(outlook.splits[Split.LASTING], (compute + lead) * growth)
    assert outlook.numbers[O.LASTING_BEST] == outlook.splits[Split.LASTING].argmin()


def test_stages_in_turn_crowd_as_one_stage_of_their_sum() -> None:
    overlapping = Terms.of(COST.model_copy(update={"is_overlapping": True}), Crowding(), 4_096)
    assert latency_ms(TERMS, 2.0, 1.0, 300.0) == pytest.approx(latency_ms(TERMS, 3.0, 0.0, 300.0))
    assert latency_ms(overlapping, 2.0, 1.0, 300.0) < latency_ms(TERMS, 2.0, 1.0, 300.0)
    assert latency_ms(overlapping, 3.0, 0.0, 300.0) == latency_ms(TERMS, 3.0, 0.0, 300.0)


def test_latency_is_a_lone_request_s_without_load_and_grows_with_it() -> None:
    alone = latency_ms(TERMS, 2.0, 1.0, 0.0)
    assert alone == pytest.approx(3.0 + TERMS.step_ms)
    rates = [latency_ms(TERMS, 2.0, 1.0, rate) for rate in (0.0, 100.0, 300.0, 5_000.0)]
    assert rates == sorted(rates)
    assert np.isfinite(rates).all()


@pytest.mark.parametrize("size", [2, 5, 9])
def test_blending_goes_through_the_known_points_and_keeps_lines(size: int) -> None:
    known_at = np.linspace(0.1, 0.9, size)
    np.testing.assert_allclose(blend_weights(known_at, known_at), np.eye(size), atol=1e-12)
    at = np.linspace(0.1, 0.9, 50)
    np.testing.assert_allclose(blend_weights(at, known_at) @ (3 * known_at + 1), 3 * at + 1)


def test_a_blend_can_have_its_least_between_two_points() -> None:
    known_at, at = np.linspace(0.1, 0.9, 9), np.linspace(0.1, 0.9, 81)
    found = blend_weights(at, known_at) @ (known_at - 0.45) ** 2
    assert at[found.argmin()] == pytest.approx(0.45)


def test_between_splits_the_table_is_read_straight_and_beyond_them_flat() -> None:
    splits = np.zeros((len(Split), NUM_SPLITS))
    splits[Split.ALPHA] = np.linspace(0.1, 0.9, NUM_SPLITS)
    splits[Split.FRESH] = splits[Split.ALPHA] * 2
    assert at_split(splits, Split.FRESH, 0.333) == pytest.approx(0.666)
    assert at_split(splits, Split.FRESH, -5.0) == pytest.approx(0.2)
    assert at_split(splits, Split.FRESH, 5.0) == pytest.approx(1.8)
    assert at_split(splits, Split.FRESH, float("nan")) == pytest.approx(0.2), "never out of bounds"


def faded(before: JointCurves, newest: JointCurves, num_requests: int) -> JointCurves:
    """What the curves' moving average shows once a window of its own curves has come in."""
    keep = 0.5 ** (num_requests / 4_096)
    old, new = keep * before.num_requests, float(num_requests)
    both = {
        name: (getattr(before, name) * old + getattr(newest, name) * new) / (old + new)
        for name in ("computed_tokens_per_request", "missed_rows_per_request")
    }
    return replace(before, num_requests=old + new, **both)


def test_the_fresh_view_turns_at_once_where_the_lasting_one_lags() -> None:
    first, second = Bowl(rate=400), Bowl(emb_scale=0.6, kv_scale=0.1, rate=400)
    stats = first.window(0.5)
    assert stats.curves is not None
    curves = replace(stats.curves, num_requests=5_900.0)
    outlook = outlook_for(stats)
    take(outlook, replace(stats, curves=curves))
    for second_s in range(1, 5):
        curves = faded(curves, second.curves(), 400)
        take(outlook, replace(second.window(0.5, start_s=second_s), curves=curves))
    alphas = outlook.splits[Split.ALPHA]
    fresh, lasting = (alphas[int(outlook.numbers[place])] for place in (O.FRESH_BEST, O.LASTING_BEST))
    wanted = outlook_for(stats)
    take(wanted, second.window(0.5))
    best = alphas[int(wanted.numbers[O.FRESH_BEST])]
    assert abs(fresh - best) < abs(lasting - best)


def test_refused_requests_do_not_bend_the_curves() -> None:
    """The curves know only those who were served, so only those fade them."""
    first, second = Bowl(rate=400), Bowl(emb_scale=0.6, kv_scale=0.1, rate=400)
    knots = []
    for num_refused in (0, 1_200):
        stats = first.window(0.5)
        assert stats.curves is not None
        curves = replace(stats.curves, num_requests=5_900.0)
        outlook = outlook_for(stats)
        take(outlook, replace(stats, curves=curves))
        for second_s in range(1, 5):
            curves = faded(curves, second.curves(), 400)
            window = second.window(0.5, start_s=second_s)
            traffic = replace(window.traffic, num_requests=400 + num_refused)
            take(outlook, replace(window, traffic=traffic, curves=curves))
        knots.append(outlook.knots.copy())
    np.testing.assert_allclose(knots[0], knots[1])


def test_stages_that_take_longer_than_reckoned_are_corrected_within_bounds() -> None:
    stats = Bowl(rate=50).window(0.5)
    slow = replace(stats, traffic=replace(stats.traffic, compute_busy=1.3 * stats.traffic.compute_busy, bus_busy=0.97))
    outlook = outlook_for(stats)
    for _ in range(300):
        take(outlook, slow)
    assert outlook.numbers[O.COMPUTE_CORRECTION] == pytest.approx(1.3, rel=0.01)
    assert 1.0 < outlook.numbers[O.BUS_CORRECTION] <= 2.0
    before = outlook.numbers[O.BUS_CORRECTION]
    take(outlook, replace(stats, traffic=replace(stats.traffic, bus_busy=0.0)))
    assert outlook.numbers[O.BUS_CORRECTION] == before, "an engine that does not know its bus says 0"


def test_arrivals_are_answers_and_what_the_queue_grew_by() -> None:
    stats = Bowl(rate=100).window(0.5)
    outlook = outlook_for(stats)
    for queued, rate in ((0, 100), (40, 140), (10, 70)):
        count_arrivals(outlook, Seen(*seen(replace(stats, traffic=replace(stats.traffic, num_queued=queued)))))
        assert outlook.numbers[O.RATE] == rate


def test_where_kv_cannot_hold_the_steps_under_way_latency_grows() -> None:
    """Half of the pool is taken by steps under way: up to 0.5 nothing changes, beyond it everything is slower."""
    stats = Bowl(rate=100).window(0.3)
    tables = []
    for requests in (0.0, 0.5 * stats.pool_bytes / (6_000 * COST.kv_token_bytes)):
        outlook = outlook_for(stats)
        take(outlook, stats, TERMS._replace(in_flight=requests))
        tables.append(outlook.splits[Split.FRESH].copy())
    alphas, (free, crowded) = outlook.splits[Split.ALPHA], tables
    np.testing.assert_allclose(crowded[alphas < 0.5], free[alphas < 0.5])
    assert np.all(crowded[alphas > 0.51] > free[alphas > 0.51])
    assert crowded[-1] / free[-1] > crowded[-5] / free[-5]


def with_tier(bowl: Bowl, host_share: float, reload_ms: float) -> tuple[WindowStats, Outlook]:
    """A window of a node that takes back all that its host tier holds."""
    stats = bowl.window(0.5)
    resident = TOKENS - bowl.computed(max(GRID[0], 0.5 - host_share))
    stats = replace(
        stats,
        new_tokens_per_request=TOKENS - resident,
        resident_tokens_per_request=resident,
        missed_rows_per_request=0.0,  # no correction by rows: shadows read them for more tokens
    )
    outlook = outlook_for(stats)
    take(outlook, stats, TERMS._replace(host_bytes=host_share * stats.pool_bytes, reload_ms=reload_ms))
    return stats, outlook


def test_what_the_host_keeps_is_read_and_not_computed() -> None:
    bowl, host_share = Bowl(), 0.25
    _, outlook = with_tier(bowl, host_share, reload_ms=1e-4)
    alphas, table = outlook.splits[Split.ALPHA], outlook.splits
    _, plain = with_tier(bowl, 0.0, reload_ms=1e-4)
    computed = (plain.splits[Split.COMPUTE] - COST.floor_ms) / COST.token_ms
    with_it, reloaded = with_host_tier(alphas, computed, host_share)
    np.testing.assert_allclose(table[Split.COMPUTE], COST.floor_ms + with_it * COST.token_ms, rtol=0.02)
    np.testing.assert_allclose(table[Split.RELOADED], reloaded, atol=0.02 * TOKENS)
    assert np.all(plain.splits[Split.RELOADED] == 0)


def test_with_a_host_tier_less_of_the_pool_is_kept_for_prefixes() -> None:
    bowl = Bowl(rate=60)
    tables = [with_tier(bowl, share, 1e-4)[1] for share in (0.0, 0.3)]
    without, with_it = (table.splits[Split.ALPHA, int(table.numbers[O.FRESH_BEST])] for table in tables)
    assert with_it > without


def test_a_tier_as_slow_as_computing_changes_nothing_for_the_better() -> None:
    bowl = Bowl(rate=60)
    _, plain = with_tier(bowl, 0.0, 1e-3)
    _, slow = with_tier(bowl, 0.3, 1e-2)
    assert slow.splits[Split.FRESH].min() > plain.splits[Split.FRESH].min()
