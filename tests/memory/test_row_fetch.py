"""Rows between disk and host memory: tickets, faults of the disk, updates while rows are read."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from helmrec.errors import RowsUnreadable
from helmrec.memory.disk_reads import DiskReads, FileReader, Runs
from helmrec.memory.row_fetch import RowFetcher, RowTicket, TableFile, TicketState
from helmrec.memory.row_frames import RowFrames
from helmrec.memory.row_log import RowLog

ROW_BYTES, START = 1_024, 88
SIZES = (200, 30)


class FaultyReader(FileReader):
    """Reads files, unless it is told to fail, to read too little, or to wait."""

    def __init__(self) -> None:
        super().__init__("direct")
        self.fault: Callable[[Runs, np.ndarray], np.ndarray] | None = None
        self.gate = threading.Event()
        self.gate.set()

    def read(self, runs: Runs, out: np.ndarray) -> np.ndarray:
        self.gate.wait(10)
        found = super().read(runs, out)
        return found if self.fault is None else self.fault(runs, found)


class Setup:
    """Two tables in files, and some frames."""

    def __init__(self, folder: Path, num_frames: int) -> None:
        rng = np.random.default_rng(0)
        self.values = rng.integers(0, 256, (sum(SIZES), ROW_BYTES), np.uint8)
        self.reader = FaultyReader()
        disk, tables, first = DiskReads(self.reader, ROW_BYTES, 3), [], 0
        for i, size in enumerate(SIZES):
            path = folder / f"table{i}"
            path.write_bytes(bytes(START) + self.values[first : first + size].tobytes())
            tables.append(TableFile(disk.add(path), START, size))
            first += size
        self.memory = np.zeros((num_frames, ROW_BYTES), np.uint8)
        log = RowLog(folder / "log", 1, ROW_BYTES, sum(SIZES))
        self.fetcher = RowFetcher(RowFrames(sum(SIZES), num_frames), self.memory, disk, tables, log)

    def ask(self, *rows: int) -> RowTicket:
        return self.fetcher.ask([np.array(rows, np.int64)])

    def until(self, ticket: RowTicket, state: TicketState = TicketState.READY) -> None:
        end_s = time.monotonic() + 10
        while ticket.state is not state:
            assert time.monotonic() < end_s, f"the ticket is {ticket.state}"
            self.fetcher.wait(0.01)
            time.sleep(0.0005)

    def check(self, ticket: RowTicket) -> None:
        frames = self.fetcher.frames_of(ticket.rows)
        assert np.array_equal(self.memory[frames], self.values[ticket.rows])

    def gather(self, *rows: int) -> np.ndarray:
        out = np.empty((len(rows), ROW_BYTES), np.uint8)
        self.fetcher.gather(np.array(rows), out)
        return out

    def write(self, row: int, value: int) -> None:
        self.values[row] = value
        self.fetcher.write(np.array([row]), self.values[[row]])


@pytest.fixture(name="setup")
def _setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path, 8)
    yield setup
    setup.reader.gate.set()
    setup.fetcher.close()
    setup.fetcher.check()


def test_rows_are_those_of_the_files(setup: Setup) -> None:
    for rows in ((0, 199, 200, 229), (5, 5, 7), (0, 1, 2, 3, 4, 5, 6, 7)):
        ticket = setup.ask(*rows)
        setup.until(ticket)
        setup.check(ticket)
        setup.fetcher.release(ticket)
    stats = setup.fetcher.stats()
    assert (stats.memory_misses, stats.memory_hits) == (11, 4)
    assert stats.disk_bytes >= 11 * ROW_BYTES


def test_a_ticket_waits_for_frames_and_no_later_one_passes_it(setup: Setup) -> None:
    first = setup.ask(*range(6))
    setup.until(first)
    second, third = setup.ask(*range(10, 15)), setup.ask(20)
    time.sleep(0.05)
    assert second.state is third.state is TicketState.QUEUED
    setup.check(first)
    setup.fetcher.release(first)
    for ticket in (second, third):
        setup.until(ticket)
        setup.check(ticket)
        setup.fetcher.release(ticket)


def test_a_cancelled_ticket_lets_the_next_one_pass(setup: Setup) -> None:
    first = setup.ask(*range(6))
    setup.until(first)
    second, third = setup.ask(*range(10, 15)), setup.ask(20)
    setup.fetcher.release(second)
    setup.until(third)
    for ticket in (first, third):
        setup.fetcher.release(ticket)
    assert setup.fetcher.stats().pinned_rows == 0


@pytest.mark.parametrize(
    "fault",
    [
        lambda runs, found: np.full_like(found, -errno.EIO),
        lambda runs, found: np.minimum(found, runs.needed - 1),
    ],
)
def test_a_fault_fails_who_asked_and_nobody_else(setup: Setup, fault: Callable[[Runs, np.ndarray], np.ndarray]) -> None:
    held = setup.ask(1, 2)
    setup.until(held)
    setup.reader.gate.clear()
    setup.reader.fault = fault
    asked, waits = setup.ask(2, 50), setup.ask(50, 1)
    while asked.state is TicketState.QUEUED or waits.state is TicketState.QUEUED:
        time.sleep(0.001)
    broken = setup.reader.fault

    def once(runs: Runs, found: np.ndarray) -> np.ndarray:
        setup.reader.fault = None
        return broken(runs, found)

    setup.reader.fault = once
    setup.reader.gate.set()
    setup.until(asked, TicketState.FAILED)
    assert asked.problem is not None
    assert "table0 at byte" in asked.problem
    setup.until(waits)
    for ticket in (waits, held):
        setup.check(ticket)
        setup.fetcher.release(ticket)
    setup.fetcher.release(asked)
    assert setup.fetcher.stats().pinned_rows == 0
    assert setup.fetcher.stats().disk_errors == 1


def test_an_update_while_its_row_is_read_is_not_overwritten(setup: Setup) -> None:
    setup.reader.gate.clear()
    ticket = setup.ask(33)
    while ticket.state is TicketState.QUEUED:
        time.sleep(0.001)
    setup.write(33, 7)
    setup.reader.gate.set()
    setup.until(ticket)
    setup.check(ticket)
    setup.fetcher.release(ticket)


def test_an_updated_row_comes_back_from_the_log(setup: Setup, tmp_path: Path) -> None:
    files = [(tmp_path / f"table{i}").read_bytes() for i in range(2)]
    setup.write(33, 7)
    setup.write(210, 9)
    setup.write(33, 8)
    for first in (0, 8, 16, 32, 208):  # evicts what was there
        ticket = setup.ask(*range(first, first + 8))
        setup.until(ticket)
        setup.check(ticket)
        setup.fetcher.release(ticket)
    assert np.array_equal(setup.gather(33, 210, 5, 33), setup.values[[33, 210, 5, 33]])
    assert files == [(tmp_path / f"table{i}").read_bytes() for i in range(2)]
    setup.fetcher.discard_updates()
    old = np.frombuffer(files[0][START:], np.uint8).reshape(-1, ROW_BYTES)[33]
    assert np.array_equal(setup.gather(33)[0], old)


def test_a_gather_that_fails_says_so_and_pins_nothing(setup: Setup) -> None:
    setup.reader.fault = lambda runs, found: np.full_like(found, -errno.EIO)
    with pytest.raises(RowsUnreadable, match="Input/output error"):
        setup.gather(3)
    assert setup.fetcher.stats().pinned_rows == 0


def test_the_disk_is_expected_to_take_as_long_as_before(setup: Setup) -> None:
    ticket = setup.ask(1, 2, 3)
    setup.until(ticket)
    setup.reader.gate.clear()
    waits = setup.ask(50, 60)
    while waits.state is TicketState.QUEUED:
        time.sleep(0.001)
    expected_s = setup.fetcher.expected_s(waits)
    assert expected_s is not None
    assert np.isclose(expected_s * setup.fetcher.stats().disk_rows_per_s, 2)
    setup.reader.gate.set()
    setup.until(waits)
    for each in (ticket, waits):
        setup.fetcher.release(each)


def test_random_requests_updates_and_faults_from_many_threads(setup: Setup) -> None:
    rng = np.random.default_rng(1)

    def sometimes(runs: Runs, found: np.ndarray) -> np.ndarray:
        chance = np.random.default_rng(int(runs.offsets[0])).random()
        return np.where(np.arange(found.size) % 7 == 3, -errno.EIO, found) if chance < 0.3 else found

    setup.reader.fault = sometimes
    num_failed = 0
    for _ in range(60):
        tickets = [setup.ask(*rng.integers(0, sum(SIZES), rng.integers(1, 4)).tolist()) for _ in range(5)]
        while any(ticket.state in {TicketState.QUEUED, TicketState.READING} for ticket in tickets):
            setup.fetcher.wait(0.01)
            for ticket in tickets:
                if ticket.state is TicketState.READY:
                    setup.check(ticket)
                    setup.fetcher.release(ticket)
        for ticket in tickets:
            num_failed += ticket.state is TicketState.FAILED
            if ticket.state is TicketState.READY:
                setup.check(ticket)
            setup.fetcher.release(ticket)
        setup.write(int(rng.integers(sum(SIZES))), int(rng.integers(256)))
        setup.fetcher.check()
    assert setup.fetcher.stats().pinned_rows == 0
    assert num_failed == setup.fetcher.stats().disk_errors
