import pytest

from helmrec.queueing import StepTimes, expected_ms, may_fit, needed_s, with_step


def steady(step_s: float, num_requests: int) -> StepTimes:
    times = StepTimes()
    for _ in range(200):
        times = with_step(times, step_s, num_requests)
    return times


def test_times_of_steps_are_learned() -> None:
    times = steady(0.02, num_requests=4)
    assert times.step_s == pytest.approx(0.02)
    assert times.deviation_s == pytest.approx(0, abs=1e-6)
    assert times.request_ms == pytest.approx(5)


def test_a_step_ahead_of_its_requests_says_nothing_about_the_share_of_a_request() -> None:
    times = with_step(steady(0.02, num_requests=4), 0.5, num_requests=0)
    assert times.request_ms == pytest.approx(5)
    assert times.step_s > 0.06


def test_a_request_expects_to_wait_for_those_before_it_and_for_what_is_left_of_running_steps() -> None:
    times = StepTimes(step_s=0.02, deviation_s=0.0, request_ms=5.0)
    assert expected_ms(times, num_waiting=3, num_running=0, spent_s=0.0) == pytest.approx(20)
    assert expected_ms(times, num_waiting=3, num_running=4, spent_s=0.0) == pytest.approx(40)
    assert expected_ms(times, num_waiting=3, num_running=4, spent_s=0.015) == pytest.approx(25)
    assert expected_ms(times, num_waiting=3, num_running=4, spent_s=9.0) == pytest.approx(20)


def test_steps_that_vary_make_it_expect_more() -> None:
    times = StepTimes(step_s=0.02, deviation_s=0.01, request_ms=5.0)
    assert expected_ms(times, num_waiting=3, num_running=0, spent_s=0.0) == pytest.approx(20 * 1.5 + 30)


def test_the_only_request_is_always_tried() -> None:
    times = StepTimes(step_s=0.02, deviation_s=0.01, request_ms=5.0)
    assert needed_s(times, num_waiting=1) == 0
    assert needed_s(times, num_waiting=2) == pytest.approx(0.05)


def test_resident_tokens_are_no_part_of_the_budget() -> None:
    assert may_fit(budget=100, num_tokens=900, num_resident=800)
    assert not may_fit(budget=100, num_tokens=900, num_resident=799)
