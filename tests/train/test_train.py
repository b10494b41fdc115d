"""Training: what labels, losses and fits mean, on cases small enough to check by hand; one whole run, slow."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from gymnasium.spaces import Box, Discrete

from helmrec.control.features import NUM_FEATURES, STEPS
from helmrec.control.helm import HelmPolicy, HelmSettings
from helmrec.control.network import NUM_HIDDEN, as_layers, following_layers, forward, join_layers, load_base, save_base
from helmrec.control.outlook import Crowding
from helmrec.control.service_cost import ServiceCost
from helmrec.sim.cost import default_cost
from helmrec.sim.oracle import cheapest_path, switching_costs
from helmrec.train.crowding import fit_crowding
from helmrec.train.distil import StepNetwork, distil, expected_regret
from helmrec.train.labels import FINE, costs_to_go, fine_costs, place_of, switch_prices
from helmrec.train.lessons import SPLITS, WINDOW_S, Lesson, Step, draw_ground
from helmrec.train.observer import Observer
from helmrec.train.ppo import StepPolicy
from helmrec.train.rollout import Examples
from helmrec.train.run import TrainPlan, train
from tests.control.bowl import COST, Bowl


def flat_lesson(costs: np.ndarray, pool_bytes: int = 1 << 30) -> Lesson:
    """A lesson of which only costs and prices matter."""
    ground = SimpleNamespace(
        service=COST,
        trace=SimpleNamespace(backlog=np.array([1_000.0]), num_users=1),
        config=SimpleNamespace(engine=SimpleNamespace(pool_bytes=pool_bytes)),
    )
    return Lesson(cast("Any", ground), [None] * int(costs.shape[0] * WINDOW_S), costs, [])


def test_costs_between_splits_go_through_those_that_were_run() -> None:
    costs = np.random.default_rng(0).uniform(1, 2, (4, SPLITS.size))
    np.testing.assert_allclose(fine_costs(costs)[:, place_of(SPLITS)], costs)


def test_beside_a_split_that_drowns_costs_stay_between_their_neighbours() -> None:
    costs = np.full((1, SPLITS.size), 20.0)
    costs[0, 0] = 1e5
    found = fine_costs(costs)[0]
    assert found.min() >= 20 - 1e-9
    assert np.all(np.diff(found) <= 1e-9)


def test_from_anywhere_the_labels_lead_where_the_oracle_is() -> None:
    """Cheap moves and a bottom that stays: the best step goes toward it, and at the bottom stays."""
    costs = np.tile(1_000 * (1 + (SPLITS - 0.4) ** 2), (20, 1))
    labels = costs_to_go(flat_lesson(costs, pool_bytes=1_000_000))
    steps = np.array(STEPS)[labels[5].argmin(axis=1)]
    bottom = int(place_of(np.array(0.4)))
    assert np.all(steps[: bottom - 2] > 0)
    assert np.all(steps[bottom + 2 :] < 0)
    assert steps[bottom] == 0


def test_dear_moves_are_left_alone() -> None:
    costs = np.tile(1_000 * (1 + (SPLITS - 0.4) ** 2), (20, 1))
    labels = costs_to_go(flat_lesson(costs, pool_bytes=1 << 50))
    inside = labels[5, 10:-10]  # at the ends a step that leads nowhere is as good as none
    assert np.all(np.array(STEPS)[inside.argmin(axis=1)] == 0)


def test_followed_from_the_start_the_labels_are_about_as_good_as_the_oracle_s_path() -> None:
    rng = np.random.default_rng(1)
    bottoms = np.repeat(rng.uniform(0.2, 0.8, 5), 8)
    lesson = flat_lesson(np.array([1_000 * (1 + (SPLITS - bottom) ** 2) for bottom in bottoms]), pool_bytes=1 << 20)
    labels, alpha, spent = costs_to_go(lesson), 0.5, 0.0
    costs, prices = fine_costs(lesson.costs) / WINDOW_S, switching_costs(FINE, switch_prices(lesson.ground))
    for tick in range(labels.shape[0] - 1):
        before = int(place_of(np.array(alpha)))
        alpha = float(np.clip(alpha + STEPS[int(labels[tick, before].argmin())], FINE[0], FINE[-1]))
        after = int(place_of(np.array(alpha)))
        spent += costs[int((tick + 1) / WINDOW_S), after] + prices[before, after]
    plan = cheapest_path(fine_costs(lesson.costs), FINE, prices, start=int(place_of(np.array(0.5))))
    assert spent <= plan.total * 1.02


def test_torch_and_the_decision_run_the_same_network() -> None:
    arrays = StepNetwork({name: np.zeros_like(array) for name, array in following_layers().items()}).arrays()
    features, scores = np.random.default_rng(0).normal(size=NUM_FEATURES), np.zeros(len(STEPS))
    forward(as_layers.py_func(join_layers(arrays)), features, np.zeros((2, NUM_HIDDEN)), scores)
    import torch  # noqa: PLC0415 - only here

    with torch.no_grad():
        theirs = StepNetwork(arrays)(torch.from_numpy(features).float()).numpy()
    np.testing.assert_allclose(scores, theirs, rtol=1e-4, atol=1e-5)


def test_distillation_learns_which_step_is_cheapest() -> None:
    rng = np.random.default_rng(0)
    features = 0.2 * rng.normal(size=(2_000, NUM_FEATURES))
    best = np.where(features[:, 3] > 0, 0, 6)
    regrets = np.full((2_000, len(STEPS)), 0.5)
    regrets[np.arange(2_000), best] = 0
    examples, start = Examples(features, regrets), following_layers()
    losses: list[float] = []
    found = distil(start, examples, 60, 0, losses.append)
    assert losses[-1] < losses[0] / 2
    assert expected_regret(found, examples) < 0.15 < expected_regret(start, examples)


def test_ppo_goes_on_from_the_network_it_is_given() -> None:
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(array.shape) for name, array in following_layers().items()}
    policy = StepPolicy(Box(-np.inf, np.inf, (NUM_FEATURES,)), Discrete(len(STEPS)), lambda _: 0.0, arrays=given)
    for name, array in policy.network.arrays().items():
        np.testing.assert_allclose(array, given[name], rtol=1e-6)


def test_crowding_is_found_again() -> None:
    crowding, rng = Crowding(first=0.3, second=0.4), np.random.default_rng(0)
    cost = ServiceCost(token_ms=1e-3, floor_ms=0.5, missed_row_ms=1e-4, step_ms=0.5)
    steps = []
    for _ in range(400):
        new, missed, rate = rng.uniform(500, 3_000), rng.uniform(1e3, 2e4), rng.uniform(20, 250)
        compute, lead = 0.5 + new * 1e-3, missed * 1e-4
        pressure = rate / 1e3 * np.hypot(compute, lead)
        growth = (1 + crowding.first * pressure + crowding.second * pressure**2) ** 4
        steps.append(Step(new, 1_000.0, missed, rate, (0.5 + compute + lead) * growth))
    lesson = replace(flat_lesson(np.ones((2, SPLITS.size))), steps=steps)
    object.__setattr__(lesson, "ground", SimpleNamespace(service=cost))
    found = fit_crowding([lesson])
    assert (found.first, found.second) == pytest.approx((0.3, 0.4), rel=1e-3)


def test_an_observer_sees_what_the_policy_s_base_sees() -> None:
    policy = HelmPolicy(COST, HelmSettings(has_residual=False, has_burst=False, has_guardrail=False))
    observer = Observer(COST, policy.base.crowding)
    bowl, alpha = Bowl(noise=0.2, rate=50), 0.3
    rng = np.random.default_rng(0)
    for second in range(12):
        window = bowl.window(alpha, start_s=second, rng=rng)
        path = alpha if second == 0 else float(policy.kept.path[0])
        move = policy.decide(window)
        assert observer.observe(window)
        np.testing.assert_allclose(observer.features(path), policy.kept.features, atol=1e-9)
        alpha = alpha if move is None else move.alpha


def test_a_lesson_is_the_same_each_time_it_is_drawn_and_another_for_another_number() -> None:
    first, again, other = (draw_ground(number, default_cost(), 40.0) for number in (3, 3, 4))
    np.testing.assert_array_equal(first.trace.time_s, again.trace.time_s)
    assert first.name == again.name != other.name


@pytest.mark.slow
def test_a_small_training_makes_a_network_that_serves(tmp_path: Path) -> None:
    plan = TrainPlan(num_lessons=2, num_trials=1, lesson_s=40, num_epochs=5, ppo_steps=1_024, num_workers=1)
    trained = train(plan, default_cost(), None, lambda what, share: None)
    assert {"distilled", "distilled and PPO", "PPO only"} <= trained.networks.keys()
    save_base(tmp_path / "base.safetensors", trained.networks[trained.chosen], trained.record)
    policy = HelmPolicy(COST, base=load_base(tmp_path / "base.safetensors"))
    policy.decide(Bowl().window(0.3))
    assert policy.explanation is not None
