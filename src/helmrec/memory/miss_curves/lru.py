"""Many exact LRU orders over the same small ids, one per column. Ids and columns have no meaning here.

An order is a queue: a touched id is appended, and its old entry becomes a gap. Gaps are skipped in the search for the
coldest id and removed when the queue is full, so a touch is two writes. The queue of column c is
`queue[c, first[c]:end[c]]`; an entry is valid if `place` holds its position.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

OUT = -1  # place of an id that is not in the queue

Queue = NDArray[np.int32]  # (columns, places)
Place = NDArray[np.int32]  # (ids, columns), a column in one piece
Ends = NDArray[np.int64]  # (2, columns): first and end


class Lines(NamedTuple):
    """The queues of all columns."""

    queue: Queue
    place: Place
    ends: Ends


def make_lines(num_columns: int, num_ids: int, num_places: int) -> Lines:
    """Empty queues. With at least twice as many places as ids in the longest queue, gaps are rarely removed."""
    return Lines(
        queue=np.empty((num_columns, num_places), np.int32),
        place=np.full((num_ids, num_columns), OUT, np.int32, order="F"),
        ends=np.zeros((2, num_columns), np.int64),
    )


def with_ids(lines: Lines, num_ids: int) -> Lines:
    """The same queues with room for more ids."""
    num_before, num_columns = lines.place.shape
    place = np.full((num_ids, num_columns), OUT, np.int32, order="F")
    place[:num_before] = lines.place
    return lines._replace(place=place)


def with_places(lines: Lines, num_places: int) -> Lines:
    """The same queues with more places."""
    queue = np.empty((lines.queue.shape[0], num_places), np.int32)
    queue[:, : lines.queue.shape[1]] = lines.queue
    return lines._replace(queue=queue)


@numba.njit(cache=True, inline="always")
def close_gaps_of(queue: Queue, place: Place, ends: Ends, column: int, num_joining: int) -> None:
    """Remove the gaps of one queue if fewer than `num_joining` places are left."""
    if ends[1, column] + num_joining > queue.shape[1]:
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
    """Make this id the hottest. `close_gaps` must have made room."""
    end = ends[1, column]
    queue[column, end] = id_
    place[id_, column] = end
    ends[1, column] = end + 1


@numba.njit(cache=True, inline="always")
def coldest(queue: Queue, place: Place, ends: Ends, column: int) -> np.int64:
    """Return the coldest id, or OUT if the queue is empty; the queue does not change."""
    at = ends[0, column]
    end = ends[1, column]
    while at < end and place[queue[column, at], column] != at:
        at += 1
    ends[0, column] = at
    return np.int64(queue[column, at]) if at < end else np.int64(OUT)
