import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.errors import ConfigError
from helmrec.memory.sampling import row_hash
from helmrec.router.sketch import (
    RowPrior,
    RowSample,
    RowSketch,
    SketchTable,
    absent_rows,
    build_sketch,
    count_clear,
    no_sample,
    sample_rows,
    shared_rate,
)
from helmrec.types import IntArray

NO_BELIEF = 0.0


def table_of(*sketches: RowSketch) -> SketchTable:
    return SketchTable(
        np.stack([s.words for s in sketches], axis=1),
        np.array([s.threshold for s in sketches]),
        np.array([s.fill for s in sketches]),
    )


def plain_clear(sketch: RowSketch, sample: RowSample, first_token: int) -> int:
    """What `count_clear` counts for one node, a row at a time."""
    bits = np.unpackbits(sketch.words.view(np.uint8), bitorder="little")
    rows = zip(sample.hashes.tolist(), sample.position.tolist(), strict=True)
    return sum(h <= sketch.threshold and p >= first_token and not bits[h % bits.size] for h, p in rows)


def estimate(sketch: RowSketch, sample: RowSample, num_rows: int, prior: tuple[float, float] = (0.0, 0.0)) -> float:
    clear = count_clear(table_of(sketch), sample, np.zeros(1, np.int64))[0]
    rate = shared_rate(sketch.threshold, sample.threshold)
    return absent_rows(clear, sketch.fill, rate, RowPrior(num_rows, *prior))


def rows_from(rng: np.random.Generator, resident: IntArray, absent_share: float, shape: tuple[int, int]) -> IntArray:
    """A request's rows, of which a share is not among the resident ones (all below a billion)."""
    rows = rng.choice(resident, shape)
    is_absent = rng.random(shape) < absent_share
    rows[is_absent] = rng.integers(10**9, 2 * 10**9, int(is_absent.sum()))
    return rows


def test_a_sketch_has_a_bit_for_each_sampled_resident_row_and_no_other() -> None:
    rows = np.arange(5_000) * 977
    sketch = build_sketch(rows, 1 << 10)
    expected = {int(row_hash(row)) % (1 << 10) for row in rows.tolist() if row_hash(row) <= sketch.threshold}
    bits = np.unpackbits(sketch.words.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits).tolist()) == expected
    assert sketch.fill == len(expected) / (1 << 10)
    assert 0.4 < sketch.fill < 0.6, "an estimate is best where about half of the bits are set"


def test_a_sketch_is_a_few_kilobytes_however_many_rows_there_are() -> None:
    assert build_sketch(np.arange(10)).num_bytes == build_sketch(np.arange(300_000)).num_bytes <= 9_000


def test_all_rows_are_sampled_where_they_are_few() -> None:
    history, candidates = np.arange(12).reshape(4, 3), np.arange(100, 106).reshape(2, 3)
    sample = sample_rows(history, candidates)
    assert sample.hashes.tolist() == [int(row_hash(row)) for row in (*range(12), *range(100, 106))]
    assert sample.position.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4]
    assert sample_rows(np.empty((0, 3), np.int64), np.empty((0, 3), np.int64)).hashes.size == 0


def test_samples_of_long_requests_stay_about_as_long_as_asked(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 10**9, (8_000, 6))
    assert 400 < sample_rows(rows[:6_000], rows[6_000:], 512).hashes.size < 640


@given(st.integers(0, 2**32), st.integers(6, 10), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_counting_over_all_nodes_is_counting_one_by_one(seed: int, log_bits: int, first_token: list[int]) -> None:
    rng = np.random.default_rng(seed)
    sketches = [
        build_sketch(rng.choice(3_000, int(rng.integers(0, 1_000)), replace=False), 1 << log_bits) for _ in first_token
    ]
    sample = sample_rows(rng.integers(0, 3_000, (40, 2)), rng.integers(0, 3_000, (10, 2)), int(rng.integers(1, 120)))
    found = count_clear(table_of(*sketches), sample, np.array(first_token))
    assert found.tolist() == [plain_clear(s, sample, first) for s, first in zip(sketches, first_token, strict=True)]


@pytest.mark.parametrize("absent_share", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_estimates_are_right_on_average_and_spread_as_the_sample_predicts(absent_share: float) -> None:
    rng = np.random.default_rng(3)
    resident = np.unique(rng.integers(0, 10**9, 200_000))
    sketch, shape = build_sketch(resident, 1 << 15), (6_000, 2)
    samples = [rows_from(rng, resident, absent_share, shape) for _ in range(150)]
    found = np.array([estimate(sketch, sample_rows(rows, rows[:0], 512), rows.size) / rows.size for rows in samples])
    num_sampled = 12_000 * min(512 / 12_000, 0.7 * 2**15 / resident.size)
    clear_share = absent_share * (1 - sketch.fill)
    predicted = np.sqrt(clear_share / num_sampled) / (1 - sketch.fill)  # the rows picked are a Poisson number
    assert predicted < 0.07
    if absent_share == 0:
        assert (found == 0).all(), "a resident row never looks absent"
        return
    assert found.std() < 1.25 * predicted
    if absent_share < 1:  # at 1 what lies above is cut off
        assert abs(found.mean() - absent_share) < 4 * predicted / np.sqrt(len(found))


def test_rows_of_tokens_that_need_not_be_computed_are_not_counted(rng: np.random.Generator) -> None:
    sketch = build_sketch(np.arange(1_000), 1 << 12)
    sample = sample_rows(np.full((100, 1), 10**6), np.full((50, 1), 10**6 + 1))
    clear = [int(count_clear(table_of(sketch), sample, np.array([first]))[0]) for first in (0, 60, 100, 1_000)]
    one, other = (plain_clear(sketch, sample._replace(position=sample.position + 10**4), 0), 50)
    assert clear[0] == one
    assert clear[0] - clear[1] in (0, 60)
    assert clear[2] in (0, other)
    assert clear[3] == 0


def test_a_weak_sample_is_held_by_what_was_believed() -> None:
    sketch = build_sketch(np.arange(1_000_000), 1 << 10)
    rows = np.arange(10**7, 10**7 + 60).reshape(30, 2)
    assert estimate(sketch, sample_rows(rows, rows[:0]), 60, (0.25, 8.0)) == pytest.approx(60 * 0.25, rel=0.2)
    assert estimate(sketch, no_sample(), 60, (0.25, 8.0)) == 15.0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_estimate_is_never_more_than_all_rows(share: float) -> None:
    full = RowSketch(np.full(2, 2**64 - 1, np.uint64), np.uint64(2**64 - 1), 1.0)
    rows = np.arange(1_000).reshape(100, 10)
    assert estimate(full, sample_rows(rows, rows[:0]), 1_000, (share, 8.0)) == 1_000 * share, "it says nothing"
    empty = build_sketch(np.empty(0, np.int64), 64)
    assert 0 <= estimate(empty, sample_rows(rows, rows[:0], 50), 1_000, (share, 8.0)) <= 1_000


@pytest.mark.parametrize("num_bits", [0, 32, 100])
def test_bits_come_in_powers_of_two(num_bits: int) -> None:
    with pytest.raises(ConfigError, match=f"power of two of at least 64, got {num_bits}"):
        build_sketch(np.arange(3), num_bits)
