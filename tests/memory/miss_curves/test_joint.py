import time
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.errors import ConfigError
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.miss_curves import GRID, CurveRequest, JointMissCurves, MissCurveConfig
from helmrec.memory.sampling import keep_sampled, sampling_threshold
from tests.memory.miss_curves.replay import KVRule, Replay, RowRule, Setting, Totals, Traffic, observed

NO_ROWS = np.empty(0, np.int64)
TINY = PageGeometry(8, 1, 1, 32, 32, 2, 16, 2)  # 8 tokens or 32 rows
TRAFFIC = Traffic(num_users=400, num_items=20_000, num_requests=800, median_events=40, num_candidates=10)


def make_curves(num_pages: int = 20, **settings: Any) -> JointMissCurves:
    config = {"alphas": (0.2, 0.5, 0.8), "sampling_rate": 1.0, "half_life_requests": None}
    return JointMissCurves(MissCurveConfig(num_pages=num_pages, page_tokens=4, rows_per_page=8, **config | settings))


def request_of(user_id: int, history: list[int], candidates: list[int], unchanged: int | None = None) -> CurveRequest:
    """A request with one row per token, all of one table."""
    events, asked = np.array([history], np.int64), np.array([candidates], np.int64)
    return CurveRequest(user_id, len(history), NO_ROWS, events, NO_ROWS, asked, unchanged)


def visit(user_id: int, num_tokens: int, unchanged: int | None = None, rows: list[int] | None = None) -> CurveRequest:
    return request_of(user_id, list(range(num_tokens)) if rows is None else rows, [], unchanged)


def reused(curves: JointMissCurves, request: CurveRequest) -> list[int]:
    """Tokens found resident at each alpha by this request alone."""
    curves.reset()
    curves.observe(request)
    curves.check()
    rates = curves.curves().kv_token_hit_rate * request.num_tokens
    return np.rint(rates).astype(int).tolist()


@pytest.mark.parametrize("kv_rule", ["always", "second-visit"])
@pytest.mark.parametrize("row_rule", ["always", "second-touch"])
def test_with_every_row_sampled_the_curves_count_exactly_what_replays_through_a_pool_count(
    kv_rule: KVRule, row_rule: RowRule
) -> None:
    alphas = (0.1, 0.3, 0.5, 0.7)
    setting = Setting(200, kv_rule, row_rule, batch_tokens=100, geometry=TINY)
    curves = setting.curves(1.0, alphas)
    replays = [Replay(setting.pool(alpha, TRAFFIC)) for alpha in alphas]
    for number, request in enumerate(TRAFFIC.visits()):
        curves.observe(observed(request))
        for replay in replays:
            replay.serve(request)
        if number % 200 == 0:
            curves.check()
    for replay in replays:
        assert replay.rows.evictions > 1_000, "a cache that never evicts shows nothing"
        assert replay.pool.kv.evicted_pages > 100
    for column, replay in enumerate(replays):
        assert astuple(totals(curves, column)) == astuple(replay.totals), f"alpha {alphas[column]}"


def totals(curves: JointMissCurves, column: int) -> Totals:
    """The curves' figures as counts."""
    got = curves.curves()
    requests = round(got.num_requests)
    computed = got.computed_tokens_per_request[column] * requests
    tokens = round(computed / (1 - got.kv_token_hit_rate[column]))
    return Totals(
        requests=requests,
        tokens=tokens,
        reused_tokens=round(tokens - computed),
        users_hit=round(got.kv_user_hit_rate[column] * requests),
        rows_read=round(got.rows_per_request[column] * requests),
        rows_missed=round(got.missed_rows_per_request[column] * requests),
    )


def test_a_sample_of_rows_predicts_hit_rates_within_a_hundredth() -> None:
    traffic = Traffic(num_users=300, num_items=60_000, num_requests=1_200, median_events=60, num_candidates=20)
    setting = Setting(num_pages=1_500, batch_tokens=200, geometry=TINY)
    exact, sample = setting.curves(1.0), setting.curves(0.1)
    for number, request in enumerate(traffic.visits()):
        if number == traffic.num_requests // 2:
            exact.reset()
            sample.reset()
        exact.observe(observed(request))
        sample.observe(observed(request))
    whole, part = exact.curves(), sample.curves()
    assert np.array_equal(whole.kv_token_hit_rate, part.kv_token_hit_rate), "users are never sampled"
    assert np.ptp(whole.emb_hit_rate) > 0.1, "a flat curve shows nothing"
    assert np.abs(whole.emb_hit_rate - part.emb_hit_rate).mean() < 0.01


