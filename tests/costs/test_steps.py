import numpy as np
import pytest

from helmrec.costs.steps import StepCosts


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
