"""K/V in eight bits: pages of codes with one scale per token and head, and the rounding that every token gets.

A scale is a power of two that depends on the largest value of this token and head alone, so neither the rest of a
batch nor later events change what is kept. A code times its scale is a number that float32, bfloat16 and float16 hold
exactly. Attention therefore sees equal keys and values whether a token was kept or has just been computed, and whether
a kernel applies the scale before or after a product. Twin: `triton_rounding.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from helmrec.codes import CODE_FORMATS, NAN_EXPONENT

CODE_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
FORMATS = {dtype: CODE_FORMATS[name] for name, dtype in CODE_DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ScaledPages:
    """Pages of codes, one byte each, and the biased exponents of their scales. Any leading dimensions."""

    codes: Tensor  # (..., pages, page_tokens, heads, dim) float8_e4m3fn or int8
    exponents: Tensor  # (..., pages, page_tokens, heads) uint8; the scale is 2**(exponent - 127)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    def clone(self) -> "ScaledPages":
        return ScaledPages(self.codes.clone(), self.exponents.clone())

    def read(self, pages: Tensor, dtype: torch.dtype) -> Tensor:  # (len(pages), page_tokens, heads, dim)
        return decode(self.codes.view(torch.uint8)[pages].view(self.dtype), self.exponents[pages], dtype)

    def write(self, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Write the values of tokens to their places. values: (tokens, heads, dim)."""
        codes, exponents = encode(values, self.dtype)
        self.codes.view(torch.uint8)[pages, offsets] = codes.view(torch.uint8)
        self.exponents[pages, offsets] = exponents


Pages = Tensor | ScaledPages  # of the model's dtype, or of codes


def holds_fp8(pages: Pages) -> bool:
    return isinstance(pages, ScaledPages) and pages.dtype == torch.float8_e4m3fn


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Pages:
    """Pages of a shape (..., pages, page_tokens, heads, dim) that holds no tokens yet.

    Exponents of a head lie side by side, as in an arena.
    """
    pages = torch.empty(shape, dtype=dtype, device=device)
    if dtype not in FORMATS:
        return pages
    *outer, page_tokens, heads, _ = shape
    exponents = pages.new_empty((*outer, heads, page_tokens), dtype=torch.uint8).transpose(-1, -2)
    return ScaledPages(pages, exponents)


def by_layer(pages: Pages) -> Iterator[Pages]:
    """Take pages of all layers apart."""
    if isinstance(pages, Tensor):
        return iter(pages)
    return (ScaledPages(*each) for each in zip(pages.codes, pages.exponents, strict=True))


class Codes(NamedTuple):
    """Values in eight bits."""

    codes: Tensor  # (..., dim)
    exponents: Tensor  # (...) uint8


def encode(values: Tensor, dtype: torch.dtype) -> Codes:
    """Round values, (..., dim), to codes with a common scale along the last dimension; NaN if one is not finite."""
    form = FORMATS[dtype]
    wide = values.float()
    peak = wide.abs().amax(-1)
    exponent = ((peak.view(torch.int32) + form.carry) >> 23) - 127 - form.top
    exponent.clamp_(min=form.lowest)
    is_finite = peak.isfinite()
    scaled = (wide * _power_of_two(-exponent)[..., None]).masked_fill(~is_finite[..., None], 0.0)
    codes = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return Codes(codes, torch.where(is_finite, exponent + 127, NAN_EXPONENT).to(torch.uint8))


def decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:  # (..., dim)
    """Return the values of codes, (..., dim), with the exponents of their scales, (...)."""
    scale = (exponents.int() << 23).view(torch.float32)
    return (codes.float() * scale[..., None]).to(dtype)


def round_in_place(values: Tensor, dtype: torch.dtype) -> None:
    """Replace values, (..., dim), by what their codes stand for."""
    values.copy_(decode(*encode(values, dtype), values.dtype))


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
