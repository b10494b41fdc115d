"""Gaps are measured from the times of steps; their causes from the operations that fall into them."""

import gc
import logging

import pytest

from helmrec.pauses import BUCKETS_MS, CpuTime, GapMonitor, Operation, follow_process, note_process


class Cpu:
    """Processor time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.others_s = 0.0  # of other threads

    def __call__(self) -> CpuTime:
        return CpuTime(self.now_s + self.others_s, self.now_s)


def busy_monitor(log_over_ms: float = 1e9) -> tuple[GapMonitor, Cpu]:
    """One whose process never sleeps: processor time is far ahead of every gap."""
    cpu = Cpu()
    return GapMonitor(log_over_ms, cpu), cpu


def run_step(monitor: GapMonitor, cpu: Cpu, arrived_s: float, start_s: float, end_s: float) -> None:
    cpu.now_s += 1_000
    monitor.starting(start_s, arrived_s)
    monitor.ended(end_s)


def test_a_device_without_requests_has_no_gap() -> None:
    monitor, cpu = busy_monitor()
    run_step(monitor, cpu, arrived_s=0.0, start_s=0.0, end_s=1.0)
    run_step(monitor, cpu, arrived_s=9.0, start_s=9.0, end_s=10.0)
    assert monitor.stats(10.0).longest_ms == 0


def test_a_gap_begins_when_the_device_is_done_and_a_request_waits() -> None:
    monitor, cpu = busy_monitor()
    run_step(monitor, cpu, arrived_s=0.0, start_s=0.0, end_s=1.0)
    run_step(monitor, cpu, arrived_s=0.5, start_s=1.03, end_s=2.0)  # it waited while the step before ran
    assert monitor.stats(2.0).longest_ms == pytest.approx(30)
    run_step(monitor, cpu, arrived_s=3.0, start_s=3.2, end_s=4.0)  # it came to an idle device
    assert monitor.stats(4.0).longest_ms == pytest.approx(200)


def test_a_step_handed_over_in_time_leaves_no_gap() -> None:
    monitor, _ = busy_monitor()
    monitor.starting(0.0, 0.0)
    following = monitor.starting(0.9, 0.2)
    monitor.ended(1.0, following)
    assert monitor.stats(1.0).longest_ms == 0


def test_a_step_handed_over_late_leaves_a_gap_although_it_overlaps_for_the_host() -> None:
    monitor, cpu = busy_monitor()
    monitor.starting(0.0, 0.0)
    cpu.now_s += 10
    following = monitor.starting(1.08, 0.2)
    monitor.ended(1.0, following)  # the device was done before, the host saw it after
    assert monitor.stats(1.1).longest_ms == pytest.approx(80)


def test_the_longest_operation_in_a_gap_is_its_cause() -> None:
    monitor, cpu = busy_monitor()
    run_step(monitor, cpu, 0.0, 0.0, 1.0)
    monitor.note(Operation("save", 1.0, 1.01))
    monitor.note(Operation("boundary move", 1.01, 1.04))
    monitor.note(Operation("refill", 0.0, 0.9))  # over before the gap
    run_step(monitor, cpu, 0.5, 1.05, 2.0)
    stats = monitor.stats(2.0)
    assert list(stats.gaps) == ["boundary move"]
    assert stats.recent_cause == "boundary move"
    assert stats.recent_ms == pytest.approx(50)


def test_a_collection_is_not_counted_for_the_operation_it_interrupts() -> None:
    monitor, cpu = busy_monitor()
    run_step(monitor, cpu, 0.0, 0.0, 1.0)
    monitor.note(Operation("collector", 1.01, 1.04))
    monitor.note(Operation("controller", 1.0, 1.05))
    run_step(monitor, cpu, 0.5, 1.05, 2.0)
    assert list(monitor.stats(2.0).gaps) == ["collector"]


def test_time_in_which_the_system_did_not_run_the_process_is_counted_apart() -> None:
    cpu = Cpu()
    monitor = GapMonitor(1e9, cpu)
    monitor.starting(0.0, 0.0)
    monitor.ended(1.0)
    cpu.now_s += 0.02
    monitor.starting(1.1, 0.5)
    stats = monitor.stats(1.1)
    assert stats.longest_ms == pytest.approx(20)
    assert stats.longest_suspended_ms == pytest.approx(80)
    assert stats.suspended_s == pytest.approx(0.08)


def test_time_in_which_only_other_threads_ran_is_a_cause_of_its_own() -> None:
    cpu = Cpu()
    monitor = GapMonitor(1e9, cpu)
    monitor.starting(0.0, 0.0)
    monitor.ended(1.0)
    cpu.now_s += 0.02
    cpu.others_s += 0.07
    monitor.starting(1.1, 0.5)
    (cause,) = (stats := monitor.stats(1.1)).gaps
    assert cause == "other threads"
    assert stats.longest_ms == pytest.approx(90)
    assert stats.longest_suspended_ms == pytest.approx(10)


def test_gaps_fall_into_buckets_and_the_recent_one_is_forgotten() -> None:
    monitor, cpu = busy_monitor()
    end_s = 0.0
    for gap_ms in (0.5, 1.5, 15.0, 7_000.0):
        run_step(monitor, cpu, end_s, end_s + gap_ms / 1e3, end_s + gap_ms / 1e3 + 0.1)
        end_s += gap_ms / 1e3 + 0.1
    gaps = monitor.stats(end_s).gaps["other"]
    assert gaps.counts == (0, 1, 0, 0, 1, *[0] * 6, 1)  # nothing is known before the first step
    assert len(gaps.counts) == len(BUCKETS_MS) + 1
    assert monitor.stats(end_s).recent_ms == pytest.approx(7_000)
    assert monitor.stats(end_s + 11).recent_ms == 0
    monitor.reset()
    assert monitor.stats(end_s).gaps == {}


def test_a_long_gap_is_logged_with_its_causes(caplog: pytest.LogCaptureFixture) -> None:
    monitor, cpu = busy_monitor(log_over_ms=20)
    run_step(monitor, cpu, 0.0, 0.0, 1.0)
    monitor.note(Operation("compile", 1.0, 1.04))
    with caplog.at_level(logging.WARNING, "helmrec.pauses"):
        run_step(monitor, cpu, 0.5, 1.05, 2.0)
        run_step(monitor, cpu, 1.5, 2.01, 3.0)  # shorter than what is logged
    (line,) = caplog.messages
    assert "50.0 ms" in line
    assert "compile 40.0 ms, other 10.0 ms" in line


def test_gaps_in_quick_succession_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    monitor, cpu = busy_monitor(log_over_ms=20)
    end_s = 0.0
    with caplog.at_level(logging.WARNING, "helmrec.pauses"):
        for _ in range(40):
            run_step(monitor, cpu, end_s, end_s + 0.03, end_s + 0.05)
            end_s += 0.05
    assert len(caplog.messages) == 2
    assert "19 such gaps were not logged" in caplog.messages[1]


def test_collections_of_this_process_reach_the_monitors_that_follow_it() -> None:
    monitor, cpu = busy_monitor()
    follow_process(monitor)
    note_process(Operation("collector", 1.0, 1.03))
    run_step(monitor, cpu, 0.0, 0.0, 1.0)
    run_step(monitor, cpu, 0.5, 1.03, 2.0)
    assert list(monitor.stats(2.0).gaps) == ["collector"]
    assert any(callback.__name__ == "_follow_collections" for callback in gc.callbacks)
