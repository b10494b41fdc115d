"""The log of row updates of engines whose rows are on disk: the front writes it, every engine of the host reads it.

An update is on disk before it is acknowledged, and every engine that serves has applied it. An engine that starts reads
the log before it serves, so that the front keeps no row in memory.
"""

import asyncio
import threading
from pathlib import Path

import torch
from numpy.typing import ArrayLike
from pydantic import ByteSize

from helmrec.config import EngineConfig
from helmrec.engine.intake import RowUpdate, prepare_rows
from helmrec.engine.row_values import compile_updates
from helmrec.engine.setup import row_log_of, tier_config
from helmrec.memory.row_fetch import sync_served
from helmrec.model.folder import VERIFY_BYTES, check_file, read_manifest
from helmrec.model.shared_tables import row_bytes_of
from helmrec.serve.settings import ServeConfig
from helmrec.types import Ids

_PART_BYTES = 64 << 20  # of values that become visible together


def one_of(engine: EngineConfig, serve: ServeConfig) -> EngineConfig:
    """Return the settings of one of several engines: `host_rows_bytes` is set for the host, and each gets its part.

    The front checks the model's files, unless engines may serve snapshots of their own.
    """
    own: dict[str, object] = {} if serve.row_deltas is not None else {"verify": "never"}
    if engine.host_rows_bytes is not None:
        own["host_rows_bytes"] = ByteSize(engine.host_rows_bytes // serve.engines)
    return engine.model_copy(update=own)


def verify_files(model: Path) -> None:
    """Check the sums of the model's large files; ModelError names one that is corrupt."""
    for name, record in read_manifest(model).files.items():
        if record.bytes > VERIFY_BYTES:
            check_file(model / name, record, verify=True, progress=lambda _: None)


def with_own_log(engine: EngineConfig, model: Path, number: int) -> EngineConfig:
    """Give an engine that follows a stream of deltas a log of its own, which it empties at its start."""
    path = Path(engine.row_log) if engine.row_log else row_log_of(model)
    return engine.model_copy(update={"row_log": f"{path}.{number}"})


class HostLog:
    """The log of one model on this host. Used in one event loop."""

    def __init__(self, model: Path, engine: EngineConfig) -> None:
        """`engine`: settings of each engine. ConfigError if its memory is too small; the log is read and checked."""
        manifest = read_manifest(model)
        self._config = manifest.model
        tier = tier_config(model, manifest.version, manifest.model, engine)
        tier.check()
        self._part_rows = max(1, _PART_BYTES // tier.row_bytes)
        self._checking, self._one_at_a_time = asyncio.Lock(), threading.Lock()
        self._log = tier.make_log()
        self._log.replay(lambda rows, slots: None)
        compile_updates(self._config, tier.codec)

    @property
    def num_bytes(self) -> int:
        """Bytes of the log that engines may read."""
        return self._log.num_bytes

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Append new rows and wait until they survive a loss of power. Engines do not have them yet."""
        async with self._checking:  # one by one, so that calls stay in order
            update = await asyncio.to_thread(prepare_rows, self._config, table, ids, values)
        if update.rows.size:
            await asyncio.to_thread(self._append, update)

    def _append(self, update: RowUpdate) -> None:
        packed = row_bytes_of(torch.from_numpy(update.values).to(getattr(torch, self._config.row_dtype)))
        with self._one_at_a_time:
            for first in range(0, update.rows.size, self._part_rows):
                part = slice(first, first + self._part_rows)
                self._log.append(update.rows[part], packed[part])
        sync_served(self._log)  # for all calls that wait for it now

    def close(self) -> None:
        self._log.close()
