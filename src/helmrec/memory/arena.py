"""The arena: the pool's one tensor, with two typed views as KV pages and as embedding rows.

It copies data between given places and knows neither owners nor users.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.errors import ConfigError
from helmrec.kernels.kv_rounding import FORMATS, LANE_TOKENS, Pages, ScaledPages
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.prefix import PageCopy
from helmrec.memory.row_cache import Slots


class Arena:
    """`num_pages` pages on one device.

    As KV, a page is, per layer, a K block (page_tokens, heads, qk) followed by a V block (page_tokens, heads, v). If
    these are codes, the exponents of their scales follow all layers: per layer those of K, (heads, page_tokens), then
    those of V. With `transposed_values` the V block is (heads, v, page_tokens), its tokens in lane order. As rows, a
    page is `rows_per_page` records of `row_stride` bytes, as a `RowCodec` stores them.
    """

    def __init__(
        self,
        num_pages: int,
        geometry: PageGeometry,
        kv_dtype: torch.dtype,
        row_dtype: torch.dtype,
        device: str,
        transposed_values: bool = False,
    ) -> None:
        assert not transposed_values or (kv_dtype in FORMATS and geometry.page_tokens % LANE_TOKENS == 0)
        self.transposed_values = transposed_values
        self._geometry = geometry
        self._buffer = _allocate(num_pages * geometry.page_bytes, device)
        self.pages = self._buffer.view(num_pages, geometry.page_bytes)
        self.k_pages = self._kv_view(num_pages, kv_dtype, geometry.qk_dim, 0, transposed=False)
        k_block = geometry.page_tokens * geometry.num_heads * geometry.qk_dim
        self.v_pages = self._kv_view(num_pages, kv_dtype, geometry.v_dim, k_block, transposed=transposed_values)
        self.k_exponents, self.v_exponents = (self._exponents_view(num_pages, of) for of in (0, 1))
        per_row = geometry.row_stride // geometry.row_itemsize
        width = per_row if geometry.row_scale_bytes else geometry.row_dim
        self.rows = self._buffer.view(row_dtype).as_strided(  # (slots, row_dim), or of records with their padding
            (num_pages * geometry.rows_per_page, width), (per_row, 1)
        )

    def _kv_view(self, num_pages: int, dtype: torch.dtype, dim: int, offset: int, *, transposed: bool) -> Tensor:
        """Return a view of shape (layers, pages, page_tokens, heads, dim)."""
        g = self._geometry
        layer = g.page_tokens * g.num_heads * (g.qk_dim + g.v_dim)
        shape = (g.num_layers, num_pages, g.page_tokens, g.num_heads, dim)
        inner = (1, dim * g.page_tokens, g.page_tokens) if transposed else (g.num_heads * dim, dim, 1)
        strides = (layer, g.page_bytes // g.kv_itemsize, *inner)
        return self._buffer.view(dtype).as_strided(shape, strides, offset)

    def _exponents_view(self, num_pages: int, of: int) -> Tensor | None:
        """Return a view of shape (layers, pages, page_tokens, heads), whose tokens are side by side."""
        g = self._geometry
        if not g.kv_scale_bytes:
            return None
        block = g.num_heads * g.page_tokens
        start = g.num_layers * block * (g.qk_dim + g.v_dim) + of * block
        shape = (g.num_layers, num_pages, g.page_tokens, g.num_heads)
        return self._buffer.as_strided(shape, (2 * block, g.page_bytes, 1, g.page_tokens), start)

    @property
    def k(self) -> Pages:
        """K of all layers, (layers, pages, page_tokens, heads, qk)."""
        return self.k_pages if self.k_exponents is None else ScaledPages(self.k_pages, self.k_exponents)

    @property
    def v(self) -> Pages:
        """V of all layers, (layers, pages, page_tokens, heads, v)."""
        if self.v_exponents is None:
            return self.v_pages
        return ScaledPages(self.v_pages, self.v_exponents, self.transposed_values)

    def copy_rows(self, source: Slots, target: Slots) -> None:
        """Move rows between slots; sources and targets are disjoint."""
        if source.size:
            self.rows[self._index(target)] = self.rows[self._index(source)]

    def write_rows(self, slots: Slots, values: Tensor) -> None:
        """Write row values to slots."""
        if slots.size:
            self.rows[self._index(slots)] = values.to(self._buffer.device)

    def keep_rows(self, slots: Slots, gathered: Tensor, positions: NDArray[np.int64]) -> None:
        """Copy rows that a step has already read to the device into slots, so that they do not cross the bus again."""
        if slots.size:
            self.rows[self._index(slots)] = gathered[self._index(positions)]

    def copy_tokens(self, copy: PageCopy) -> None:
        """Copy the first tokens of one page to another, in every layer."""
        in_lanes = -(-copy.num_tokens // LANE_TOKENS) * LANE_TOKENS  # tokens that lie among the first ones
        num_values = in_lanes if self.transposed_values else copy.num_tokens
        for pages, num in ((self.k_pages, copy.num_tokens), (self.v_pages, num_values)):
            pages[:, copy.target, :num] = pages[:, copy.source, :num]
        for exponents in (self.k_exponents, self.v_exponents):
            if exponents is not None:
                exponents[:, copy.target, : copy.num_tokens] = exponents[:, copy.source, : copy.num_tokens]

    def _index(self, where: Slots | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(where.astype(np.int64)).to(self._buffer.device)


def _allocate(num_bytes: int, device: str) -> Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"pool_bytes: {num_bytes} bytes cannot be allocated on {device!r} ({reason})") from None
