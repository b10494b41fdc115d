"""One search for all baselines, and a catalogue whose every entry runs within limits."""

import numpy as np
import pytest

from helmrec.control.policy import Limited, Limits, Policy
from helmrec.control.static import Static, StaticSettings
from helmrec.errors import ConfigError
from helmrec_bench.baselines.tune import Family, LogUniform, OneOf, Uniform, Whole, tune
from helmrec_bench.baselines.tuned import learned_baselines, simple_baselines, solver_baselines
from tests.bench.baselines.drift import COST, bowls, episode, follow

STATIC = Family("static", {"alpha": Uniform(0, 1)}, lambda s: Static(StaticSettings(**s)))


def distance(policy: Policy) -> float:
    assert isinstance(policy, Static)
    return abs(policy.settings.alpha - 0.23)


def test_the_search_finds_what_is_good_and_keeps_its_record() -> None:
    tuned = tune(STATIC, distance, 60, np.random.default_rng(0))
    assert tuned.best.loss < 0.05
    assert tuned.best.loss == min(trial.loss for trial in tuned.trials)
    assert len(tuned.trials) == 60
    assert tuned.trials[0].settings == {}


def test_the_defaults_stay_if_nothing_drawn_is_better() -> None:
    at_default = distance(Static())
    tuned = tune(STATIC, lambda policy: abs(distance(policy) - at_default), 20, np.random.default_rng(0))
    assert tuned.best.settings == {}


def test_the_same_seed_searches_the_same_settings() -> None:
    one, two, other = (tune(STATIC, distance, 5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == two != other


def test_a_policy_that_breaks_its_node_never_wins() -> None:
    losses = iter([float("nan"), 3.0, float("nan")])
    assert tune(STATIC, lambda _: next(losses), 3, np.random.default_rng(0)).best.loss == 3.0


def test_what_has_nothing_to_tune_is_tried_once() -> None:
    assert len(tune(Family("fixed", {}, lambda _: Static()), distance, 50, np.random.default_rng(0)).trials) == 1


def test_a_search_without_trials_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget must be at least 1, got 0"):
        tune(STATIC, distance, 0, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("range_", "low", "high"), [(Uniform(2, 3), 2, 3), (LogUniform(1e-3, 10), 1e-3, 10), (Whole(1, 3), 1, 3)]
)
def test_draws_stay_in_range_and_reach_its_ends(range_: Uniform | LogUniform | Whole, low: float, high: float) -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([range_.draw(rng) for _ in range(2_000)])
    assert drawn.min() >= low
    assert drawn.max() <= high
    assert drawn.min() < low * 1.02
    assert drawn.max() > high * 0.98
    if isinstance(range_, LogUniform):
        assert np.mean(drawn < 0.1) == pytest.approx(0.5, abs=0.05)


def test_one_of_draws_each() -> None:
    rng = np.random.default_rng(0)
    assert {OneOf(("a", "b")).draw(rng) for _ in range(50)} == {"a", "b"}


FAMILIES = {f.name: f for f in (*simple_baselines(COST), *solver_baselines(COST), *learned_baselines([episode(0)]))}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rival_runs_with_any_settings_of_its_space_and_keeps_its_limits(name: str) -> None:
    family, rng = FAMILIES[name], np.random.default_rng(7)
    limits = Limits(min_alpha=0.2, max_alpha=0.8, max_step=0.07)
    for number in range(2):
        settings = {key: range_.draw(rng) for key, range_ in family.space.items()}
        path = follow(Limited(family.build(settings), limits), bowls(number)[:40])
        assert path.min() >= 0.2
        assert path.max() <= 0.8
        assert np.abs(np.diff(path)).max() <= 0.07 + 1e-12


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reset_rival_is_as_new(name: str) -> None:
    used, fresh = FAMILIES[name].build({}), FAMILIES[name].build({})
    follow(used, bowls(1)[:13], seed=1)
    used.reset()
    np.testing.assert_array_equal(follow(used, bowls(2)[:25], seed=2), follow(fresh, bowls(2)[:25], seed=2))
