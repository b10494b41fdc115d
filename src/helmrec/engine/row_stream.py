"""The state of following a stream of row deltas, as statistics show it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowStreamStats:
    """How far an engine has followed its stream of row deltas."""

    source: str
    position: int  # sequence number of the last delta that is visible as a whole
    newest: int  # the highest sequence number that the source had when it was asked last
    lag_deltas: int  # deltas that the source has and the engine has not
    lag_s: (
        float  # how long the oldest delta that is not visible has waited; while stopped, at least the time since then
    )
    deltas: int  # applied
    rows: int  # applied
    duplicates: int  # deltas that came again and were ignored
    skipped: int  # numbers that an operator has skipped
    stops: int  # times that something stopped the application
    stop: str | None  # why no delta is applied now
