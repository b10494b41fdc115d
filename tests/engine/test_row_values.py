"""New values of rows are converted bit by bit as torch does, in one thread."""

import numpy as np
import pytest
import torch

from helmrec.engine.intake import RowUpdate
from helmrec.engine.row_values import converted, new_values, pinned_block, split_block
from helmrec.errors import RequestError
from helmrec.memory.row_master import RowMaster

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def every_float16() -> np.ndarray:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    return every[np.isfinite(every)].reshape(-1, 62)


def many_float32() -> np.ndarray:
    """Numbers of all sizes, with those that lie half way between two of fewer bits."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint64).astype(np.uint32)
    bits[::3] &= np.uint32(0xFFFF8000)
    bits[::5] &= np.uint32(0xFFFFF000)
    bits[:4] = [0, 1, 0x80000000, 0x7F7FFFFF]
    of_half_size = np.arange(31_744, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (of_half_size[:-1] + of_half_size[1:]) / 2
    bits[4 : 4 + between.size] = between.view(np.uint32)
    bits[4 : 4 + between.size : 7] += np.uint32(1)
    every = bits.view(np.float32)
    return np.where(np.isfinite(every), every, 0.0).astype(np.float32).reshape(-1, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", [every_float16(), many_float32()], ids=["float16", "float32"])
def test_values_are_rounded_as_torch_rounds_them(values: np.ndarray, dtype: torch.dtype) -> None:
    found, expected = converted(values, dtype), torch.from_numpy(values.copy()).to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_values_of_the_masters_type_are_not_copied_unless_they_are_read_only() -> None:
    for dtype in (np.float16, np.float32):
        values = np.ones((3, 4), dtype)
        kind = torch.from_numpy(values).dtype
        assert converted(values, kind).data_ptr() == values.ctypes.data
        values.flags.writeable = False
        assert converted(values, kind).data_ptr() != values.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differences_are_added_and_a_sum_that_is_not_finite_is_refused(dtype: torch.dtype) -> None:
    master = RowMaster({"item": torch.full((5, 3), 2.0, dtype=dtype)})
    update = RowUpdate(np.array([1, 4]), np.full((2, 3), 0.5, np.float32), np.array([True, False]))
    assert new_values(master, update).tolist() == [[2.5] * 3, [0.5] * 3]
    largest = torch.finfo(dtype).max
    master.update(np.array([1]), torch.full((1, 3), largest, dtype=dtype))
    with pytest.raises(RequestError, match="difference to row 1"):
        new_values(master, update._replace(values=np.full((2, 3), largest, np.float32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 11), (64, 512)])
def test_a_block_holds_values_and_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values, rows = torch.randn(shape).to(dtype), np.random.default_rng(0).permutation(shape[0])
    places, found = split_block(pinned_block(rows, values), values)
    assert torch.equal(found, values)
    assert places.tolist() == rows.tolist()
    assert places.data_ptr() % 16 == found.data_ptr() % 16, "kernels are compiled for one alignment"
