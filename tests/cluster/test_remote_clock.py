"""Times of other processes in the clock of this one."""

import numpy as np

from helmrec.cluster.remote_clock import RemoteClock, RemoteClocks, Stamp


def test_a_translated_time_is_late_by_the_shortest_transit_at_most() -> None:
    clock, rng = RemoteClock(), np.random.default_rng(0)
    clock.local_s(1_000.0, 7.001)
    for sent_s, transit_s in enumerate(rng.uniform(0.001, 0.8, 4), 1):
        local_s = clock.local_s(1_000.0 + sent_s, 7.0 + sent_s + transit_s)
        assert abs(local_s - (7.001 + sent_s)) < 1e-6


def test_a_remote_clock_that_jumps_or_drifts_is_followed_within_ten_seconds() -> None:
    clock = RemoteClock()
    for i in range(10):
        clock.local_s(100.0 + i, 50.0 + i)
    assert clock.local_s(4_000.0, 60.0) == 60.0, "never later than now"
    ages = [60.0 + i - clock.local_s(400.0 + i, 60.0 + i) for i in range(1, 15)]
    assert ages[0] > 3_000
    assert ages[-4:] == [0.0] * 4


def test_the_clocks_of_many_fronts_are_bounded_and_those_heard_of_last_stay() -> None:
    clocks = RemoteClocks()
    for i in range(3_000):
        assert clocks.came_s(Stamp(f"front {i}", 5.0, 7.0), 100.0) == 98.0
    assert len(clocks) == 1_024
