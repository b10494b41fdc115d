"""The journal of shared tables: one update of rows at a time, complete in shared memory before any row is written.

If the process that writes the rows is killed half way, any other process that maps both completes the write. Values are
final, so that writing them twice, or by several processes at once, does no harm.
"""

import mmap
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.types import IntArray, RowPosition

RowBytes = NDArray[np.uint8]  # (rows, row_bytes)


class _Word(IntEnum):
    """Words at the beginning of a journal."""

    IS_LOADED = 0  # whether the tables hold the rows of the model
    ENTERED = 1  # number of the update in the journal
    BEGUN = 2  # number of the last update whose write has begun
    DONE = 3  # number of the last update that is written
    NUM_ROWS = 4  # of the update in the journal
    SEQUENCE = 5  # position in the stream of deltas, once it is written
    OFFSET = 6
    DONE_SEQUENCE = 7  # position of the rows in the tables
    DONE_OFFSET = 8
    STREAM_BYTES = 9  # of the identity of the stream; 0: none is known


_HEADER_BYTES = 4_096
_STREAM_AT, _MOST_STREAM_BYTES = 1_024, 1_024


class JournalEntry(NamedTuple):
    """One update: a copy of what is in the journal."""

    number: int
    rows: IntArray
    values: RowBytes
    position: RowPosition


def journal_bytes(max_rows: int, row_bytes: int) -> int:
    """Return the size of a journal for updates of at most `max_rows`."""
    return _HEADER_BYTES + max_rows * (8 + row_bytes)


class RowJournal:
    """A journal in shared memory. One process enters and writes updates; all may read and redo them.

    Other processes learn of an update from a message or from the end of the writer, never by polling these words, so
    that their order in memory does not matter.
    """

    def __init__(self, memory: mmap.mmap, max_rows: int, row_bytes: int) -> None:
        self._words = np.frombuffer(memory, np.int64, len(_Word))
        self._rows = np.frombuffer(memory, np.int64, max_rows, _HEADER_BYTES)
        values = np.frombuffer(memory, np.uint8, max_rows * row_bytes, _HEADER_BYTES + 8 * max_rows)
        self._values = values.reshape(max_rows, row_bytes)
        self._stream = np.frombuffer(memory, np.uint8, _MOST_STREAM_BYTES, _STREAM_AT)
        self.max_rows = max_rows

    @property
    def is_loaded(self) -> bool:
        """Whether the tables have been filled."""
        return bool(self._words[_Word.IS_LOADED])

    @property
    def stream(self) -> str | None:
        """Identity of the stream of deltas that the rows are from; None if none is known."""
        num = int(self._words[_Word.STREAM_BYTES])
        return self._stream[:num].tobytes().decode() if num else None

    def note_stream(self, stream: str) -> None:
        """Record which stream the next updates are from; ConfigError if its name is too long."""
        if stream == self.stream:
            return
        name = np.frombuffer(stream.encode(), np.uint8)
        if name.size > _MOST_STREAM_BYTES:
            raise ConfigError(f"the name of a stream has at most {_MOST_STREAM_BYTES} bytes, got {name.size}")
        self._words[_Word.STREAM_BYTES] = 0
        self._stream[: name.size] = name
        self._words[_Word.STREAM_BYTES] = name.size

    def note_loaded(self, position: RowPosition) -> None:
        """Record that the tables hold rows of this position."""
        self._words[[_Word.DONE_SEQUENCE, _Word.DONE_OFFSET]] = position.sequence, position.offset
        self._words[_Word.IS_LOADED] = 1

    @property
    def done(self) -> int:
        """Number of the last update that is written."""
        return int(self._words[_Word.DONE])

    @property
    def position(self) -> RowPosition:
        """Position of the written rows in the stream of deltas."""
        return RowPosition(*self._words[[_Word.DONE_SEQUENCE, _Word.DONE_OFFSET]].tolist())

    def enter(self, rows: IntArray, values: RowBytes, position: RowPosition) -> int:
        """Put the next update into the journal, in place of one that is written or was given up; return its number."""
        assert rows.size <= self.max_rows, "an update is larger than the journal"
        assert not self._is_half_written, "an update is entered over one that is being written"
        number = self.done + 1
        self._words[_Word.ENTERED] = 0
        self._rows[: rows.size] = rows
        self._values[: rows.size] = values
        self._words[[_Word.NUM_ROWS, _Word.SEQUENCE, _Word.OFFSET]] = rows.size, position.sequence, position.offset
        self._words[_Word.ENTERED] = number
        return number

    def entry(self) -> JournalEntry:
        """Return the update in the journal."""
        num, sequence, offset = self._words[[_Word.NUM_ROWS, _Word.SEQUENCE, _Word.OFFSET]].tolist()
        rows, values = self._rows[:num].copy(), self._values[:num].copy()
        number = int(self._words[_Word.ENTERED])  # last: it is 0 while another update is being entered
        return JournalEntry(number, rows, values, RowPosition(sequence, offset))

    def write(self, write: Callable[[IntArray, RowBytes], None]) -> None:
        """Write the update in the journal to the tables with `write`. Only who has entered it may call this."""
        number, num = int(self._words[_Word.ENTERED]), int(self._words[_Word.NUM_ROWS])
        self._words[_Word.BEGUN] = number
        write(self._rows[:num], self._values[:num])  # not a copy: engines are held meanwhile
        self._note_done(number)

    def redo(self, write: Callable[[IntArray, RowBytes], None]) -> None:
        """Complete an update whose write has begun, if there is one."""
        entry = self.entry()
        if not self._is_half_written or entry.number != self._words[_Word.BEGUN]:
            return  # another process has completed it, and perhaps entered the next one while this one read
        write(entry.rows, entry.values)
        self._note_done(entry.number)

    def _note_done(self, number: int) -> None:
        """Record that the update in the journal, which has this number, is written."""
        self._words[[_Word.DONE_SEQUENCE, _Word.DONE_OFFSET]] = self._words[[_Word.SEQUENCE, _Word.OFFSET]]
        self._words[_Word.DONE] = number

    @property
    def _is_half_written(self) -> bool:
        return bool(self._words[_Word.BEGUN] > self._words[_Word.DONE])

    def check(self) -> None:
        entered, begun, done, num = self._words[[_Word.ENTERED, _Word.BEGUN, _Word.DONE, _Word.NUM_ROWS]].tolist()
        assert done <= begun <= done + 1, "more than one update is being written"
        assert entered in (0, done, done + 1), "the update in the journal is not the next one"
        assert begun in (done, entered), "another update than the one in the journal is being written"
        assert 0 <= num <= self.max_rows
