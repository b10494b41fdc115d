"""Intervals and the search for the largest load."""

from collections.abc import Mapping

import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec_bench.judging.judge import interval, largest_of, largest_of_each, paired_change


def test_intervals_are_student_s() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for size in (2, 5, 16):
        values = rng.normal(3, 2, size)
        low, high = stats.t.interval(0.95, size - 1, values.mean(), stats.sem(values))
        found = interval(values.tolist())
        assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high), rel=1e-3)


def test_many_seeds_get_an_interval_that_is_not_too_narrow() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(0, 1, 40)
    low, high = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    found = interval(values.tolist())
    assert found.low <= low < high <= found.high
    assert found.high - found.low < 1.06 * (high - low)


def test_one_seed_says_nothing_about_spread() -> None:
    assert interval([2.0]).low == -np.inf
    with pytest.raises(ConfigError, match="at least one value"):
        interval([])


def test_pairing_takes_out_what_seeds_share() -> None:
    """Seeds differ tenfold, the change is a fifth on each."""
    references = [1.0, 10.0, 3.0, 7.0, 0.5]
    change = paired_change([0.8 * value for value in references], references)
    assert (change.mean, change.low, change.high) == pytest.approx((-0.2, -0.2, -0.2))
    with pytest.raises(ConfigError, match=r"as many references \(1\) as values \(2\)"):
        paired_change([1.0, 2.0], [1.0])


def test_the_largest_of_some_loads_is_found_by_halving() -> None:
    tried: list[float] = []

    def is_met(load: float) -> bool:
        tried.append(load)
        return load <= 0.7

    loads = tuple(round(0.1 * step, 1) for step in range(1, 11))
    assert largest_of(loads, is_met) == 0.7
    assert len(tried) <= 4
    assert largest_of(loads, lambda load: True) == 1.0
    assert largest_of(loads, lambda load: False) is None


def test_searches_that_go_on_together_each_find_their_own() -> None:
    asked: list[set[str]] = []

    def are_met(loads: Mapping[str, float]) -> dict[str, bool]:
        asked.append(set(loads))
        return {name: load <= {"none": 0.0, "some": 2.0, "all": 9.0}[name] for name, load in loads.items()}

    assert largest_of_each(("none", "some", "all"), (1.0, 2.0, 3.0), are_met) == {"none": 0, "some": 2, "all": 3}
    assert asked == [{"none", "some", "all"}] * 2
