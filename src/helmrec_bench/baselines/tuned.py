"""Every baseline by name, with what is tuned of it: the same search (`tune`) over each of these spaces.

Best static in hindsight is not here: it is read off a sweep (`sim.oracle.best_static`).
"""

from collections.abc import Sequence
from typing import Any

from helmrec.config import Frozen
from helmrec.control.policy import Policy
from helmrec.control.static import Static, StaticSettings
from helmrec_bench.baselines.bayes import BayesianOptimiser, BayesSettings
from helmrec_bench.baselines.features import Episode
from helmrec_bench.baselines.heuristics import PID, HillClimber, HillSettings, OneCache, OneCacheSettings, PIDSettings
from helmrec_bench.baselines.lstm import LSTMSettings, train_lstm
from helmrec_bench.baselines.milp import MILPPlanner, MILPSettings
from helmrec_bench.baselines.model_based import ArgminSettings, MarginalSettings, MarginalUtility, MissCurveArgmin
from helmrec_bench.baselines.predictors import FollowSettings, PredictivePolicy
from helmrec_bench.baselines.service_cost import ServiceCost
from helmrec_bench.baselines.trees import TreeSettings, train_trees
from helmrec_bench.baselines.tune import Family, LogUniform, OneOf, Settings, Space, Uniform, Whole

FOLLOW: Space = {"min_distance": Uniform(0, 0.08), "slew": LogUniform(0.01, 0.1), "smoothing": Uniform(0.1, 1)}


def simple_baselines(cost: ServiceCost) -> tuple[Family, ...]:
    """Baselines that need neither training nor an extra."""
    one_cache: Space = {"tolerance": LogUniform(0.002, 0.2), "slew": LogUniform(0.01, 0.1)}
    return (
        Family("untuned 0.5", {}, lambda _: Static()),
        Family("static", {"alpha": Uniform(0.1, 0.9)}, lambda s: Static(StaticSettings(**s))),
        Family("kv-only", one_cache, lambda s: OneCache("kv", OneCacheSettings(**s))),
        Family("emb-only", one_cache, lambda s: OneCache("emb", OneCacheSettings(**s))),
        Family(
            "pid",
            {
                "setpoint": Uniform(-0.9, 0.9),
                "proportional": LogUniform(0.005, 0.3),
                "integral": LogUniform(0.003, 0.1),
                "derivative": OneOf((0.0, 0.01, 0.05)),
                "smoothing": Uniform(0.05, 1),
            },
            lambda s: PID(cost, PIDSettings(**s)),
        ),
        Family(
            "hill climber",
            {
                "signal": OneOf(("mean", "p99")),
                "settle_windows": Whole(0, 8),
                "trial_windows": Whole(1, 15),
                "first_step": Uniform(0.03, 0.15),
                "min_step": LogUniform(0.005, 0.03),
                "shrink": Uniform(0.3, 0.9),
            },
            lambda s: HillClimber(HillSettings(**s)),
        ),
        Family(
            "marginal utility",
            {"reach": Uniform(0.02, 0.2), "step": LogUniform(0.005, 0.08), "min_gain": LogUniform(1e-4, 0.02)},
            lambda s: MarginalUtility(cost, MarginalSettings(**s)),
        ),
        Family(
            "miss-curve argmin",
            {
                "min_gain": LogUniform(1e-3, 0.1),
                "min_distance": Uniform(0, 0.1),
                "slew": LogUniform(0.01, 0.1),
                "hedge": Uniform(0.4, 1),
            },
            lambda s: MissCurveArgmin(cost, ArgminSettings(**s)),
        ),
    )


def solver_baselines(cost: ServiceCost) -> tuple[Family, ...]:
    """Baselines that solve a problem every few windows."""
    return (
        Family(
            "bayesian optimisation",
            {
                "signal": OneOf(("mean", "p99")),
                "settle_windows": Whole(0, 8),
                "trial_windows": Whole(1, 15),
                "length_scale": LogUniform(0.05, 0.6),
                "memory_s": LogUniform(30, 3_000),
                "spread": LogUniform(0.05, 0.6),
                "noise": LogUniform(0.005, 0.1),
                "caution": Uniform(0.3, 2.5),
            },
            lambda s: BayesianOptimiser(BayesSettings(**s)),
        ),
        Family(
            "milp",
            {
                "horizon": Whole(2, 8),
                "window_lag": Whole(3, 20),
                "trend": Uniform(0, 1),
                "grow_ms": LogUniform(0.5, 100),
                "shrink_ms": LogUniform(0.5, 100),
            },
            lambda s: MILPPlanner(cost, MILPSettings(**s)),
        ),
    )


def learned_baselines(episodes: Sequence[Episode], seed: int = 0) -> tuple[Family, ...]:
    """Baselines trained on episodes; a trial of their tuning is a training."""

    def trees(settings: Settings) -> Policy:
        predictor = train_trees(episodes, TreeSettings(**_of(TreeSettings, settings)), seed)
        return PredictivePolicy(predictor, FollowSettings(**_of(FollowSettings, settings)))

    def lstm(settings: Settings) -> Policy:
        predictor = train_lstm(episodes, LSTMSettings(**_of(LSTMSettings, settings)), seed)
        return PredictivePolicy(predictor, FollowSettings(**_of(FollowSettings, settings)))

    tree_space: Space = {
        "num_windows": Whole(1, 8),
        "num_trees": Whole(30, 300),
        "depth": Whole(2, 7),
        "learning_rate": LogUniform(0.02, 0.3),
    }
    lstm_space: Space = {
        "num_windows": Whole(2, 16),
        "width": OneOf((16, 24, 32)),
        "num_epochs": Whole(10, 40),
        "learning_rate": LogUniform(0.002, 0.03),
    }
    return Family("xgboost", {**tree_space, **FOLLOW}, trees), Family("lstm", {**lstm_space, **FOLLOW}, lstm)


def _of(kind: type[Frozen], settings: Settings) -> dict[str, Any]:
    """The settings that are this kind's: a predictor and the way it is followed are tuned together."""
    return {name: value for name, value in settings.items() if name in kind.model_fields}
