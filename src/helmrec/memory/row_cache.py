"""The interface between the pool and an embedding cache, with its index on the host or the device."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class RowMover(Protocol):
    """Moves row data inside the pool."""

    def copy_rows(self, source: Slots, target: Slots) -> None: ...


class RowCache(Protocol):
    """A cache of rows in pages. Counters never decrease."""

    hits: int
    misses: int
    evictions: int
    refills: int  # rows read ahead of demand
    moves: int  # rows that changed slots, so that a page could be given up

    @property
    def capacity(self) -> int:
        """Slots in owned pages."""

    @property
    def num_resident(self) -> int: ...

    @property
    def index_bytes(self) -> int: ...

    def add_pages(self, pages: Sequence[int]) -> None: ...

    def give_up_pages(self, num: int, mover: RowMover) -> list[int]:
        """Evict the coldest rows, move the others, and give up `num` pages."""

    def by_heat(self) -> NDArray[np.int64]:
        """Return all resident rows, coldest first."""

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Queue rows, coldest first, for refills: they were hot before this cache was started."""

    def check(self) -> None: ...
