"""Random operations on the frames of rows in host memory, with a plain twin, and the cases that matter by name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.memory.row_frames import NO_SLOT, Acquired, RowFrames

NUM_ROWS = 40


def rows(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def fill(frames: RowFrames, ids: np.ndarray, load: int = 1) -> Acquired:
    """Acquire rows and end their read."""
    found = frames.acquire(ids, load)
    assert found is not None
    to_read = found.frames[found.to_read]
    frames.publish(to_read, np.ones(to_read.size, np.bool_))
    return found


def test_a_row_is_read_once_however_often_a_request_asks_for_it() -> None:
    frames = RowFrames(NUM_ROWS, 4)
    found = fill(frames, rows(7, 3, 7, 7))
    assert found.to_read.tolist() == [0, 1]
    assert found.frames[0] == found.frames[2] == found.frames[3] != found.frames[1]
    assert (frames.hits, frames.misses) == (2, 2)
    frames.check()


def test_a_pinned_row_is_never_evicted() -> None:
    frames = RowFrames(NUM_ROWS, 3)
    held = fill(frames, rows(0, 1))
    for load, row in enumerate(range(2, 30), start=2):
        frames.release(fill(frames, rows(row), load).frames)
        assert frames.are_held(held.frames, rows(0, 1))
    frames.check()


def test_no_frame_is_taken_unless_all_are() -> None:
    frames = RowFrames(NUM_ROWS, 3)
    held = fill(frames, rows(0))
    assert frames.acquire(rows(0, 1, 2, 3), 2) is None
    frames.check()
    assert (frames.num_pinned, frames.misses) == (1, 1)
    frames.release(held.frames)
    assert frames.acquire(rows(0, 1, 2), 3) is not None


def test_a_row_read_twice_outlives_rows_read_once() -> None:
    frames = RowFrames(NUM_ROWS, 4)
    for load in (1, 2):
        frames.release(fill(frames, rows(0), load).frames)
    for load, row in enumerate(range(1, 5), start=3):
        frames.release(fill(frames, rows(row), load).frames)
    found = fill(frames, rows(0), 9)
    assert not found.to_read.size


def test_who_waits_for_a_read_that_fails_no_longer_holds_the_row() -> None:
    frames = RowFrames(NUM_ROWS, 3)
    first, second = frames.acquire(rows(5, 6), 1), frames.acquire(rows(6), 2)
    assert first is not None
    assert second is not None
    assert second.awaited.tolist() == [1]
    frames.publish(first.frames, np.array([True, False]))
    assert not frames.are_held(second.frames, rows(6))
    assert frames.are_held(first.frames[:1], rows(5))
    frames.release(first.frames)
    frames.release(second.frames)
    frames.check()
    again = frames.acquire(rows(6), 3)
    assert again is not None
    assert again.to_read.size == 1


def test_an_updated_row_is_read_from_the_log_after_its_eviction() -> None:
    frames = RowFrames(NUM_ROWS, 1)
    frames.release(fill(frames, rows(4)).frames)
    assert frames.log(rows(4, 9), rows(17, 18)).tolist() == [0, -1]
    assert frames.slots_of(rows(4, 9, 1)).tolist() == [17, 18, NO_SLOT]
    frames.release(fill(frames, rows(1), 2).frames)  # evicts row 4
    assert frames.slots_of(rows(4, 9, 1)).tolist() == [17, 18, NO_SLOT]
    found = fill(frames, rows(4), 3)
    assert found.slots.tolist() == [17]
    frames.check()


def test_the_index_counts_in_the_bytes() -> None:
    num = RowFrames.frames_for(1 << 20, 1_000, 64)
    assert num == 1_000
    num = RowFrames.frames_for(30_000, 1_000, 64)
    assert 0 < num * 64 + RowFrames(1_000, num).num_bytes <= 30_000 + 32
    assert RowFrames.frames_for(3_000, 1_000, 64) < 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_requests_keep_the_invariants(data: st.DataObject) -> None:
    frames = RowFrames(NUM_ROWS, data.draw(st.integers(1, 12)))
    held: list[tuple[np.ndarray, Acquired]] = []
    reading: list[tuple[np.ndarray, Acquired]] = []
    load = slot = 0
    slots: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["acquire", "acquire", "publish", "release", "log"]))
        if what == "acquire":
            load += 1
            ids = rows(*data.draw(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=8)))
            before = frames.num_pinned
            found = frames.acquire(ids, load)
            if found is None:
                assert frames.num_pinned == before
            else:
                assert [slots.get(int(row), NO_SLOT) for row in ids[found.to_read]] == found.slots.tolist()
                held.append((ids, found))
                reading.append((ids, found))
        elif what == "publish" and reading:
            ids, found = reading.pop(data.draw(st.integers(0, len(reading) - 1)))
            is_read = np.array([data.draw(st.booleans()) for _ in found.to_read], np.bool_)
            frames.publish(found.frames[found.to_read], is_read)
        elif what == "release" and held:
            frames.release(held.pop(data.draw(st.integers(0, len(held) - 1)))[1].frames)
        elif what == "log":
            row = data.draw(st.integers(0, NUM_ROWS - 1))
            slot += 1
            slots[row] = slot
            frames.log(rows(row), rows(slot))
        frames.check()
        assert frames.slots_of(np.arange(NUM_ROWS)).tolist() == [slots.get(r, NO_SLOT) for r in range(NUM_ROWS)]


@pytest.mark.parametrize("num_frames", [1, 5])
def test_frames_of_an_absent_row_is_a_bug(num_frames: int) -> None:
    frames = RowFrames(NUM_ROWS, num_frames)
    with pytest.raises(AssertionError, match="not in memory"):
        frames.frames_of(rows(1))
