import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory.history import History, RowEpochs, chain, common_tokens
from helmrec.types import IntArray

MASK = (1 << 64) - 1
words = st.integers(0, 2**63 - 1)


def plain_mix(word: int, salt: int) -> int:
    mixed = word + salt * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 32) * 0x87C37B91114253D5 & MASK
    mixed = (mixed ^ mixed >> 29) * 0x4CF5AD432745937F & MASK
    return mixed ^ mixed >> 32


def plain_fold(state: int, mixed: int) -> int:
    state ^= mixed
    return ((state << 27 & MASK | state >> 37) * 5 + 0x52DCE729) & MASK


def plain_chain(seed: tuple[int, ...], num_context: int, columns: list[list[int]]) -> list[int]:
    """The twin, in Python integers. columns: one list per event."""
    state, states = 0, []
    for i, word in enumerate(seed):
        state = plain_fold(state, plain_mix(word, i))
    for token in range(num_context):
        state = plain_fold(state, plain_mix(token, len(seed)))
        states.append(state)
    for event in columns:
        state = plain_fold(state, sum(plain_mix(word, field) for field, word in enumerate(event)) & MASK)
        states.append(state)
    return states


events = st.lists(st.tuples(words, words, words), max_size=12)


def columns_of(rows: list[tuple[int, int, int]]) -> IntArray:
    return np.array(rows, np.int64).reshape(-1, 3).T


@given(st.lists(words, min_size=1, max_size=4), st.integers(0, 3), events)
def test_the_chain_is_that_of_its_plain_twin(
    seed: list[int], num_context: int, history: list[tuple[int, int, int]]
) -> None:
    states = chain(tuple(seed), num_context, columns_of(history))
    assert states.tolist() == plain_chain(tuple(seed), num_context, [list(event) for event in history])


@given(events.filter(len), st.data())
def test_one_changed_field_changes_all_later_states_and_no_earlier_one(
    history: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    columns = columns_of(history)
    event = data.draw(st.integers(0, len(history) - 1))
    field = data.draw(st.integers(0, 2))
    changed = columns.copy()
    changed[field, event] ^= data.draw(st.integers(1, 2**62))
    before, after = chain((1, 2), 1, columns), chain((1, 2), 1, changed)
    assert np.array_equal(before[: 1 + event], after[: 1 + event])
    assert (before[1 + event :] != after[1 + event :]).all()
    assert common_tokens(before, after) == 1 + event


@given(events, st.integers(0, 2), st.integers(1, 2**62))
def test_one_changed_seed_word_changes_every_state(history: list[tuple[int, int, int]], at: int, change: int) -> None:
    seed = [7, 8, 9]
    changed = list(seed)
    changed[at] ^= change
    before, after = (chain(tuple(s), 2, columns_of(history)) for s in (seed, changed))
    assert (before != after).all()
    assert common_tokens(before, after) == 0


def test_no_two_events_collide_where_one_field_grows_as_another_shrinks() -> None:
    """The same sum of item and time: 60,000 events whose 64-bit states must all differ."""
    total = 1_700_000_000
    states = {int(chain((1,), 0, np.array([[i], [0], [0], [total - i]]))[0]) for i in range(60_000)}
    assert len(states) == 60_000


def test_swapped_events_and_swapped_fields_are_other_histories() -> None:
    base = chain((1,), 0, np.array([[1, 2], [3, 4]]))
    assert chain((1,), 0, np.array([[2, 1], [4, 3]]))[-1] != base[-1]
    assert chain((1,), 0, np.array([[3, 4], [1, 2]]))[-1] != base[-1]


@given(events, events, events)
def test_common_tokens_are_those_before_the_first_difference(
    shared: list[tuple[int, int, int]], left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]
) -> None:
    a, b = shared + left, shared + right
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(chain((1,), 1, columns_of(a)), chain((1,), 1, columns_of(b))) == 1 + same


def test_empty_chains_share_nothing() -> None:
    empty = chain((1,), 0, np.empty((3, 0), np.int64))
    assert common_tokens(empty, empty) == 0
    assert common_tokens(empty, chain((1,), 2, np.empty((3, 0), np.int64))) == 0


NUM_ROWS = 12
row = st.integers(0, NUM_ROWS - 1)


@given(
    context=st.lists(row, max_size=3),
    rows=st.lists(st.tuples(row, row), max_size=8),
    updates=st.lists(st.lists(row, max_size=3), max_size=5),
    data=st.data(),
)
def test_fresh_tokens_end_at_the_first_row_changed_since(
    context: list[int], rows: list[tuple[int, int]], updates: list[list[int]], data: st.DataObject
) -> None:
    epochs, changed_at = RowEpochs(NUM_ROWS), dict.fromkeys(range(NUM_ROWS), 0)
    for epoch, update in enumerate(updates, start=1):
        epochs.mark(np.array(update, np.int64))
        changed_at |= dict.fromkeys(update, epoch)
    assert epochs.current == len(updates)
    tokens = [[r] for r in context] + [list(pair) for pair in rows]
    made = data.draw(st.lists(st.integers(0, len(updates)), max_size=len(tokens)))
    stale = (i for i, epoch in enumerate(made) if any(changed_at[r] > epoch for r in tokens[i]))
    history = History(
        user_id=0,
        context_rows=np.array(context, np.int64),
        event_rows=np.array(rows, np.int64).reshape(-1, 2).T,
        states=np.zeros(len(tokens), np.uint64),
    )
    assert epochs.fresh_tokens(history, np.array(made, np.uint32)) == next(stale, len(made))
