import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory.prefix_hash import MODULUS, ChainState, HashKey, advance, begin_chain, chain, common_tokens
from helmrec.types import IntArray

SECRET = bytes(range(32))
KEY = HashKey(SECRET)
HALF = (1 << 32) - 1
values = st.integers(0, 2**63 - 1)
events = st.lists(st.tuples(values, values, values), max_size=12)


def derive(purpose: str, num_bytes: int, word_bytes: int) -> list[int]:
    derived = hashlib.shake_256(f"helmrec prefix hash 1 {purpose} ".encode() + SECRET).digest(num_bytes)
    return [int.from_bytes(derived[i : i + word_bytes], "little") for i in range(0, num_bytes, word_bytes)]


def plain_word(event: list[int], lane: int) -> int:
    word, keys = 0, derive("fields", 16 * len(event), 4)
    for field, value in enumerate(event):
        low, high = keys[4 * field + 2 * lane], keys[4 * field + 2 * lane + 1]
        word += ((value + low) & HALF) * (((value >> 32) + high) & HALF)
    return word % 2**64


def plain_chain(seed: tuple[int, ...], num_context: int, history: list[list[int]]) -> tuple[list[int], ChainState]:
    """The twin, in Python integers: the states, and both lanes after the last of them."""
    numbers = derive("chain", 48, 8)
    joins = [numbers[2] + (numbers[3] << 64), numbers[4] + (numbers[5] << 64)]
    lanes, states = [1, 1], []
    steps = [*((False, [value, value]) for value in seed), *((True, [i, i]) for i in range(num_context))]
    steps += [(True, [plain_word(event, lane) for lane in (0, 1)]) for event in history]
    for is_token, words in steps:
        for lane in (0, 1):
            lanes[lane] = (lanes[lane] * (numbers[lane] >> 7) + words[lane]) % MODULUS
        if is_token:
            states.append((joins[0] + lanes[0]) * (joins[1] + lanes[1]) % 2**128 >> 64)
    return states, ChainState(*lanes)


def columns_of(rows: list[tuple[int, int, int]]) -> IntArray:
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 3).T)


@given(st.lists(values, min_size=1, max_size=4), st.integers(0, 3), events)
def test_the_chain_is_that_of_its_plain_twin(
    seed: list[int], num_context: int, history: list[tuple[int, int, int]]
) -> None:
    states, end = plain_chain(tuple(seed), num_context, [list(event) for event in history])
    assert chain(KEY, tuple(seed), num_context, columns_of(history)).tolist() == states
    if not num_context:
        assert advance(KEY, begin_chain(KEY, tuple(seed)), columns_of(history)) == end


@pytest.mark.parametrize("num_fields", [1, 16, 17, 40])
def test_events_may_have_any_number_of_fields(num_fields: int, rng: np.random.Generator) -> None:
    columns = rng.integers(0, 2**63 - 1, (num_fields, 5))
    few = HashKey(SECRET)  # has derived no more keys than it begins with
    assert chain(few, (1,), 0, columns).tolist() == plain_chain((1,), 0, columns.T.tolist())[0]
    assert chain(few, (1,), 0, columns[:1]).tolist() == plain_chain((1,), 0, columns[:1].T.tolist())[0]


@given(events, st.integers(0, 12))
def test_a_chain_goes_on_where_another_ended(history: list[tuple[int, int, int]], cut: int) -> None:
    start = begin_chain(KEY, (3,))
    half = advance(KEY, start, columns_of(history[:cut]))
    assert advance(KEY, half, columns_of(history[cut:])) == advance(KEY, start, columns_of(history))


@given(events.filter(len), st.data())
def test_one_changed_field_changes_all_later_states_and_no_earlier_one(
    history: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    columns = columns_of(history)
    event = data.draw(st.integers(0, len(history) - 1))
    field = data.draw(st.integers(0, 2))
    changed = columns.copy()
    changed[field, event] ^= data.draw(st.integers(1, 2**62))
    before, after = chain(KEY, (1, 2), 1, columns), chain(KEY, (1, 2), 1, changed)
    assert np.array_equal(before[: 1 + event], after[: 1 + event])
    assert (before[1 + event :] != after[1 + event :]).all()
    assert common_tokens(before, after) == 1 + event


@given(events, st.integers(0, 2), st.integers(1, 2**62))
def test_one_changed_seed_word_changes_every_state(history: list[tuple[int, int, int]], at: int, change: int) -> None:
    seed = [7, 8, 9]
    changed = list(seed)
    changed[at] ^= change
    before, after = (chain(KEY, tuple(s), 2, columns_of(history)) for s in (seed, changed))
    assert (before != after).all()
    assert common_tokens(before, after) == 0


def test_no_two_events_collide_where_one_field_grows_as_another_shrinks() -> None:
    """The same sum of item and time: 60,000 events whose 64-bit states must all differ."""
    total = 1_700_000_000
    states = {int(chain(KEY, (1,), 0, np.array([[i], [0], [0], [total - i]]))[0]) for i in range(60_000)}
    assert len(states) == 60_000


def test_swapped_events_and_swapped_fields_are_other_histories() -> None:
    base = chain(KEY, (1,), 0, np.array([[1, 2], [3, 4]]))
    assert chain(KEY, (1,), 0, np.array([[2, 1], [4, 3]]))[-1] != base[-1]
    assert chain(KEY, (1,), 0, np.array([[3, 4], [1, 2]]))[-1] != base[-1]


def test_events_that_collide_in_16_bits_under_one_key_do_not_under_another() -> None:
    events = np.random.default_rng(1).integers(0, 2**63 - 1, (4_000, 2, 1))
    known, secret = (
        np.array([chain(key, (1,), 0, event)[0] for event in events]) & np.uint64(0xFFFF)
        for key in (KEY, HashKey(b"x" * 32))
    )
    order = np.argsort(known, kind="stable")
    colliding = known[order[1:]] == known[order[:-1]]
    assert colliding.sum() > 50
    assert (secret[order[1:]] == secret[order[:-1]])[colliding].sum() <= 2


def test_random_keys_differ_and_show_nothing_of_their_secret() -> None:
    one, other = HashKey.random(), HashKey.random()
    assert one.fingerprint != other.fingerprint
    assert HashKey(SECRET).fingerprint == KEY.fingerprint
    assert repr(KEY) == f"HashKey({KEY.fingerprint})"
    assert SECRET.hex()[:8] not in repr(KEY)


def test_a_seal_tells_states_apart_and_is_no_state() -> None:
    columns = np.arange(6).reshape(2, 3)
    end = advance(KEY, begin_chain(KEY, (1,)), columns)
    assert KEY.seal(end) == KEY.seal(ChainState(*end))
    assert KEY.seal(end) != KEY.seal(begin_chain(KEY, (1,)))
    assert KEY.seal(end) not in {*end, int(chain(KEY, (1,), 0, columns)[-1])}
    assert KEY.seal(end) != HashKey(b"x" * 32).seal(end)