def test_a_kv_hit_spares_the_history_rows_at_that_alpha_only() -> None:
    curves = make_curves(kv_admission="always", row_admission="always")
    for user in range(5):  # 10 pages at alpha 0.5, one of them free: users 3 and 4 fit, at 0.8 none does whole
        curves.observe(visit(user, 16, rows=list(range(user * 16, user * 16 + 16))))
    curves.reset()
    curves.observe(visit(3, 16, rows=list(range(48, 64))))
    got = curves.curves()
    assert got.rows_per_request.tolist() == [0, 0, 16]
    assert got.kv_user_hit_rate.tolist() == [1, 1, 0]
    assert got.computed_tokens_per_request.tolist() == [0, 0, 16]


def test_the_coldest_history_loses_its_tail_first() -> None:
    curves = make_curves(kv_admission="always")
    curves.observe(visit(1, 16))
    curves.observe(visit(2, 24))
    # At 0.5 six of nine pages are user 2's; at 0.8 its six pages do not fit into four, which displaces nobody.
    assert reused(curves, visit(1, 16)) == [16, 12, 12]


def test_with_second_visit_a_first_visit_displaces_no_user() -> None:
    rules: list[KVRule] = ["second-visit", "always"]
    for rule, expected in zip(rules, ([30, 30, 30], [0, 0, 0]), strict=True):
        curves = make_curves(num_pages=200, batch_pages=8, kv_admission=rule)
        for user in (1, 1, *range(10, 60)):
            curves.observe(visit(user, 30))
        assert reused(curves, visit(1, 30)) == expected


def test_a_changed_history_reuses_only_what_is_as_it_was() -> None:
    curves = make_curves(kv_admission="always")
    curves.observe(visit(1, 10))
    assert reused(curves, visit(1, 12, unchanged=6)) == [6, 6, 6]
    assert reused(curves, visit(1, 12, unchanged=0)) == [0, 0, 0]
    assert reused(curves, visit(1, 13)) == [12, 12, 12]


def test_a_history_longer_than_the_share_is_served_and_not_kept() -> None:
    curves = make_curves(kv_admission="always")
    curves.observe(visit(1, 40))  # ten pages: more than alpha 0.8 leaves
    assert reused(curves, visit(1, 40)) == [40, 36, 0]


def test_a_request_without_history_reads_candidates_alone() -> None:
    curves = make_curves()
    for _ in range(2):
        curves.observe(request_of(1, [], [1, 2, 1]))
    got = curves.curves()
    assert got.rows_per_request.tolist() == [3, 3, 3]
    assert got.missed_rows_per_request.tolist() == [1, 1, 1]  # a row missed twice in a step is read once
    assert got.kv_token_hit_rate.tolist() == [0, 0, 0]
    curves.check()


def test_rows_of_tokens_resident_at_every_alpha_are_not_read() -> None:
    curves = make_curves(kv_admission="always")
    curves.observe(visit(1, 12))
    curves.observe(visit(1, 14))
    assert curves.curves().rows_per_request.tolist() == [7, 7, 7]  # of two requests: all 12 rows, then 2


def test_old_requests_fade() -> None:
    curves = make_curves(half_life_requests=1.0)
    curves.observe(visit(1, 4))
    curves.observe(visit(1, 4))
    got = curves.curves()
    assert got.num_requests == 1.5
    assert got.kv_user_hit_rate.tolist() == pytest.approx([2 / 3] * 3)


def test_the_longest_unseen_user_is_forgotten_first() -> None:
    curves = make_curves(num_pages=400, max_users=3, kv_admission="always")
    for user in (1, 2, 3, 1, 4):
        curves.observe(visit(user, 4))
    assert [reused(curves, visit(user, 4)) for user in (3, 1, 4)] == [[4, 4, 4]] * 3
    assert reused(curves, visit(2, 4)) == [0, 0, 0]


def test_tables_grow_with_what_they_hold() -> None:
    curves = make_curves(num_pages=8_000, kv_admission="always", row_admission="always")
    rng = np.random.default_rng(0)
    for user in range(3_000):
        curves.observe(visit(user, 4, rows=rng.integers(0, 10**12, 4).tolist()))
    curves.observe(visit(-1, 6_000))
    assert reused(curves, visit(2_999, 4)) == [4, 4, 4]


def test_curves_are_a_value_that_reads_in_less_than_a_microsecond() -> None:
    curves = make_curves()
    curves.observe(visit(1, 4))
    got = curves.curves()
    curves.observe(visit(1, 4))
    assert got.num_requests == 1
    with pytest.raises(ValueError, match="read-only"):
        got.emb_hit_rate[0] = 1.0
    start = time.thread_time()  # others may have the core meanwhile
    for _ in range(10_000):
        got.emb_hit_rate  # noqa: B018 - the read is what is timed
    assert (time.thread_time() - start) / 10_000 < 1e-6


