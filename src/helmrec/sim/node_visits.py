"""Who came lately, and how often: `VisitLog` compiled. Bounded, the user seen longest ago forgotten first."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.sim.node_jit import inner
from helmrec.types import IntArray

_LIMIT = 1 << 16  # as VisitLog
_USER, _COUNT, _BEFORE, _AFTER = 0, 1, 2, 3


class Visits(NamedTuple):
    place: NDArray[np.int32]  # (users,) line of a user plus one; zero is none
    lines: IntArray  # (limit + 1, 4) user, count, neighbours; the last one holds the ends and how many there are
    last_s: NDArray[np.float64]  # (limit,)


class Seen(NamedTuple):
    num: int  # this visit included
    last_s: float  # when the visit before was; without one, this one


def make_visits(num_users: int) -> Visits:
    limit = min(_LIMIT, max(1, num_users))
    lines = np.zeros((limit + 1, 4), np.int64)
    lines[limit, _BEFORE] = lines[limit, _AFTER] = limit
    return Visits(np.zeros(num_users, np.int32), lines, np.zeros(limit))


@inner
def record_visit(visits: Visits, user: int, now_s: float) -> Seen:
    """Count this visit."""
    lines, ends = visits.lines, visits.lines.shape[0] - 1
    line = int(visits.place[user]) - 1
    last_s = now_s
    if line >= 0:
        last_s = visits.last_s[line]
        _take_out(lines, line)
    elif lines[ends, _COUNT] < ends:
        line = lines[ends, _COUNT]
        lines[ends, _COUNT] += 1
        lines[line, _COUNT] = 0
    else:
        line = lines[ends, _AFTER]
        _take_out(lines, line)
        visits.place[lines[line, _USER]] = 0
        lines[line, _COUNT] = 0
    visits.place[user] = line + 1
    lines[line, _USER] = user
    lines[line, _COUNT] += 1
    visits.last_s[line] = now_s
    last = lines[ends, _BEFORE]
    lines[line, _BEFORE], lines[line, _AFTER] = last, ends
    lines[last, _AFTER] = lines[ends, _BEFORE] = line
    return Seen(lines[line, _COUNT], last_s)


@inner
def _take_out(lines: IntArray, line: int) -> None:
    before, after = lines[line, _BEFORE], lines[line, _AFTER]
    lines[before, _AFTER] = after
    lines[after, _BEFORE] = before
