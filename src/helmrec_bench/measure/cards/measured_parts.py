"""The file of a measurement that several calls make in parts: each replaces its own parts and keeps the others."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmrec_bench.lab.provenance import provenance, this_command, write_measurement

Row = dict[str, Any]
_UNKNOWN = ("unknown", "-dirty")  # ends of the name of a commit that does not say which code ran


class MeasuredParts:
    """Parts by name, and how each was made. Calls that measure different parts may run side by side."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """names: of all parts; what else the file holds is dropped when it is written."""
        self._path, self._names = path, names
        self._made: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._now = provenance(this_command())
        self._read()

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def put(self, name: str, part: Any) -> None:
        """Write a part to the file at once, so that a run that is stopped leaves what it has."""
        self._read()
        self._parts[name], self._made[name] = part, self._now
        write_measurement(self._path, {"made": self._made, **self._parts})

    def rows_of_this_commit(self, name: str) -> list[Row]:
        """Rows of a part that a call before measured, with the same code."""
        commit = self._now["commit"]
        is_known = not commit.endswith(_UNKNOWN)
        is_same = is_known and self._made.get(name, {}).get("commit") == commit
        return list(self._parts[name]) if is_same else []

    def _read(self) -> None:
        found = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self._made = {name: made for name, made in found.get("made", {}).items() if name in self._names}
        self._parts = {name: found[name] for name in self._made}
