"""Which signals are worth it, and that no bound is ever exceeded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.config import RelayConfig
from helmrec.engine.relay.leases import ComputeShare, Leases
from helmrec.engine.relay.trigger import PrefillSignal, RelayLoad, Verdict, decide
from helmrec.errors import ConfigError

CONFIG = RelayConfig(budget_ms=50, risk=0.5, max_held=0.25, max_compute=0.3, max_leases=4)
SIGNAL = PrefillSignal(inline_ms=40, budget_ms=50, ahead_s=0.0, num_missing=1_000, num_pages=10, is_held=False)
LOAD = RelayLoad(held_pages=0, kv_pages=100, num_leases=0, compute_share=0.0)


@pytest.mark.parametrize(
    ("signal", "load", "verdict"),
    [
        (SIGNAL, LOAD, Verdict.ADMITTED),
        (SIGNAL._replace(inline_ms=24.9), LOAD, Verdict.NOT_AT_RISK),
        (SIGNAL._replace(budget_ms=81), LOAD, Verdict.NOT_AT_RISK),
        (SIGNAL._replace(num_missing=0), LOAD, Verdict.RESIDENT),
        (SIGNAL._replace(is_held=True), LOAD, Verdict.HELD_ALREADY),
        (SIGNAL, LOAD._replace(held_pages=15), Verdict.ADMITTED),
        (SIGNAL, LOAD._replace(held_pages=16), Verdict.NO_ROOM),
        (SIGNAL._replace(num_missing=0), LOAD._replace(held_pages=16), Verdict.NO_ROOM),
        (SIGNAL, LOAD._replace(num_leases=4), Verdict.NO_ROOM),
        (SIGNAL, LOAD._replace(compute_share=0.31), Verdict.TOO_BUSY),
        (SIGNAL._replace(num_missing=0), LOAD._replace(compute_share=0.9), Verdict.RESIDENT),
        (SIGNAL._replace(ahead_s=0.1), LOAD._replace(compute_share=0.15), Verdict.ADMITTED),
        (SIGNAL._replace(ahead_s=0.2), LOAD._replace(compute_share=0.15), Verdict.TOO_BUSY),
    ],
)
def test_each_signal_is_judged_by_risk_and_bounds(signal: PrefillSignal, load: RelayLoad, verdict: Verdict) -> None:
    assert decide(CONFIG, signal, load) is verdict


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30), st.floats(0.1, 5)), max_size=60))
def test_whatever_comes_leases_stay_within_their_pages(signals: list[tuple[int, int, float]]) -> None:
    leases, now_s = Leases(), 0.0
    for user, num_pages, hold_s in signals:
        now_s += 0.3
        leases.expire(now_s)
        load = RelayLoad(leases.held_pages, 100, len(leases), 0.0)
        if decide(CONFIG, PrefillSignal(40, 50, 0.0, 1, num_pages, user in leases), load) is Verdict.ADMITTED:
            leases.grant(user, num_pages, now_s, hold_s * 1e3)
        if user % 3 == 0:
            leases.use(user)
        leases.check()
        assert leases.held_pages <= 25
        assert len(leases) <= 4
    leases.expire(now_s + 10)
    assert len(leases) == leases.held_pages == 0


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.4)), max_size=80))
def test_whatever_comes_the_share_of_time_stays_within_its_bound(signals: list[tuple[float, float]]) -> None:
    share, now_s = ComputeShare(), 0.0
    for pause_s, ahead_s in signals:
        now_s += pause_s
        load = LOAD._replace(compute_share=share.share(now_s))
        if decide(CONFIG, SIGNAL._replace(ahead_s=ahead_s), load) is Verdict.ADMITTED:
            share.add(now_s, ahead_s)
        assert share.share(now_s) <= CONFIG.max_compute + 1e-9


def test_a_lease_that_was_used_does_not_end_the_next_one_of_its_user() -> None:
    leases = Leases()
    first = leases.grant(7, num_pages=3, now_s=0.0, hold_ms=1_000)
    leases.use(7)
    second = leases.grant(7, num_pages=2, now_s=1.0, hold_ms=4_000)
    assert first.token != second.token
    assert leases.expire(2.0) == []
    assert 7 in leases
    assert leases.expire(5.0) == [7]
    assert (leases.used, leases.expired, leases.held_pages) == (1, 1, 0)


def test_leases_that_are_over_leave_the_heap_long_before_they_would_have_ended() -> None:
    leases = Leases()
    leases.grant(0, num_pages=1, now_s=0.0, hold_ms=1e12)
    for i in range(1, 10_000):
        leases.grant(i, num_pages=1, now_s=i, hold_ms=1e9)
        (leases.use, leases.drop, leases.lose)[i % 3](i)
        leases.check()
    assert len(leases._ends) < 100
    assert (leases.used, leases.lost, len(leases)) == (3_333, 3_333, 1)
    assert leases.expire(1e9) == [0]


def test_the_share_of_time_fades() -> None:
    share = ComputeShare()
    assert share.share(3.0) == 0
    share.add(3.0, 0.2)
    share.add(3.0, 0.2)
    assert share.share(3.0) == pytest.approx(0.4)
    assert share.share(4.0) == pytest.approx(0.4 / 2.718, rel=1e-3)
    assert share.share(30.0) < 1e-9


def test_bounds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_held must be at most 1"):
        RelayConfig(max_held=1.5)
    with pytest.raises(ConfigError, match=r"max_hold_ms must be at least hold_ms \(500\), got 499"):
        RelayConfig(max_hold_ms=499)
    assert RelayConfig(hold_ms=100).longest_hold_ms == 2_000
