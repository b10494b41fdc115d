import numpy as np
import pytest
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.memory.sampling import is_sampled, keep_sampled, row_hash, sampling_threshold

MASK = (1 << 64) - 1


def sampled(rows: NDArray[np.int64], rate: float) -> NDArray[np.int64]:
    kept = rows.copy()
    return kept[: keep_sampled(kept, sampling_threshold(rate))]


def plain_hash(row: int) -> int:
    mixed = (row + 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def test_the_hash_is_the_published_one() -> None:
    assert int(row_hash(0)) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0


def test_the_compiled_hash_equals_its_plain_twin() -> None:
    rows = [0, 1, 2, 12_345, 2**31, 2**40 + 7, 2**62]
    assert [int(row_hash(row)) for row in rows] == [plain_hash(row) for row in rows]


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_sample_equals_its_plain_twin_and_has_the_asked_size(rate: float) -> None:
    rows = np.arange(200_000)
    kept = sampled(rows, rate)
    threshold = sampling_threshold(rate)
    assert kept.tolist() == [row for row in rows.tolist() if plain_hash(row) <= int(threshold)]
    assert abs(kept.size / rows.size - rate) < 5 * np.sqrt(rate / rows.size)
    assert is_sampled(int(kept[0]), threshold)


def test_rate_one_keeps_everything_in_order_with_repeats() -> None:
    rows = np.array([5, 3, 5, 9])
    assert sampled(rows, 1.0).tolist() == [5, 3, 5, 9]


def test_a_smaller_sample_is_part_of_a_larger_one() -> None:
    rows = np.arange(100_000)
    assert set(sampled(rows, 0.01).tolist()) <= set(sampled(rows, 0.02).tolist())


def test_no_rows_are_no_work() -> None:
    assert sampled(np.empty(0, np.int64), 0.1).size == 0


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"rate must be .* got"):
        sampling_threshold(rate)
