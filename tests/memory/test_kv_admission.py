from dataclasses import replace

from helmrec.memory.kv_admission import (
    AdmitEveryPrefix,
    EarlierVisits,
    ExpectedBenefit,
    SecondVisit,
    Visit,
    VisitLog,
    make_kv_admission,
)

FIRST = Visit(count=1, idle_s=None, num_tokens=100, room=False, coldest_idle_s=10.0)


def test_always_admits_a_first_visit() -> None:
    assert AdmitEveryPrefix().admits(FIRST)


def test_a_first_visit_is_kept_only_where_it_displaces_nobody() -> None:
    for policy in (SecondVisit(), ExpectedBenefit()):
        assert not policy.admits(FIRST)
        assert policy.admits(replace(FIRST, room=True))


def test_a_second_visit_is_kept() -> None:
    assert SecondVisit().admits(replace(FIRST, count=2))


def test_a_user_who_returns_sooner_than_the_coldest_is_idle_is_worth_its_place() -> None:
    policy = ExpectedBenefit(linear_tokens=1_000)
    assert policy.admits(replace(FIRST, count=2, idle_s=9.0))
    assert not policy.admits(replace(FIRST, count=2, idle_s=12.0))


def test_a_longer_history_is_worth_a_longer_wait() -> None:
    policy = ExpectedBenefit(linear_tokens=1_000)
    waited = replace(FIRST, count=2, idle_s=19.0)
    assert not policy.admits(replace(waited, num_tokens=100))
    assert policy.admits(replace(waited, num_tokens=1_000))


def test_the_log_counts_visits_and_remembers_the_one_before() -> None:
    log = VisitLog()
    assert log.record(7, 1.0) == EarlierVisits(1, None)
    assert log.record(7, 3.5) == EarlierVisits(2, 1.0)
    assert log.record(8, 4.0) == EarlierVisits(1, None)


def test_the_log_forgets_the_user_seen_longest_ago() -> None:
    log = VisitLog(limit=2)
    for user_id in (1, 2, 1, 3):
        log.record(user_id, 0.0)
    assert log.record(1, 1.0).count == 3
    assert log.record(2, 1.0).count == 1


def test_policies_go_by_name() -> None:
    assert isinstance(make_kv_admission("always"), AdmitEveryPrefix)
    assert isinstance(make_kv_admission("second-visit"), SecondVisit)
    assert isinstance(make_kv_admission("benefit"), ExpectedBenefit)
