"""Reads a log of one's own, as CSV or Parquet, line by line. A bad line is dropped and counted under its reason.

It knows the columns of a log, not traces; `imported` converts a log to a trace.
"""

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from helmrec.config import Frozen
from helmrec.errors import TraceError
from helmrec.traffic.arrow import pyarrow
from helmrec.traffic.importers import Log

_TICKS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_LAST_S = 32_503_680_000  # the year 3000: later times are of another unit
_MAX_ACTIONS = 256  # a trace stores an action in one byte
_EVERY = 10_000  # lines between two reports of progress
_NO_UTF8 = "not UTF-8"

Progress = Callable[[int, int], None]  # done and total, in bytes or lines


class LogColumns(Frozen):
    """The names of a log's columns, and how its values are written."""

    user: str = Field("user", min_length=1, description="column with the user's id")
    item: str = Field("item", min_length=1, description="column with the item's id")
    action: str | None = Field("action", min_length=1, description="column with the action; none: all are one action")
    time: str = Field("time", min_length=1, description="column with the time")
    time_unit: Literal["s", "ms", "us", "ns", "iso"] = Field(
        "s", description="unit of times since 1970, or iso for ISO 8601 text (UTC if it names no zone)"
    )
    actions: tuple[str, ...] = Field((), description="actions by number, from 0; others are dropped. Empty: all")
    delimiter: str = Field(",", description="between the fields of a CSV line")

    @field_validator("delimiter")
    @classmethod
    def _is_one_character(cls, value: str) -> str:
        value = "\t" if value == "\\t" else value
        if len(value) != 1 or value in '"\r\n':
            raise ValueError("must be one character, such as ',' or '\\t'")
        return value


class Dropped(NamedTuple):
    """Lines dropped for one reason: how many, and the number of the first."""

    num: int
    first_line: int


@dataclass(slots=True)
class LogReport:
    """What was read of a log, and what was dropped and why."""

    num_read: int = 0
    num_kept: int = 0
    num_users: int = 0
    num_items: int = 0
    num_out_of_order: int = 0  # kept: events that stand after a later event of their user; they are sorted
    actions: dict[str, int] = field(default_factory=dict)  # the number of each action in the trace
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def drop(self, reason: str, line: int) -> None:
        num, first_line = self.dropped.get(reason, (0, line))
        self.dropped[reason] = Dropped(num + 1, first_line)


class OwnLog(NamedTuple):
    """The events of a log in order of time, and the report on its lines."""

    log: Log
    report: LogReport


ReadLog = Callable[[Path, LogColumns, Progress], OwnLog]


def read_csv_log(path: Path, columns: LogColumns, on_progress: Progress = lambda *_: None) -> OwnLog:
    """Read a CSV file with a header, plain or `.gz`. It needs no library besides the core dependencies."""
    return _read(_csv_lines(path, columns, on_progress), path, columns)


def read_parquet_log(path: Path, columns: LogColumns, on_progress: Progress = lambda *_: None) -> OwnLog:
    """Read a Parquet file; a line's number counts from 1. Columns of type timestamp have their unit in the file."""
    return _read(_parquet_lines(path, columns, on_progress), path, columns)


class _Line(NamedTuple):
    """The fields of one line. `fault` is set where they could not be told apart."""

    number: int
    user: Any = None
    item: Any = None
    action: Any = None
    time: Any = None
    fault: str | None = None


def _read(lines: Iterator[_Line], path: Path, columns: LogColumns) -> OwnLog:
    events, report = _Events(columns), LogReport()
    for line in lines:
        report.num_read += 1
        try:
            events.add(line)
        except _Unusable as fault:
            report.drop(str(fault), line.number)
    if not events.time:
        causes = (f"{dropped.num} lines: {reason}" for reason, dropped in report.dropped.items())
        raise TraceError(f"{path} has no usable events; {'; '.join(causes) or 'it has no lines'}")
    return events.finish(report)


class _Unusable(Exception):
    """A line that cannot be used; its text is the reason without values, so that reasons can be counted."""


