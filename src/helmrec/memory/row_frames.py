"""Host memory as a cache of rows that are on disk: which row is in which frame, who needs it, and which row goes next.

Bookkeeping only: a frame is a number, and no row data is touched here. It is not thread-safe; its loops release the
interpreter's lock. A frame is pinned by every request that needs its row and by the read that fills it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.types import IntArray

Frames = NDArray[np.int32]

IN_FILE = -1  # of the index: the row is only in its table's file; ~slot - 1 and less: its latest value is in the log
NO_ROW = -1  # of a frame
NO_SLOT = -1  # of a frame: the row has the value of its table's file
MOST_USES = 3


class FrameArrays(NamedTuple):
    """The state, for compiled loops. What a lookup needs of a frame lies together: memory is what it waits for."""

    where: NDArray[np.int32]  # (rows,) frame; IN_FILE; or -2 - slot of the log
    row_of: IntArray  # (frames,)
    state: NDArray[np.int32]  # (frames, 4) as `PINS` and so on
    counts: IntArray  # (4,) as `_PINNED` and so on


# Columns of `FrameArrays.state`.
PINS = 0
USES = 1  # reads since the hand passed, up to MOST_USES; the first read is not counted
LOAD = 2  # number of the read that fills the frame; 0: it is filled
SLOT = 3  # where in the log the row's value is, or NO_SLOT
_PINNED, _HAND, _EVICTED, _RESIDENT = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Acquired:
    """Pinned frames of the rows of a request."""

    frames: Frames  # (rows,)
    to_read: IntArray  # positions of the rows that must be read, each row once
    slots: NDArray[np.int32]  # of these: where in the log their values are, or NO_SLOT
    awaited: IntArray  # numbers of other reads that fill some of the frames


class RowFrames:
    """The index of rows in host memory, evicted by CLOCK with a counter of two bits."""

    def __init__(self, num_rows: int, num_frames: int) -> None:
        assert num_frames >= 1
        self._arrays = FrameArrays(
            where=np.full(num_rows, IN_FILE, np.int32),
            row_of=np.full(num_frames, NO_ROW, np.int64),
            state=np.tile(np.array([0, 0, 0, NO_SLOT], np.int32), (num_frames, 1)),
            counts=np.zeros(4, np.int64),
        )
        self.hits = 0  # lookups of rows in memory, or on their way
        self.misses = 0  # rows to read from disk

    @staticmethod
    def frames_for(num_bytes: int, num_rows: int, row_stride: int) -> int:
        """Return the frames that fit so many bytes together with the index of all rows; may be less than one."""
        per_frame = row_stride + 8 + 4 * 4
        return min(num_rows, (num_bytes - 4 * num_rows) // per_frame)

    @property
    def num_frames(self) -> int:
        return self._arrays.row_of.size

    @property
    def num_pinned(self) -> int:
        return int(self._arrays.counts[_PINNED])

    @property
    def num_resident(self) -> int:
        """Frames with a row, also one that is being read."""
        return int(self._arrays.counts[_RESIDENT])

    @property
    def evictions(self) -> int:
        return int(self._arrays.counts[_EVICTED])

    @property
    def num_bytes(self) -> int:
        """Bytes of the index and of what is known of frames."""
        return sum(part.nbytes for part in self._arrays)

    def acquire(self, rows: IntArray, load: int) -> Acquired | None:
        """Pin a frame for each entry of `rows`, evicting unpinned ones; None, and nothing changed, if too few are.

        `load` is the number of the read that will fill the frames of absent rows. Rows that were evicted on the way to
        None stay evicted.
        """
        assert load > 0
        frames, to_read = np.empty(rows.size, np.int32), np.empty(rows.size, np.int64)
        num = _acquire(self._arrays, rows, load, frames, to_read)
        if num < 0:
            return None
        self.misses += num
        self.hits += rows.size - num
        to_read = to_read[:num].copy()
        awaited = np.unique(_awaited(self._arrays.state[:, LOAD], frames, load))
        return Acquired(frames, to_read, self._arrays.state[frames[to_read], SLOT], awaited)

    def release(self, frames: Frames) -> None:
        """Unpin frames that `acquire` or `pin_filled` has pinned, once for each entry."""
        _release(self._arrays, frames)

    def publish(self, frames: Frames, is_read: NDArray[np.bool_]) -> None:
        """End a read: frames that were not filled lose their rows, also for those who have pinned them."""
        _publish(self._arrays, frames, is_read)

    def are_held(self, frames: Frames, rows: IntArray) -> bool:
        """Whether these frames still have these rows, all of them filled."""
        arrays = self._arrays
        return bool((arrays.row_of[frames] == rows).all() and not arrays.state[frames, LOAD].any())

    def pin_filled(self, rows: IntArray) -> Frames:
        """Pin the filled frames of these rows; -1 where there is none."""
        frames = np.empty(rows.size, np.int32)
        _pin_filled(self._arrays, rows, frames)
        return frames

    def frames_of(self, rows: IntArray) -> Frames:
        """Return the frames of rows that the caller has pinned."""
        frames = self._arrays.where[rows]
        assert not frames.size or frames.min() >= 0, "a step reads a row that is not in memory"
        return frames

    def slots_of(self, rows: IntArray) -> NDArray[np.int32]:
        """Return where in the log the latest value of each row is, or NO_SLOT."""
        found = self._arrays.where[rows]
        in_memory = found >= 0
        of_frames = self._arrays.state[np.where(in_memory, found, 0), SLOT]
        return np.where(in_memory, of_frames, np.where(found == IN_FILE, NO_SLOT, -2 - found)).astype(np.int32)

    def log(self, rows: IntArray, slots: IntArray) -> Frames:
        """Note that the latest values of distinct rows are in these slots of the log.

        Return their frames, -1 where a row is not in memory.
        """
        found, arrays = self._arrays.where[rows], self._arrays
        in_memory = found >= 0
        arrays.state[found[in_memory], SLOT] = slots[in_memory]
        arrays.where[rows[~in_memory]] = -2 - slots[~in_memory]
        return np.where(in_memory, found, NO_ROW).astype(np.int32)

    def forget_log(self) -> None:
        """Drop all rows whose values are in the log, in memory too: rows are read from the files again."""
        arrays = self._arrays
        assert not self.num_pinned, "rows are in use"
        logged = np.flatnonzero(arrays.state[:, SLOT] != NO_SLOT)
        arrays.where[arrays.row_of[logged]] = IN_FILE
        arrays.row_of[logged], arrays.state[logged, SLOT] = NO_ROW, NO_SLOT
        arrays.counts[_RESIDENT] -= logged.size
        arrays.where[arrays.where < IN_FILE] = IN_FILE

    def are_filled(self, frames: Frames) -> NDArray[np.bool_]:
        """Whether frames are filled, and not being read."""
        return self._arrays.state[frames, LOAD] == 0

    def check(self) -> None:
        arrays = self._arrays
        used = np.flatnonzero(arrays.row_of != NO_ROW)
        assert np.array_equal(arrays.where[arrays.row_of[used]], used), "the index does not match the frames"
        assert np.count_nonzero(arrays.where >= 0) == used.size, "a row points to a frame that is not its own"
        assert used.size == self.num_resident
        assert (arrays.state[:, PINS] >= 0).all(), "a frame was released too often"
        assert np.count_nonzero(arrays.state[:, PINS]) == self.num_pinned
        assert (arrays.state[arrays.state[:, LOAD] != 0, PINS] > 0).all(), "a frame that is being read may be evicted"
        assert (arrays.row_of[arrays.state[:, LOAD] != 0] != NO_ROW).all(), "a read fills a frame without a row"
        assert (arrays.state[arrays.row_of == NO_ROW, SLOT] == NO_SLOT).all()


@numba.njit(cache=True, nogil=True)
def _acquire(arrays: FrameArrays, rows: IntArray, load: int, frames: Frames, to_read: IntArray) -> int:
    """Fill in `frames` and `to_read`; return the number to read, or -1."""
    for i in range(rows.size):
        frame = arrays.where[rows[i]]
        frames[i] = max(frame, -1)
        if frame >= 0:
            _pin(arrays, frame)
            arrays.state[frame, USES] = min(MOST_USES, arrays.state[frame, USES] + 1)
    num = 0
    for i in range(rows.size):
        if frames[i] >= 0:
            continue
        frame = arrays.where[rows[i]]
        if frame < 0:
            if arrays.counts[_PINNED] == arrays.row_of.size:
                _undo(arrays, rows, load, frames)
                return -1
            frame = _take(arrays)
            arrays.state[frame, SLOT] = NO_SLOT if arrays.where[rows[i]] == IN_FILE else -2 - arrays.where[rows[i]]
            arrays.where[rows[i]] = frame
            arrays.row_of[frame] = rows[i]
            arrays.state[frame, LOAD] = load
            arrays.state[frame, USES] = 0
            arrays.counts[_RESIDENT] += 1
            _pin(arrays, frame)  # by the read
            to_read[num] = i
            num += 1
        frames[i] = frame
        _pin(arrays, frame)
    return num


@numba.njit(cache=True, nogil=True)
def _awaited(load_of: NDArray[np.int32], frames: Frames, load: int) -> IntArray:
    """Return the other reads that fill these frames, each as often as it fills one."""
    found = np.empty(frames.size, np.int64)
    num = 0
    for i in range(frames.size):
        found[num] = load_of[frames[i]]
        num += found[num] != 0 and found[num] != load
    return found[:num].copy()


@numba.njit(cache=True, nogil=True)
def _undo(arrays: FrameArrays, rows: IntArray, load: int, frames: Frames) -> None:
    """Unpin what an `_acquire` that failed has pinned, and drop the rows that it was to read."""
    for i in range(rows.size):
        frame = frames[i]
        if frame < 0:
            continue
        _unpin(arrays, frame)
        if arrays.state[frame, LOAD] == load and arrays.row_of[frame] != NO_ROW:
            _drop(arrays, frame)
            arrays.state[frame, LOAD] = 0
            _unpin(arrays, frame)


@numba.njit(cache=True, nogil=True)
def _take(arrays: FrameArrays) -> int:
    """Return an empty frame: the next that is neither pinned nor used since the hand passed. One must be unpinned."""
    frame = arrays.counts[_HAND]
    while arrays.state[frame, PINS] > 0 or (arrays.state[frame, USES] > 0 and arrays.row_of[frame] != NO_ROW):
        if arrays.state[frame, PINS] == 0:
            arrays.state[frame, USES] -= 1
        frame = frame + 1 if frame + 1 < arrays.row_of.size else 0
    arrays.counts[_HAND] = frame + 1 if frame + 1 < arrays.row_of.size else 0
    if arrays.row_of[frame] != NO_ROW:
        _drop(arrays, frame)
        arrays.counts[_EVICTED] += 1
    return frame


@numba.njit(cache=True, nogil=True)
def _drop(arrays: FrameArrays, frame: int) -> None:
    """Take the row out of a frame."""
    slot = arrays.state[frame, SLOT]
    arrays.where[arrays.row_of[frame]] = IN_FILE if slot == NO_SLOT else -2 - slot
    arrays.row_of[frame] = NO_ROW
    arrays.state[frame, SLOT] = NO_SLOT
    arrays.counts[_RESIDENT] -= 1


@numba.njit(cache=True, nogil=True)
def _pin(arrays: FrameArrays, frame: int) -> None:
    arrays.counts[_PINNED] += arrays.state[frame, PINS] == 0
    arrays.state[frame, PINS] += 1


@numba.njit(cache=True, nogil=True)
def _unpin(arrays: FrameArrays, frame: int) -> None:
    arrays.state[frame, PINS] -= 1
    arrays.counts[_PINNED] -= arrays.state[frame, PINS] == 0


@numba.njit(cache=True, nogil=True)
def _release(arrays: FrameArrays, frames: Frames) -> None:
    for i in range(frames.size):
        _unpin(arrays, frames[i])


@numba.njit(cache=True, nogil=True)
def _publish(arrays: FrameArrays, frames: Frames, is_read: NDArray[np.bool_]) -> None:
    for i in range(frames.size):
        arrays.state[frames[i], LOAD] = 0
        if not is_read[i]:
            _drop(arrays, frames[i])
        _unpin(arrays, frames[i])


@numba.njit(cache=True, nogil=True)
def _pin_filled(arrays: FrameArrays, rows: IntArray, frames: Frames) -> None:
    for i in range(rows.size):
        frame = arrays.where[rows[i]]
        is_filled = frame >= 0 and arrays.state[max(frame, 0), LOAD] == 0
        frames[i] = frame if is_filled else -1
        if is_filled:
            _pin(arrays, frame)
