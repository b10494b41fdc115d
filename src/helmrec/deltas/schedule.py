"""Snapshots of tables by schedule, in a process of their own, and the removal of what they make superfluous.

The rule of removal: the newest `keep` snapshots stay, and every delta behind the oldest of them. So a node that has
begun to load a snapshot finds all deltas behind it, as long as it needs less time than passes between two snapshots. A
running node must not lag behind the oldest snapshot that is kept.
"""

import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import Field

from helmrec.config import Frozen
from helmrec.deltas.snapshot import (
    POSITION,
    SnapshotPosition,
    newest_snapshot,
    snapshot_name,
    snapshots,
    write_snapshot,
)
from helmrec.deltas.source import DeltaSink, open_source
from helmrec.errors import ConfigError, HelmRecError
from helmrec.failures import FailureLog
from helmrec.model.folder import Progress

log = logging.getLogger("helmrec.deltas")
_LOOK_EVERY_S = 1.0
_NICENESS = 10  # requests come first
_LOCK = ".lock"


class SnapshotPlan(Frozen):
    """Which snapshots are written, and how many of them stay."""

    model: Path
    deltas: str = Field(repr=False)
    folder: Path
    keep: int | None = Field(2, ge=2)  # None: all of them
    trims: bool = False  # whether deltas are removed that every kept snapshot includes
    every_s: float | None = Field(None, gt=0)
    to: int | None = Field(None, ge=1)  # the last delta to include; None: the newest


def make_snapshot(
    plan: SnapshotPlan,
    read: Callable[[int, int], None] = lambda done, total: None,
    written: Progress = lambda _: None,
) -> SnapshotPosition | None:
    """Write a snapshot, then remove what it makes superfluous; None if it is there already, or there is no delta.

    ConfigError if another process writes one to the same folder. `read` and `written` are those of `write_snapshot`.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    source = open_source(plan.deltas)
    try:
        with _alone(plan.folder):
            _clear_up(plan.folder)
            end = source.newest() if plan.to is None else plan.to
            newest = newest_snapshot(plan.folder, plan.model) if plan.to is None else None
            position = None
            if not (target := plan.folder / snapshot_name(end)).exists() and end:
                position = write_snapshot(newest or plan.model, source, target, end, read, written)
            remove_old(plan, source)
            return position
    finally:
        source.close()


def remove_old(plan: SnapshotPlan, source: DeltaSink) -> None:
    """Remove all but the newest snapshots and, if the plan says so, the deltas that all of those include."""
    if plan.keep is None:
        return
    found = snapshots(plan.folder, plan.model)
    for _, old in found[: -plan.keep]:
        gone = old.with_name(f".{old.name}.removed")
        old.rename(gone)  # at once, so that nobody starts from half a snapshot
        shutil.rmtree(gone)
        log.info("an old snapshot was removed", extra={"path": str(old)})
    kept = found[-plan.keep :]
    if plan.trims and len(kept) == plan.keep:
        source.trim(kept[0][0].sequence)


def is_due(plan: SnapshotPlan, now_s: float) -> bool:
    """Whether the newest snapshot is older than the schedule says, by the wall clock."""
    found = snapshots(plan.folder, plan.model) if plan.folder.is_dir() else []
    if not found or plan.every_s is None:
        return True
    return now_s - (found[-1][1] / POSITION).stat().st_mtime >= plan.every_s


def keep_schedule(plan: SnapshotPlan, parent: int | None = None) -> None:
    """Write snapshots as they fall due, for good. A failure is logged, and the next look tries again.

    `parent`: end with this process.
    """
    failures = FailureLog(log)
    while parent is None or os.getppid() == parent:
        started_s = time.monotonic()
        try:
            if is_due(plan, time.time()) and (made := make_snapshot(plan)) is not None:
                fields = {"position": made.sequence, "seconds": round(time.monotonic() - started_s, 1)}
                log.info("row snapshot written", extra=fields)
        except _Taken:
            pass  # another server of this host writes it
        except (HelmRecError, OSError) as error:
            failures.note("row snapshot", error)
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def scheduled(plan: SnapshotPlan | None, prepare: Callable[[], None]) -> Iterator[None]:
    """Keep a schedule in a process of its own, for as long as the context lasts. `prepare` is called in it first."""
    if plan is None:
        yield
        return
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=_work, args=(plan, os.getpid(), prepare), daemon=True)
    worker.start()
    try:
        yield
    finally:
        worker.kill()  # an unfinished snapshot is ignored, and cleared up by the next one
        worker.join()


def _work(plan: SnapshotPlan, parent: int, prepare: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the server, which stops in its own time
    with suppress(OSError):
        os.nice(_NICENESS)
    prepare()
    keep_schedule(plan, parent)


class _Taken(ConfigError):
    """Another process writes a snapshot."""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; it ends with the process."""
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _Taken(f"another process writes a snapshot to {folder}") from None
        yield


def _clear_up(folder: Path) -> None:
    """Remove what killed processes have left."""
    for pattern in (".*.partial", ".*.removed"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
