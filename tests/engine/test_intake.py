import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helmrec.engine.id_checks import REFUSE, _first_step_back, _shift, are_finite, has_infinite
from helmrec.engine.intake import Intake, prepare_rows
from helmrec.errors import RequestError
from helmrec.model.config import RetrievalHead
from helmrec.types import RankRequest
from tests.helpers import random_request, tiny_config

near_zero = st.integers(-2, 6)
blocks = st.tuples(st.integers(1, 3), st.integers(0, 9)).flatmap(
    lambda shape: st.lists(
        st.lists(near_zero, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def plain_shift(block: list[list[int]], limits: list[int], offsets: list[int]) -> tuple[int, list[list[int]]]:
    """The twin: the flat index of the first id outside its line's range, and the lines before it shifted."""
    shifted = [list(line) for line in block]
    for i, line in enumerate(block):
        for at, value in enumerate(line):
            if not 0 <= value < limits[i]:
                return i * len(line) + at, shifted
        shifted[i] = [value + offsets[i] for value in line]
    return sum(map(len, block)), shifted


@given(blocks, st.lists(st.integers(1, 7), min_size=3, max_size=3))
def test_ids_are_checked_and_shifted_as_by_the_plain_twin(block: list[list[int]], limits: list[int]) -> None:
    offsets = [0, 100, 2**40]
    array = np.array(block, np.int64).reshape(len(block), -1)
    num, counts = len(block), np.zeros(len(block), np.int64)
    outside = _shift(array, np.array(limits[:num]), np.array(offsets[:num]), np.full(num, REFUSE), counts)
    assert (outside, array.tolist()) == plain_shift(block, limits, offsets)
    assert not counts.any()


@given(blocks, st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_unknown_ids_are_replaced_counted_and_then_checked(block: list[list[int]], limits: list[int]) -> None:
    offsets, rows = [0, 100, 2**40], [0, REFUSE, 0]
    array, num = np.array(block, np.int64).reshape(len(block), -1), len(block)
    known = [
        [0 if row == 0 and i >= limit else i for i in line]
        for line, limit, row in zip(block, limits, rows, strict=False)
    ]
    counts = np.zeros(num, np.int64)
    outside = _shift(array, np.array(limits[:num]), np.array(offsets[:num]), np.array(rows[:num]), counts)
    expected, shifted = plain_shift(known, limits, offsets)
    assert outside == expected
    if outside == array.size:
        assert array.tolist() == shifted
        assert counts.tolist() == [
            sum(i >= limit for i in line) if row == 0 else 0
            for line, limit, row in zip(block, limits, rows, strict=False)
        ]


@given(st.lists(near_zero, max_size=40))
def test_the_first_step_back_is_that_of_its_plain_twin(values: list[int]) -> None:
    expected = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), len(values))
    assert _first_step_back(np.array(values, np.int64)) == expected


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_ids_of_any_integer_type_and_stride_are_copied_not_kept(dtype: type[np.integer]) -> None:
    values = np.zeros((5, 2), dtype)
    values[:, 0] = [3, 1, 4, 1, 5]
    ids = values[:, 0]  # not contiguous
    frozen = np.ones(5, dtype)
    frozen.setflags(write=False)
    request = RankRequest(
        user_id=1,
        items=ids,
        actions=frozen,
        timestamps=frozen,
        candidates=ids,
        features={"category": ids},
        candidate_features={"category": ids},
        context={"country": 3, "hour": 7},
    )
    prepared = Intake(tiny_config(), version=1, max_history=10).prepare(request)
    ids[:] = 0
    assert prepared.columns[0].tolist() == [3, 1, 4, 1, 5]
    assert prepared.columns[1].tolist() == [303, 301, 304, 301, 305]
    assert prepared.columns[2:].tolist() == [[1] * 5, [1] * 5]
    assert prepared.candidate_rows.tolist() == [[3, 1, 4, 1, 5], [303, 301, 304, 301, 305]]


def test_a_retrieval_model_keeps_all_events_but_the_last_and_needs_one() -> None:
    config = tiny_config(num_tasks=1, retrieval=RetrievalHead())
    intake = Intake(config, version=1, max_history=100)
    prepared = intake.prepare(random_request(np.random.default_rng(0), config, num_events=5))
    assert (prepared.num_events, prepared.num_unkept, prepared.history.num_tokens) == (5, 1, 1 + 4)
    assert prepared.num_attending == 2, "the last event and the hour, no candidates"
    with pytest.raises(RequestError, match=r"items: at least one event is needed.*, got 0"):
        intake.prepare(random_request(np.random.default_rng(0), config, num_events=0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@given(
    st.lists(
        st.one_of(st.sampled_from([np.inf, -np.inf, np.nan, 65504.0, -65504.0, 0.0, -0.0]), st.floats(-9, 9)),
        max_size=40,
    )
)
def test_numbers_that_are_not_finite_are_found_as_by_the_plain_twin(dtype: type, numbers: list[float]) -> None:
    values: NDArray[np.floating] = np.array(numbers, dtype)
    assert has_infinite(values, np.inf) == (not np.isfinite(values).all())
    if dtype is np.float32:
        assert has_infinite(values, 9.0) == (not (np.abs(values) < 9.0).all())
        assert are_finite(values) == np.isfinite(values).all()
    twice = np.stack([values, values[::-1]])[:, ::2]
    assert has_infinite(twice, np.inf) == (not np.isfinite(twice).all())


def test_new_rows_of_float16_are_taken_as_they_are() -> None:
    config = tiny_config(row_dtype="float16")
    values = np.full((2, config.row_dim), 65504.0, np.float16)
    assert prepare_rows(config, "item", [3, 1], values).values is values
    values[1, 2] = np.inf
    with pytest.raises(RequestError, match=r"values\[1, 2\]: numbers finite in float16 are needed, got inf"):
        prepare_rows(config, "item", [3, 1], values)
    with pytest.raises(RequestError, match=r"values\[0, 0\]: numbers finite in float16 are needed, got 65520"):
        prepare_rows(config, "item", [3], np.full((1, config.row_dim), 65520.0, np.float32))
    with pytest.raises(RequestError, match="ids: each id may be given once, got 3"):
        prepare_rows(config, "item", [3, 1, 3], np.zeros((3, config.row_dim), np.float32))
