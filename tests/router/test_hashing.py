import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.router.hashing import NO_NODE, rendezvous, within_bound

USERS = range(4_000)
MASK = 2**64 - 1


def mixed(word: int) -> int:
    """SplitMix64's finaliser, in integers that do not overflow."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def plain_rendezvous(user: int, ids: list[int], weights: list[float]) -> int:
    def score(place: int) -> float:
        word = mixed(mixed(user) ^ mixed(~ids[place] & MASK))
        return float(-np.log(((word >> 11) + 0.5) / 2.0**53) / weights[place])

    return min(range(len(ids)), key=score)


def homes(ids: list[int], weights: list[float] | None = None) -> np.ndarray:
    taken = np.ones(len(ids), np.bool_)
    weight = np.array(weights or [1.0] * len(ids))
    return np.array([ids[rendezvous(user, np.array(ids), weight, taken)] for user in USERS])


@given(st.integers(0, 2**62), st.lists(st.tuples(st.integers(0, 2**62), st.floats(0.05, 1)), min_size=1, max_size=9))
def test_the_compiled_loop_is_the_plain_one(user: int, nodes: list[tuple[int, float]]) -> None:
    ids, weights = [i for i, _ in nodes], [w for _, w in nodes]
    found = rendezvous(user, np.array(ids), np.array(weights), np.ones(len(ids), np.bool_))
    expected = plain_rendezvous(user, ids, weights)
    assert ids[found] == ids[expected]


@pytest.mark.parametrize("count", [3, 8, 31])
def test_a_node_that_joins_takes_its_share_and_moves_no_other_user(count: int) -> None:
    before, after = homes(list(range(count))), homes([*range(count), 99])
    moved = before != after
    assert (after[moved] == 99).all()
    expected = len(USERS) / (count + 1)
    assert abs(moved.sum() - expected) < 4 * np.sqrt(expected)


def test_a_node_that_leaves_gives_its_users_to_all_others() -> None:
    before, after = homes([0, 1, 2, 3, 4]), homes([0, 1, 3, 4])
    assert (before[before != 2] == after[before != 2]).all()
    shares = np.bincount(after[before == 2], minlength=5)[[0, 1, 3, 4]]
    assert shares.min() > 0.15 * shares.sum()


def test_users_are_spread_in_proportion_to_the_weights() -> None:
    shares = np.bincount(homes([0, 1, 2], [1.0, 0.5, 0.25])) / len(USERS)
    np.testing.assert_allclose(shares, np.array([4, 2, 1]) / 7, atol=0.03)


def test_who_may_not_be_taken_is_not() -> None:
    nobody = np.zeros(3, np.bool_)
    assert rendezvous(1, np.arange(3), np.ones(3), nobody) == NO_NODE
    assert rendezvous(1, np.arange(3), np.ones(3), np.array([False, True, False])) == 1


@given(st.lists(st.tuples(st.floats(0, 1e4), st.booleans()), min_size=1, max_size=12), st.floats(1, 3), st.floats(0, 5))
def test_no_node_above_the_bound_is_allowed_and_one_always_is(
    nodes: list[tuple[float, bool]], factor: float, slack: float
) -> None:
    loads, alive = np.array([load for load, _ in nodes]), np.array([is_alive for _, is_alive in nodes])
    allowed = within_bound(loads, alive, factor, slack)
    assert not (allowed & ~alive).any()
    assert allowed.any() == alive.any()
    if alive.any():
        bound = factor * loads[alive].mean() + slack
        assert (loads[allowed] <= bound * (1 + 1e-9)).all()
