"""New values of rows as a master keeps them, and as a card receives them.

All of it runs in the calling thread alone. The parallel operations of torch would leave its threads spinning on other
cores after every call, beside the thread that steps the engine.
"""

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.intake import RowUpdate, prepare_rows
from helmrec.errors import RequestError
from helmrec.kernels.row_codec import RowCodec
from helmrec.memory.row_codes import widened
from helmrec.memory.row_master import HostRows, encoded_on_host, first_non_finite
from helmrec.model.config import ModelConfig
from helmrec.types import IntArray

_ALIGN = 256  # of the rows behind the values of a block
_ROW_BYTES = 8  # of a row id
_HALF = np.float32(0.5)  # its last bit is the smallest float16
_HALF_BITS = np.uint32(126 << 23)
_BLOCK = 4_096  # numbers that stay in the nearest cache


def new_values(master: HostRows, update: RowUpdate) -> Tensor:  # (rows, width of a stored row)
    """Convert an update as the master stores rows; RequestError if the sum of a difference and a row is not finite.

    Rows in eight bits take no differences: their sums would be rounded again and again.
    """
    codec = master.codec
    if update.is_added is None:
        return stored(update.values, codec)
    if codec.code is not None:
        raise RequestError("values", "differences", f"rows of {codec.code} (host_row_dtype) take new values only")
    new = update.values.astype(np.float32)
    with np.errstate(over="ignore"):  # a sum may be too large, which is looked for below
        new[update.is_added] += master.gather(update.rows[update.is_added]).float().numpy()
    sums = converted(new, codec.dtype)
    if (at := first_non_finite(sums)) is not None:
        raise RequestError("values", f"a difference to row {update.rows[at]}", "the sum must be finite")
    return sums


def stored(values: NDArray[np.float32] | NDArray[np.float16], codec: RowCodec) -> Tensor:
    """Return values as a codec stores them: rounded to the model's dtype first, as the rows in its files are."""
    rounded = converted(values, codec.dtype)
    return rounded if codec.code is None else encoded_on_host(rounded, codec)


def compile_updates(config: ModelConfig, codec: RowCodec) -> None:
    """Compile what checks new rows of a model and converts them to this form: of any type, writable or not."""
    for dtype in (np.float32, np.float16):
        values = np.ones((1, config.row_dim), dtype)
        for _ in range(2):
            update = prepare_rows(config, config.tables[0].name, np.zeros(1, np.int64), values)
            stored(update.values, codec)
            values.flags.writeable = False


def converted(values: NDArray[np.float32] | NDArray[np.float16], dtype: torch.dtype) -> Tensor:
    """Return finite values as a tensor of this type, rounded to the nearest; in the same memory if it is their type."""
    if dtype == torch.float16 and values.dtype == np.float32:
        flat = np.ascontiguousarray(values).reshape(-1)
        return torch.from_numpy(_rounded_to_float16(flat.view(np.uint32))).view(dtype).view(values.shape)
    if dtype == torch.float16:
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    wide = widened(np.ascontiguousarray(values).view(np.uint16)) if values.dtype == np.float16 else values
    if dtype == torch.bfloat16:
        flat = np.ascontiguousarray(wide).reshape(-1)
        return torch.from_numpy(_rounded_to_bfloat16(flat.view(np.uint32))).view(dtype).view(values.shape)
    wide = wide if wide.flags.writeable else wide.copy()
    return torch.from_numpy(wide).to(dtype)


@numba.njit(cache=True, nogil=True)
def _rounded_to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.int16]:
    """Return the upper halves of finite float32, rounded to the nearest, ties to even."""
    upper = np.empty(bits.size, np.int16)
    for i in range(bits.size):
        is_odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
        upper[i] = np.int16(np.uint16((bits[i] + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)))
    return upper


@numba.njit(cache=True, nogil=True)
def _rounded_to_float16(bits: NDArray[np.uint32]) -> NDArray[np.int16]:
    """Return float32 as bits of float16, rounded to the nearest, ties to even; infinite where they are too large."""
    half, tiny = np.empty(bits.size, np.int16), np.empty(_BLOCK, np.uint32)
    numbers = tiny.view(np.float32)
    for start in range(0, bits.size, _BLOCK):
        part, found_part = bits[start : start + _BLOCK], half[start : start + _BLOCK]
        for i in range(part.size):
            tiny[i] = part[i] & np.uint32(0x7FFFFFFF)
        for i in range(part.size):
            numbers[i] += _HALF  # so that the addition rounds a number that is subnormal in float16
        for i in range(part.size):
            size = part[i] & np.uint32(0x7FFFFFFF)
            is_odd = (size >> np.uint32(13)) & np.uint32(1)
            found = (size - np.uint32(112 << 23) + np.uint32(0xFFF) + is_odd) >> np.uint32(13)
            found = tiny[i] - _HALF_BITS if size < np.uint32(113 << 23) else found
            found = np.uint32(0x7C00) if size >= np.uint32(143 << 23) else found
            found_part[i] = np.int16(np.uint16(found | ((part[i] >> np.uint32(16)) & np.uint32(0x8000))))
    return half


def pinned_block(rows: IntArray, values: Tensor) -> Tensor:  # (bytes,)
    """Return values and then rows in one pinned block, which one copy brings to a card."""
    start = _rows_start(values)
    block = torch.empty(start + _ROW_BYTES * rows.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    flat = block.numpy()
    np.copyto(flat[: values.nbytes], values.contiguous().view(torch.uint8).view(-1).numpy())
    np.copyto(flat[start:].view(np.int64), rows)
    return block


def split_block(block: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and values of a block that was made of values of this shape and type."""
    rows = block[_rows_start(values) :].view(torch.int64)
    return rows, block[: values.nbytes].view(values.dtype).view(values.shape)


def _rows_start(values: Tensor) -> int:
    return -(-values.nbytes // _ALIGN) * _ALIGN
