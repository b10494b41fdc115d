"""A circuit breaker: after failures one after another, calls are refused at once; now and then one is let through.

closed     every call may go on
open       none may, until the pause is over
half-open  one may, and its outcome decides: closed again, or open for another pause
Pure: the clock comes in. Not for several threads.
"""

from helmrec.clock import Clock


class Breaker:
    """Counts failures of whatever it stands before."""

    def __init__(self, max_failures: int, pause_s: float, clock: Clock) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._clock = clock
        self._opened_s: float | None = None
        self._is_trying = False
        self._num_in_a_row = 0
        self.num_failures = 0

    @property
    def is_closed(self) -> bool:
        return self._opened_s is None

    def admit(self) -> bool:
        """Whether a call may go on. If so, tell how it ended: `succeeded`, `failed` or `dropped`."""
        if self._opened_s is None:
            return True
        if self._is_trying or self._clock.now() - self._opened_s < self._pause_s:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        self._opened_s, self._is_trying, self._num_in_a_row = None, False, 0

    def failed(self) -> None:
        self.num_failures += 1
        self._num_in_a_row += 1
        if self._is_trying or self._num_in_a_row >= self._max_failures:
            self._opened_s, self._is_trying = self._clock.now(), False

    def dropped(self) -> None:
        """The call was given up before it could show anything."""
        self._is_trying = False

    def check(self) -> None:
        assert not (self._is_trying and self.is_closed), "only a breaker that is open tries"
        assert self.is_closed == (self._num_in_a_row < self._max_failures), "it is open after that many failures"
