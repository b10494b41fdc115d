import numpy as np
import pytest

from helmrec.costs.reload import ReloadCosts, StepCosts, can_overlap, is_cheaper, with_delay


def test_pages_are_worth_loading_while_they_delay_less_than_computing() -> None:
    assert is_cheaper(num_pages=3, page_s=1.0, computing_s=3.1)
    assert not is_cheaper(num_pages=3, page_s=1.0, computing_s=3.0)


def test_a_step_overlaps_with_as_much_as_it_computes() -> None:
    assert can_overlap(loading_s=1.0, computing_s=1.0)
    assert not can_overlap(loading_s=1.1, computing_s=1.0)


def test_a_step_that_was_not_delayed_lowers_the_learned_delay() -> None:
    assert with_delay(1.0, num_pages=2, exposed_s=-5.0) == pytest.approx(0.8)
    assert with_delay(1.0, num_pages=2, exposed_s=4.0) == pytest.approx(1.2)


def test_step_costs_are_learned_from_the_steps_that_ran() -> None:
    costs, rng = StepCosts(), np.random.default_rng(0)
    for _ in range(200):
        tokens = int(rng.integers(1, 5_000))
        pairs = tokens * float(rng.integers(1, 5_000))
        costs.observe(tokens, pairs, 1e-3 + 2e-6 * tokens + 3e-10 * pairs)
    assert costs.seconds(1_000, 1e6) == pytest.approx(2e-3 + 3e-4, rel=0.02)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-3, 100.0])
def test_steps_that_are_all_alike_are_no_puzzle(seconds: float) -> None:
    costs = StepCosts()
    for _ in range(3_000):
        costs.observe(10, 30.0, seconds)
    assert costs.seconds(10, 30.0, is_whole_step=True) == pytest.approx(seconds, rel=1e-3, abs=1e-9)


def test_a_step_that_was_held_up_hardly_changes_what_steps_are_thought_to_cost() -> None:
    costs, rng = StepCosts(), np.random.default_rng(0)
    for i in range(60):
        tokens = int(rng.integers(1, 5_000))
        costs.observe(tokens, 0.0, 1e-3 + 2e-6 * tokens if i % 20 else 0.5)
    assert costs.seconds(1_000, 0.0) == pytest.approx(2e-3, rel=0.05)
    assert costs.seconds(0, 0.0, is_whole_step=True) == pytest.approx(1e-3, rel=0.1)


def test_what_a_reload_delays_is_learned_and_doubted_until_it_is_tried() -> None:
    costs = ReloadCosts(StepCosts(), page_s=1e-3)
    costs.page_s = 1.0
    for tokens in (100, 200, 300) * 20:
        costs.steps.observe(tokens, 0.0, 1e-3 * tokens)
    assert not costs.prefers_reload(0, 100, num_pages=1)
    tries = 0
    while not costs.prefers_reload(0, 100, num_pages=1):
        tries += 1
    assert 100 < tries < 400
    for _ in range(30):
        costs.observe_reload(2, exposed_s=0.5)
    assert costs.page_s == pytest.approx(0.25, rel=0.01)


def test_a_step_loads_no_longer_than_it_computes() -> None:
    costs = ReloadCosts(StepCosts(), page_s=1.0)
    for tokens in (100, 200, 300) * 20:
        costs.steps.observe(tokens, 0.0, 1e-2 * tokens)
    costs.page_s = 0.0  # as if all had been hidden so far
    chosen = []
    costs.begin_step()
    for _ in range(5):  # a prefix of three pages takes 3 s on the bus and 4 s to compute
        loads = 3 * costs.prefers_reload(0, 400, num_pages=3)
        costs.note_planned(400 * bool(loads), 400, loads)
        chosen.append(bool(loads))
    assert chosen == [True, False, True, False, True]
    costs.begin_step()
    assert costs.prefers_reload(0, 400, num_pages=3)
