"""Rows of tables larger than host memory: part of them in locked memory, all of them on disk.

It takes the place of a `RowMaster`: kernels read its memory by frame instead of by row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from helmrec.errors import ConfigError
from helmrec.kernels.row_codec import RowCodec
from helmrec.memory.disk_reads import BlockReader, DiskReads, FileReader
from helmrec.memory.row_fetch import RowFetcher, TableFile, TicketState
from helmrec.memory.row_frames import Frames, RowFrames
from helmrec.memory.row_log import FollowedLog, RowLog
from helmrec.memory.row_master import LockedBuffer
from helmrec.types import IntArray

_WARM_SHARE = 0.75  # of the frames that are filled before the first request


class RowFile(NamedTuple):
    """The rows of a table in a file, one after the other."""

    path: Path
    start: int
    num_rows: int


class TierConfig(NamedTuple):
    """Sizes and files of a tier."""

    files: Sequence[RowFile]  # in the order of row ids
    codec: RowCodec  # of the files: rows as they are
    num_bytes: int  # of host memory, with the index of all rows
    least_rows: int  # of one request
    log: Path
    version: int  # of the model
    disk_reads: Literal["direct", "cached"] = "direct"
    num_threads: int = 32
    follows_log: bool = False  # another process writes it

    @property
    def row_bytes(self) -> int:
        return self.codec.dim * self.codec.dtype.itemsize

    @property
    def stride(self) -> int:
        return self.codec.stride

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    def make_log(self) -> RowLog:
        """Return the log of row updates, not read yet."""
        kind = FollowedLog if self.follows_log else RowLog
        return kind(self.log, self.version, self.row_bytes, self.num_rows)

    @property
    def num_frames(self) -> int:
        """Rows in host memory."""
        return RowFrames.frames_for(self.num_bytes, self.num_rows, self.stride)

    def check(self) -> None:
        """Raise ConfigError if fewer rows fit in host memory than one request may read."""
        num = self.num_frames
        if num < min(self.least_rows, self.num_rows):
            per_row = -(-(self.num_bytes - 4 * self.num_rows) // max(1, num)) if num > 0 else 2 * self.stride
            needed = 4 * self.num_rows + min(self.least_rows, self.num_rows) * per_row
            raise ConfigError(
                f"host_rows_bytes must be at least {needed} for the index of {self.num_rows} rows and the "
                f"{self.least_rows} rows that one request may read, got {self.num_bytes}"
            )


class TieredRows:
    """Rows in frames of host memory, filled from disk by `fetcher`."""

    is_shared = False

    def __init__(self, config: TierConfig, reader: BlockReader | None = None) -> None:
        config.check()
        num_frames = config.num_frames
        assert config.codec.code is None, "files hold rows as they are"
        self.codec = config.codec
        self._row_bytes = config.row_bytes
        self._buffer = LockedBuffer(num_frames * config.stride)
        self.rows = self._buffer.rows(config.codec)  # (frames, row_dim)
        disk = DiskReads(reader or FileReader(config.disk_reads), config.row_bytes, config.num_threads)
        tables = [TableFile(disk.add(file.path), file.start, file.num_rows) for file in config.files]
        memory = self._buffer.data.numpy().reshape(num_frames, config.stride)
        frames = RowFrames(config.num_rows, num_frames)
        self.num_bytes = self._buffer.data.nbytes + frames.num_bytes
        self.fetcher = RowFetcher(frames, memory, disk, tables, config.make_log())

    def lock(self) -> None:
        """Let a card read the frames, until `close`."""
        self._buffer.lock()

    def frames_of(self, rows: IntArray) -> Frames:
        """Return the frames of rows that a step holds."""
        return self.fetcher.frames_of(rows)

    def gather(self, rows: IntArray) -> Tensor:  # (rows, row_dim)
        """Return the values of any rows. Those that no step holds may come from disk, for which this waits."""
        out = torch.empty((rows.size, self.codec.dim), dtype=self.codec.dtype)
        if rows.size:
            self.fetcher.gather(rows, out.view(torch.uint8).numpy())
        return out

    def update(self, rows: IntArray, values: Tensor) -> None:
        """Write new values to the log and to memory, while no step reads rows."""
        packed = values.contiguous().view(torch.uint8).numpy().reshape(rows.size, self._row_bytes)
        self.fetcher.write(rows, packed)

    def warm(self, rows: IntArray) -> None:
        """Read the last of these rows, which are the hottest, to memory. Rows that cannot be read are left out."""
        num_frames = len(self.rows)
        most, part = int(_WARM_SHARE * num_frames), max(1, num_frames // 8)
        for some in np.array_split(rows[-most:], -(-min(rows.size, most) // part)) if rows.size else ():
            ticket = self.fetcher.ask([some])
            while ticket.state in {TicketState.QUEUED, TicketState.READING}:
                self.fetcher.wait(0.1)
            self.fetcher.release(ticket)

    def close(self) -> None:
        """End reads and unlock the memory."""
        self.fetcher.close()
        self._buffer.close()
