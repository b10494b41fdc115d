"""Bayesian optimisation: what it believes, and where it ends up."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec_bench.baselines.bayes import BayesianOptimiser, BayesSettings, BayesTrial, believe
from tests.control.bowl import Bowl, drive


def test_belief_is_firm_where_it_tried_and_open_where_it_did_not() -> None:
    settings = BayesSettings(noise=0.001, spread=0.3, length_scale=0.1)
    belief = believe(
        [BayesTrial(0.2, 10.0, 0.0), BayesTrial(0.4, 40.0, 0.0)], np.array([0.2, 0.4, 0.95]), 0.0, settings
    )
    np.testing.assert_allclose(np.exp(belief.mean), [10, 40, 20], rtol=0.01)
    np.testing.assert_allclose(belief.deviation, [0, 0, 0.3], atol=0.002)


def test_belief_is_that_of_the_textbook_formula() -> None:
    """Each split on its own by a plain inverse."""
    rng, settings = np.random.default_rng(3), BayesSettings(memory_s=50)
    trials = [BayesTrial(float(a), float(1 + ms), float(60 * t)) for a, ms, t in rng.random((6, 3))]
    alphas = np.linspace(0, 1, 5)
    belief = believe(trials, alphas, 70.0, settings)
    log_ms = np.log([trial.latency_ms for trial in trials])
    centre, prior = (log_ms.min() + log_ms.max()) / 2, settings.spread**2

    def alike(a: float, b: float, gap_s: float) -> float:
        return prior * float(np.exp(-((a - b) ** 2) / 2 / settings.length_scale**2 - abs(gap_s) / settings.memory_s))

    among = np.array([[alike(x.alpha, y.alpha, x.end_s - y.end_s) for y in trials] for x in trials])
    inverse = np.linalg.inv(among + settings.noise**2 * np.eye(6))
    for at, alpha in enumerate(alphas):
        across = np.array([alike(float(alpha), trial.alpha, 70 - trial.end_s) for trial in trials])
        assert belief.mean[at] == pytest.approx(centre + across @ inverse @ (log_ms - centre))
        assert belief.deviation[at] == pytest.approx(np.sqrt(prior - across @ inverse @ across))


def test_old_trials_fade() -> None:
    settings = BayesSettings(memory_s=100)
    trials = [BayesTrial(0.2, 10.0, 0.0), BayesTrial(0.8, 20.0, 0.0)]
    fresh, old = (believe(trials, np.array([0.2]), now_s, settings) for now_s in (0.0, 1_000.0))
    assert old.deviation[0] > 5 * fresh.deviation[0]


@pytest.mark.parametrize("bowl", [Bowl(), Bowl(emb_scale=0.5, kv_scale=0.1), Bowl(emb_scale=0.12, kv_scale=0.5)])
def test_it_finds_the_minimum_under_noise(bowl: Bowl) -> None:
    path = drive(BayesianOptimiser(), replace(bowl, noise=0.05), 0.5, 600)
    spent = [bowl.latency_ms(alpha) for alpha in path[300:]]
    assert np.mean(spent) < 1.02 * bowl.latency_ms(bowl.bottom())


def test_it_comes_along_when_traffic_turns() -> None:
    policy, noise = BayesianOptimiser(), 0.05
    drive(policy, Bowl(emb_scale=0.5, kv_scale=0.1, noise=noise), 0.5, 300)
    turned = Bowl(emb_scale=0.12, kv_scale=0.5, noise=noise)
    path = drive(policy, turned, 0.75, 300, start_s=300.0)
    spent = [turned.latency_ms(alpha) for alpha in path[100:]]
    assert np.mean(spent) < 1.05 * turned.latency_ms(turned.bottom()) < 0.7 * turned.latency_ms(0.75)
