"""How rows are stored: as values of the model's dtype, or in eight bits with a scale of their own.

A row in eight bits is a record of bytes: one code per value, the biased exponent of their scale, zeros up to a multiple
of 16 bytes. The scale is a power of two that depends on the largest value of the row alone, and a code times its scale
is a number that the model's dtype holds exactly. A row therefore has the same values whether it is decoded from the
pool or from host memory, or rounded as it is read. Records move as bytes; only the embedding stage decodes them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from helmrec.kernels.kv_rounding import CODE_DTYPES, decode, encode

_ALIGN = 16  # a card reads 16 bytes at a time


@dataclass(frozen=True, slots=True)
class RowCodec:
    """The form of stored rows."""

    dim: int
    dtype: torch.dtype  # of the model's rows
    code: str | None = None  # a name of `CODE_DTYPES`; None: rows are stored as they are

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.dtype if self.code is None else torch.uint8

    @property
    def width(self) -> int:
        """Entries of a stored row; a record counts with its padding, so that it is copied 16 bytes at a time."""
        return self.dim if self.code is None else self.stride

    @property
    def stride(self) -> int:
        """Bytes from one stored row to the next."""
        num_bytes = self.dim * self.dtype.itemsize if self.code is None else self.dim + 1
        return -(-num_bytes // _ALIGN) * _ALIGN

    def encode(self, values: Tensor) -> Tensor:  # (..., width) of stored_dtype
        """Return rows of values, (..., dim), as they are stored."""
        if self.code is None:
            return values.to(self.dtype)
        codes, exponents = encode(values, CODE_DTYPES[self.code])
        records = torch.zeros((*values.shape[:-1], self.width), dtype=torch.uint8, device=values.device)
        records[..., : self.dim] = codes.view(torch.uint8)
        records[..., self.dim] = exponents
        return records

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:  # (..., dim)
        """Return the values of stored rows, (..., width)."""
        if self.code is None:
            return stored.to(dtype)
        codes = stored[..., : self.dim].contiguous().view(CODE_DTYPES[self.code])
        return decode(codes, stored[..., self.dim], dtype)

    def recode(self, stored: Tensor, into: "RowCodec") -> Tensor:
        """Return stored rows as another codec of the same rows stores them."""
        return stored if into == self else into.encode(self.decode(stored, self.dtype))


class Recoding(NamedTuple):
    """Rows are read in one form and kept in another."""

    source: RowCodec
    target: RowCodec
