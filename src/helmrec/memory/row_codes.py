"""Rows in eight bits on the host, without torch: each becomes a record of codes, the exponent of their scale and zeros.

The scale depends on the largest value of the row alone. Twins: `RowCodec.encode` in torch, `triton_row_recode.py`.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.codes import CODE_FORMATS, NAN_EXPONENT
from helmrec.memory.row_journal import RowBytes

_BIAS = np.float32(2.0**112)  # between the exponents of float16 and float32
_INFINITE = np.uint32(0x7F80_0000)
_SUBNORMAL = np.uint32(121 << 23)  # 2**-6, the smallest normal number of fp8_e4m3
_WHOLE = np.float32(2.0**23)  # added to a positive number, it rounds it to a whole one in the low bits
_WHOLE_AND_SIGN = np.float32(1.5 * 2.0**23)  # the same of any small number


def encode_rows(rows: RowBytes, dtype: str, code: str, out: RowBytes) -> None:
    """Write the records of rows to `out`, (rows, record bytes). rows: (rows, bytes of their values), of this dtype."""
    values, form = as_float32(rows, dtype), CODE_FORMATS[code]
    _encode(values, out, form.top, form.carry, form.lowest, code == "int8")


def as_float32(rows: RowBytes, dtype: str) -> NDArray[np.float32]:  # (rows, row_dim)
    """Return the values of rows that are given by their bytes."""
    if dtype == "float32":
        return rows.view(np.float32)
    bits = np.ascontiguousarray(rows.view(np.uint16))
    return (widened if dtype == "float16" else _shifted)(bits)


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return float16, given by their bits, as float32; NumPy takes five times as long."""
    return _widen(bits.reshape(-1)).reshape(bits.shape)


def _shifted(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bfloat16, given by their bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@numba.njit(cache=True, nogil=True)
def _widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    wide = np.empty(bits.size, np.uint32)
    numbers = wide.view(np.float32)
    for i in range(bits.size):
        wide[i] = (np.uint32(bits[i]) & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(bits.size):
        numbers[i] *= _BIAS
    for i in range(bits.size):
        is_wrong = (bits[i] & np.uint16(0x7C00)) == np.uint16(0x7C00)  # infinite, or NaN
        wide[i] |= ((np.uint32(bits[i]) & np.uint32(0x8000)) << np.uint32(16)) | (
            _INFINITE if is_wrong else np.uint32(0)
        )
    return numbers


@numba.njit(cache=True, nogil=True)
def _encode(values: NDArray[np.float32], out: RowBytes, top: int, carry: int, lowest: int, is_int8: bool) -> None:
    num, dim = values.shape
    scaled = np.empty(dim, np.float32)
    bits, scale = scaled.view(np.uint32), np.empty(1, np.float32)
    for i in range(num):
        scaled[:] = values[i]
        peak = np.uint32(0)
        for j in range(dim):
            peak = max(peak, bits[j] & np.uint32(0x7FFFFFFF))
        out[i, dim + 1 :] = 0
        if peak >= _INFINITE:
            out[i, :dim] = 0
            out[i, dim] = NAN_EXPONENT
            continue
        exponent: int = max(((int(peak) + carry) >> 23) - 127 - top, lowest)
        scale.view(np.uint32)[0] = np.uint32((127 - exponent) << 23)
        for j in range(dim):
            scaled[j] *= scale[0]
        if is_int8:
            _to_int8(scaled, out[i])
        else:
            _to_fp8(scaled, out[i])
        out[i, dim] = np.uint8(exponent + 127)


@numba.njit(cache=True, nogil=True)
def _to_int8(scaled: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    bits = scaled.view(np.uint32)
    for j in range(scaled.size):
        scaled[j] += _WHOLE_AND_SIGN
    for j in range(scaled.size):
        out[j] = np.uint8(bits[j] & np.uint32(0xFF))


@numba.njit(cache=True, nogil=True)
def _to_fp8(scaled: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    bits, small = scaled.view(np.uint32), np.empty(scaled.size, np.float32)
    small_bits = small.view(np.uint32)
    for j in range(scaled.size):
        small[j] = abs(scaled[j]) * np.float32(512.0) + _WHOLE  # below 2**-6 codes are multiples of 2**-9
    for j in range(scaled.size):
        size = bits[j] & np.uint32(0x7FFFFFFF)
        is_odd = (size >> np.uint32(20)) & np.uint32(1)
        normal = ((size + np.uint32(0x7FFFF) + is_odd) >> np.uint32(20)) - np.uint32(120 << 3)
        code = small_bits[j] & np.uint32(0xF) if size < _SUBNORMAL else normal
        out[j] = np.uint8(code | ((bits[j] >> np.uint32(24)) & np.uint32(0x80)))
