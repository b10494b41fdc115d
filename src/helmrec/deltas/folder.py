"""Deltas as files of one folder, named by sequence number.

A file is written beside its place, synced to disk, and linked to its name, which fails if the name is taken. So a
reader sees whole files only, and two producers cannot write over each other.
"""

import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from helmrec.deltas.delta import MAX_DELTA_BYTES, Delta, decode, encode
from helmrec.errors import ConfigError, DeltaCorrupt, DeltaOutOfOrder, DeltaUnavailable

_SUFFIX = ".delta.safetensors"
_DIGITS = 20
_STREAM = "stream"
_LIST_EVERY_S = 0.5


class DeltaFolder:
    """The deltas of a folder.

    A folder of many deltas takes long to list. So the next number is looked for by its name, and the folder is listed
    where that is missing, at most twice a second: a number behind a gap is seen that much later.
    """

    def __init__(
        self, folder: str | Path, *, is_made: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = str(folder)
        self._folder, self._clock = Path(folder), clock
        self._prefix = f"{self._folder}{os.sep}"
        self._newest, self._listed_s = 0, -math.inf
        if is_made:
            self._folder.mkdir(parents=True, exist_ok=True)
        if not self._folder.is_dir():
            raise ConfigError(f"there is no folder of row deltas, got {self.name!r}")

    def read(self, after: int) -> Iterator[Delta]:
        for sequence in range(after + 1, self.newest() + 1):
            data = self._bytes_of(sequence)
            if data is None:
                yield from (self._read(later) for later in self._sequences() if later >= sequence)
                return
            yield decode(data, self._prefix + self._file(sequence), sequence)

    def newest(self) -> int:
        at = self._newest
        if self._clock() - self._listed_s >= _LIST_EVERY_S or not self._has(at):
            at = max(self._sequences(), default=0)
            self._listed_s = self._clock()
        while self._has(at + 1):
            at += 1
        self._newest = at
        return at

    def close(self) -> None:
        """Nothing is held open."""

    def stream(self) -> str:
        path = self._folder / _STREAM
        if not path.exists():
            self._put(_STREAM, secrets.token_hex(8).encode(), is_first=False)
        try:
            name = path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DeltaUnavailable(f"{path} cannot be read: {error}") from None
        if not name:
            raise DeltaCorrupt(f"{path} is empty: it must name the stream")
        return name

    def write(self, delta: Delta) -> None:
        self._put(self._file(delta.sequence), encode(delta), is_first=True, sequence=delta.sequence)
        self._newest = max(self._newest, delta.sequence)

    def skip(self, delta: Delta) -> None:
        path = self._folder / self._file(delta.sequence)
        if path.exists():
            path.rename(path.with_name(f"{path.name}.skipped"))  # kept for whoever looks for the reason
        self.write(delta)

    def trim(self, up_to: int) -> None:
        for sequence in self._sequences()[:-1]:
            if sequence <= up_to:
                (self._folder / self._file(sequence)).unlink(missing_ok=True)

    def _sequences(self) -> list[int]:
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - a long folder, listed often
        except OSError as error:
            raise DeltaUnavailable(f"{self.name} cannot be read: {error.strerror}") from None
        numbers = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return sorted(int(number) for number in numbers if len(number) == _DIGITS and number.isdigit())

    def _has(self, sequence: int) -> bool:
        return os.path.exists(self._prefix + self._file(sequence))  # noqa: PTH110 - asked often

    def _file(self, sequence: int) -> str:
        return f"{sequence:0{_DIGITS}d}{_SUFFIX}"

    def _read(self, sequence: int) -> Delta:
        path, data = self._prefix + self._file(sequence), self._bytes_of(sequence)
        if data is None:  # perhaps trimmed since it was listed
            raise DeltaUnavailable(f"{path} cannot be read: it is gone", sequence)
        return decode(data, path, sequence)

    def _bytes_of(self, sequence: int) -> memoryview | None:
        """Read a file; None if there is none. A `bytearray` would be filled with zeros under the interpreter lock."""
        path = self._prefix + self._file(sequence)
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - opened often
                data = np.empty(min(os.fstat(file.fileno()).st_size, MAX_DELTA_BYTES + 1), np.uint8)
                view, at = data.data, 0
                while at < data.size and (num := file.readinto(view[at:])):
                    at += num
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DeltaUnavailable(f"{path} cannot be read: {error.strerror}", sequence) from None
        return view[:at]

    def _put(self, name: str, data: bytes, *, is_first: bool, sequence: int | None = None) -> None:
        """Write a file whole or not at all. `is_first`: fail if it is there; else keep what is there."""
        beside = self._folder / f".{name}.{secrets.token_hex(4)}"
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(beside, self._folder / name)
            except FileExistsError:
                if is_first:
                    raise DeltaOutOfOrder(f"{self._folder / name} is there already", sequence) from None
            _sync(self._folder)
        except OSError as error:
            raise DeltaUnavailable(f"{self._folder / name} cannot be written: {error.strerror}", sequence) from None
        finally:
            beside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
