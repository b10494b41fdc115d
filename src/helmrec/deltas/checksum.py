"""The checksum of a delta: XXH64 with seed 0, as https://github.com/Cyan4973/xxHash specifies it.

It finds damage, not forgery: whoever may write to the place of a stream may write any delta. It is compiled and runs
outside the interpreter lock, since every byte of a stream passes through it beside serving.
"""

import numba
import numpy as np
from numpy.typing import NDArray

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)


def xxh64(data: bytes | bytearray | memoryview) -> int:
    """Return the 64-bit hash of some bytes."""
    flat = np.frombuffer(data, np.uint8)
    if flat.ctypes.data % 8:
        flat = flat.copy()
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    return int(_hash(words, flat))


@numba.njit(cache=True, nogil=True, inline="always")
def _rotated(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@numba.njit(cache=True, nogil=True, inline="always")
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotated(lane + word * _P2, 31) * _P1


@numba.njit(cache=True, nogil=True)
def _lanes(words: NDArray[np.uint64]) -> np.uint64:
    """Hash whole stripes of four words; the four lanes do not depend on each other."""
    a, b, c, d = _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1
    for i in range(words.size // 4):
        a = _round(a, words[4 * i])
        b = _round(b, words[4 * i + 1])
        c = _round(c, words[4 * i + 2])
        d = _round(d, words[4 * i + 3])
    found = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
    for lane in (a, b, c, d):
        found = (found ^ _round(np.uint64(0), lane)) * _P1 + _P4
    return found


@numba.njit(cache=True, nogil=True)
def _hash(words: NDArray[np.uint64], flat: NDArray[np.uint8]) -> np.uint64:
    """`words` are the whole words of `flat`."""
    found = _lanes(words) if words.size >= 4 else _P5
    found += np.uint64(flat.size)
    for i in range(words.size // 4 * 4, words.size):
        found = _rotated(found ^ _round(np.uint64(0), words[i]), 27) * _P1 + _P4
    at = words.size * 8
    if at + 4 <= flat.size:
        half = np.uint64(0)
        for i in range(4):
            half |= np.uint64(flat[at + i]) << np.uint64(8 * i)
        found = _rotated(found ^ (half * _P1), 23) * _P2 + _P3
        at += 4
    for i in range(at, flat.size):
        found = _rotated(found ^ (np.uint64(flat[i]) * _P5), 11) * _P1
    found = (found ^ (found >> np.uint64(33))) * _P2
    found = (found ^ (found >> np.uint64(29))) * _P3
    return found ^ (found >> np.uint64(32))
