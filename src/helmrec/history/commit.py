"""Group commit: all jobs that wait when the writer is free share one transaction and one forced write.

It knows when to commit and to sync, not what the jobs do.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from helmrec.clock import Clock
from helmrec.errors import HelmRecError, HistoryError, HistoryFull, QueueFull
from helmrec.history.config import HistoryConfig
from helmrec.history.file import HistoryFile, Txn

T = TypeVar("T")


class _WriteJob(Generic[T]):
    """The work of one caller in a shared transaction: it raises before it writes, or writes everything."""

    def __init__(self, work: Callable[[Txn], T], *, frees: bool) -> None:
        self.work = work
        self.frees = frees
        self.future: Future[T] = Future()

    def run(self, txn: Txn) -> T | HelmRecError:
        try:
            return self.work(txn)
        except HelmRecError as error:
            return error

    def settle(self, outcome: T | Exception) -> None:
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class GroupCommit:
    """The only thread that writes. Futures are completed after the commit, never before."""

    def __init__(self, file: HistoryFile, config: HistoryConfig, clock: Clock) -> None:
        self._file = file
        self._config = config
        self._clock = clock
        self._jobs: queue.Queue[_WriteJob[Any] | None] = queue.Queue(config.queue_limit)
        self._closing = threading.Lock()
        self._is_closed = False
        self._synced_s = clock.now()
        self._is_dirty = False
        self._failed_sync: HistoryError | None = None
        self.num_commits = 0
        self._thread = threading.Thread(target=self._loop, name="history-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Txn], T], *, frees: bool = False) -> Future[T]:
        """Queue `work` for a transaction. frees: it frees more room than it takes.

        Raises QueueFull if too many wait. Work whose future is cancelled before it starts is not done.
        """
        job = _WriteJob(work, frees=frees)
        with self._closing:
            if self._is_closed:
                raise HistoryError(f"{self._file.path} is closed")
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                raise QueueFull(f"{self._config.queue_limit} appends wait for the history store") from None
        return job.future

    def close(self) -> None:
        """Finish all submitted work, then end the thread."""
        with self._closing:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        is_open = True
        while is_open:
            jobs = self._take()
            is_open = None not in jobs
            running = [job for job in jobs if job is not None and job.future.set_running_or_notify_cancel()]
            if running:
                self._commit(running)
            self._sync_if_due()

    def _take(self) -> list[_WriteJob[Any] | None]:
        """Wait for jobs and return all that wait; none when it is time to sync. None among them ends the thread."""
        jobs: list[_WriteJob[Any] | None] = []
        try:
            jobs.append(self._jobs.get(timeout=self._patience_s()))
            while jobs[-1] is not None and len(jobs) < self._config.max_commit_appends:
                jobs.append(self._jobs.get_nowait())
        except queue.Empty:
            pass
        return jobs

    def _patience_s(self) -> float | None:
        if self._config.sync != "interval" or not self._is_dirty:
            return None
        return max(0.0, self._synced_s + self._config.sync_interval_s - self._clock.now())

    def _commit(self, jobs: list[_WriteJob[Any]]) -> None:
        try:
            if self._failed_sync is not None:
                raise self._failed_sync
            outcomes = self._file.write(lambda txn: [job.run(txn) for job in jobs], may_exceed=_all_free(jobs))
        except HistoryFull as error:
            if len(jobs) == 1:
                jobs[0].settle(error)
            else:  # there may be room for some of them, and always for those that free room
                for job in jobs:
                    self._commit([job])
            return
        except Exception as error:  # callers wait for their futures, and later jobs need this thread
            for job in jobs:
                job.settle(error)
            return
        if not self._is_dirty:
            self._is_dirty, self._synced_s = True, self._clock.now()
        self.num_commits += 1
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.settle(outcome)

    def _sync_if_due(self) -> None:
        if self._patience_s() != 0.0:
            return
        self._is_dirty = False
        try:
            self._file.sync()
        except HistoryError as error:  # committed data may be lost: later work must not be acknowledged
            self._failed_sync = error


def _all_free(jobs: list[_WriteJob[Any]]) -> bool:
    return all(job.frees for job in jobs)
