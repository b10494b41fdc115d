"""Rounding of K/V to codes: nearest, exact in every dtype, and by token and head alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helmrec.kernels.kv_rounding import (
    FORMATS,
    ScaledPages,
    by_layer,
    decode,
    empty_pages,
    encode,
    lane_order,
    round_in_place,
)

CODES = list(FORMATS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_CODE = {
    torch.float8_e4m3fn: torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double(),
    torch.int8: torch.arange(-127, 128).double(),
}


def noise(rng: np.random.Generator, *shape: int) -> Tensor:
    spread = np.exp(rng.normal(0, 3, (*shape[:-1], 1)))
    return torch.from_numpy((rng.normal(0, 1, shape) * spread).clip(-3e4, 3e4)).float()


@pytest.mark.parametrize("codes", CODES)
@given(exponent=st.integers(-14, 14), mantissas=st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_each_value_becomes_the_nearest_code(codes: torch.dtype, exponent: int, mantissas: list[float]) -> None:
    values = torch.tensor(mantissas, dtype=torch.float32) * 2.0**exponent
    found, biased = encode(values, codes)
    scale = 2.0 ** (int(biased) - 127)
    legal = EVERY_CODE[codes]
    distance = (values.double()[:, None] - scale * legal[legal.isfinite()]).abs()
    got = (values.double() - decode(found, biased, torch.float64)).abs()
    assert torch.equal(got, distance.min(1).values)
    top = float(legal[legal.isfinite()].max())
    assert float(values.abs().max()) <= top * scale
    is_lowest = int(biased) - 127 == FORMATS[codes].lowest
    assert is_lowest or float(values.abs().max()) > top * scale / 2, "half of the codes are unused"


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_exact_in_every_dtype_and_rounding_twice_changes_nothing(
    codes: torch.dtype, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    values = noise(rng, 500, 3, 24).to(dtype)
    rounded = values.clone()
    round_in_place(rounded, codes)
    assert torch.equal(rounded.double(), decode(*encode(values, codes), torch.float64))
    again = rounded.clone()
    round_in_place(again, codes)
    assert torch.equal(again, rounded)
    assert not torch.equal(rounded, values)


@pytest.mark.parametrize("codes", CODES)
def test_a_token_is_rounded_the_same_alone_and_among_others(codes: torch.dtype, rng: np.random.Generator) -> None:
    values = noise(rng, 40, 3, 24)
    together = decode(*encode(values, codes), torch.float32)
    for i in range(len(values)):
        assert torch.equal(decode(*encode(values[i : i + 1], codes), torch.float32)[0], together[i])


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_reads_as_nan(codes: torch.dtype, wrong: float) -> None:
    values = torch.ones(2, 2, 4)
    values[0, 1, 2] = wrong
    read = decode(*encode(values, codes), torch.float32)
    assert read[0, 1].isnan().all()
    assert torch.equal(read[0, 0], values[0, 0])
    assert torch.equal(read[1], values[1])


@pytest.mark.parametrize("codes", CODES)
def test_pages_return_what_was_written(codes: torch.dtype, rng: np.random.Generator) -> None:
    pages = empty_pages((2, 5, 4, 3, 8), codes, torch.device("cpu"))
    assert isinstance(pages, ScaledPages)
    values = noise(rng, 2, 3, 8)
    layer = list(by_layer(pages))[1]
    assert isinstance(layer, ScaledPages)
    layer.write(torch.tensor([4, 1]), torch.tensor([0, 3]), values)
    read = layer.read(torch.tensor([1, 4]), torch.float32)
    round_in_place(values, codes)
    assert torch.equal(read[1, 0], values[0])
    assert torch.equal(read[0, 3], values[1])


def test_transposed_pages_return_what_was_written(rng: np.random.Generator) -> None:
    pages = empty_pages((3, 32, 2, 8), torch.float8_e4m3fn, torch.device("cpu"), transposed=True)
    assert isinstance(pages, ScaledPages)
    values = noise(rng, 32, 2, 8)
    pages.write(torch.full((32,), 2), torch.arange(32), values)
    round_in_place(values, torch.float8_e4m3fn)
    assert torch.equal(pages.read(torch.tensor([2]), torch.float32)[0], values)


def test_the_four_tokens_of_a_lane_lie_side_by_side() -> None:
    """Of 16 scores, lane i of four holds those of tokens 2i, 2i + 1, 2i + 8, 2i + 9."""
    places = lane_order(torch.arange(48))
    assert sorted(places.tolist()) == list(range(48))
    for first in (0, 16, 32):
        for lane in range(4):
            tokens = first + torch.tensor([0, 1, 8, 9]) + 2 * lane
            assert places[tokens].tolist() == list(range(first + 4 * lane, first + 4 * lane + 4))


def test_a_lift_makes_scales_larger_and_keeps_values(rng: np.random.Generator) -> None:
    values = noise(rng, 4, 2, 128)
    plain, lifted = encode(values, torch.float8_e4m3fn), encode(values, torch.float8_e4m3fn, lift=9)
    assert torch.equal(lifted.exponents, plain.exponents + 9)
    assert lifted.codes.float().abs().max() <= 448 / 2**9
    difference = decode(*lifted, torch.float32) - decode(*plain, torch.float32)
    assert difference.norm() < 0.01 * values.norm()


def test_int8_is_closer_than_fp8_on_values_of_one_size(rng: np.random.Generator) -> None:
    """Why both exist: int8 spends its bits on values near the largest one, fp8 on small ones."""
    values = torch.from_numpy(rng.normal(0, 1, (1000, 4, 128))).float()
    error = {codes: (decode(*encode(values, codes), torch.float32) - values).norm() for codes in CODES}
    assert error[torch.int8] < 0.5 * error[torch.float8_e4m3fn]
