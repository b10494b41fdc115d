"""The journal of shared tables: whenever its writer is killed, another process finds all rows of an update or none."""

import mmap
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from helmrec.errors import ConfigError
from helmrec.memory.row_journal import RowJournal, journal_bytes
from helmrec.types import IntArray, RowPosition

NUM_ROWS, ROW_BYTES, MAX_ROWS = 12, 4, 6


class Killed(Exception):
    """The writer ends here."""


class Tables:
    """Tables and journal in memory that several processes could map."""

    def __init__(self) -> None:
        self.rows = np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
        self.memory = mmap.mmap(-1, journal_bytes(MAX_ROWS, ROW_BYTES))
        self.bytes_left: int | None = None  # that are written before the writer is killed

    def journal(self) -> RowJournal:
        return RowJournal(self.memory, MAX_ROWS, ROW_BYTES)

    def write(self, rows: IntArray, values: Any) -> None:
        for row, value in zip(rows, values, strict=True):
            for at in range(ROW_BYTES):
                if self.bytes_left == 0:
                    raise Killed
                self.bytes_left = None if self.bytes_left is None else self.bytes_left - 1
                self.rows[row, at] = value[at]


class Interrupted:
    """An array whose next assignment is made half, and then the writer is killed."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __setitem__(self, key: slice, values: Any) -> None:
        num = key.stop // 2
        self._array[:num] = values[:num]
        raise Killed


def values_of(number: int, num: int) -> Any:
    return np.full((num, ROW_BYTES), number, np.uint8)


def test_an_update_is_read_as_it_was_entered() -> None:
    tables = Tables()
    number = tables.journal().enter(np.array([3, 1]), values_of(7, 2), RowPosition(5, 2))
    entry = tables.journal().entry()
    assert (entry.number, entry.rows.tolist(), entry.position) == (number, [3, 1], RowPosition(5, 2))
    assert (entry.values == 7).all()
    assert not tables.rows.any(), "nothing is written yet"
    tables.journal().write(tables.write)
    assert (tables.journal().done, tables.journal().position) == (number, RowPosition(5, 2))
    assert tables.rows[:, 0].tolist() == [0, 7, 0, 7, *[0] * 8]


def test_an_update_that_was_given_up_is_not_redone() -> None:
    tables = Tables()
    tables.journal().enter(np.array([3]), values_of(7, 1), RowPosition())
    tables.journal().redo(tables.write)
    assert not tables.rows.any()
    assert tables.journal().enter(np.array([4]), values_of(8, 1), RowPosition()) == 1
    tables.journal().write(tables.write)
    assert tables.rows[:, 0].tolist() == [0, 0, 0, 0, 8, *[0] * 7]


@given(st.lists(st.tuples(st.integers(1, MAX_ROWS), st.integers(0, 30)), min_size=1, max_size=6))
def test_a_writer_killed_at_any_byte_leaves_whole_updates(updates: list[tuple[int, int]]) -> None:
    tables, expected = Tables(), np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    for i, (num, bytes_left) in enumerate(updates):
        rows, value = (np.arange(num) * 5 + i) % NUM_ROWS, i + 1
        journal = tables.journal()
        journal.enter(rows, values_of(value, num), RowPosition(i + 1))
        tables.bytes_left = bytes_left
        try:
            journal.write(tables.write)
        except Killed:
            assert journal.done == i, "not done before every byte is written"
        tables.bytes_left = None
        for _ in range(2):  # two processes find it
            tables.journal().redo(tables.write)
        expected[rows] = value
        np.testing.assert_array_equal(tables.rows, expected)
        assert (tables.journal().done, tables.journal().position) == (i + 1, RowPosition(i + 1))
        tables.journal().check()


@pytest.mark.parametrize("part", ["_rows", "_values"])
def test_a_writer_killed_while_it_enters_an_update_changes_nothing(part: str) -> None:
    tables = Tables()
    first = tables.journal()
    first.enter(np.array([1, 2]), values_of(1, 2), RowPosition())
    first.write(tables.write)
    setattr(first, part, Interrupted(getattr(first, part)))
    with pytest.raises(Killed):
        first.enter(np.array([1, 2]), values_of(2, 2), RowPosition())
    tables.journal().redo(tables.write)
    assert tables.rows[:4, 0].tolist() == [0, 1, 1, 0]
    tables.journal().check()
    assert tables.journal().enter(np.array([0]), values_of(3, 1), RowPosition()) == 2


def test_a_process_that_was_stopped_while_it_redid_an_update_does_not_write_the_next_one_early() -> None:
    tables = Tables()
    tables.journal().enter(np.array([1]), values_of(1, 1), RowPosition())
    tables.bytes_left = 2
    with pytest.raises(Killed):
        tables.journal().write(tables.write)
    tables.bytes_left = None
    slow = tables.journal()

    def entry_after_others_went_on() -> Any:
        found = RowJournal.entry(slow)
        other = tables.journal()
        other.redo(tables.write)
        other.enter(np.array([1]), values_of(9, 1), RowPosition())
        return found._replace(number=other.entry().number)

    slow.entry = entry_after_others_went_on  # type: ignore[method-assign]
    slow.redo(tables.write)
    assert (tables.rows[1] == 1).all(), "the second update has not begun"
    assert slow.done == 1


def test_loading_is_remembered() -> None:
    tables = Tables()
    assert not tables.journal().is_loaded
    tables.journal().note_loaded(RowPosition(4))
    assert tables.journal().is_loaded
    assert tables.journal().position == RowPosition(4)


def test_the_stream_of_the_rows_is_known_to_the_next_process() -> None:
    tables = Tables()
    assert tables.journal().stream is None
    for name in ("a stream", "ein Strom, größer"):
        tables.journal().note_stream(name)
        assert tables.journal().stream == name
    with pytest.raises(ConfigError, match="at most 1024 bytes, got 2000"):
        tables.journal().note_stream("x" * 2_000)
    tables.journal().check()
