"""A model of tens of GiB for measurements of tables: each row says which row it is. Written by several threads."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.model.config import ModelConfig, TableConfig
from helmrec.model.folder import VERIFY_BYTES, checksum
from helmrec.model.profiles import profile
from helmrec.model.weights import random_dense, stream_model, table_head
from helmrec.types import IntArray
from helmrec_bench.measure.cards.traffic import serving_config

GIB = 1 << 30
STAMPED = 4  # values at the start of a row that say which row it is
_DIGIT = 1_000
_PART_BYTES = 32 << 20
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_SAY_EVERY_S = 5.0

Note = Callable[[str], None]


def note_since(began_s: float, text: str) -> None:
    """Print a line with the seconds since `began_s` of the monotonic clock, which all processes share."""
    print(f"[{time.monotonic() - began_s:6.1f} s] {text}", flush=True)


def large_config(device: str, table_bytes: int) -> ModelConfig:
    """The wide shape for a card, and a small one for a CPU, with tables of about so many bytes."""
    if device == "cuda":
        return serving_config(24, table_bytes)
    base = profile("demo")
    item = TableConfig(name=base.features[0].name, num_rows=table_bytes // base.row_stride)
    return ModelConfig(**base.model_dump() | {"features": (item, *base.features[1:])})


def stamps(rows: IntArray) -> NDArray[np.float32]:  # (rows, STAMPED)
    """Digits of the rows of a table, scaled to the size of other values; exact in every dtype of rows."""
    digits = rows[:, None] // _DIGIT ** np.arange(STAMPED) % _DIGIT
    return (digits / 512).astype(np.float32)


def write_large_model(folder: Path, config: ModelConfig, note: Note) -> None:
    """Write a model, unless it is there, and let its pages leave memory. Rows of a table are equal but for stamps.

    A table over 256 MiB gets no checksum, which would take a minute: engines of measurements do not verify it.
    """
    if (folder / "config.json").exists():
        note(f"{folder} is there")
    else:
        total = config.num_rows * config.row_bytes
        writer = _TableWriter(config, lambda done: note(f"{done / GIB:.1f} of {total / GIB:.1f} GiB are written"))
        with (
            patch("helmrec.model.weights.checksum", _checksum_of_small),
            patch("helmrec.model.weights.write_table", writer.write),
        ):
            dense = random_dense(config, torch.Generator().manual_seed(0))
            stream_model(folder, config, dense, {table.name: () for table in config.tables})
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(_drop_pages, folder.rglob("*.safetensors")))
    note("the model is on disk, and not in memory")


def _drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checksum_of_small(path: Path, progress: Any) -> str:
    return checksum(path, progress) if path.stat().st_size <= VERIFY_BYTES else "not computed"


class _TableWriter:
    """Writes tables in parts, by several threads."""

    def __init__(self, config: ModelConfig, say: Callable[[int], None]) -> None:
        self._say, self._said_s, self._done = say, time.monotonic(), 0
        self._lock = threading.Lock()
        dtype = getattr(torch, config.row_dtype)
        row = torch.randn(config.row_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._part = row.repeat(max(1, _PART_BYTES // config.row_bytes), 1)

    def write(self, path: Path, shape: tuple[int, int], dtype: str, parts: Iterable[bytes], progress: Any) -> None:
        """Write a table, in place of `helmrec.model.weights.write_table`."""
        head = table_head(shape, dtype)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_all(file, memoryview(head), 0)
            with ThreadPoolExecutor(_THREADS) as threads:
                list(
                    threads.map(
                        partial(self._write_part, file, len(head), shape[0]), range(0, shape[0], len(self._part))
                    )
                )
        finally:
            os.close(file)

    def _write_part(self, file: int, start: int, num_rows: int, first: int) -> None:
        part = self._part[: num_rows - first].clone()
        part[:, :STAMPED] = torch.from_numpy(stamps(np.arange(first, first + len(part)))).to(part.dtype)
        _write_all(file, part.view(torch.uint8).view(-1).numpy().data, start + first * part[0].nbytes)
        with self._lock:
            self._done += part.nbytes
            if time.monotonic() - self._said_s > _SAY_EVERY_S:
                self._said_s = time.monotonic()
                self._say(self._done)


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        num = os.pwrite(file, data, at)
        data, at = data[num:], at + num
