from dataclasses import replace

from helmrec.memory.kv_admission import (
    KV_ADMISSIONS,
    EarlierVisits,
    Visit,
    VisitLog,
    admit_always,
    admit_never,
    expected_benefit,
    second_visit,
)

FIRST = Visit(count=1, idle_s=None, num_tokens=100, room=False, coldest_idle_s=10.0)


def test_always_admits_a_first_visit() -> None:
    assert admit_always(FIRST)


def test_a_first_visit_is_kept_only_where_it_displaces_nobody() -> None:
    for policy in (second_visit, expected_benefit):
        assert not policy(FIRST)
        assert policy(replace(FIRST, room=True))


def test_a_second_visit_is_kept() -> None:
    assert second_visit(replace(FIRST, count=2))


def test_a_user_who_returns_sooner_than_the_coldest_is_idle_is_worth_its_place() -> None:
    assert expected_benefit(replace(FIRST, count=2, idle_s=9.0))
    assert not expected_benefit(replace(FIRST, count=2, idle_s=12.0))


def test_a_longer_history_is_worth_a_longer_wait() -> None:
    waited = replace(FIRST, count=2, idle_s=19.0)
    assert not expected_benefit(replace(waited, num_tokens=100))
    assert expected_benefit(replace(waited, num_tokens=2_048))


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


def test_nothing_is_admitted_where_kv_depends_on_the_query() -> None:
    assert not admit_never(replace(FIRST, count=2, room=True))


def test_policies_go_by_name() -> None:
    assert KV_ADMISSIONS["always"] is admit_always
    assert KV_ADMISSIONS["second-visit"] is second_visit
    assert KV_ADMISSIONS["benefit"] is expected_benefit
