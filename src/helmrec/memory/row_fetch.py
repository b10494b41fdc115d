"""Brings rows from disk to host memory ahead of the steps that read them, and keeps them there until those have ended.

A request's rows are asked for with a ticket. One thread looks tickets up, in order; others read. A read that fails
fails the ticket that asked for it; tickets that wait for the same rows ask for them again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import RowLogError, RowsNotSynced, RowsUnreadable
from helmrec.memory.disk_reads import Bytes, DiskReads, ReadEnd
from helmrec.memory.row_frames import NO_SLOT, Frames, RowFrames
from helmrec.memory.row_log import FollowedLog, LoggedRows, RowLog
from helmrec.types import IntArray

_SMOOTHING = 0.2
_LAST_LOAD = 2**31 - 2
_NO_FRAMES = np.empty(0, np.int32)


class TicketState(Enum):
    """Where a ticket is."""

    QUEUED = "queued"  # not looked up yet, or no frame is free
    READING = "reading"
    READY = "ready"  # all its rows are in memory, and stay there until it is released
    FAILED = "failed"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class RowTicket:
    """Rows that a request needs in memory."""

    parts: Sequence[IntArray]
    asked_s: float
    state: TicketState = TicketState.QUEUED
    rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    frames: Frames = field(default_factory=_NO_FRAMES.copy)
    num_awaited: int = 0  # reads that it waits for
    is_shared: bool = False  # whether it waits for reads of others, which may fail
    num_read: int = 0  # rows that it reads itself
    done_at: int = 0  # its rows are there when so many rows have been read in all
    problem: str | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """One read."""

    ticket: RowTicket
    rows: IntArray
    frames: Frames
    started_s: float
    waiting: list[RowTicket] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowTierStats:
    """Rows in host memory and on disk. Counters never decrease."""

    capacity_rows: int  # that host memory holds
    resident_rows: int
    pinned_rows: int  # of waiting and running requests
    memory_hits: int  # lookups of requests that found a row in host memory
    memory_misses: int  # rows read from disk for requests
    memory_evictions: int
    disk_bytes: int  # read, in whole blocks
    disk_errors: int  # reads of requests that failed
    disk_waits: int  # requests that waited for the disk
    disk_wait_s: float
    longest_disk_wait_s: float
    disk_rows_per_s: float  # while rows were read, lately
    log_rows: int  # updates of rows in the log
    log_bytes: int


class TableFile(NamedTuple):
    """Where the rows of a table are: one after the other in a file."""

    file: int
    start: int
    num_rows: int


class RowFetcher:
    """Rows in host memory, as a cache of those on disk. Any thread may call it."""

    def __init__(
        self,
        frames: RowFrames,
        memory: Bytes,
        disk: DiskReads,
        tables: Sequence[TableFile],
        log: RowLog,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """memory: (frames, stride). tables: in the order of row ids. The log is replayed."""
        self._frames, self._memory, self._disk, self._log, self._now = frames, memory, disk, log, now
        self._starts = np.cumsum([0, *(table.num_rows for table in tables)])
        self._files = np.array([table.file for table in tables])
        self._offsets = np.array([table.start for table in tables])
        self._log_file: int | None = None
        self._lock = threading.Lock()
        self._has_tickets = threading.Condition(self._lock)  # or frames were released
        self._has_ended = threading.Condition(self._lock)  # a ticket is ready, or has failed
        self._queue: deque[RowTicket] = deque()
        self._loads: dict[int, _Load] = {}
        self._next_load = 1
        self._late: dict[int, Bytes] = {}  # new values of rows that a read is bringing
        self._is_closed = False
        self._num_started = self._num_done = 0  # rows
        self._row_s = 0.0  # time of a row, lately; 0: none was read
        self._ended_s = -np.inf
        self._disk_bytes = self._disk_errors = self._disk_waits = 0
        self._wait_s = self._longest_wait_s = 0.0
        log.replay(self._note_logged)
        self._thread = threading.Thread(target=self._look_up_all, name="helmrec-row-lookup", daemon=True)
        self._thread.start()

    def _note_logged(self, rows: IntArray, slots: IntArray) -> None:
        self._frames.log(rows, slots)
        if self._log_file is None:
            self._log_file = self._disk.add(self._log.path)

    # Tickets.

    def ask(self, parts: Sequence[IntArray]) -> RowTicket:
        """Ask for the rows of these arrays."""
        ticket = RowTicket(parts, self._now())
        with self._lock:
            self._queue.append(ticket)
            self._has_tickets.notify()
        return ticket

    def release(self, ticket: RowTicket) -> None:
        """Give up a ticket, in any state."""
        with self._lock:
            if ticket.state is not TicketState.RELEASED:
                self._let_go(ticket)
                ticket.state = TicketState.RELEASED

    def _let_go(self, ticket: RowTicket) -> None:
        self._frames.release(ticket.frames)
        ticket.frames = _NO_FRAMES
        self._has_tickets.notify()

    def wait(self, timeout_s: float) -> None:
        """Wait until a ticket is ready or has failed, or the time is over."""
        with self._lock:
            if self._queue or self._loads:
                self._has_ended.wait(timeout_s)

    def expected_s(self, ticket: RowTicket) -> float | None:
        """Return the time until the rows of a ticket are expected; None: it is not known."""
        with self._lock:
            if ticket.state is not TicketState.READING or not self._row_s:
                return None
            return max(0, ticket.done_at - self._num_done) * self._row_s

    def _look_up_all(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._is_closed:
                    self._has_tickets.wait()
                if self._is_closed:
                    return
                ticket = self._queue[0]
            if ticket.parts:
                ticket.rows, ticket.parts = np.concatenate([part.ravel() for part in ticket.parts]), ()
            with self._lock:
                started = self._look_up(ticket)
            if started is not None:
                load, files, offsets = started
                on_end = partial(self._end, load)
                self._disk.start(files, offsets, self._loads[load].frames.astype(np.int64), self._memory, on_end)

    def _look_up(self, ticket: RowTicket) -> tuple[int, IntArray, IntArray] | None:
        """Take the first ticket off the queue, unless no frames are free; return what to read, if anything."""
        if self._queue[0] is not ticket:  # one was put before it again
            return None
        if ticket.state is not TicketState.QUEUED:
            self._queue.popleft()
            return None
        found, load = self._frames.acquire(ticket.rows, self._next_load), self._next_load
        if found is None:
            self._has_tickets.wait()  # for frames: no later ticket may take them first
            return None
        self._queue.popleft()
        ticket.frames, ticket.state = found.frames, TicketState.READING
        for awaited in found.awaited.tolist():
            self._loads[awaited].waiting.append(ticket)
        ticket.num_awaited, ticket.num_read = found.awaited.size, found.to_read.size
        ticket.is_shared = ticket.num_awaited > 0
        ticket.done_at = self._num_started + found.to_read.size
        if not found.to_read.size:
            self._end_if_there(ticket)
            return None
        ticket.num_awaited += 1
        self._next_load = self._next_load % _LAST_LOAD + 1  # they are kept as int32, and few are under way
        self._num_started += found.to_read.size
        rows = ticket.rows[found.to_read]
        self._loads[load] = _Load(ticket, rows, found.frames[found.to_read], self._now())
        return (load, *self._places(rows, found.slots))

    def _places(self, rows: IntArray, slots: NDArray[np.int32]) -> tuple[IntArray, IntArray]:
        """Return the file of each row and where in it the row's value is."""
        table = np.searchsorted(self._starts, rows, side="right") - 1
        files = self._files[table]
        offsets = self._offsets[table] + (rows - self._starts[table]) * self._log.row_bytes
        in_log = slots != NO_SLOT
        if in_log.any():
            files[in_log], offsets[in_log] = self._log_file, self._log.offsets(slots[in_log].astype(np.int64))
        return files, offsets

    def _end(self, number: int, end: ReadEnd) -> None:
        """Take the end of a read, in a thread of the disk."""
        with self._lock:
            load, now = self._loads.pop(number), self._now()
            is_read = end.is_read | self._write_late(load)
            self._frames.publish(load.frames, is_read)
            self._count(load, end, now)
            ticket = load.ticket
            if not is_read.all() and ticket.state is TicketState.READING:
                self._disk_errors += 1
                ticket.problem, ticket.state = end.problem, TicketState.FAILED
                self._let_go(ticket)
            for each in (ticket, *load.waiting):
                if each.state is TicketState.READING:
                    each.num_awaited -= 1
                    self._end_if_there(each)
            self._has_tickets.notify()
            self._has_ended.notify_all()

    def _write_late(self, load: _Load) -> NDArray[np.bool_]:
        """Write values that came while their rows were read; return which rows had one."""
        is_late = np.array([bool(self._late) and row in self._late for row in load.rows.tolist()], np.bool_)
        for i in np.flatnonzero(is_late).tolist():
            self._memory[load.frames[i], : self._log.row_bytes] = self._late.pop(int(load.rows[i]))
        return is_late

    def _count(self, load: _Load, end: ReadEnd, now: float) -> None:
        took_s = max(1e-6, now - max(load.started_s, self._ended_s))  # reads overlap
        row_s = took_s / load.rows.size  # averaged instead of its inverse, so that a slow read counts at once
        self._row_s += (_SMOOTHING if self._row_s else 1.0) * (row_s - self._row_s)
        self._ended_s = now
        self._num_done += load.rows.size
        self._disk_bytes += end.num_bytes

    def _end_if_there(self, ticket: RowTicket) -> None:
        """Make a ticket ready that waits for no read; ask again if another's read has failed."""
        if ticket.num_awaited:
            return
        if ticket.is_shared and not self._frames.are_held(ticket.frames, ticket.rows):
            self._let_go(ticket)
            ticket.state = TicketState.QUEUED
            self._queue.appendleft(ticket)
            return
        ticket.state = TicketState.READY
        self._has_ended.notify_all()
        if ticket.num_read:
            waited_s = self._now() - ticket.asked_s
            self._disk_waits += 1
            self._wait_s += waited_s
            self._longest_wait_s = max(self._longest_wait_s, waited_s)

    # Rows.

    def frames_of(self, rows: IntArray) -> Frames:
        """Return the frames of rows that tickets hold."""
        return self._frames.frames_of(rows)

    def gather(self, rows: IntArray, out: Bytes) -> None:
        """Copy the values of any rows to `out`, (rows, row_bytes). Those that are not in memory are read, not kept."""
        with self._lock:
            frames = self._frames.pin_filled(rows)
            absent = np.flatnonzero(frames < 0)
            files, offsets = self._places(rows[absent], self._frames.slots_of(rows[absent]))
        held = np.flatnonzero(frames >= 0)
        try:
            out[held] = self._memory[frames[held], : self._log.row_bytes]
            if absent.size:
                self._read_now(files, offsets, absent, out)
        finally:
            with self._lock:
                self._frames.release(frames[held])
                self._has_tickets.notify()

    def _read_now(self, files: IntArray, offsets: IntArray, targets: IntArray, out: Bytes) -> None:
        ended, found = threading.Event(), list[ReadEnd]()

        def on_end(end: ReadEnd) -> None:
            found.append(end)
            ended.set()

        self._disk.start(files, offsets, targets, out, on_end)
        ended.wait()
        if not found[0].is_read.all():
            raise RowsUnreadable(f"rows cannot be read from disk: {found[0].problem}")

    def write(self, rows: IntArray, values: Bytes) -> None:
        """Write new values of distinct rows, (rows, row_bytes), to the log and to memory. No step may read them now."""
        with self._lock:
            slots = self._log.append(rows, values)
            if self._log_file is None:
                self._log_file = self._disk.add(self._log.path)
            frames = self._frames.log(rows, slots)
            there = np.flatnonzero(frames >= 0)
            is_filled = self._frames.are_filled(frames[there])
            filled = there[is_filled]
            self._memory[frames[filled], : self._log.row_bytes] = values[filled]
            for i in there[~is_filled].tolist():
                self._late[int(rows[i])] = values[i].copy()

    def next_logged(self) -> LoggedRows | None:
        """Return the next update of a log that another process writes, for `write` to take; None: there is none."""
        return self._log.next_update() if isinstance(self._log, FollowedLog) else None

    def sync(self) -> None:
        """Wait until updates written so far survive a loss of power. No lock may be held that steps need."""
        sync_served(self._log)

    def discard_updates(self) -> None:
        """Forget the log: rows have the values of the model's files again. No ticket may be open."""
        with self._lock:
            self._log.discard()
            self._frames.forget_log()

    def stats(self) -> RowTierStats:
        with self._lock:
            frames = self._frames
            return RowTierStats(
                capacity_rows=frames.num_frames,
                resident_rows=frames.num_resident,
                pinned_rows=frames.num_pinned,
                memory_hits=frames.hits,
                memory_misses=frames.misses,
                memory_evictions=frames.evictions,
                disk_bytes=self._disk_bytes,
                disk_errors=self._disk_errors,
                disk_waits=self._disk_waits,
                disk_wait_s=self._wait_s,
                longest_disk_wait_s=self._longest_wait_s,
                disk_rows_per_s=1 / self._row_s if self._row_s else 0.0,
                log_rows=self._log.num_rows,
                log_bytes=self._log.num_bytes,
            )

    def check(self) -> None:
        with self._lock:
            self._frames.check()
            if not self._loads:
                assert not self._late, "a late value was not written"
                assert self._num_started == self._num_done

    def close(self) -> None:
        """End the threads; reads that were started end first."""
        with self._lock:
            self._is_closed = True
            self._has_tickets.notify_all()
        self._thread.join()
        self._disk.close()
        self._log.close()


def sync_served(row_log: RowLog) -> None:
    """Sync a log whose updates are served, or will be whatever happens; RowsNotSynced if that fails."""
    try:
        row_log.sync()
    except RowLogError as error:
        raise RowsNotSynced(str(error)) from error
