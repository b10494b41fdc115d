from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.errors import ConfigError, TraceError
from helmrec.traffic.trace import Catalogue, EmpiricalLaw, Epoch, ZipfLaw, index_histories
from helmrec.traffic.workload import lanes_for
from tests.traffic.cases import small_trace


def test_histories_equal_their_plain_twin() -> None:
    trace = small_trace()
    histories = index_histories(trace)
    lengths: dict[int, int] = {}
    visits: dict[int, int] = {}
    for r, user in enumerate(trace.user.tolist()):
        lengths[user] = lengths.get(user, 0) + int(trace.num_new[r])
        assert histories.length[r] == lengths[user]
        assert histories.visit[r] == visits.get(user, 0)
        visits[user] = visits.get(user, 0) + 1
        assert histories.is_last[r] == (user not in trace.user[r + 1 :])
    own = [lengths[user] - int(trace.backlog[user]) for user in range(trace.num_users)]
    assert np.diff(histories.own_start).tolist() == own


def changed(name: str, index: int, value: float) -> dict[str, Any]:
    values = getattr(small_trace(), name).copy()
    values[index] = value
    return {name: values}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("user", 3, -1), "user must be from 0 to .* got -1"),
        (changed("epoch", 3, 99), "epoch must be from 0 to .* got 99"),
        (changed("phase", 3, 2), "phase must be from 0 to 1, got 2"),
        (changed("item", 3, 1_003), "item must be from 0 to 1002, got 1003"),
        (changed("action", 3, 4), "action must be from 0 to 3, got 4"),
        (changed("num_candidates", 3, -5), "num_candidates must be at least 0, got -5"),
        (changed("time_s", 3, -1.0), "time_s must .* never fall"),
        (changed("num_new", 3, 5_000), "num_new must add up"),
        (changed("timestamp_s", 1, 0), "timestamp_s must not fall within a user, got 0 at event 1"),
        (changed("timestamp_s", 0, 5), "events after a backlog must not lie before start_time_s, got 5"),
        (changed("time_s", -1, np.inf), "time_s must"),
        ({"time_s": np.zeros(3)}, "must be equally long"),
        ({"backlog": np.append(small_trace().backlog, 0).astype(np.int32)}, "every user must have"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_the_value_seen(change: dict[str, Any], message: str) -> None:
    trace = small_trace()
    trace.check()
    with pytest.raises(TraceError, match=message):
        replace(trace, **change).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_items": 100}, "num_items must be at least num_lanes"),
        ({"num_lanes": 48}, "num_lanes must be a power of two"),
        ({"epochs": (Epoch(law=1),)}, "names law 1, there are 1"),
        ({"shoes": 1}, "shoes is not a known setting"),
    ],
)
def test_a_catalogue_that_fits_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"num_items": 1_000, "laws": (ZipfLaw(exponent=1),), "epochs": (Epoch(),)}
    Catalogue(**good)
    with pytest.raises(ConfigError, match=message):
        Catalogue(**good | settings)


@pytest.mark.parametrize(("ends", "mass"), [((5, 5), (0.5, 0.5)), ((5,), (0.5, 0.5)), ((5,), (0.0,)), ((5,), (-1.0,))])
def test_counts_that_are_no_distribution_are_refused(ends: tuple[int, ...], mass: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        EmpiricalLaw(ends=ends, mass=mass)


@pytest.mark.parametrize(
    ("num_items", "lanes"), [(1, 1), (1_024, 1), (2_048, 2), (12_611, 8), (10**6, 256), (10**9, 256)]
)
def test_small_catalogues_get_few_lanes(num_items: int, lanes: int) -> None:
    assert lanes_for(num_items) == lanes
