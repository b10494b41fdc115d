"""A circuit breaker: after several failures in a row, calls are refused at once, except one after each pause.

closed     every call is admitted
open       no call is admitted until the pause has passed
half-open  one call is admitted, and its outcome closes the breaker or opens it for another pause
Pure: the clock is passed in. Not thread-safe.
"""

from helmrec.clock import Clock


class Breaker:
    """Admits or refuses calls by the outcome of earlier ones."""

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
        """Return whether a call is admitted. If so, report its end: `succeeded`, `failed` or `dropped`."""
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
        """Record that an admitted call ended without an outcome."""
        self._is_trying = False

    def check(self) -> None:
        assert not (self._is_trying and self.is_closed), "only an open breaker tries a call"
        assert self.is_closed == (self._num_in_a_row < self._max_failures), "it is open after that many failures"
