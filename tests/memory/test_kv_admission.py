import numpy as np
import pytest

from helmrec.memory.kv_admission import (
    ADMISSIONS,
    Admission,
    VisitCount,
    VisitLog,
    has_room,
    idle_s,
    is_admitted,
    is_evicted_last,
    reserved_pages,
)

FIRST, SECOND = VisitCount(1, 0.0), VisitCount(2, 9.0)


def test_always_admits_a_first_visit() -> None:
    assert is_admitted(Admission.ALWAYS, FIRST, 100, 10.0)


@pytest.mark.parametrize("admission", [Admission.SECOND_VISIT, Admission.BENEFIT])
def test_a_first_visit_is_kept_only_where_it_displaces_nobody(admission: Admission) -> None:
    assert not is_admitted(admission, FIRST, 100, 10.0)
    assert has_room(admission, num_free=8, reserve=8)
    assert not has_room(admission, num_free=7, reserve=8)


def test_a_second_visit_is_kept() -> None:
    assert is_admitted(Admission.SECOND_VISIT, SECOND, 100, 0.0)


def test_a_user_who_returns_sooner_than_the_coldest_is_idle_is_worth_its_place() -> None:
    assert is_admitted(Admission.BENEFIT, VisitCount(2, 9.0), 100, 10.0)
    assert not is_admitted(Admission.BENEFIT, VisitCount(2, 12.0), 100, 10.0)


def test_a_longer_history_is_worth_a_longer_wait() -> None:
    assert not is_admitted(Admission.BENEFIT, VisitCount(2, 19.0), 100, 10.0)
    assert is_admitted(Admission.BENEFIT, VisitCount(2, 19.0), 2_048, 10.0)


def test_a_probationary_prefix_is_given_up_for_any_that_is_admitted() -> None:
    assert idle_s(False, 3.0, 4.5) == 1.5
    assert is_admitted(Admission.BENEFIT, VisitCount(2, 1e9), 1, idle_s(True, 4.5, 4.5))
    assert np.isinf(idle_s(True, 4.5, 4.5))


def test_a_probationary_prefix_is_evicted_first_unless_a_request_is_about_to_use_it() -> None:
    assert is_evicted_last(is_probationary=False, is_ahead=False)
    assert is_evicted_last(is_probationary=True, is_ahead=True)
    assert not is_evicted_last(is_probationary=True, is_ahead=False)


def test_nothing_is_admitted_where_kv_depends_on_the_query() -> None:
    assert not is_admitted(Admission.NEVER, SECOND, 100, np.inf)
    assert not has_room(Admission.NEVER, num_free=100, reserve=1)


def test_the_pages_of_a_batch_are_kept_free_but_never_more_than_a_quarter() -> None:
    assert reserved_pages(kv_pages=100, batch_pages=10) == 10
    assert reserved_pages(kv_pages=100, batch_pages=40) == 25
    assert reserved_pages(kv_pages=2, batch_pages=40) == 1


def test_the_log_counts_visits_and_remembers_the_one_before() -> None:
    log = VisitLog()
    assert log.record(7, 1.0) == VisitCount(1, 0.0)
    assert log.record(7, 3.5) == VisitCount(2, 2.5)
    assert log.record(8, 4.0) == VisitCount(1, 0.0)


def test_the_log_forgets_the_user_seen_longest_ago() -> None:
    log = VisitLog(limit=2)
    for user_id in (1, 2, 1, 3):
        log.record(user_id, 0.0)
    assert log.record(1, 1.0).num == 3
    assert log.record(2, 1.0).num == 1


def test_every_setting_has_a_rule() -> None:
    assert set(ADMISSIONS.values()) == set(Admission)
