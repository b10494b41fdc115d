"""Requests that wait for rows from disk: which rows each may read, whether they are there, and whether in time.

Used by the scheduler, with its lock held. A request's rows are asked for while it waits, counting on the KV that is
resident then; if less is resident when it is planned, its rows are asked for again, for the whole history.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from helmrec.engine.intake import Prepared
from helmrec.errors import DiskTooSlow, HelmRecError, RowsUnreadable
from helmrec.memory.row_fetch import RowFetcher, RowTicket, TicketState
from helmrec.types import UserId

log = logging.getLogger("helmrec.engine")


@dataclass(frozen=True, slots=True)
class _Asked:
    """Rows that were asked for: of events from `first` to `end`, and of everything else."""

    ticket: RowTicket
    first: int
    end: int


class RowWaits:
    """Tickets of waiting requests."""

    def __init__(self, fetcher: RowFetcher, most_ahead: int) -> None:
        """`most_ahead`: requests whose rows are asked for before their step."""
        self._fetcher = fetcher
        self._most = most_ahead
        self._asked: dict[object, _Asked] = {}  # by what stands in the queue
        self._ahead: dict[UserId, _Asked] = {}  # of histories that are computed ahead

    @property
    def is_waiting(self) -> bool:
        return bool(self._asked or self._ahead)

    def wait(self, timeout_s: float) -> None:
        """Wait until the rows of some request are there; with no lock held."""
        self._fetcher.wait(timeout_s)

    def look_ahead(self, queue: Iterable[tuple[object, Prepared]], resident: Callable[[Prepared], int]) -> None:
        """Ask for the rows of the first requests of the queue; give up those of requests that have left it."""
        first = [each for _, each in zip(range(self._most), queue, strict=False)]
        keys = {key for key, _ in first}
        for key in [key for key in self._asked if key not in keys]:
            self._fetcher.release(self._asked.pop(key).ticket)
        if first:
            self.drop_ahead()  # it may hold the frames that these need
        for key, request in first:
            if key not in self._asked:
                self._asked[key] = self._ask(request, resident(request))

    def _ask(self, request: Prepared, num_resident: int) -> _Asked:
        history, num_features = request.history, len(request.candidate_rows)
        first = max(0, num_resident - history.context_rows.size)
        events = request.columns[:num_features, first:]
        parts = [events, request.candidate_rows, history.context_rows, request.request_rows]
        return _Asked(self._fetcher.ask(parts), first, request.num_events)

    def are_there(self, key: object) -> bool:
        asked = self._asked.get(key)
        return asked is not None and asked.ticket.state is TicketState.READY

    def problem(self, key: object, left_s: float | None) -> HelmRecError | None:
        """Return why a request cannot be served, if so. left_s: until its step must begin; None: it has no deadline."""
        asked = self._asked.get(key)
        if asked is None:
            return None
        ticket = asked.ticket
        if ticket.state is TicketState.FAILED:
            log.error("rows cannot be read from disk: %s", ticket.problem)
            return RowsUnreadable(f"rows of the request cannot be read from disk: {ticket.problem}")
        if left_s is not None and left_s < 0 and ticket.state is TicketState.READING:
            return DiskTooSlow(f"the deadline passed while {ticket.num_read} rows were read from disk")
        expected_s = None if left_s is None else self._fetcher.expected_s(ticket)
        if left_s is None or expected_s is None or expected_s <= left_s:
            return None
        return DiskTooSlow(
            f"the deadline would pass while {ticket.num_read} rows are read from disk, "
            f"which takes about {expected_s * 1e3:.1f} ms; {max(0.0, left_s) * 1e3:.1f} ms are left"
        )

    def take(self, key: object, request: Prepared, num_resident: int) -> RowTicket | None:
        """Hand over the rows of a request whose step is planned; None, and ask for all of them, if KV has gone."""
        asked = self._asked.pop(key)
        if _covers(asked, request, num_resident):
            return asked.ticket
        self._fetcher.release(asked.ticket)
        self._asked[key] = self._ask(request, 0)
        return None

    def are_there_ahead(self, chunk: Prepared, num_resident: int) -> bool:
        """Whether the rows of a history that is computed ahead are there; else ask for them."""
        user_id, asked = chunk.history.user_id, self._ahead.get(chunk.history.user_id)
        if asked is not None and _covers(asked, chunk, num_resident):
            return asked.ticket.state is TicketState.READY
        if asked is not None:
            self._fetcher.release(asked.ticket)
        self._ahead[user_id] = self._ask(chunk, num_resident)
        return False

    def are_unreadable_ahead(self, user_id: UserId) -> bool:
        """Whether rows of a history that is computed ahead could not be read. They are not asked for again."""
        asked = self._ahead.get(user_id)
        if asked is None or asked.ticket.state is not TicketState.FAILED:
            return False
        log.error("rows of a history that was to be computed ahead cannot be read: %s", asked.ticket.problem)
        return True

    def take_ahead(self, chunk: Prepared, num_resident: int) -> RowTicket | None:
        """Hand over the rows of a planned step ahead; None, and ask for all of them, if KV has gone."""
        asked = self._ahead.pop(chunk.history.user_id)
        if _covers(asked, chunk, num_resident):
            return asked.ticket
        self._fetcher.release(asked.ticket)
        self._ahead[chunk.history.user_id] = self._ask(chunk, 0)
        return None

    def drop_ahead(self, users: Iterable[UserId] = ()) -> None:
        """Give up the rows of histories that are not computed ahead any more: of all but these users."""
        kept = set(users)
        for user_id in [user_id for user_id in self._ahead if user_id not in kept]:
            self._fetcher.release(self._ahead.pop(user_id).ticket)

    def release(self, ticket: RowTicket) -> None:
        """A step has ended: its rows may leave memory."""
        self._fetcher.release(ticket)

    def close(self) -> None:
        """Give up all rows."""
        for asked in (*self._asked.values(), *self._ahead.values()):
            self._fetcher.release(asked.ticket)
        self._asked, self._ahead = {}, {}


def _covers(asked: _Asked, request: Prepared, num_resident: int) -> bool:
    """Whether all rows were asked for that a request reads if so many of its tokens are resident."""
    return asked.first <= max(0, num_resident - request.history.context_rows.size) and request.num_events <= asked.end
