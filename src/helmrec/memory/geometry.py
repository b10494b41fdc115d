"""Page geometry: how many tokens and rows a page holds, from the model's shapes."""

import math
from dataclasses import dataclass

_ALIGN_ROW = 16
_ALIGN_PAGE = 256
_MOST_PADDING = 0.05  # share of a KV page, to align it for TMA


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Shapes that fix a page. A page is KV of `page_tokens` tokens for all layers, or `rows_per_page` rows."""

    page_tokens: int
    num_layers: int
    num_heads: int
    qk_dim: int
    v_dim: int
    kv_itemsize: int
    row_dim: int
    row_itemsize: int
    kv_scale_bytes: int = 0  # of each token and head, for K and for V; 0: values are kept as they are
    row_scale_bytes: int = 0  # of each row; 0: values are kept as they are
    host_row_bytes: int | None = None  # of a row in host memory; None: as in the pool

    @property
    def token_bytes(self) -> int:
        """Bytes of K/V of one token over all layers, with their scales."""
        values = (self.qk_dim + self.v_dim) * self.kv_itemsize
        return self.num_layers * self.num_heads * (values + 2 * self.kv_scale_bytes)

    @property
    def row_stride(self) -> int:
        """Bytes of a row in the pool, with its scale and padding."""
        return _round_up(self.row_dim * self.row_itemsize + self.row_scale_bytes, _ALIGN_ROW)

    @property
    def host_row_stride(self) -> int:
        """Bytes of a row in host memory, which cross the bus when it is missed."""
        return self.row_stride if self.host_row_bytes is None else _round_up(self.host_row_bytes, _ALIGN_ROW)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: a multiple of a row's and, if that takes little padding, of a TMA row's."""
        kv_bytes, rows = self.page_tokens * self.token_bytes, math.lcm(self.row_stride, _ALIGN_PAGE)
        aligned = _round_up(kv_bytes, math.lcm(rows, self._tma_row_bytes))
        return aligned if aligned <= (1 + _MOST_PADDING) * kv_bytes else _round_up(kv_bytes, rows)

    @property
    def is_tma_aligned(self) -> bool:
        """Whether a card's copy engine (TMA) can read pages: their size must be a multiple of its row's."""
        return self.page_bytes % self._tma_row_bytes == 0

    @property
    def _tma_row_bytes(self) -> int:
        """Bytes of a TMA row: the key of a token in one layer; of codes also one value of all tokens of a page."""
        key = self.num_heads * self.qk_dim * self.kv_itemsize
        return math.lcm(key, self.page_tokens) if self.kv_scale_bytes else key

    @property
    def rows_per_page(self) -> int:
        return self.page_bytes // self.row_stride

    @property
    def kv_waste(self) -> float:
        """Share of a KV page that is padding."""
        return 1 - self.page_tokens * self.token_bytes / self.page_bytes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
