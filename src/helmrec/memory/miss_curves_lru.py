"""Many exact LRU orders over the same small ids, one per column. Knows ids and columns, not what they stand for.

An order is a line that ids join at its end. Whoever joins again leaves a gap where it stood; gaps are skipped on the
way to the coldest and closed when places run out, so a touch is two writes. Column c's line is
`queue[c, first[c]:end[c]]`, and an entry counts if `place` says that its id stands there.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

OUT = -1  # place of an id that does not stand in a line

Queue = NDArray[np.int32]  # (columns, places)
Place = NDArray[np.int32]  # (ids, columns)
Ends = NDArray[np.int64]  # (2, columns): first and end


class Lines(NamedTuple):
    queue: Queue
    place: Place
    ends: Ends


def make_lines(num_columns: int, num_ids: int, num_places: int) -> Lines:
    """Empty lines. Twice the places of the longest line, and more, make closing gaps rare."""
    return Lines(
        queue=np.empty((num_columns, num_places), np.int32),
        place=np.full((num_ids, num_columns), OUT, np.int32),
        ends=np.zeros((2, num_columns), np.int64),
    )


def with_ids(lines: Lines, num_ids: int) -> Lines:
    """The same lines, with room for more ids."""
    more = num_ids - lines.place.shape[0]
    return lines._replace(place=np.pad(lines.place, ((0, more), (0, 0)), constant_values=OUT))


def with_places(lines: Lines, num_places: int) -> Lines:
    """The same lines, with more places."""
    queue = np.empty((lines.queue.shape[0], num_places), np.int32)
    queue[:, : lines.queue.shape[1]] = lines.queue
    return lines._replace(queue=queue)


@numba.njit(cache=True)
def close_gaps(lines: Lines, num_joining: int) -> None:
    """Make sure that many ids can join each line; there are places enough once its gaps are closed."""
    queue, place, ends = lines.queue, lines.place, lines.ends
    for column in range(queue.shape[0]):
        if ends[1, column] + num_joining <= queue.shape[1]:
            continue
        to = 0
        for at in range(ends[0, column], ends[1, column]):
            id_ = queue[column, at]
            if place[id_, column] == at:
                queue[column, to] = id_
                place[id_, column] = to
                to += 1
        ends[0, column] = 0
        ends[1, column] = to


@numba.njit(cache=True, inline="always")
def join(queue: Queue, place: Place, ends: Ends, column: int, id_: int | np.int64) -> None:
    """This id is now the hottest. `close_gaps` has made sure of a place."""
    end = ends[1, column]
    queue[column, end] = id_
    place[id_, column] = end
    ends[1, column] = end + 1


@numba.njit(cache=True, inline="always")
def coldest(queue: Queue, place: Place, ends: Ends, column: int) -> np.int64:
    """The id that joined longest ago, or OUT of an empty line; it stays."""
    at = ends[0, column]
    end = ends[1, column]
    while at < end and place[queue[column, at], column] != at:
        at += 1
    ends[0, column] = at
    return np.int64(queue[column, at]) if at < end else np.int64(OUT)
