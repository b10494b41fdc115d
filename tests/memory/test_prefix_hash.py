import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory.prefix_hash import History, RowEpochs, chain, common_tokens
from tests.memory.test_chained_hash import KEY, columns_of, events


@given(events, events, events)
def test_common_tokens_are_those_before_the_first_difference(
    shared: list[tuple[int, int, int]], left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]
) -> None:
    a, b = shared + left, shared + right
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(chain(KEY, (1,), 1, columns_of(a)), chain(KEY, (1,), 1, columns_of(b))) == 1 + same


def test_empty_chains_share_nothing() -> None:
    empty = chain(KEY, (1,), 0, np.empty((3, 0), np.int64))
    assert common_tokens(empty, empty) == 0
    assert common_tokens(empty, chain(KEY, (1,), 2, np.empty((3, 0), np.int64))) == 0


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
