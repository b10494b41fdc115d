"""The tables of a model in memory that all engines of a host map, as an engine reads them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.config import FixedRowDtype
from helmrec.errors import ConfigError
from helmrec.kernels.row_codec import RowCodec
from helmrec.kernels.row_gather import MAX_ROWS
from helmrec.memory.row_journal import RowBytes
from helmrec.memory.row_master import LockedBuffer, RowMaster
from helmrec.model.config import ModelConfig
from helmrec.model.table_memory import TableFiles, TableMemory


class SharedTables:
    """Shared tables as one engine maps them. The descriptors may be closed afterwards."""

    def __init__(self, config: ModelConfig, files: TableFiles, row_dtype: FixedRowDtype = "model") -> None:
        """row_dtype: of the rows in this memory."""
        if config.num_rows > MAX_ROWS:
            raise ConfigError(f"engines share at most {MAX_ROWS} rows over all tables, got {config.num_rows}")
        self.memory = TableMemory(config, files, row_dtype)
        self.journal = self.memory.journal
        codec = row_codec(config, row_dtype)
        sizes = {table.name: table.num_rows for table in config.tables}
        self.master = RowMaster.over(LockedBuffer(self.memory.num_bytes, self.memory.memory), sizes, codec)

    def redo(self) -> None:
        """Complete an update that the keeper has begun to write."""
        self.journal.redo(self.memory.write)


def row_codec(config: ModelConfig, row_dtype: FixedRowDtype) -> RowCodec:
    """Return how rows of a model are stored in this type."""
    code = None if row_dtype == "model" else row_dtype
    return RowCodec(config.row_dim, getattr(torch, config.row_dtype), code)


def row_bytes_of(values: Tensor) -> RowBytes:  # (rows, bytes of a stored row)
    """Return stored rows as bytes, as a journal takes them; there may be none."""
    flat: RowBytes = values.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.reshape(len(values), values.shape[1] * values.element_size())


def rows_of_bytes(values: RowBytes, dtype: torch.dtype) -> Tensor:  # (rows, width of a stored row)
    """Return the stored rows of an entry of a journal; there may be none."""
    return torch.from_numpy(values.reshape(-1)).view(dtype).view(len(values), values.shape[1] // dtype.itemsize)


def values_of_bytes(rows: RowBytes, codec: RowCodec) -> NDArray[np.float32]:  # (rows, row_dim)
    """Return the values of stored rows that are given as bytes."""
    return codec.decode(rows_of_bytes(rows, codec.stored_dtype), torch.float32).numpy()
