from typing import Any

import numpy as np
import pytest

from helmrec.errors import ConfigError, RequestError
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema, NewEvents, to_columns, to_events
from tests.helpers import tiny_config
from tests.history.helpers import SCHEMA, events_of, same

GOOD: dict[str, Any] = {"items": [1, 2], "actions": [0, 3], "timestamps": [5, 5], "features": {"category": [1, 19]}}


def test_events_come_out_of_columns_as_they_went_in() -> None:
    new = events_of(3, 10, 40)
    columns = to_columns(SCHEMA, new, 100)
    assert columns.dtype == np.int64
    assert same(to_events(SCHEMA, 10, columns), new)


def test_columns_stand_in_the_intakes_order() -> None:
    assert to_columns(SCHEMA, NewEvents(**GOOD), 9).tolist() == [[1, 2], [1, 19], [0, 3], [5, 5]]


def test_a_models_shape_gives_the_schema() -> None:
    schema = EventSchema.of_model(tiny_config())
    assert (schema.num_items, schema.num_actions, schema.feature_names) == (300, 4, ("category",))


def test_columns_are_a_copy() -> None:
    items = np.array([1, 2])
    columns = to_columns(SCHEMA, NewEvents(**GOOD | {"items": items}), 9)
    items[:] = 7
    assert columns[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": [1, 1000]}, r"items\[1\]: values run from 0 to 999, got 1000"),
        ({"items": [-1, 1]}, r"items\[0\]: values run from 0 to 999, got -1"),
        ({"items": []}, "items: between 1 and 9 events are needed, got 0"),
        ({"items": list(range(10))}, "items: between 1 and 9 events are needed, got 10"),
        ({"items": [1.5, 2]}, r"items\[0\]: integers of 64 bits are needed"),
        ({"items": [True, False]}, r"items\[0\]: integers"),
        ({"items": ["a", "b"]}, r"items\[0\]: integers"),
        ({"items": [1, 2**70]}, rf"items\[1\]: integers of 64 bits are needed, got {2**70}"),
        ({"items": [1, 2**63]}, r"items\[1\]: values run|items\[1\]: integers"),
        ({"items": [[1], [2]]}, "items: a flat list of integers is needed"),
        ({"items": [[1], [2, 3]]}, "items: a flat list of integers is needed"),
        ({"items": 5}, "items: a flat list of integers is needed"),
        ({"items": None}, "items: a flat list of integers is needed"),
        ({"actions": [0, 4]}, r"actions\[1\]: values run from 0 to 3, got 4"),
        ({"actions": [0]}, "actions: one value per item is needed, 2 in all, got 1"),
        ({"timestamps": [6, 5]}, r"timestamps\[1\]: time runs backwards from 6, got 5"),
        ({"timestamps": [-6, 5]}, r"timestamps\[0\]: values run from 0"),
        ({"features": {}}, r"features: .*\['category'\], got \[\]"),
        ({"features": {"category": [1, 2], "colour": [1, 2]}}, r"features: .* got \['category', 'colour'\]"),
        ({"features": [1]}, r"features: .* got \[1\]"),
        ({"features": {"category": [1, 20]}}, r"features\['category'\]\[1\]: values run from 0 to 19, got 20"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        to_columns(SCHEMA, NewEvents(**GOOD | change), 9)


def test_settings_out_of_bounds_are_refused_with_the_value() -> None:
    with pytest.raises(ConfigError, match=r"sync_interval_s must be more than 0\.0, got 0"):
        HistoryConfig(sync_interval_s=0)
    with pytest.raises(ConfigError, match="sync"):
        HistoryConfig(sync="never")
