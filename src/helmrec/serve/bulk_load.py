"""Loads the histories of many users from a file into a server, in batches.

A line holds events of one user, as the body of `/v1/events`. Unless a line has a `base_version`, it continues the lines
before it of the same user, and the first starts at version 0. So a load that was interrupted may be run again: the
server recognises what it has. After a refused line, later lines of the same user are refused too: no gaps.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from helmrec.errors import ConfigError, HelmRecError, HistoryUnavailable, QueueFull, RequestError, ServerError
from helmrec.serve.bodies import decode
from helmrec.serve.client import Client
from helmrec.serve.schema import AppendOutcome, EventsBody
from helmrec.traffic.arrow import pyarrow
from helmrec.types import UserId

_BATCH_APPENDS = 500
_BATCH_EVENTS = 50_000  # about 1 MB of JSON
_BATCH_FIELDS = 8_000  # a server refuses bodies of more than 10,000
_MAX_TRIES = 8
_FIRST_PAUSE_S = 0.25
_BATCH_ROWS = 1_000  # of a Parquet file read at once
_BUSY = tuple(kind.__name__ for kind in (HistoryUnavailable, QueueFull))

Progress = Callable[[int, int], None]  # done and total, in bytes or rows


class Line(NamedTuple):
    """A line of the file, or the reason why it is none."""

    number: int
    body: EventsBody | None
    error: str | None = None


@dataclass(slots=True)
class BulkReport:
    """What was loaded, and the lines that were not."""

    num_lines: int = 0
    num_events: int = 0  # of appends that were done, repeats included
    num_stored: int = 0  # lines
    num_repeats: int = 0  # lines whose events were there already
    users: set[UserId] = field(default_factory=set)
    bad: list[tuple[int, str]] = field(default_factory=list)  # line numbers and reasons


def read_lines(path: Path, on_progress: Progress = lambda *_: None) -> Iterator[Line]:
    """Read histories from `*.parquet`, or from any other name as JSON lines."""
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return _parquet_lines(path, on_progress) if path.suffix == ".parquet" else _json_lines(path, on_progress)


def _json_lines(path: Path, on_progress: Progress) -> Iterator[Line]:
    decoder, size, done = msgspec.json.Decoder(EventsBody), path.stat().st_size, 0
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            done += len(text)
            if text.strip():
                yield _checked(number, lambda text=text: decode(decoder, text))  # type: ignore[misc]
            on_progress(done, size)


def _parquet_lines(path: Path, on_progress: Progress) -> Iterator[Line]:
    """Columns as the fields of the body; `features` is a struct, or a column `features.NAME` each."""
    arrow, parquet = pyarrow("Parquet files need", ", or write JSON lines")
    try:
        file = parquet.ParquetFile(path)
        total, number = file.metadata.num_rows, 0
        for batch in file.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield _checked(number, lambda row=row: _converted(row))  # type: ignore[misc]
            on_progress(number, total)
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a Parquet file that can be read: {error}") from None


def _converted(row: dict[str, Any]) -> EventsBody:
    given = {name: value for name, value in row.items() if value is not None}
    flat = {name: given.pop(name) for name in list(given) if name.startswith("features.")}
    if flat:
        given["features"] = {name.removeprefix("features."): ids for name, ids in flat.items()}
    try:
        return msgspec.convert(given, EventsBody)
    except msgspec.ValidationError as error:
        raise RequestError("row", sorted(row), str(error)) from None


def _checked(number: int, parse: Callable[[], EventsBody]) -> Line:
    try:
        return Line(number, parse())
    except RequestError as error:
        return Line(number, None, str(error))


class BulkLoad:
    """Sends lines to a server in batches. A batch that finds the store busy is sent again."""

    def __init__(self, client: Client, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._sleep = sleep
        self._versions = dict[UserId, int]()  # of each user after the lines so far
        self._wrong = dict[UserId, tuple[int, str]]()  # the first wrong line of a user, and why it is wrong
        self.report = BulkReport()

    def run(self, lines: Iterable[Line]) -> BulkReport:
        """Send all lines. Raise HelmRecError if the server does not answer; what was sent before is in `report`."""
        batch, num_events, num_fields = list[Line](), 0, 0
        for line in lines:
            self.report.num_lines += 1
            if line.body is None:
                self.report.bad.append((line.number, line.error or ""))
                continue
            body = self._based(line.body)
            num_events, num_fields = num_events + len(body.items), num_fields + 6 + len(body.features)
            if batch and (len(batch) == _BATCH_APPENDS or num_events > _BATCH_EVENTS or num_fields > _BATCH_FIELDS):
                self._send(batch)
                batch, num_events, num_fields = [], len(body.items), 6 + len(body.features)
            batch.append(Line(line.number, body))
        if batch:
            self._send(batch)
        return self.report

    def _based(self, body: EventsBody) -> EventsBody:
        base = self._versions.get(body.user_id, 0) if body.base is None else body.base
        self._versions[body.user_id] = base + len(body.items)
        return msgspec.structs.replace(body, base_version=base)

    def _send(self, batch: list[Line]) -> None:
        pending = batch
        for tried in range(_MAX_TRIES):
            if tried:
                self._sleep(_FIRST_PAUSE_S * 2 ** (tried - 1))
            outcomes = self._outcomes(pending)
            pending = [line for line, outcome in zip(pending, outcomes, strict=True) if not self._note(line, outcome)]
            if not pending:
                return
        raise ServerError(f"the history store stayed busy, from line {pending[0].number} on")

    def _outcomes(self, lines: list[Line]) -> list[AppendOutcome]:
        bodies = [line.body for line in lines if line.body is not None]
        try:
            return self._client.append_many(bodies)
        except (QueueFull, HistoryUnavailable) as error:
            return [AppendOutcome(error=str(error), type=type(error).__name__)] * len(lines)
        except HelmRecError as error:
            raise ServerError(f"lines {lines[0].number} to {lines[-1].number}: {error}") from None

    def _note(self, line: Line, outcome: AppendOutcome) -> bool:
        """Record an outcome. False if the append is to be sent again."""
        report, body = self.report, line.body
        assert body is not None
        if outcome.error is None:
            report.num_stored += 1
            report.num_repeats += outcome.is_repeat
            report.num_events += len(body.items)
            report.users.add(body.user_id)
        elif (outcome.type or "").endswith(_BUSY):
            return False
        else:
            number, error = self._wrong.setdefault(body.user_id, (line.number, outcome.error))
            is_behind = number != line.number and outcome.error == error
            report.bad.append(
                (line.number, f"left out behind line {number} of its user" if is_behind else outcome.error)
            )
        return True
