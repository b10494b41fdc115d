"""A step laid out in the arrays of a graph, against the same step in arrays of its own."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from helmrec.engine.assemble import Assembly, Outline, StepForm, assemble
from helmrec.engine.layout import (
    ABSENT,
    NO_CONTEXT,
    NO_PAGES,
    NO_REQUESTS,
    StepArrays,
    lay_out,
    place_of,
)
from helmrec.kernels import row_index
from tests.engine.test_assemble import CONFIG, PAGE_TOKENS, plan, prepare

SEQUENCES, SIZE, TOKENS, PAGES, HEADS = 4, 16, 24, 3, 6
NUM_FEATURES = len(CONFIG.features)
POISON = 99
FORM = StepForm(CONFIG, PAGE_TOKENS, SEQUENCES)


def poisoned() -> StepArrays:
    """Room for a step, full of what another left."""

    def full(*shape: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        return np.full(shape, POISON)

    return StepArrays(
        event_rows=full(NUM_FEATURES, SIZE).astype(np.int32),
        context_rows=full(2 * SEQUENCES).astype(np.int32),
        event_at=full(SIZE),
        actions=full(SIZE),
        positions=full(SIZE),
        gaps=full(SIZE),
        candidates=full(HEADS),
        head_at=full(HEADS),
        context_at=full(2 * SEQUENCES),
        write_slots=full(TOKENS),
        cu_events=full(SEQUENCES + 1),
        cu_tokens=full(SEQUENCES + 1).astype(np.int32),
        num_resident=full(SEQUENCES).astype(np.int32),
        num_new=full(SEQUENCES).astype(np.int32),
        page_table=full(SEQUENCES, PAGES).astype(np.int32),
    )


def both(resident: int) -> tuple[Assembly, StepArrays]:
    """A step of two requests in arrays of its own, and in those of a graph."""
    first, second = prepare(2, num_candidates=1), prepare(5, num_candidates=3)
    members = [(first, plan(first, resident, [1])), (second, plan(second, 0, [2, 3]))]
    target = poisoned()
    FORM.fill(Outline(members, CONFIG), target)
    return assemble(members, CONFIG, PAGE_TOKENS), target


def padded(values: object, size: int, filler: int) -> list[int]:
    listed = np.asarray(values).tolist()
    return [*listed, *[filler] * (size - len(listed))]


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_a_padded_step_is_the_step_and_harmless_beyond_it(resident: int) -> None:
    step, target = both(resident)
    assert target.event_at.tolist() == padded(step.event_at, SIZE, TOKENS - 1)
    for name in ("actions", "positions", "gaps"):
        assert getattr(target, name).tolist() == padded(getattr(step, name), SIZE, 0)
    for name in ("candidates", "head_at"):
        assert getattr(target, name).tolist() == padded(getattr(step, name), HEADS, 0)
    assert target.write_slots.tolist() == padded(step.write_slots, TOKENS, -1)
    for name in ("cu_tokens", "cu_events"):
        expected = padded(getattr(step, name), SEQUENCES + 1, int(getattr(step, name)[-1]))
        assert getattr(target, name).tolist() == expected
    assert target.num_resident.tolist() == padded(step.num_resident, SEQUENCES, 0)
    assert target.num_new.tolist() == padded(step.num_new, SEQUENCES, 0)
    assert target.page_table.tolist() == [[1, 0, 0], [2, 3, 0], [0] * 3, [0] * 3]
    by_feature = [padded(rows, SIZE, ABSENT) for rows in step.event_rows]
    assert target.event_rows.tolist() == by_feature


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_each_context_table_has_one_place_per_sequence(resident: int) -> None:
    step, target = both(resident)
    expected_at, expected_rows = [TOKENS - 1] * 2 * SEQUENCES, [ABSENT] * 2 * SEQUENCES
    places = step.context_table * SEQUENCES + step.context_owner
    for place, at, row in zip(places, step.context_at, step.context_rows, strict=True):
        expected_at[place], expected_rows[place] = at, row
    assert target.context_at.tolist() == expected_at
    assert target.context_rows.tolist() == expected_rows


def test_no_step_at_all_is_harmless_too() -> None:
    target = poisoned()
    lay_out(NO_REQUESTS, NO_PAGES, NO_CONTEXT, FORM.shape, target)
    assert set(target.event_at.tolist()) == set(target.context_at.tolist()) == {TOKENS - 1}
    assert set(target.write_slots.tolist()) == {-1}
    assert set(target.event_rows.ravel().tolist()) == set(target.context_rows.tolist()) == {ABSENT}
    for name in ("actions", "positions", "gaps", "cu_tokens", "num_resident", "num_new", "page_table", "candidates"):
        assert not getattr(target, name).any()


def test_padding_reads_no_row() -> None:
    assert ABSENT == row_index.ABSENT


def test_an_outline_counts_what_is_laid_out() -> None:
    first, second = prepare(2, num_candidates=1), prepare(5, num_candidates=3)
    members = [(first, plan(first, 1, [1])), (second, plan(second, 3, [2, 3]))]
    outline, step = Outline(members, CONFIG), assemble(members, CONFIG, PAGE_TOKENS)
    assert outline.num_events == step.event_at.size
    assert outline.num_tokens == step.write_slots.size == step.cu_tokens[-1]
    assert outline.num_context == step.context_at.size
    assert sum(outline.num_rows) == outline.total_rows == step.rows.size
    assert sum(outline.num_candidates) == outline.total_candidates == step.candidates.size


@pytest.mark.parametrize("is_graph", [False, True])
def test_a_request_is_read_where_its_arrays_lie(is_graph: bool) -> None:
    # Given a request whose arrays are parts of longer lines, and read-only, as a front or a chunk leaves them
    whole, target = prepare(5, num_candidates=3), poisoned()
    longer = np.concatenate([whole.columns, np.full_like(whole.columns, POISON)], axis=1)
    candidates = np.concatenate([whole.candidate_rows, np.full_like(whole.candidate_rows, POISON)], axis=1)
    longer.flags.writeable = candidates.flags.writeable = False
    part = replace(whole, columns=longer[:, :5], candidate_rows=candidates[:, :3])
    # When a step of it is laid out
    if is_graph:
        FORM.fill(Outline([(part, plan(part, 2, [1, 2]))], CONFIG), target)
        found = {name: getattr(target, name)[..., :7] for name in ("event_rows", "actions", "gaps")}
    else:
        step = assemble([(part, plan(part, 2, [1, 2]))], CONFIG, PAGE_TOKENS)
        found = {name: getattr(step, name) for name in ("event_rows", "actions", "gaps")}
    # Then it is the step of the whole request
    expected = assemble([(whole, plan(whole, 2, [1, 2]))], CONFIG, PAGE_TOKENS)
    for name, values in found.items():
        assert values.tolist() == getattr(expected, name).tolist()


def test_lines_that_skip_numbers_have_no_place() -> None:
    with pytest.raises(AssertionError, match="16 bytes apart"):
        place_of(np.zeros((2, 6), np.int64)[:, ::2])


def test_a_prepared_request_is_bound_to_its_process() -> None:
    with pytest.raises(TypeError, match="bound to the addresses"):
        pickle.dumps(prepare(2))
