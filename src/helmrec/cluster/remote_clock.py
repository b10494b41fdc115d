"""Translate times of other processes into this process's monotonic clock. Wall clocks are never compared.

Monotonic clocks are not set back by NTP, administrators or virtual machines. A sender adds a reading of its clock to
each message; the receiver estimates the offset between the two clocks from those readings.
"""

from collections import OrderedDict
from math import inf
from typing import NamedTuple

_WINDOW_S = 5.0
_MAX_SENDERS = 1_024


class Stamp(NamedTuple):
    """When a request arrived at a front and left it, by that front's monotonic clock. Sent as a plain tuple."""

    front: str
    came_s: float
    sent_s: float


class RemoteClock:
    """The monotonic clock of one other process.

    The offset is the smallest difference of readings in the last 5 to 10 seconds. So a translated time is late by the
    shortest transit in that window and never later than now, and a clock that drifts or jumps is followed within 10 s.
    """

    def __init__(self) -> None:
        self._smallest_s = self._smallest_before_s = inf  # differences of readings, in this window and the one before
        self._window_began_s = -inf

    def local_s(self, remote_s: float, now_s: float) -> float:
        """Translate the reading `remote_s`, which arrives now, into this process's clock."""
        if not 0 <= now_s - self._window_began_s < _WINDOW_S:
            self._smallest_before_s, self._smallest_s = self._smallest_s, inf
            self._window_began_s = now_s
        self._smallest_s = min(self._smallest_s, now_s - remote_s)
        return remote_s + min(self._smallest_s, self._smallest_before_s)


class RemoteClocks:
    """The clocks of all fronts that send requests to this process: the 1,024 that sent most recently."""

    def __init__(self) -> None:
        self._clocks: OrderedDict[str, RemoteClock] = OrderedDict()

    def came_s(self, stamp: Stamp, now_s: float) -> float:
        """Return when a request that arrives now arrived at its front, by this process's clock."""
        clock = self._clocks.setdefault(stamp.front, RemoteClock())
        self._clocks.move_to_end(stamp.front)
        if len(self._clocks) > _MAX_SENDERS:
            self._clocks.popitem(last=False)
        return clock.local_s(stamp.sent_s, now_s) - (stamp.sent_s - stamp.came_s)

    def __len__(self) -> int:
        return len(self._clocks)
