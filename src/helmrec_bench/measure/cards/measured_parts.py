"""The file of a measurement that several calls make in parts: each replaces its own parts and keeps the others."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helmrec_bench.lab.provenance import provenance, this_command, write_measurement

Row = dict[str, Any]
_UNKNOWN = ("unknown", "-dirty")  # ends of the name of a commit that does not say which code ran


class MeasuredParts:
    """Parts by name, and the commands that made each. Calls that measure different parts may run side by side."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """names: of all parts; what else the file holds is dropped when it is written."""
        self._path, self._names = path, names
        self._made: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._added: dict[str, list[Row]] = {}  # by this call
        self._now = provenance(this_command())
        self._read()

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def put(self, name: str, part: Any) -> None:
        """Write a part to the file at once, so that a run that is stopped leaves what it has."""
        with self._alone():
            self._read()
            self._write(name, part)

    def add_row(self, name: str, row: Row) -> None:
        """Add a row to a part to which calls side by side may add."""
        added = self._added.setdefault(name, [])
        added.append(row)
        with self._alone():
            self._read()
            others = [each for each in self.rows_of_this_commit(name) if each not in added]
            self._write(name, [*others, *added])

    def _write(self, name: str, part: Any) -> None:
        before = self._made.get(name, {}).get("commands", []) if self._goes_on(name) else []
        commands = list(dict.fromkeys([*before, self._now["command"]]))
        self._parts[name], self._made[name] = part, self._now | {"commands": commands}
        write_measurement(self._path, {"made": self._made, **self._parts})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock of the folder, so that what others write is not lost."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def part_of_this_commit(self, name: str) -> Row:
        """A part of names and values that a call before measured, with the same code."""
        return dict(self._parts[name]) if self._goes_on(name) else {}

    def rows_of_this_commit(self, name: str) -> list[Row]:
        """Rows of a part that calls before measured, with the same code."""
        return list(self._parts[name]) if self._goes_on(name) else []

    def _goes_on(self, name: str) -> bool:
        commit = self._now["commit"]
        return not commit.endswith(_UNKNOWN) and self._made.get(name, {}).get("commit") == commit

    def _read(self) -> None:
        found = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self._made = {name: made for name, made in found.get("made", {}).items() if name in self._names}
        self._parts = {name: found[name] for name in self._made}
