"""Snapshots of a server for its next start: hot rows, the split, and the learned state of the controller.

A snapshot is one safetensors file, replaced atomically. A file that is damaged or of other tables is logged and
ignored: a cold start is slow, not wrong. No score depends on it, only which rows are prefetched.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from helmrec.engine.choose import device_name
from helmrec.engine.engine import Engine
from helmrec.errors import AlphaOutOfRange
from helmrec.failures import FailureLog
from helmrec.model.config import ModelConfig
from helmrec.serve.control import Steering
from helmrec.serve.settings import ServeConfig
from helmrec.types import IntArray

log = logging.getLogger("helmrec.serve")
_FORMAT = "helmrec-snapshot-2"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State of a served engine to keep over a restart."""

    rows: IntArray  # resident rows, coldest first
    alpha: float  # target of the boundary
    learned: Mapping[str, list[float]] = field(default_factory=dict)  # by the controller; may be empty
    learned_on: Mapping[str, str | int] = field(default_factory=dict)  # model, pool, precision and device


class SnapshotFile:
    """The snapshot file of a server of one model."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self.path = path
        self._tables = json.dumps([[table.name, table.num_rows] for table in model.tables])

    def write(self, snapshot: Snapshot) -> None:
        """Replace the file atomically: a reader sees the old or the new one, also after a crash."""
        numbers = {"alpha": snapshot.alpha, "learned": snapshot.learned, "learned_on": snapshot.learned_on}
        metadata = {"format": _FORMAT, "tables": self._tables, "numbers": json.dumps(numbers)}
        data = save({"rows": snapshot.rows}, metadata)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except BaseException:
            beside.unlink(missing_ok=True)  # a partial file would take space on a full disk
            raise

    def read(self) -> Snapshot | None:
        """Read the snapshot; None if there is no valid one, with a warning if the file is ignored."""
        if not self.path.exists():
            return None
        try:
            return self._read()
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("snapshot ignored", extra={"path": str(self.path), "reason": str(error)})
            return None

    def _read(self) -> Snapshot:
        with safe_open(self.path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"format {metadata.get('format')!r} is not {_FORMAT}")
            if metadata["tables"] != self._tables:
                raise ValueError("it is of a model with other tables")
            rows = np.asarray(file.get_tensor("rows"), np.int64)
        numbers = json.loads(metadata["numbers"])
        alpha = float(numbers["alpha"])
        if rows.ndim != 1 or not 0 <= alpha <= 1:
            raise ValueError(f"alpha {alpha} or rows of shape {rows.shape} are invalid")
        of = {str(name): value for name, value in numbers["learned_on"].items()}
        return Snapshot(rows, alpha, self._learned(numbers["learned"]), of)

    def _learned(self, stored: dict[str, Any]) -> dict[str, list[float]]:
        """The learned state of the controller; none of it, with a warning, if a part is no list of numbers."""
        learned = {name: np.array(values, np.float64) for name, values in stored.items()}
        if all(values.ndim == 1 and np.isfinite(values).all() for values in learned.values()):
            return {name: values.tolist() for name, values in learned.items()}
        log.warning("the learned state of the controller is invalid and ignored", extra={"path": str(self.path)})
        return {}


class SnapshotKeeper:
    """Writes snapshots of an engine from time to time, and restores the last one to the next engine.

    Collects the state in the engine's thread and writes the file in another. Failures are logged and counted in
    `failures`; serving continues without a snapshot.
    """

    def __init__(self, file: SnapshotFile, every_s: float) -> None:
        self._file = file
        self._every_s = every_s
        self._last_s: float | None = None
        self._writer: threading.Thread | None = None
        self.failures = FailureLog(log)

    @classmethod
    def of(cls, config: ServeConfig, model: ModelConfig) -> "SnapshotKeeper | None":
        """Make the keeper of the settings; None if they have no `snapshot_path`."""
        if config.snapshot_path is None:
            return None
        return cls(SnapshotFile(Path(config.snapshot_path), model), config.snapshot_every_s)

    def restore(self, engine: Engine, steering: Steering | None) -> None:
        """Restore rows, and with a policy also the split and its learned state. Without a policy the split stays."""
        self._try(self._restore, engine, steering)

    def _restore(self, engine: Engine, steering: Steering | None) -> None:
        found = self._file.read()
        if found is None:
            return
        if steering is not None:
            with suppress(AlphaOutOfRange):  # the pool may be smaller than it was
                engine.move_alpha(found.alpha)
                engine.settle()
            self._relearn(found, engine, steering)
        engine.warm(found.rows)
        pool = engine.stats().pool
        log.info("restored", extra={"rows": pool.resident_rows, "of": found.rows.size, "alpha": round(pool.alpha, 4)})

    @staticmethod
    def _relearn(found: Snapshot, engine: Engine, steering: Steering) -> None:
        """Restore the learned state of the policy, unless it is from another model, pool, precision or device."""
        here = _learned_on(engine)
        other = [name for name, value in here.items() if found.learned_on.get(name) != value]
        if other and found.learned:
            seen = {name: found.learned_on.get(name) for name in other}
            log.warning("the learned state of the controller is from another node and ignored", extra={"of": seen})
        elif found.learned:
            try:
                steering.relearn(found.learned)
            except (AssertionError, KeyError, ValueError) as error:  # another version of the controller wrote it
                steering.reset()
                log.warning("the learned state of the controller does not fit", extra={"reason": repr(error)})

    def keep_if_due(self, engine: Engine, steering: Steering | None, now_s: float) -> None:
        """Write a snapshot if one is due and the last is not still being written."""
        if self._last_s is None:
            self._last_s = now_s
        is_writing = self._writer is not None and self._writer.is_alive()
        if now_s - self._last_s < self._every_s or is_writing:
            return
        self._last_s = now_s
        self._try(self._write_beside, engine, steering)

    def _write_beside(self, engine: Engine, steering: Steering | None) -> None:
        look = _look(engine, steering)
        writer = threading.Thread(target=self._try, args=(self._file.write, look), name="helmrec-snapshot")
        writer.start()
        self._writer = writer  # one that could not be started cannot be joined

    def keep(self, engine: Engine, steering: Steering | None) -> None:
        """Write a snapshot now, and wait until it is on disk."""
        if self._writer is not None:
            self._writer.join()
        self._try(self._write, engine, steering)

    def _write(self, engine: Engine, steering: Steering | None) -> None:
        self._file.write(_look(engine, steering))

    def _try(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            self.failures.note(str(self._file.path), error, "snapshot failed")


def _look(engine: Engine, steering: Steering | None) -> Snapshot:
    learned = {} if steering is None else steering.learned
    return Snapshot(engine.hot_rows(), engine.stats().pool.alpha_target, learned, _learned_on(engine))


def _learned_on(engine: Engine) -> dict[str, str | int]:
    """Return model, pool, precision and device, on which the learned state of a controller depends."""
    config, shape = engine.config, engine.model_config.model_dump_json().encode()
    return {
        "model": hashlib.sha256(shape).hexdigest(),
        "pool_bytes": config.sized_pool_bytes,
        "kv_dtype": config.kv_dtype,
        "compute_dtype": config.compute_dtype,
        "row_dtype": config.row_dtype,
        "host_row_dtype": config.host_row_dtype,
        "device": device_name(config.device),
    }