def test_the_same_requests_give_the_same_curves() -> None:
    def run() -> bytes:
        curves = Setting(num_pages=200, batch_tokens=100, geometry=TINY).curves(0.2)
        for request in TRAFFIC.visits():
            curves.observe(observed(request))
        return curves.curves().emb_hit_rate.tobytes()

    assert run() == run()


def all_figures(curves: JointMissCurves) -> list[bytes]:
    got = curves.curves()
    return [getattr(got, name).tobytes() for name in got.__slots__ if name not in {"num_requests", "faded"}]


@pytest.mark.parametrize("row_rule", ["always", "second-touch"])
def test_rows_read_many_requests_at_once_are_rows_read_one_request_at_a_time(row_rule: RowRule) -> None:
    setting = Setting(num_pages=200, row_rule=row_rule, batch_tokens=100, geometry=TINY)
    at_once, one_by_one = setting.curves(0.5), setting.curves(0.5)
    for request in TRAFFIC.visits():
        at_once.observe(observed(request))
        one_by_one.observe(observed(request))
        one_by_one.read_pending()
    at_once.check()
    assert all_figures(at_once) == all_figures(one_by_one)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("num_events", [0, 31, 32, 200])
def test_exactly_the_sampled_rows_of_a_request_are_read(rate: float, num_events: int) -> None:
    curves = make_curves(num_pages=1_000, sampling_rate=rate, row_admission="always", kv_admission="always")
    rng = np.random.default_rng(0)
    context, events, single, candidates = (rng.integers(0, 10**9, shape) for shape in (2, (3, num_events), 1, (3, 40)))
    curves.observe(CurveRequest(1, 2 + num_events, context, events, single, candidates))
    expected = np.concatenate((context, events.T.ravel(), single, candidates.T.ravel()))
    expected = expected[: keep_sampled(expected, sampling_threshold(rate))]
    read = curves.curves().missed_rows_per_request * rate
    assert np.rint(read).astype(int).tolist() == [expected.size] * 3
    rows = curves._rows.state.rows
    assert set(rows[rows >= 0].tolist()) == set(expected.tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alphas": (0.5, 0.2)}, r"alphas: must be 1 to 62 ascending values, got \(0.5, 0.2\)"),
        ({"alphas": ()}, "alphas: must be 1 to 62"),
        ({"alphas": (0.5, 1.5)}, r"alphas.1 must be at most 1\S*, got 1.5"),
        ({"sampling_rate": 0.0}, r"sampling_rate must be more than 0\S*, got 0.0"),
        ({"kv_admission": "never"}, "kv_admission: .* got 'never'"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_curves(**settings)


def test_an_engine_settings_carry_over() -> None:
    geometry = PageGeometry(32, 3, 4, 128, 128, 2, 512, 2)
    engine = EngineConfig(pool_bytes="24GiB", kv_admission="benefit", row_admission="always")
    config = MissCurveConfig.of_engine(engine, geometry, batch_tokens=1_000)
    assert config.num_pages == (24 << 30) // geometry.page_bytes
    assert config.batch_pages == 32
    assert config.alphas == GRID
    assert (config.kv_admission, config.row_admission) == ("second-visit", "always")
    assert config.sampling_rate * config.num_pages * config.rows_per_page == pytest.approx(1 << 14)


@pytest.mark.parametrize("half_life", [None, 50.0])
def test_the_difference_of_two_looks_is_what_came_between_them(half_life: float | None) -> None:
    whole, later = make_curves(half_life_requests=half_life), make_curves(half_life_requests=half_life)
    rng = np.random.default_rng(0)
    visits = [
        visit(int(user), int(num)) for user, num in zip(rng.integers(0, 9, 300), rng.integers(4, 40, 300), strict=True)
    ]
    for request in visits[:200]:
        whole.observe(request)
        later.observe(request)
    before = whole.curves()
    later.reset()
    for request in visits[200:]:
        whole.observe(request)
        later.observe(request)
    after, expected = whole.curves(), later.curves()
    kept = np.exp(after.faded - before.faded) * before.num_requests
    weight = after.num_requests - kept
    assert weight == pytest.approx(expected.num_requests)
    for name in ("computed_tokens_per_request", "missed_rows_per_request", "rows_per_request", "kv_user_hit_rate"):
        own = (after.num_requests * getattr(after, name) - kept * getattr(before, name)) / weight
        np.testing.assert_allclose(own, getattr(expected, name), rtol=1e-9, atol=1e-9)
