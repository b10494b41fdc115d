import numpy as np
import pytest

from helmrec.engine.assemble import Assembly, assemble
from helmrec.engine.padding import (
    EMPTY,
    NOWHERE,
    RowLayout,
    StepArrays,
    context_places,
    pad_candidates,
    pad_rows,
    pad_tokens,
)
from tests.engine.test_assemble import CONFIG, PAGE_TOKENS, plan, prepare

SEQUENCES, SIZE, TOKENS, PAGES = 4, 16, 24, 3
NUM_FEATURES = len(CONFIG.features)
POISON = 99


def two_requests(resident: int = 0) -> Assembly:
    first, second = prepare(2, num_candidates=1), prepare(5, num_candidates=3)
    return assemble([(first, plan(first, resident, [1])), (second, plan(second, 0, [2, 3]))], CONFIG, PAGE_TOKENS)


def poisoned() -> StepArrays:
    """Room for a step, full of what another left."""
    lines = [np.full(SIZE, POISON) for _ in range(4)]
    lengths = [np.full(n, POISON, np.int32) for n in (SEQUENCES + 1, SEQUENCES, SEQUENCES)]
    table = np.full((SEQUENCES, PAGES), POISON, np.int32)
    return StepArrays(*lines, np.full(2 * SEQUENCES, POISON), np.full(TOKENS, POISON), *lengths, table)  # type: ignore[call-arg]


def padded(values: object, size: int, filler: int) -> list[int]:
    listed = np.asarray(values).tolist()
    return [*listed, *[filler] * (size - len(listed))]


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_a_padded_step_is_the_step_and_harmless_beyond_it(resident: int) -> None:
    step, target = two_requests(resident), poisoned()
    pad_tokens(target, StepArrays.of(step), context_places(step, SEQUENCES))
    assert target.event_at.tolist() == padded(step.event_at, SIZE, TOKENS - 1)
    for name in ("actions", "positions", "gaps"):
        assert getattr(target, name).tolist() == padded(getattr(step, name), SIZE, 0)
    assert target.write_slots.tolist() == padded(step.write_slots, TOKENS, -1)
    assert target.cu_tokens.tolist() == padded(step.cu_tokens, SEQUENCES + 1, int(step.cu_tokens[-1]))
    assert target.num_resident.tolist() == padded(step.num_resident, SEQUENCES, 0)
    assert target.num_new.tolist() == padded(step.num_new, SEQUENCES, 0)
    assert target.page_table.tolist() == [[1, 0, 0], [2, 3, 0], [0] * 3, [0] * 3]


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_each_context_table_has_one_place_per_sequence(resident: int) -> None:
    step, target = two_requests(resident), poisoned()
    pad_tokens(target, StepArrays.of(step), context_places(step, SEQUENCES))
    expected = [TOKENS - 1] * 2 * SEQUENCES
    for table, owner, at in zip(step.context_table, step.context_owner, step.context_at, strict=True):
        expected[table * SEQUENCES + owner] = at
    assert target.context_at.tolist() == expected


def test_no_step_at_all_is_harmless_too() -> None:
    target = poisoned()
    pad_tokens(target, EMPTY, NOWHERE)
    assert set(target.event_at.tolist()) == set(target.context_at.tolist()) == {TOKENS - 1}
    assert set(target.write_slots.tolist()) == {-1}
    for name in ("actions", "positions", "gaps", "cu_tokens", "num_resident", "num_new", "page_table"):
        assert not getattr(target, name).any()


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_every_row_lies_where_its_place_says_and_the_rest_is_filler(resident: int) -> None:
    step = two_requests(resident)
    layout = RowLayout(NUM_FEATURES, step.event_at.size, SIZE, context_places(step, SEQUENCES))
    target = np.full(NUM_FEATURES * SIZE + 2 * SEQUENCES, POISON, np.int32)
    pad_rows(target, step.rows.astype(np.int32), layout, -7)
    of_events = [feature * SIZE + event for feature in range(NUM_FEATURES) for event in range(step.event_at.size)]
    places = np.array([*of_events, *(NUM_FEATURES * SIZE + layout.context_at)])
    assert np.array_equal(target[places], step.rows)
    assert len(set(places.tolist())) == step.rows.size
    assert set(np.delete(target, places).tolist()) == {-7}
    by_feature = target[: NUM_FEATURES * SIZE].reshape(NUM_FEATURES, SIZE)
    assert np.array_equal(by_feature[:, : step.event_at.size], step.event_rows)


def test_the_head_reads_each_candidates_token_and_rows() -> None:
    step = two_requests()
    at, rows = np.full(6, POISON), np.full((2, 6), POISON)
    pad_candidates(at, rows, step.candidates, step.head_at, np.array([0, SIZE]))
    assert at.tolist() == [*step.event_at[step.candidates].tolist(), 0, 0]
    assert rows.tolist() == [[*step.candidates, 0, 0], [*(step.candidates + SIZE), 0, 0]]
