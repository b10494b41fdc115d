"""K/V in eight bits: pages of codes with one scale per token and head, and the rounding that every token gets.

A scale is a power of two that depends on the largest value of this token and head alone, so neither the rest of a
batch nor later events change what is kept. A code times its scale is a number that float32, bfloat16 and float16 hold
exactly. Attention therefore sees equal keys and values whether a token was kept or has just been computed, and whether
a kernel applies the scale before or after a product. Twin: `triton_rounding.py`.

Matrix units for eight-bit floats read values with tokens side by side. Pages of values may lie so; the views of them
have the same shape, and `lane_order` says where the value of a token is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from helmrec.codes import CODE_FORMATS, NAN_EXPONENT

CODE_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
FORMATS = {dtype: CODE_FORMATS[name] for name, dtype in CODE_DTYPES.items()}


LANE_TOKENS = 16  # that `lane_order` rearranges among themselves

_Places = TypeVar("_Places", int, Tensor)


def lane_order(token: _Places) -> _Places:
    """Return the place of a token's value in its page, where tokens lie side by side.

    Of the scores of 16 tokens a lane of a matrix unit holds those of tokens 2i, 2i + 1, 2i + 8 and 2i + 9. As left
    operand of the product with values it must hold four neighbours, so these four tokens lie side by side.
    """
    return (token & ~15) | ((token & 6) << 1) | ((token & 8) >> 2) | (token & 1)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledPages:
    """Pages of codes, one byte each, and the biased exponents of their scales. Any leading dimensions."""

    codes: Tensor  # (..., pages, page_tokens, heads, dim) float8_e4m3fn or int8
    exponents: Tensor  # (..., pages, page_tokens, heads) uint8; the scale is 2**(exponent - 127)
    in_lane_order: bool = False  # whether the codes of a page are in the lane order of its tokens

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    def clone(self) -> "ScaledPages":
        return replace(self, codes=self.codes.clone(), exponents=self.exponents.clone())

    def read(self, pages: Tensor, dtype: torch.dtype) -> Tensor:  # (len(pages), page_tokens, heads, dim)
        codes = self.codes.view(torch.uint8)[pages]
        if self.in_lane_order:
            codes = codes[:, lane_order(torch.arange(codes.shape[1], device=codes.device))]
        return decode(codes.view(self.dtype), self.exponents[pages], dtype)

    def write(self, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Write the values of tokens to their places. values: (tokens, heads, dim)."""
        codes, exponents = encode(values, self.dtype)
        places = lane_order(offsets) if self.in_lane_order else offsets
        self.codes.view(torch.uint8)[pages, places] = codes.view(torch.uint8)
        self.exponents[pages, offsets] = exponents


Pages = Tensor | ScaledPages  # of the model's dtype, or of codes


def holds_fp8(pages: Pages) -> bool:
    return isinstance(pages, ScaledPages) and pages.dtype == torch.float8_e4m3fn


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, transposed: bool = False) -> Pages:
    """Pages of a shape (..., pages, page_tokens, heads, dim) that holds no tokens yet.

    Exponents of a head lie side by side, as in an arena; so do the values of a dim if pages are `transposed`.
    """
    *outer, page_tokens, heads, dim = shape
    if dtype not in FORMATS:
        return torch.empty(shape, dtype=dtype, device=device)
    exponents = torch.empty((*outer, heads, page_tokens), dtype=torch.uint8, device=device).transpose(-1, -2)
    if not transposed:
        return ScaledPages(torch.empty(shape, dtype=dtype, device=device), exponents)
    assert page_tokens % LANE_TOKENS == 0, f"a lane order is of {LANE_TOKENS} tokens, got pages of {page_tokens}"
    codes = torch.empty((*outer, heads, dim, page_tokens), dtype=dtype, device=device).movedim(-1, -3)
    return ScaledPages(codes, exponents, in_lane_order=True)


def by_layer(pages: Pages) -> Iterator[Pages]:
    """Take pages of all layers apart."""
    if isinstance(pages, Tensor):
        return iter(pages)
    parts = zip(pages.codes, pages.exponents, strict=True)
    return (ScaledPages(codes, exponents, pages.in_lane_order) for codes, exponents in parts)


class Codes(NamedTuple):
    """Values in eight bits."""

    codes: Tensor  # (..., dim)
    exponents: Tensor  # (...) uint8


def query_lift(dim: int) -> int:
    """Return by how many powers of two the scale of a query is larger than it must be.

    Its products with keys then fit float16, and the largest digits of its values stay: a code has as many digits down
    to a 2**14th of the largest one.
    """
    return 2 + dim.bit_length() - 1


def encode(values: Tensor, dtype: torch.dtype, lift: int = 0) -> Codes:
    """Round values, (..., dim), to codes with a common scale along the last dimension; NaN if one is not finite.

    lift: binary orders by which the scale is larger than the values need.
    """
    form = FORMATS[dtype]
    wide = values.float()
    peak = wide.abs().amax(-1)
    exponent = ((peak.view(torch.int32) + form.carry) >> 23) - 127 - form.top
    exponent.clamp_(min=form.lowest).add_(lift)
    is_finite = peak.isfinite()
    scaled = (wide * _power_of_two(-exponent)[..., None]).masked_fill(~is_finite[..., None], 0.0)
    codes = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return Codes(codes, torch.where(is_finite, exponent + 127, NAN_EXPONENT).to(torch.uint8))


def decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:  # (..., dim)
    """Return the values of codes, (..., dim), with the exponents of their scales, (...)."""
    scale = (exponents.int() << 23).view(torch.float32)
    return (codes.float() * scale[..., None]).to(dtype)


def round_in_place(values: Tensor, dtype: torch.dtype, lift: int = 0) -> None:
    """Replace values, (..., dim), by what their codes stand for."""
    values.copy_(decode(*encode(values, dtype, lift), values.dtype))


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
