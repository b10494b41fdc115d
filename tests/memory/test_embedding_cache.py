import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from helmrec.memory.embedding_cache import ABSENT, EmbeddingCache, repeats_of
from helmrec.memory.row_admission import AdmitEveryRow, SecondTouch
from helmrec.memory.row_order import make_order

Rows = NDArray[np.int64]


def make_cache(num_pages: int = 4, owned: int = 2, per_page: int = 4, order: str = "lru") -> EmbeddingCache:
    """`owned` of `num_pages` pages, in an id space of 1,000 rows; every missed row is worth a slot."""
    cache = EmbeddingCache(1_000, num_pages, per_page, make_order(order, num_pages * per_page), AdmitEveryRow())
    cache.add_pages(range(owned))
    return cache


def read(cache: EmbeddingCache, rows: list[int] | Rows) -> int:
    """Look rows up and admit what was missed; returns the hits."""
    wanted = np.asarray(rows, np.int64)
    missed = wanted[cache.lookup(wanted) == ABSENT]
    cache.publish(cache.admit(missed, np.arange(missed.size)))
    return wanted.size - missed.size


def shrink(cache: EmbeddingCache, num: int) -> None:
    cache.finish_shrink(cache.remove_pages(num))


def resident(cache: EmbeddingCache) -> set[int]:
    return set(cache.by_heat().tolist())


def zipf(rng: np.random.Generator, num_rows: int, size: int) -> Rows:
    weights = 1 / np.arange(1, num_rows + 1) ** 0.9
    return rng.permutation(num_rows)[rng.choice(num_rows, size, p=weights / weights.sum())]


def test_the_first_read_misses_and_the_second_hits() -> None:
    cache = make_cache()
    assert cache.lookup(np.array([5, 7])).tolist() == [ABSENT, ABSENT]
    assert read(cache, [5, 7]) == 0
    assert read(cache, [5, 7, 9]) == 2
    assert (cache.hits, cache.misses) == (2, 5)
    cache.check()


def test_an_admission_is_invisible_until_published() -> None:
    cache = make_cache()
    admission = cache.admit(np.array([5]), np.array([0]))
    assert cache.peek(np.array([5]))[0] == ABSENT
    cache.publish(admission)
    assert cache.peek(np.array([5]))[0] == admission.slots[0]


def test_a_withdrawn_admission_gives_its_slots_back() -> None:
    cache = make_cache()
    cache.withdraw(cache.admit(np.array([5, 6]), np.array([0, 1])))
    assert resident(cache) == set()
    cache.check()


def test_a_row_missed_twice_by_a_step_is_read_and_admitted_once() -> None:
    cache = make_cache()
    read(cache, [3])
    rows = np.array([9, 5, 3, 9, 5, 9])
    slots = cache.lookup(rows)
    missed, repeats = np.flatnonzero(slots == ABSENT), repeats_of(slots)
    assert missed.tolist() == [0, 1]
    assert (repeats.places.tolist(), repeats.sources.tolist()) == ([3, 4, 5], [0, 1, 0])
    assert (cache.hits, cache.misses) == (4, 3), "a repeat reads what the step has read already"
    admission = cache.admit(rows[missed], missed)
    assert admission.rows.tolist() == [9, 5]
    assert admission.positions.tolist() == [0, 1]
    cache.publish(admission)
    assert (cache.lookup(rows) >= 0).all()
    cache.check()


def test_peeking_neither_counts_nor_warms() -> None:
    cache = make_cache(owned=1)
    read(cache, [1, 2, 3, 4])
    before = cache.hits
    cache.peek(np.array([1]))
    assert cache.hits == before
    read(cache, [5])
    assert resident(cache) == {2, 3, 4, 5}


def test_the_least_recently_read_row_makes_room() -> None:
    cache = make_cache(owned=1)
    read(cache, [1, 2, 3, 4])
    read(cache, [1, 3])
    read(cache, [5, 6])
    assert resident(cache) == {1, 3, 5, 6}
    assert cache.evictions == 2


def test_the_least_often_read_row_makes_room() -> None:
    cache = make_cache(owned=1, order="frequency")
    read(cache, [1, 2, 3, 4])
    for _ in range(3):
        read(cache, [1, 2, 4])
    read(cache, [3])
    read(cache, [5])
    assert resident(cache) == {1, 2, 4, 5}


def test_more_missed_rows_than_capacity_keep_the_latest() -> None:
    cache = make_cache(owned=1)
    read(cache, list(range(10)))
    assert resident(cache) == {6, 7, 8, 9}
    cache.check()


def test_a_cache_without_pages_only_misses() -> None:
    cache = make_cache(owned=0)
    assert read(cache, [1, 2]) == 0
    assert (cache.capacity, cache.num_resident) == (0, 0)
    cache.check()


def test_empty_slots_are_given_to_any_row_but_full_caches_only_admit_worthy_ones() -> None:
    cache = EmbeddingCache(1_000, 1, 4, make_order("lru", 4), SecondTouch(4))
    cache.add_pages([0])
    read(cache, [1, 2, 3, 4])
    assert resident(cache) == {1, 2, 3, 4}
    read(cache, [5])
    assert resident(cache) == {1, 2, 3, 4}
    read(cache, [5])
    assert resident(cache) == {2, 3, 4, 5}


