"""All errors that a caller can cause, as one tree.

HelmRecError
├── ConfigError          a setting is out of bounds or unknown
│   ├── PoolTooSmall     the pool cannot hold one request
│   └── AlphaOutOfRange  the requested split leaves one cache too few pages
├── ModelError           a model folder is missing, corrupt, truncated, mismatched or pickled
├── TraceError           a trace, or a file a trace is made from, is malformed
├── HistoryError         a history store is foreign, damaged, closed, or held by another writer
│   ├── HistoryFull      it has no room for more events
│   │   └── DiskFull     its disk is full
│   ├── HistoryUnavailable  it does not answer in time, or cannot be reached
│   └── TablesTooSmall   it may hold ids that the model has no rows for
├── DeltaError           a stream of row deltas cannot be read or written as it is; carries `sequence`
│   ├── DeltaCorrupt     a delta is damaged or malformed
│   ├── DeltaGap         a delta is missing
│   ├── DeltaOutOfOrder  a delta comes after a later one, or belongs to another stream
│   └── DeltaUnavailable its place does not answer, or cannot be written
├── StaleVersion         events were appended to a version that is not the latest; carries `current`
├── RequestError         one field of a request (or update) is wrong; carries `field` and `value`
│   └── TooLarge         it is longer than this server accepts
├── Refused              the request is fine but cannot be served now
│   ├── QueueFull
│   ├── DeadlineExceeded
│   │   └── DiskTooSlow  its rows cannot be read from disk before its deadline
│   └── Forgotten        its user was forgotten while it waited
├── RowsUnreadable       rows of a request cannot be read from disk
├── RowLogError          an update of rows cannot be written to its log
│   └── RowsNotSynced    it is written and served, but may not survive a loss of power
├── NonFiniteScores      the model's scores for a request are not numbers
├── EngineClosed
└── ServerError          a server failed or could not be reached; raised by the client
"""


class HelmRecError(Exception):
    """Root of all errors a caller can cause."""


class ConfigError(HelmRecError, ValueError):
    """A setting is out of bounds or unknown."""


class PoolTooSmall(ConfigError):
    """The pool cannot hold the pages of one request."""


class AlphaOutOfRange(ConfigError):
    """The requested split leaves one cache too few pages."""


class ModelError(HelmRecError):
    """A model folder cannot be loaded as it is."""


class TraceError(HelmRecError):
    """A trace, or a file a trace is made from, is malformed."""


class HistoryError(HelmRecError):
    """A history store cannot be used as it is."""


class HistoryFull(HistoryError):
    """The history store has no room for more events."""


class DiskFull(HistoryFull):
    """The disk of the history store is full. What could not be written was not acknowledged."""


class HistoryUnavailable(HistoryError):
    """The history store does not answer in time, or cannot be reached. The call may be tried again."""


class TablesTooSmall(HistoryError):
    """The model has fewer rows in a table than the ids of stored events may need."""


class DeltaError(HelmRecError):
    """A stream of row deltas cannot be read or written as it is. `sequence` is the delta concerned, if it is one."""

    def __init__(self, message: str, sequence: int | None = None) -> None:
        super().__init__(message)
        self.sequence = sequence


class DeltaCorrupt(DeltaError):
    """A delta is damaged or malformed."""


class DeltaGap(DeltaError):
    """A delta is missing: a later one is there."""


class DeltaOutOfOrder(DeltaError):
    """A delta comes after a later one, its number is taken, or it belongs to another stream."""


class DeltaUnavailable(DeltaError):
    """The place of the deltas does not answer, or cannot be written. The call may be tried again."""


class StaleVersion(HelmRecError):
    """Events were appended to a version of a history that is not the latest. Nothing was kept."""

    def __init__(self, user_id: int | str, base: int, current: int) -> None:
        super().__init__(f"user {user_id} is at version {current}, not at base version {base}")
        self.user_id = user_id
        self.base = base
        self.current = current


class RequestError(HelmRecError, ValueError):
    """One field of a request is wrong. The engine's state is untouched."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field}: {problem}, got {value!r}")
        self.field = field
        self.value = value
        self.problem = problem


class TooLarge(RequestError):
    """The request is longer than this server accepts; a retry does not help."""


class Refused(HelmRecError):
    """The request is well formed but cannot be served now."""


class QueueFull(Refused):
    """The bounded queue has no room."""


class DeadlineExceeded(Refused):
    """The request's deadline has passed, or would before its scores are ready."""


class DiskTooSlow(DeadlineExceeded):
    """The request's rows cannot be read from disk before its deadline."""


class Forgotten(Refused):
    """The user was forgotten while the request waited."""


class RowsUnreadable(HelmRecError):
    """Rows of a request cannot be read from disk. Other requests are served."""


class RowLogError(HelmRecError):
    """An update of rows cannot be written to its log. No row was changed."""


class RowsNotSynced(RowLogError):
    """An update of rows is served, but its log cannot be synced: it may be lost if the machine loses power."""


class NonFiniteScores(HelmRecError):
    """The model's scores for the request are not numbers. Nothing computed for it is kept."""


class EngineClosed(HelmRecError):
    """The engine was closed."""


class ServerError(HelmRecError):
    """A server failed, or could not be reached."""
