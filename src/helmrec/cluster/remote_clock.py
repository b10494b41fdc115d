"""Times of other processes, translated into the clock of this one. Wall clocks are never compared.

Every process reads its own monotonic clock, which no NTP step, administrator or virtual machine sets back. Whoever
sends adds a reading; whoever receives learns the offset between the two clocks from the readings that arrive.
"""

from collections import OrderedDict
from math import inf
from typing import NamedTuple

_WINDOW_S = 5.0
_MAX_SENDERS = 1_024


class Stamp(NamedTuple):
    """When a request came to a front and left it, by that front's monotonic clock. A plain tuple on its way."""

    front: str
    came_s: float
    sent_s: float


class RemoteClock:
    """The monotonic clock of one other process.

    The smallest delay of the last 5 to 10 seconds stands for the offset, so a translated time is late by the shortest
    transit of that window, never later than now, and follows a clock that drifts or jumps within 10 seconds.
    """

    def __init__(self) -> None:
        self._smallest_s = self._smallest_before_s = inf  # differences of readings, in this window and the one before
        self._window_began_s = -inf

    def local_s(self, remote_s: float, now_s: float) -> float:
        """What our clock showed at the reading `remote_s`, which arrives now."""
        if not 0 <= now_s - self._window_began_s < _WINDOW_S:
            self._smallest_before_s, self._smallest_s = self._smallest_s, inf
            self._window_began_s = now_s
        self._smallest_s = min(self._smallest_s, now_s - remote_s)
        return remote_s + min(self._smallest_s, self._smallest_before_s)


class RemoteClocks:
    """The clocks of all fronts that send requests here; of more than 1,024, those heard of last."""

    def __init__(self) -> None:
        self._clocks: OrderedDict[str, RemoteClock] = OrderedDict()

    def came_s(self, stamp: Stamp, now_s: float) -> float:
        """When a request that arrives now came to its front, by our clock."""
        clock = self._clocks.setdefault(stamp.front, RemoteClock())
        self._clocks.move_to_end(stamp.front)
        if len(self._clocks) > _MAX_SENDERS:
            self._clocks.popitem(last=False)
        return clock.local_s(stamp.sent_s, now_s) - (stamp.sent_s - stamp.came_s)

    def __len__(self) -> int:
        return len(self._clocks)