class _Events:
    """Events as they are read; ids are numbered by first use."""

    def __init__(self, columns: LogColumns) -> None:
        self._columns = columns
        self._ticks = _TICKS_PER_S.get(columns.time_unit, 1_000_000)
        self._users = dict[str, int]()
        self._items = dict[str, int]()
        self._actions = {name: number for number, name in enumerate(columns.actions)}
        self._latest = list[int]()  # the latest time of each user
        self.num_out_of_order = 0
        self.user, self.item, self.action, self.time = list[int](), list[int](), list[int](), list[int]()

    def add(self, line: _Line) -> None:
        if line.fault is not None:
            raise _Unusable(line.fault)
        columns = self._columns
        user, item = _text(line.user, columns.user), _text(line.item, columns.item)
        action = "" if columns.action is None else _text(line.action, columns.action)
        time = self._parse_time(line.time)
        if columns.actions and action not in self._actions:
            raise _Unusable(f"{columns.action} is none of {', '.join(columns.actions)}")
        if action not in self._actions and len(self._actions) == _MAX_ACTIONS:
            raise TraceError(
                f"column {columns.action!r} must have at most {_MAX_ACTIONS} different values, got {action!r} besides"
            )
        number = self._users.setdefault(user, len(self._users))
        if number == len(self._latest):
            self._latest.append(time)
        self.num_out_of_order += time < self._latest[number]
        self._latest[number] = max(time, self._latest[number])
        self.user.append(number)
        self.item.append(self._items.setdefault(item, len(self._items)))
        self.action.append(self._actions.setdefault(action, len(self._actions)))
        self.time.append(time)

    def _parse_time(self, value: Any) -> int:
        """The time in ticks of the unit; microseconds for ISO times."""
        name = self._columns.time
        try:
            ticks = self._ticks_of(value if isinstance(value, int | float | datetime) else _text(value, name))
        except (ValueError, OverflowError):
            raise _Unusable(f"{name} cannot be read (--time-unit {self._columns.time_unit})") from None
        if ticks < 0:
            raise _Unusable(f"{name} is before 1970")
        if ticks >= _LAST_S * self._ticks:
            raise _Unusable(f"{name} is after the year 3000 (--time-unit {self._columns.time_unit})")
        return ticks

    def _ticks_of(self, value: int | float | datetime | str) -> int:
        if isinstance(value, datetime):
            return _microseconds(value) * self._ticks // 1_000_000
        if self._columns.time_unit == "iso":
            return _microseconds(datetime.fromisoformat(str(value)))
        try:
            return int(value)
        except ValueError:
            return math.floor(float(value))

    def finish(self, report: LogReport) -> OwnLog:
        """The log in order of time, events of the same tick in the order of the file."""
        time = np.array(self.time, np.int64)
        report.num_kept, report.num_out_of_order = time.size, self.num_out_of_order
        report.num_users, report.num_items = len(self._users), len(self._items)
        numbers = self._action_numbers()
        report.actions = dict(sorted(numbers.items(), key=lambda pair: pair[1])) if self._columns.action else {}
        codes = np.array([numbers[name] for name in self._actions], np.uint8)
        order = np.argsort(time, kind="stable")
        log = Log(
            user=np.array(self.user, np.int64)[order],
            item=np.array(self.item, np.int64)[order],
            action=codes[np.array(self.action, np.int64)[order]],
            timestamp_s=time[order] // self._ticks,
            num_actions=len(self._columns.actions) or int(codes.max()) + 1,
        )
        return OwnLog(log, report)

    def _action_numbers(self) -> dict[str, int]:
        """As given; else the numbers in the file if all are from 0 to 255; else numbered in alphabetical order."""
        if self._columns.actions:
            return self._actions
        if all(name.isdecimal() and int(name) < _MAX_ACTIONS for name in self._actions):
            return {name: int(name) for name in self._actions}
        return {name: number for number, name in enumerate(sorted(self._actions))}


def _text(value: Any, name: str) -> str:
    """An id as text: the number 7 of a Parquet file is the "7" of a CSV file."""
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    text = "" if value is None else str(value).strip()
    if not text:
        raise _Unusable(f"{name} is missing")
    if not text.isascii() and not _is_unicode(text):
        raise _Unusable(_NO_UTF8)
    return text


def _is_unicode(text: str) -> bool:
    """Whether no byte was kept as a lone surrogate, as bytes that are not UTF-8 are."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _microseconds(time: datetime) -> int:
    moment = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)


def _positions(path: Path, header: list[str], columns: LogColumns) -> list[int]:
    """Where user, item, time and, if there is one, action stand in a line."""
    names = [columns.user, columns.item, columns.time, *([columns.action] if columns.action is not None else [])]
    for name in names:
        if header.count(name) != 1:
            problem = "is missing" if name not in header else "stands there more than once"
            raise TraceError(f"{path}: column {name!r} {problem}; its columns are {', '.join(header) or '(none)'}")
    return [header.index(name) for name in names]


def _line(number: int, values: list[Any]) -> _Line:
    return _Line(number, values[0], values[1], values[3] if len(values) > 3 else None, values[2])


def _csv_lines(path: Path, columns: LogColumns, on_progress: Progress) -> Iterator[_Line]:
    with _opened(path) as raw:
        packed: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        text = io.TextIOWrapper(packed, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader, size = csv.reader(text, delimiter=columns.delimiter), path.stat().st_size
        try:
            header = [name.strip() for name in next(reader, [])]
            at = _positions(path, header, columns)
            for fields in reader:
                if not fields:
                    continue  # an empty line, as at the end of many files
                if reader.line_num % _EVERY == 0:
                    on_progress(raw.tell(), size)
                if len(fields) != len(header):
                    yield _Line(reader.line_num, fault=f"not {len(header)} fields, as the header has")
                else:
                    yield _line(reader.line_num, [fields[i] for i in at])
        except (csv.Error, EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if not path.is_file():
        raise TraceError(f"no such file: {path}")
    with path.open("rb") as file:
        yield file


def _parquet_lines(path: Path, columns: LogColumns, on_progress: Progress) -> Iterator[_Line]:
    arrow, parquet = pyarrow("Parquet files need")
    with _opened(path) as raw:
        try:
            file = parquet.ParquetFile(raw)
            at = _positions(path, file.schema_arrow.names, columns)
            names, total = [file.schema_arrow.names[i] for i in at], file.metadata.num_rows
            number = 0
            for batch in file.iter_batches(_EVERY, columns=names):
                on_progress(number, total)
                for values in zip(*(_values(batch.column(name), arrow) for name in names), strict=True):
                    number += 1
                    yield _line(number, list(values))
        except (arrow.ArrowException, OSError) as error:
            raise TraceError(f"{path} is not a Parquet file that can be read: {error}") from None


def _values(column: Any, arrow: Any) -> list[Any]:
    """Python values; timestamps with microseconds, which is what `datetime` holds."""
    if arrow.types.is_timestamp(column.type):
        column = column.cast(arrow.timestamp("us", column.type.tz), safe=False)
    return column.to_pylist()
