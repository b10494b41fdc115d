"""Gradient-boosted trees (XGBoost) that predict the best split from the last windows."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import ConfigError
from helmrec_bench.baselines.features import Episode, Floats, examples


class TreeSettings(Frozen):
    """What XGBoost is trained with."""

    num_windows: int = Field(3, ge=1, description="windows looked at")
    num_trees: int = Field(120, ge=1)
    depth: int = Field(4, ge=1, description="of a tree")
    learning_rate: float = Field(0.1, gt=0, le=1)
    subsample: float = Field(0.8, gt=0, le=1, description="share of examples each tree sees")


class Trees:
    """A trained ensemble."""

    def __init__(self, booster: Any, num_windows: int) -> None:
        self.num_windows = num_windows
        self._booster = booster

    def predict(self, inputs: Floats) -> float:
        return float(self._booster.inplace_predict(inputs.reshape(1, -1))[0])


def train_trees(episodes: Sequence[Episode], settings: TreeSettings | None = None, seed: int = 0) -> Trees:
    """On one thread, so that the same seed gives the same trees."""
    settings, xgboost = settings or TreeSettings(), _xgboost()
    data = examples(episodes, settings.num_windows)
    matrix = xgboost.DMatrix(data.inputs.reshape(len(data.alphas), -1), label=data.alphas)
    parameters = {
        "objective": "reg:squarederror",
        "max_depth": settings.depth,
        "eta": settings.learning_rate,
        "subsample": settings.subsample,
        "seed": seed,
        "nthread": 1,
    }
    return Trees(xgboost.train(parameters, matrix, settings.num_trees), settings.num_windows)


def _xgboost() -> Any:
    try:
        import xgboost  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("this baseline needs xgboost: pip install 'helmrec[bench]'") from None
    return xgboost
