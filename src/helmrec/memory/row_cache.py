"""What the pool knows of an embedding cache, wherever its index lives."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class RowMover(Protocol):
    """Moves row data inside the pool."""

    def copy_rows(self, source: Slots, target: Slots) -> None: ...


class RowCache(Protocol):
    """Rows in pages. Counters only grow."""

    hits: int
    misses: int
    evictions: int
    refills: int  # rows read ahead of demand
    moves: int  # rows that changed slots, so that a page could go

    @property
    def capacity(self) -> int:
        """Slots in owned pages."""

    @property
    def num_resident(self) -> int: ...

    @property
    def index_bytes(self) -> int: ...

    def add_pages(self, pages: Sequence[int]) -> None: ...

    def give_up_pages(self, num: int, mover: RowMover) -> list[int]:
        """Evict the coldest rows and let go of `num` pages; rows of theirs that stay have moved elsewhere."""

    def by_heat(self) -> NDArray[np.int64]:
        """All resident rows, coldest first."""

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Rows, coldest first, that a refill should read: they were hot before this cache began."""

    def check(self) -> None: ...
