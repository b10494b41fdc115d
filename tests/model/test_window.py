import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helmrec.model.window import gap_bucket, window_anchor

windows = st.integers(4, 200)
lengths = st.integers(0, 2_000)


@given(lengths, lengths, windows)
def test_the_window_is_never_longer_than_w_and_lies_in_what_was_sent(first: int, num: int, window: int) -> None:
    anchor = window_anchor(first, num, window)
    end = first + num
    assert first <= anchor <= end
    assert end - anchor <= window
    if num:
        assert anchor < end, "the latest event is always seen"


@given(st.integers(0, 500), windows)
def test_a_history_that_fits_is_seen_whole(num: int, window: int) -> None:
    if num <= window:
        assert window_anchor(0, num, window) == 0


@given(windows, st.integers(1, 600))
def test_the_anchor_never_goes_back_as_a_history_grows(window: int, num: int) -> None:
    assert window_anchor(0, num - 1, window) <= window_anchor(0, num, window)


@given(windows)
def test_the_anchor_stays_for_a_quarter_of_the_window_and_then_jumps_by_it(window: int) -> None:
    step = window // 4
    anchors = [window_anchor(0, num, window) for num in range(window + 5 * step)]
    changes = [num for num in range(1, len(anchors)) if anchors[num] != anchors[num - 1]]
    assert set(np.diff(changes).tolist()) <= {step}
    assert {anchors[num] - anchors[num - 1] for num in changes} == {step}


@given(windows)
def test_at_least_three_quarters_of_a_full_window_are_seen(window: int) -> None:
    for num in range(window, 3 * window):
        assert num - window_anchor(0, num, window) > window - window // 4 - 1


@given(windows, lengths, st.integers(0, 100))
def test_clients_that_send_at_least_the_window_get_the_anchor_of_full_clients(
    window: int, num: int, extra: int
) -> None:
    first = max(0, num - window - extra)
    assert window_anchor(first, num - first, window) == window_anchor(0, num, window)


@given(st.integers(4, 100), st.integers(1, 100), st.integers(0, 300))
def test_the_anchor_of_a_client_that_sends_its_last_events_never_goes_back(window: int, sent: int, first: int) -> None:
    assert window_anchor(first, sent, window) <= window_anchor(first + 1, sent, window)


def test_short_tails_still_share_an_anchor() -> None:
    """A client that sends 8 of a window of 16 moves its anchor every second event."""
    anchors = [window_anchor(first, 8, 16) for first in range(8, 16)]
    assert anchors == [8, 10, 10, 12, 12, 14, 14, 16]


@given(st.sampled_from([4, 8, 16, 32, 64, 128]), st.integers(0, 300), st.integers(0, 300))
def test_a_growing_tail_never_moves_its_anchor_back(window: int, first: int, num: int) -> None:
    assert window_anchor(first, num, window) <= window_anchor(first, num + 1, window)


def test_a_growing_tail_never_moves_its_anchor_back_for_odd_quarters_either() -> None:
    anchors = [window_anchor(13, num, 28) for num in range(29)]
    assert anchors == sorted(anchors)


def test_gap_buckets_are_two_per_octave_and_the_last_is_open() -> None:
    gaps = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 2**40]
    assert [gap_bucket(gap, 64) for gap in gaps] == [0, 1, 3, 4, 5, 5, 6, 6, 7, 7, 8, 64 - 1]
    assert max(gap_bucket(gap, 4) for gap in gaps) == 3


@given(st.lists(st.integers(0, 2**62), max_size=20), st.integers(2, 200))
def test_gap_buckets_grow_with_the_gap_and_stay_in_range(gaps: list[int], num_buckets: int) -> None:
    buckets = [gap_bucket(gap, num_buckets) for gap in sorted(gaps)]
    assert buckets == sorted(buckets)
    assert all(0 <= bucket < num_buckets for bucket in buckets)
