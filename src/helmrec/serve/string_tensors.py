"""Tensors of strings in the Open Inference Protocol (datatype BYTES), which users may be given as.

As bytes, each string follows its length in four bytes.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import RequestError

BYTES = "BYTES"
_LENGTH = struct.Struct("<I")


def listed_strings(field: str, values: Sequence[int | str]) -> NDArray[Any]:
    """Return an array of Python strings; RequestError, with the name of the field, if one value is none."""
    for value in values:
        if not isinstance(value, str):
            raise RequestError(field, value, f"strings are needed in a tensor of {BYTES}")
    strings = np.empty(len(values), object)
    strings[:] = values
    return strings


def unpack_strings(field: str, raw: bytes) -> NDArray[Any]:
    """Return an array of the strings in these bytes."""
    strings, at = list[str](), 0
    while at < len(raw):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(raw, at)[0] if begin <= len(raw) else len(raw) + 1
        if end > len(raw):
            raise RequestError(field, len(raw), "strings, each after its length in four bytes, must fill the bytes")
        try:
            strings.append(raw[begin:end].decode())
        except UnicodeDecodeError:
            raise RequestError(field, repr(raw[begin:end][:50]), "UTF-8 is needed") from None
        at = end
    return listed_strings(field, strings)


def pack_strings(values: Sequence[str]) -> bytes:
    texts = [value.encode() for value in values]
    return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
