"""The master copy of every embedding row, in host memory; rows of all tables share one id space.

Tables may be memory-mapped files; updates then live in private pages and never reach the file.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RowMaster:
    """Every row of every table, by table offset."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self._tables = list(tables.values())
        sizes = [table.shape[0] for table in self._tables]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    @property
    def row_dim(self) -> int:
        return self._tables[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._tables[0].dtype

    def gather(self, rows: NDArray[np.int64]) -> Tensor:  # (rows, row_dim)
        out = torch.empty((rows.size, self.row_dim), dtype=self.dtype)
        for table, start, where in self._by_table(rows):
            out[where] = table[torch.from_numpy(rows[where] - start)]
        return out

    def update(self, rows: NDArray[np.int64], values: Tensor) -> None:
        for table, start, where in self._by_table(rows):
            table[torch.from_numpy(rows[where] - start)] = values[where]

    def _by_table(self, rows: NDArray[np.int64]) -> list[tuple[Tensor, int, NDArray[np.int64]]]:
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        found = np.unique(owner).tolist()
        return [(self._tables[i], int(self._starts[i]), np.flatnonzero(owner == i)) for i in found]