def test_a_shrink_keeps_the_globally_hottest_rows_and_moves_survivors() -> None:
    cache = make_cache(num_pages=3, owned=3)
    read(cache, list(range(12)))
    hot = [0, 5, 10, 11]
    read(cache, hot)
    before = {row: int(cache.peek(np.array([row]))[0]) for row in hot}
    plan = cache.remove_pages(2)
    assert {int(cache.peek(np.array([row]))[0]) for row in hot} == set(before.values()), "readers saw a half move"
    moved = dict(zip(plan.source.tolist(), plan.target.tolist(), strict=True))
    cache.finish_shrink(plan)
    assert resident(cache) == set(hot)
    assert {row: int(cache.peek(np.array([row]))[0]) for row in hot} == {r: moved.get(s, s) for r, s in before.items()}
    assert not moved.keys() & set(moved.values())
    cache.check()


def test_survivors_keep_their_rank() -> None:
    cache = make_cache(num_pages=3, owned=3)
    read(cache, list(range(12)))
    read(cache, [11, 0, 10, 5])
    shrink(cache, 2)
    read(cache, [100])
    assert resident(cache) == {0, 10, 5, 100}


def test_shrinking_a_half_empty_cache_evicts_nothing() -> None:
    cache = make_cache(num_pages=3, owned=3)
    read(cache, [1, 2, 3, 4])
    shrink(cache, 2)
    assert resident(cache) == {1, 2, 3, 4}
    assert cache.evictions == 0


def test_shrinking_to_nothing_and_growing_again_works() -> None:
    cache = make_cache()
    read(cache, [1, 2, 3])
    shrink(cache, 2)
    assert (cache.capacity, resident(cache)) == (0, set())
    cache.add_pages([3])
    read(cache, [4])
    assert resident(cache) == {4}
    cache.check()


@pytest.mark.parametrize("steps", [1, 8], ids=["at-once", "page-by-page"])
@pytest.mark.parametrize("order", ["lru", "frequency"])
def test_the_hit_rate_after_a_shrink_is_that_of_a_cache_born_small(order: str, steps: int) -> None:
    batches = zipf(np.random.default_rng(3), 1_000, 20_000).reshape(200, 100)
    moved = make_cache(num_pages=20, owned=14, per_page=16, order=order)
    born = make_cache(num_pages=20, owned=6, per_page=16, order=order)
    for batch in batches[:100]:
        read(moved, batch)
        read(born, batch)
    for _ in range(steps):
        shrink(moved, 8 // steps)
        moved.check()
    hits = [np.sum([read(cache, batch) for batch in batches[100:]]) / 10_000 for cache in (moved, born)]
    assert abs(hits[0] - hits[1]) < 0.01


Operation = tuple[str, list[int]]


@settings(max_examples=150)
@given(
    st.sampled_from(["lru", "frequency"]),
    st.lists(
        st.tuples(
            st.sampled_from(["read", "read", "read", "withdraw", "grow", "shrink"]),
            st.lists(st.integers(0, 40), max_size=12),
        ),
        max_size=40,
    ),
)
def test_no_slot_is_lost_whatever_happens(order: str, operations: list[Operation]) -> None:
    cache, owned = make_cache(num_pages=6, owned=3, order=order), {0, 1, 2}
    for kind, rows in operations:
        if kind == "read":
            read(cache, rows)
        elif kind == "withdraw":
            cache.withdraw(cache.admit(np.array(rows, np.int64), np.arange(len(rows))))
        elif kind == "grow":
            new = sorted(set(range(6)) - owned)[: len(rows)]
            cache.add_pages(new)
            owned |= set(new)
        else:
            plan = cache.remove_pages(min(len(rows), len(owned)))
            cache.finish_shrink(plan)
            owned -= set(plan.pages)
        cache.check()
        assert cache.capacity == 4 * len(owned)
        assert cache.num_resident == len(resident(cache)) <= cache.capacity


@pytest.mark.parametrize("name", ["lru", "frequency"])
def test_a_cache_that_grows_back_takes_the_hottest_absent_rows_and_holds_them_cold(name: str) -> None:
    cache = EmbeddingCache(100, 4, 4, make_order(name, 16), AdmitEveryRow())
    cache.add_pages([0, 1, 2, 3])
    for row in range(16):  # row 15 is the hottest
        cache.publish(cache.admit(np.array([row]), np.array([0])))
        cache.lookup(np.array([row]))
    shrink = cache.remove_pages(2)
    cache.finish_shrink(shrink)
    assert sorted(cache.by_heat()) == list(range(8, 16))
    cache.add_pages(shrink.pages)
    refill = cache.refill(3)
    assert refill.rows.tolist() == [7, 6, 5], "the hottest of those that went, hottest first"
    cache.publish(refill, is_cold=True)
    cache.check()
    rest = cache.refill(100)
    assert rest.rows.tolist() == [4, 3, 2, 1, 0]
    cache.publish(rest, is_cold=True)
    assert cache.refill(100).rows.size == 0
    cache.publish(cache.admit(np.array([50, 51]), np.array([0, 1])))
    assert sorted(set(range(16)) - set(cache.by_heat().tolist())) == [0, 1], "the coldest of the refilled go first"


def test_rows_that_came_back_on_demand_are_not_refilled() -> None:
    cache = EmbeddingCache(100, 2, 4, make_order("lru", 8), AdmitEveryRow())
    cache.add_pages([0])
    for row in (1, 2, 3, 4, 5, 1):  # 1 is evicted for 5 and comes back, for which 2 goes
        cache.publish(cache.admit(np.array([row]), np.array([0])))
    cache.add_pages([1])
    assert cache.refill(8).rows.tolist() == [2]
