"""The circuit breaker, by its clock."""

import numpy as np
import pytest

from helmrec.clock import ManualClock
from helmrec.serve.breaker import Breaker


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(3, 1.0, clock)


def fail(breaker: Breaker, num: int) -> None:
    for _ in range(num):
        assert breaker.admit()
        breaker.failed()


def test_it_opens_after_failures_in_a_row_and_a_success_starts_the_count_again(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.is_closed
    fail(breaker, 1)
    assert not breaker.is_closed
    assert not breaker.admit()
    assert breaker.num_failures == 5


def test_after_the_pause_one_call_is_let_through_and_decides(breaker: Breaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.advance(0.9)
    assert not breaker.admit()
    clock.advance(0.1)
    assert [breaker.admit() for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert not breaker.admit(), "another pause"
    clock.advance(1)
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.is_closed
    assert all(breaker.admit() for _ in range(3))


def test_a_trial_that_was_given_up_makes_way_for_the_next(breaker: Breaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.advance(1)
    assert breaker.admit()
    breaker.dropped()
    assert breaker.admit()
    breaker.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_store_that_is_gone_is_asked_once_a_pause_however_many_call(seed: int, clock: ManualClock) -> None:
    rng, breaker, num_admitted = np.random.default_rng(seed), Breaker(3, 1.0, clock), 0
    for _ in range(500):
        clock.advance(float(rng.exponential(0.05)))
        if breaker.admit():
            num_admitted += 1
            breaker.failed()
        breaker.check()
    assert clock.now() / 2 < num_admitted <= 3 + clock.now()
