"""The protocol of a place that holds a stream of deltas, and the rule of its order.

A third party follows a stream of its own by one class with the methods of `DeltaSource`. A place that producers can
write to has those of `DeltaSink` as well.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from helmrec.deltas.delta import Delta
from helmrec.errors import ConfigError, DeltaGap, DeltaOutOfOrder
from helmrec.redaction import redact

_LOOK_AHEAD = 64  # deltas behind a gap that are searched for the missing one


class DeltaSource(Protocol):
    """A stream of deltas that can be read from any position. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """How logs and errors name the place; without passwords."""

    def read(self, after: int) -> Iterator[Delta]:
        """Yield the deltas with a sequence number above `after`, as they are stored; end at the last one.

        Raises DeltaCorrupt at a delta that cannot be read, and DeltaUnavailable if the place does not answer.
        """

    def newest(self) -> int:
        """Return the highest sequence number, 0 if there is none; DeltaUnavailable if the place does not answer."""

    def close(self) -> None: ...


class DeltaSink(DeltaSource, Protocol):
    """A stream that can be written."""

    def stream(self) -> str:
        """Return the identity of the stream; the first call makes it."""

    def write(self, delta: Delta) -> None:
        """Append a delta durably; DeltaOutOfOrder if its number is taken already, by whomever."""

    def skip(self, delta: Delta) -> None:
        """Put a delta without parts in the place of a missing or a bad one; every reader then passes it."""

    def trim(self, up_to: int) -> None:
        """Remove the deltas up to this number, except the newest one, which the next number follows from."""


def in_order(deltas: Iterable[Delta], after: int, stream: str | None = None) -> Iterator[Delta]:
    """Yield deltas whose numbers follow `after` one by one; those up to it come again, as duplicates.

    Raises DeltaGap where one is missing, and DeltaOutOfOrder where it comes behind a later one, or where a delta
    is not of `stream`.
    """
    rest = iter(deltas)
    for delta in rest:
        if stream is not None and delta.stream != stream:
            raise DeltaOutOfOrder(
                f"delta {delta.sequence} is of stream {delta.stream}, not of stream {stream}", delta.sequence
            )
        stream = delta.stream
        if delta.sequence <= after:
            yield delta
            continue
        if (missing := after + 1) != delta.sequence:
            late = any(other.sequence == missing for other in islice(rest, _LOOK_AHEAD))
            if late:
                raise DeltaOutOfOrder(f"delta {missing} comes behind delta {delta.sequence}", missing)
            raise DeltaGap(f"delta {missing} is missing: the next one is delta {delta.sequence}", missing)
        after = delta.sequence
        yield delta


def open_source(place: str, *, is_made: bool = False) -> DeltaSink:
    """Open a folder or a Redis (redis://, rediss://, unix://). `is_made`: a missing folder is made.

    ConfigError if there is no such folder, or if the package of Redis is missing.
    """
    if "://" not in place:
        from helmrec.deltas.folder import DeltaFolder  # noqa: PLC0415 - it implements this module's protocol

        return DeltaFolder(place, is_made=is_made)
    if not place.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"row deltas are read from a folder or a Redis (redis://HOST:6379/0), got {redact(place)!r}")
    try:
        from helmrec.deltas.redis import RedisDeltas  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"row deltas in Redis need pip install 'helmrec[cluster]' ({error})") from None
    return RedisDeltas(place)
