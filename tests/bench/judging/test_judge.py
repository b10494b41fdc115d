"""Intervals and the search for the largest load."""

import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec_bench.judging.judge import Search, interval, largest_load, largest_of, paired_change


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


def test_the_search_ends_just_below_the_edge() -> None:
    found = largest_load(lambda load: load <= 137, Search(10, 1_000, tolerance=0.01))
    assert found is not None
    assert 137 / 1.01 <= found <= 137


def test_the_search_knows_when_the_edge_is_outside() -> None:
    assert largest_load(lambda _: False, Search(10, 100)) is None
    assert largest_load(lambda _: True, Search(10, 100)) == 100


def test_the_search_takes_few_tries() -> None:
    tried: list[float] = []
    largest_load(lambda load: tried.append(load) or load <= 50, Search(10, 100, tolerance=0.02))  # type: ignore[func-returns-value]
    assert len(tried) <= 2 + 7


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
