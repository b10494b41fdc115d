"""Small traces that tests share, and models whose tables have every size relation to the lanes."""

from typing import Any

from helmrec.model.config import ITEM, ModelConfig, TableConfig
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.traffic.workload import Phase, Users, Workload
from tests.helpers import tiny_config

NUM_ITEMS = 1_003  # not a multiple of the lanes


def small_workload(**overrides: Any) -> Workload:
    """Some hundred requests over 16 lanes, with drift, flash items, ramps and a change of crowd."""
    settings: dict[str, Any] = {
        "name": "small",
        "num_items": NUM_ITEMS,
        "num_lanes": 16,
        "num_candidates": 40,
        "epoch_s": 2.0,
        "users": Users(history_sigma=0.5, min_history=0, max_history=200, new_events=3, return_median_s=2),
        "phases": (
            Phase(name="calm", duration_s=10, rate=15, hot_users=8, history=30),
            Phase(
                name="busy",
                duration_s=10,
                rate=(15, 40),
                hot_share=(0.7, 0.3),
                hot_users=8,
                hot_first=(0, 8),
                history=(30, 10),
                item_exponent=(1.2, 0.8),
                flash_share=0.2,
                flash_items=30,
                drift_items_per_hour=100_000,
            ),
        ),
        "repeat": 2,
    }
    return Workload(**settings | overrides)


def small_trace(seed: int = 0, **overrides: Any) -> Trace:
    return generate(small_workload(**overrides), seed)


def model_of_many_tables() -> ModelConfig:
    """Tables larger than the catalogue, not a multiple of the lanes, and smaller than the lanes; two user tables."""
    return tiny_config(
        window=64,
        max_candidates=64,
        features=(
            TableConfig(name=ITEM, num_rows=2_000),
            TableConfig(name="category", num_rows=9),
            TableConfig(name="shop", num_rows=333),
            TableConfig(name="brand", num_rows=64),
        ),
        user_context=(TableConfig(name="country", num_rows=5), TableConfig(name="user", num_rows=200)),
    )
