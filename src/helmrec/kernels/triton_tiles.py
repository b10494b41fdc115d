"""Tiles of queries, keys and values for the portable attention kernel: from flat tensors, from pages, with TMA or not.

Pages may hold codes, which are decoded as they are read. This module does not know scores or masks.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from helmrec.kernels.attention_plan import AttentionInputs, padded
from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.triton_rounding import AS_THEY_ARE, FORMAT_OF, decode, lane_order

_AS_THEY_ARE = tl.constexpr(AS_THEY_ARE)

# One argument a line would bury the kernels.
# fmt: off


@triton.jit
def load_flat(source, strides, row, row_end, head, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
              USE_TMA: tl.constexpr):
    """ROWS rows of one head of a flat tensor; without TMA, rows from row_end on read as zero."""
    if USE_TMA:
        tile = source.load([row, head * DIM])
    else:
        rows = row + tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED)
        at = rows.to(tl.int64)[:, None] * strides[0] + head * strides[1] + dims[None, :]
        tile = tl.load(source + at, mask=(rows < row_end)[:, None] & (dims < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_paged(source, strides, exponents, exponent_strides, table, token, num_tokens, head,
               PAGE_TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
               USE_TMA: tl.constexpr, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """ROWS history tokens of one head; with TMA they must lie inside one page. Codes are decoded to float32.

    If LANES, the tokens of a page are in lane order.
    """
    if USE_TMA:
        page = tl.load(table + token // PAGE_TOKENS)
        tile = tl.reshape(source.load([page, token % PAGE_TOKENS, head * DIM]), (ROWS, PADDED))
    else:
        tokens = token + tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED)
        live = tokens < num_tokens
        pages = tl.load(table + tokens // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
        offsets = tokens % PAGE_TOKENS
        if LANES:
            offsets = lane_order(offsets)
        at = (pages * strides[0] + offsets * strides[1] + head * strides[2])[:, None] + dims[None, :] * strides[3]
        tile = tl.load(source + at, mask=live[:, None] & (dims < DIM)[None, :], other=0)
    if FORMAT != _AS_THEY_ARE:
        tokens = token + tl.arange(0, ROWS)
        live = tokens < num_tokens
        pages = tl.load(table + tokens // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
        at = pages * exponent_strides[0] + (tokens % PAGE_TOKENS) * exponent_strides[1] + head * exponent_strides[2]
        tile = decode(tile, tl.load(exponents + at, mask=live, other=0), FORMAT)
    return tile


# fmt: on


class KeptPages(NamedTuple):
    """Pages as a kernel takes them."""

    k: Tensor  # codes as uint8
    v: Tensor
    exponents: tuple[Tensor, Tensor]
    exponent_strides: tuple[int, ...]
    format: int
    lanes: bool = False  # whether values are in lane order

    @classmethod
    def of(cls, k: Pages, v: Pages, unused: Tensor) -> "KeptPages":
        """`unused` takes the place of pointers that are not read."""
        if isinstance(k, Tensor) or isinstance(v, Tensor):
            assert isinstance(k, Tensor), "K and V are kept alike"
            assert isinstance(v, Tensor), "K and V are kept alike"
            return cls(k, v, (unused, unused), (0, 0, 0), AS_THEY_ARE)
        strides = k.exponents.stride()
        assert strides == v.exponents.stride(), "K and V are kept alike"
        k_codes, v_codes = (pages.codes.view(torch.uint8) for pages in (k, v))
        return cls(k_codes, v_codes, (k.exponents, v.exponents), strides, FORMAT_OF[k.dtype], v.in_lane_order)


def tma_can_read(sources: AttentionInputs, block_n: int) -> bool:
    """Whether tiles are boxes the copy engine can fetch: whole power-of-two heads, aligned, blocks inside a page."""
    aligned = all(t.data_ptr() % 16 == 0 and all(s * t.itemsize % 16 == 0 for s in t.stride()[:-2]) for t in sources)
    packed = all(t.stride()[-2:] == (t.shape[-1], 1) and t.shape[-1] == padded(t.shape[-1]) for t in sources)
    same = all(t.dtype in {sources.q.dtype, torch.uint8} and t.numel() > 0 for t in sources)
    return aligned and packed and same and sources.k_pages.shape[1] % block_n == 0


def rows_descriptor(t: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(t, [t.shape[0], t.shape[1] * t.shape[2]], [t.stride(0), 1], [rows, t.shape[2]])


def pages_descriptor(t: Tensor, rows: int) -> TensorDescriptor:
    shape, strides = [*t.shape[:2], t.shape[2] * t.shape[3]], [*t.stride()[:2], 1]
    return TensorDescriptor(t, shape, strides, [1, rows, t.shape[3]])
