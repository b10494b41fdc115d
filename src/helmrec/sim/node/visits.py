"""The visits of a simulated node's most recent users: a compiled `VisitLog`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.jit import inner
from helmrec.memory.kv_admission import MOST_VISITORS, VisitCount
from helmrec.memory.links import Links, link_last, make_links, unlink
from helmrec.types import IntArray


class Visits(NamedTuple):
    """Recent users and their number of visits. Bounded: the least recent user is forgotten first."""

    place: NDArray[np.int32]  # (users,) line of a user plus one; zero is none
    user: IntArray  # (limit,) user of each line
    num_visits: IntArray  # (limit + 1,) visits; the last one is the number of lines in use
    links: Links  # least recent first
    last_s: NDArray[np.float64]  # (limit,)


def make_visits(num_users: int) -> Visits:
    """A log without visits."""
    limit = min(MOST_VISITORS, max(1, num_users))
    return Visits(
        place=np.zeros(num_users, np.int32),
        user=np.zeros(limit, np.int64),
        num_visits=np.zeros(limit + 1, np.int64),
        links=make_links(limit),
        last_s=np.zeros(limit),
    )


@inner
def record_visit(visits: Visits, user: int, now_s: float) -> VisitCount:
    """Count this visit of a user."""
    count, limit = visits.num_visits, visits.user.size
    line = int(visits.place[user]) - 1
    last_s = now_s
    if line >= 0:
        last_s = visits.last_s[line]
        unlink(visits.links, line)
    elif count[limit] < limit:
        line = count[limit]
        count[limit] += 1
    else:
        line = visits.links[limit, 1]
        unlink(visits.links, line)
        visits.place[visits.user[line]] = 0
        count[line] = 0
    visits.place[user] = line + 1
    visits.user[line] = user
    count[line] += 1
    visits.last_s[line] = now_s
    link_last(visits.links, line)
    return VisitCount(count[line], now_s - last_s)
