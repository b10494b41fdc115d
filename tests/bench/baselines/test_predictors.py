"""Predictors learn from episodes and follow on traffic they never saw."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from helmrec.errors import ConfigError
from helmrec_bench.baselines.features import NUM_FEATURES, Episode, Floats, examples, features
from helmrec_bench.baselines.lstm import LSTMSettings, train_lstm
from helmrec_bench.baselines.predictors import FollowSettings, PredictivePolicy, Predictor
from helmrec_bench.baselines.trees import TreeSettings, train_trees
from tests.bench.baselines.drift import bottoms, bowls, episode, follow
from tests.control.bowl import Bowl


@cache
def lessons() -> tuple[Episode, ...]:
    return tuple(episode(seed) for seed in range(8))


class Echo:
    """Wants a fixed distance above the newest window's split."""

    num_windows = 2

    def predict(self, inputs: Floats) -> float:
        assert inputs.shape == (2, NUM_FEATURES)
        return float(inputs[-1, 0]) + 0.2


TRAINERS: dict[str, Callable[[], Predictor]] = {
    "trees": lambda: train_trees(lessons()),
    "lstm": lambda: train_lstm(lessons(), LSTMSettings(num_epochs=12)),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trained_predictor_follows_better_than_any_constant(name: str) -> None:
    policy = PredictivePolicy(TRAINERS[name](), FollowSettings(slew=0.1))
    gaps, constants = [], []
    for seed in (100, 101, 102):
        best = bottoms(nodes := bowls(seed))
        policy.reset()
        gaps.append(np.abs(follow(policy, nodes) - best)[20:].mean())
        constants.append(min(np.abs(alpha - best)[20:].mean() for alpha in np.linspace(0.1, 0.9, 81)))
    assert np.mean(gaps) < 0.6 * np.mean(constants)


@pytest.mark.parametrize(
    "train",
    [
        lambda seed: train_trees(lessons()[:2], TreeSettings(num_trees=10), seed),
        lambda seed: train_lstm(lessons()[:2], LSTMSettings(num_epochs=1), seed),
    ],
)
def test_the_same_seed_trains_the_same_predictor(train: Callable[[int], Predictor]) -> None:
    inputs = examples(lessons()[:1], 8).inputs[0]

    def answer(predictor: Predictor) -> float:
        return predictor.predict(inputs[-predictor.num_windows :])

    assert answer(train(1)) == answer(train(1)) != answer(train(2))


def test_training_leaves_the_caller_s_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    train_lstm(lessons()[:1], LSTMSettings(num_epochs=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_example_pairs_windows_with_the_split_wanted_after_them() -> None:
    first = replace(lessons()[0], alpha_star=np.arange(120) / 120)
    data = examples((first, lessons()[1]), 3)
    assert data.inputs.shape == (2 * (120 - 3), 3, NUM_FEATURES)
    np.testing.assert_array_equal(data.inputs[5], [features(stats) for stats in first.stats[5:8]])
    assert data.alphas[5] == first.alpha_star[8]


def test_features_are_of_order_one_even_in_overload() -> None:
    stats = Bowl(emb_scale=2, kv_scale=2, rate=5_000).window(0.5)
    assert np.all(np.abs(features(stats)) <= 4)


def test_a_prediction_is_followed_at_slew_after_enough_windows() -> None:
    policy = PredictivePolicy(Echo(), FollowSettings(slew=0.05))
    assert policy.decide(Bowl().window(0.5)) is None
    move = policy.decide(Bowl().window(0.5, 1))
    assert move is not None
    assert move.alpha == pytest.approx(0.55)
    policy.reset()
    assert policy.decide(Bowl().window(0.5)) is None


def test_a_prediction_nearby_is_left_alone() -> None:
    policy = PredictivePolicy(Echo(), FollowSettings(min_distance=0.3))
    assert [policy.decide(Bowl().window(0.5, float(window))) for window in range(4)] == [None] * 4


def test_too_short_an_episode_and_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 120 windows, the longest has 120"):
        examples(lessons()[:1], 120)
    with pytest.raises(ConfigError, match=r"one value per window \(1\), not 2"):
        Episode("wrong", (Bowl().window(0.5),), np.zeros(2))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(ConfigError, match=r"needs xgboost: pip install 'helmrec\[bench\]'"):
        train_trees(lessons()[:1])
