"""Deltas in a Redis stream, whose entries have the ids SEQUENCE-0.

Redis refuses an id that is not above all earlier ones, so no delta is written over. Skipped numbers lie in a hash
beside the stream, since an entry cannot be inserted in the middle. Durability is a setting of the Redis server.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helmrec.deltas.delta import Delta, decode, encode
from helmrec.errors import DeltaOutOfOrder, DeltaUnavailable, HistoryError
from helmrec.history.redis_client import connect, redis_errors
from helmrec.redaction import redact

_TIMEOUT_MS = 10_000.0
_AT_ONCE = 8  # entries of one read
_FIELD = b"delta"
_TAKEN = "equal or smaller"  # how Redis refuses the id of an entry that is not above all others


class RedisDeltas:
    """The deltas of a Redis stream."""

    def __init__(self, url: str, key: str = "helmrec:row-deltas") -> None:
        self.name = redact(url)
        self._key, self._skipped, self._stream = key, f"{key}:skipped", f"{key}:stream"
        with self._errors():
            self._client: Any = connect(url, _TIMEOUT_MS)

    def read(self, after: int) -> Iterator[Delta]:
        with self._errors():
            skipped = {int(number): data for number, data in self._client.hgetall(self._skipped).items()}
        while entries := self._entries(after):
            for sequence, data in entries:
                yield from self._before(skipped, after, sequence)
                yield decode(skipped.get(sequence, data), f"{self.name}: delta {sequence}", sequence)
                after = sequence

    def _before(self, skipped: dict[int, bytes], after: int, sequence: int) -> Iterator[Delta]:
        """Yield skipped deltas between two entries."""
        for number in sorted(number for number in skipped if after < number < sequence):
            yield decode(skipped[number], f"{self.name}: delta {number}", number)

    def _entries(self, after: int) -> list[tuple[int, bytes]]:
        with self._errors():
            found = self._client.xrange(self._key, min=f"{after + 1}-0", count=_AT_ONCE)
        return [(int(entry.partition(b"-")[0]), fields.get(_FIELD, b"")) for entry, fields in found]

    def newest(self) -> int:
        with self._errors():
            found = self._client.xrevrange(self._key, count=1)
        return int(found[0][0].partition(b"-")[0]) if found else 0

    def close(self) -> None:
        self._client.close()

    def stream(self) -> str:
        with self._errors():
            self._client.set(self._stream, secrets.token_hex(8), nx=True)
            name: str = self._client.get(self._stream).decode()
        return name

    def write(self, delta: Delta) -> None:
        data = encode(delta)
        try:
            with self._errors():
                self._client.xadd(self._key, {_FIELD: data}, id=f"{delta.sequence}-0")
        except DeltaUnavailable as error:
            if _TAKEN not in str(error):
                raise
            if (delta.sequence, data) in self._entries(delta.sequence - 1)[:1]:
                return  # the connection was lost after the first try had been written
            raise DeltaOutOfOrder(f"{self.name}: delta {delta.sequence} is there already", delta.sequence) from None

    def skip(self, delta: Delta) -> None:
        with self._errors():
            self._client.hset(self._skipped, str(delta.sequence), encode(delta))

    def trim(self, up_to: int) -> None:
        first = min(up_to + 1, self.newest())
        if first < 2:
            return
        with self._errors():
            self._client.xtrim(self._key, minid=f"{first}-0", approximate=False)
            if gone := [number for number in self._client.hkeys(self._skipped) if int(number) <= up_to]:
                self._client.hdel(self._skipped, *gone)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of Redis."""
        try:
            with redis_errors(self.name):
                yield
        except HistoryError as error:
            raise DeltaUnavailable(str(error)) from None
