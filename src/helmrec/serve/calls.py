"""What all calls have in common, over HTTP and gRPC: an id, a line in the log, a count, and errors by name."""

import itertools
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus

from starlette.exceptions import HTTPException

from helmrec.errors import HelmRecError, HistoryError, HistoryUnavailable
from helmrec.serve import problems
from helmrec.serve.schema import Problem
from helmrec.types import RowPosition

log = logging.getLogger("helmrec.serve")
scored_at: ContextVar[RowPosition | None] = ContextVar("scored_at", default=None)  # of the rows of the running call
ID_HEADER = "x-request-id"
CLIENT_GONE = 499  # for logs and metrics only: the client has disconnected
_PROBES = frozenset({"/readyz", "/healthz", "/v2/health/ready", "/v2/health/live"})  # called every second: not logged
_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REFUSALS = frozenset({429, 503})  # a server that starts or is overloaded gives them by the thousand
_REFUSALS_EVERY_S = 10.0


class CallLog:
    """Gives calls their ids; logs and counts them.

    Of refusals (429, 503) of a route, the first is logged, then one every ten seconds, with the number of those that
    were not. At level debug all are.
    """

    def __init__(
        self, count: Callable[[str, int, float, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`count` is called with the route, status and seconds of every call, and the cause of an error or ""."""
        self._count = count
        self._clock = clock
        self._refused_s: dict[tuple[str, int], float] = {}  # when a refusal was last logged, by route and status
        self._unlogged: Counter[tuple[str, int]] = Counter()
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    def request_id(self, given: str) -> str:
        """Begin a call; return the client's own id if it is valid, else a unique one."""
        scored_at.set(None)
        return given if _VALID_ID.fullmatch(given) else f"{self._prefix}-{next(self._numbers)}"

    def conclude(
        self, request_id: str, method: str, route: str, status: int, seconds: float, problem: Problem | None = None
    ) -> None:
        """Count and log a call. An error without `problem` is counted under the name of its status."""
        is_error = status >= 400 and route not in _PROBES
        self._count(route, status, seconds, _cause(status, problem) if is_error else "")
        level = logging.DEBUG if not is_error else logging.INFO if status < 500 else logging.WARNING
        if log.isEnabledFor(level) and self._is_logged(route, status):
            fields: dict[str, object] = {"id": request_id, "method": method, "route": route, "status": status}
            if (position := scored_at.get()) is not None and position != RowPosition():
                fields |= {"row_sequence": position.sequence, "row_offset": position.offset}
            if not_logged := self._unlogged.pop((route, status), 0):
                fields["not_logged"] = not_logged
            log.log(level, "request", extra={**fields, "ms": round(seconds * 1e3, 3)})

    def _is_logged(self, route: str, status: int) -> bool:
        if status not in _REFUSALS or log.isEnabledFor(logging.DEBUG):
            return True
        now_s, last_s = self._clock(), self._refused_s.get((route, status))
        if last_s is not None and now_s - last_s < _REFUSALS_EVERY_S:
            self._unlogged[route, status] += 1
            return False
        self._refused_s[route, status] = now_s
        return True


def _cause(status: int, problem: Problem | None) -> str:
    """Return the name under which an error is counted: its class, or that of its status."""
    if problem is not None:
        return problem.type.removeprefix(problems.TYPE_PREFIX) if problem.type != "about:blank" else problem.title
    return "Client gone" if status == CLIENT_GONE else HTTPStatus(status).phrase


def explain(error: Exception, request_id: str, path: str) -> Problem:
    """Describe an error to the client. Details of internal failures go to the log, not to the client."""
    is_internal = isinstance(error, HistoryError) and not isinstance(error, problems.SHOWN_HISTORY_ERRORS)
    if isinstance(error, HistoryError) and not is_internal and not isinstance(error, HistoryUnavailable):
        log.warning("the history store refused", extra={"id": request_id, "path": path, "reason": str(error)})
    if isinstance(error, HelmRecError | HTTPException) and not is_internal:
        return problems.of_error(error, request_id)
    log.error("request failed", exc_info=error, extra={"id": request_id, "path": path})
    return problems.of_failure(request_id)
