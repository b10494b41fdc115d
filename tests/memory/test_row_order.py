"""Both orders against plain twins: an OrderedDict, and a sum of decayed touches per slot."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helmrec.memory.row_order import DecayedFrequencyOrder, LruOrder, make_order

NUM_SLOTS = 8
HALF_LIFE = 8
Operations = list[tuple[str, list[int]]]
operations = st.lists(
    st.tuples(
        st.sampled_from(["touch", "insert", "remove", "evict", "relocate"]),
        st.lists(st.integers(0, NUM_SLOTS - 1), max_size=8),
    ),
    max_size=60,
)


def slots_of(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def distinct(values: list[int]) -> list[int]:
    return list(dict.fromkeys(values))


@given(operations)
def test_lru_evicts_as_an_ordered_dict_does(steps: Operations) -> None:
    order, twin = LruOrder(NUM_SLOTS), OrderedDict[int, None]()
    for kind, values in steps:
        used = [slot for slot in values if slot in twin]
        if kind == "touch":
            order.touch(slots_of(used))
            for slot in used:
                twin.move_to_end(slot)
        elif kind == "insert":
            new = [slot for slot in distinct(values) if slot not in twin]
            order.insert(slots_of(new))
            twin.update(dict.fromkeys(new))
        elif kind == "relocate":
            source = distinct(used)
            target = [slot for slot in range(NUM_SLOTS) if slot not in twin][: len(source)]
            moved = dict(zip(source, target, strict=False))
            order.relocate(slots_of(list(moved)), slots_of(list(moved.values())))
            twin = OrderedDict((moved.get(slot, slot), None) for slot in twin)
        else:
            gone = distinct(used) if kind == "remove" else order.coldest(min(2, len(twin))).tolist()
            order.remove(slots_of(gone))
            for slot in gone:
                del twin[slot]
        assert order.coldest(len(twin)).tolist() == list(twin)


class PlainFrequency:
    """Every touch of every slot, summed anew each time: 2 ** (time / half life) over its touches."""

    def __init__(self) -> None:
        self.weight: dict[int, float] = {}
        self.time = 0.0

    def touch(self, slots: list[int]) -> None:
        for slot in slots:
            self.time += 1
            self.weight[slot] += 2 ** (self.time / HALF_LIFE)

    def insert(self, slots: list[int]) -> None:
        self.weight |= dict.fromkeys(slots, 2 ** (self.time / HALF_LIFE))

    def weights(self, slots: list[int]) -> list[float]:
        return [self.weight[slot] for slot in slots]


def apply(order: DecayedFrequencyOrder, twin: PlainFrequency, kind: str, values: list[int]) -> None:
    used = [slot for slot in values if slot in twin.weight]
    if kind == "touch":
        order.touch(slots_of(used))
        twin.touch(used)
    elif kind == "insert":
        new = [slot for slot in distinct(values) if slot not in twin.weight]
        order.insert(slots_of(new))
        twin.insert(new)
    elif kind == "relocate":
        target = [slot for slot in range(NUM_SLOTS) if slot not in twin.weight]
        source = distinct(used)[: len(target)]
        order.relocate(slots_of(source), slots_of(target[: len(source)]))
        for old, new_slot in zip(source, target, strict=False):
            twin.weight[new_slot] = twin.weight.pop(old)
    else:
        gone = distinct(used)
        order.remove(slots_of(gone))
        for slot in gone:
            del twin.weight[slot]


@given(operations)
def test_frequency_ranks_all_slots_as_plain_sums_do(steps: Operations) -> None:
    for num_steps in range(0, len(steps) + 1, 4):
        order, twin = DecayedFrequencyOrder(NUM_SLOTS, HALF_LIFE), PlainFrequency()
        for kind, values in steps[:num_steps]:
            apply(order, twin, kind, values)
        ranked = order.coldest(len(twin.weight)).tolist()
        assert sorted(ranked) == sorted(twin.weight)
        np.testing.assert_allclose(twin.weights(ranked), sorted(twin.weight.values()))


@given(operations)
def test_frequency_evicts_the_coldest_however_often_it_is_asked(steps: Operations) -> None:
    order, twin = DecayedFrequencyOrder(NUM_SLOTS, HALF_LIFE), PlainFrequency()
    for kind, values in steps:
        apply(order, twin, kind, values)
        coldest = order.coldest(min(2, len(twin.weight))).tolist()
        np.testing.assert_allclose(twin.weights(coldest), sorted(twin.weight.values())[: len(coldest)])
        if kind == "evict":
            order.remove(slots_of(coldest))
            for slot in coldest:
                del twin.weight[slot]


def test_a_slot_filled_after_a_look_is_the_coldest_if_it_is() -> None:
    order = DecayedFrequencyOrder(4, HALF_LIFE)
    order.insert(slots_of([0, 1, 2]))
    order.touch(slots_of([0, 0, 1, 1, 1, 2, 2, 2, 2]))
    assert order.coldest(1).tolist() == [0]
    order.insert(slots_of([3]))
    assert order.coldest(1).tolist() == [3]


def test_the_coldest_slot_stays_the_coldest_when_it_moves() -> None:
    order = DecayedFrequencyOrder(4, HALF_LIFE)
    order.insert(slots_of([0, 1, 2]))
    order.touch(slots_of([0, 1, 1, 2, 2, 2]))
    assert order.coldest(2).tolist() == [0, 1]
    order.relocate(slots_of([0]), slots_of([3]))
    assert order.coldest(1).tolist() == [3]


def test_old_touches_fade() -> None:
    order = DecayedFrequencyOrder(3, half_life=2)
    order.insert(slots_of([0, 1, 2]))
    order.touch(slots_of([0] * 5))
    order.touch(slots_of([2] * 40))
    order.touch(slots_of([1]))
    assert order.coldest(3).tolist() == [0, 1, 2]


def test_scores_stay_finite_after_millions_of_touches() -> None:
    order = DecayedFrequencyOrder(2, half_life=1)
    order.insert(slots_of([0, 1]))
    order.touch(np.zeros(2_000_000, np.int32))
    assert order.coldest(2).tolist() == [1, 0]


def test_the_coldest_slots_stay_in_the_order() -> None:
    for name in ("lru", "frequency"):
        order = make_order(name, 4)
        order.insert(slots_of([3, 1]))
        assert sorted(order.coldest(2).tolist()) == sorted(order.coldest(2).tolist()) == [1, 3]


def test_orders_go_by_name() -> None:
    assert isinstance(make_order("lru", 4), LruOrder)
    assert isinstance(make_order("frequency", 4), DecayedFrequencyOrder)


@pytest.mark.parametrize("name", ["lru", "frequency"])
def test_an_empty_order_has_no_coldest(name: str) -> None:
    assert make_order(name, 4).coldest(0).size == 0
