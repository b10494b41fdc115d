"""Connections to Redis with timeouts, and conversion of its errors, without passwords and events of users."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from helmrec.errors import HistoryError, HistoryFull, HistoryUnavailable, RequestError
from helmrec.redaction import redact

_UNAVAILABLE = (  # the server is unreachable, or cannot serve now
    redis.ConnectionError,
    redis.TimeoutError,
    redis.InvalidResponse,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    OSError,
)
_CANNOT_PERSIST = "MISCONF"  # error of a server that cannot write to its disk


def connect(url: str, timeout_ms: float) -> "redis.Redis":
    """Make a client with this timeout; it reconnects once if the connection was lost."""
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    timeout_s = timeout_ms / 1e3
    try:
        return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry)
    except ValueError:  # its message quotes parts of the address, perhaps of the password
        problem = "is not an address of Redis, such as redis://:PASSWORD@HOST:6379/0 (write special characters as %40)"
        raise HistoryError(f"{redact(url)} {problem}") from None


@contextmanager
def redis_errors(place: str) -> Iterator[None]:
    """Convert errors of Redis to errors of this package that name `place`, an address without its password."""
    try:
        yield
    except RequestError:  # a ValueError, too
        raise
    except redis.OutOfMemoryError as error:
        raise HistoryFull(_explained(place, error)) from None
    except _UNAVAILABLE as error:
        raise HistoryUnavailable(_explained(place, error)) from None
    except (redis.RedisError, ValueError) as error:
        kind = HistoryFull if _CANNOT_PERSIST in str(error) else HistoryError
        raise kind(_explained(place, error)) from None


def _explained(place: str, error: Exception) -> str:
    """Return the message of an error without the command, which contains events of users."""
    return redact(f"{place}: {str(error).rpartition('caused error: ')[2] or type(error).__name__}")
