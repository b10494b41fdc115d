import pytest

from helmrec.costs.reload import ReloadCosts, can_overlap, is_cheaper, with_delay
from helmrec.costs.steps import StepCosts


def test_pages_are_worth_loading_while_they_delay_less_than_computing() -> None:
    assert is_cheaper(num_pages=3, page_s=1.0, computing_s=3.1)
    assert not is_cheaper(num_pages=3, page_s=1.0, computing_s=3.0)


def test_a_step_overlaps_with_as_much_as_it_computes() -> None:
    assert can_overlap(loading_s=1.0, computing_s=1.0)
    assert not can_overlap(loading_s=1.1, computing_s=1.0)


def test_a_step_that_was_not_delayed_lowers_the_learned_delay() -> None:
    assert with_delay(1.0, num_pages=2, exposed_s=-5.0) == pytest.approx(0.8)
    assert with_delay(1.0, num_pages=2, exposed_s=4.0) == pytest.approx(1.2)


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
