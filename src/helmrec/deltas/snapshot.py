"""Snapshots of tables: a model folder with the rows of a stream up to a position, which is recorded in it.

A node that starts from a snapshot needs only the deltas behind it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from helmrec.config import Frozen
from helmrec.deltas.checks import check_delta
from helmrec.deltas.consumer import StreamStart
from helmrec.deltas.delta import NamedModel
from helmrec.deltas.source import DeltaSource, in_order
from helmrec.engine.intake import RowUpdate
from helmrec.engine.row_values import new_values
from helmrec.errors import ConfigError, DeltaGap, ModelError, RequestError
from helmrec.memory.row_master import RowMaster
from helmrec.model.folder import Progress, read_manifest
from helmrec.model.weights import load_model, parts_of, stream_model

POSITION = "row-position.json"
_DIGITS = 20


class SnapshotPosition(Frozen):
    """The content of row-position.json."""

    model: int  # version of the model that the stream began with
    stream: str = Field(min_length=1)
    sequence: int = Field(ge=0)


def read_position(folder: Path) -> SnapshotPosition | None:
    """Return the position of a model folder; None if it is of no stream. ModelError if it cannot be read."""
    path = folder / POSITION
    if not path.exists():
        return None
    try:
        return SnapshotPosition.model_validate_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def read_start(folder: Path) -> StreamStart:
    """Return where to follow a stream from with the rows of this folder."""
    position = read_position(folder)
    return StreamStart() if position is None else StreamStart(position.stream, position.sequence)


def snapshots(folder: Path, model: Path) -> list[tuple[SnapshotPosition, Path]]:
    """Return the snapshots of this model in a folder, in the order of their positions. Others are ignored."""
    version, found = _base_version(model), []
    for each in folder.iterdir():
        if each.is_dir() and not each.name.startswith(".") and (position := read_position(each)) is not None:
            found += [(position, each)] if position.model == version else []
    return sorted(found, key=lambda one: (one[0].sequence, one[1]))


def newest_snapshot(folder: Path, model: Path) -> Path | None:
    """Return the snapshot of this model with the highest position; None if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"row_snapshots must be a folder, got {str(folder)!r}")
    found = snapshots(folder, model)
    return found[-1][1] if found else None


def write_snapshot(
    model: Path,
    source: DeltaSource,
    out: Path,
    to: int | None = None,
    read: Callable[[int, int], None] = lambda done, total: None,
    written: Progress = lambda _: None,
) -> SnapshotPosition:
    """Write the model with the deltas up to `to`, the newest if it is None, as a new folder. It appears whole.

    Rows are changed in private copies of the pages they lie in, so memory is needed for changed pages only. `read` is
    called with the deltas done and their number, `written` with further bytes.
    """
    if out.exists():
        raise ConfigError(f"a snapshot is written to a new folder, got {str(out)!r}, which is there")
    start, loaded, newest = read_start(model), load_model(model), source.newest()
    end = newest if to is None else to
    if not start.sequence <= end <= newest:
        raise DeltaGap(f"the stream goes from delta {start.sequence} of the model to {newest}, got {end}", end)
    master, stream = RowMaster(loaded.tables), start.stream
    for delta in in_order(source.read(start.sequence), start.sequence, stream):
        if delta.sequence > end:
            break
        if delta.model is not None:
            loaded = load_model(check_named(delta.model))
            master = RowMaster(loaded.tables)
        try:
            _write(master, check_delta(loaded.config, delta))
        except RequestError as error:
            raise ModelError(f"delta {delta.sequence} does not fit {model}: {error}") from None
        stream = delta.stream
        read(delta.sequence - start.sequence, end - start.sequence)
    if stream is None:
        raise DeltaGap(f"{source.name} holds no delta: there is nothing to make a snapshot of")
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
    tables = {name: parts_of(rows) for name, rows in loaded.tables.items()}
    stream_model(beside, loaded.config, loaded.dense, tables, written)
    position = SnapshotPosition(model=_base_version(model), stream=stream, sequence=end)
    with (beside / POSITION).open("w", encoding="utf-8") as file:
        file.write(position.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.rename(out)
    return position


def check_named(model: NamedModel) -> Path:
    """Return the folder of a model that a delta names; ModelError if it is missing, or holds another version."""
    folder = Path(model.folder)
    if (found := read_manifest(folder).version) != model.version:
        raise ModelError(f"{folder} must hold version {model.version} of the model, got {found}")
    return folder


def snapshot_name(sequence: int) -> str:
    return f"{sequence:0{_DIGITS}d}"


def _write(master: RowMaster, update: RowUpdate) -> None:
    master.update(update.rows, new_values(master, update))


def _base_version(model: Path) -> int:
    position = read_position(model)
    return read_manifest(model).version if position is None else position.model
