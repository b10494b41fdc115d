"""Gaps in serving, and what caused them.

A gap is a time in which requests wait, no step runs on the device and the loop starts none. The engine's loop reports
the times of each step to `GapMonitor`; code that may block the loop reports its operations. The monitor does not know
engines, devices or requests. Times are arguments.
"""

import gc
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from weakref import WeakSet

log = logging.getLogger("helmrec.pauses")

Cause = Literal[
    "collector",
    "compile",
    "boundary move",
    "save",
    "refill",
    "rows",
    "audit",
    "controller",
    "snapshot",
    "other threads",  # the loop did not run, but others of the process did
    "other",
]
BUCKETS_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 5_000.0)
_STOPS_EVERY_THREAD: frozenset[Cause] = frozenset({"collector", "compile"})
_KEPT_OPERATIONS = 256
_RECENT_S = 10.0
_LOG_EVERY_S = 1.0
NOTED_S = 2e-4  # shorter operations are not recorded


class Operation(NamedTuple):
    """An operation that may have kept the loop from starting a step."""

    cause: Cause
    start_s: float
    end_s: float

    def overlap_s(self, start_s: float, end_s: float) -> float:
        return max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s))


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """Gaps whose longest operation had one cause."""

    counts: tuple[int, ...]  # by bucket of `BUCKETS_MS`, the last one without a bound
    total_s: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class PauseStats:
    """Gaps since the start, without the time in which the operating system did not run the process."""

    gaps: dict[str, GapHistogram]  # by cause
    suspended_s: float  # time inside gaps in which the operating system did not run the process
    longest_suspended_ms: float
    recent_ms: float  # the longest gap of the last ten seconds
    recent_cause: str  # cause of that gap; empty if there was none

    @property
    def longest_ms(self) -> float:
        return max((gap.longest_ms for gap in self.gaps.values()), default=0.0)


@dataclass(slots=True)
class _Tally:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_MS) + 1))
    total_s: float = 0.0
    longest_ms: float = 0.0

    def add(self, gap_ms: float) -> None:
        self.counts[bisect_left(BUCKETS_MS, gap_ms)] += 1
        self.total_s += gap_ms / 1e3
        self.longest_ms = max(self.longest_ms, gap_ms)


class CpuTime(NamedTuple):
    """Processor time so far."""

    process_s: float
    thread_s: float  # of the thread that asks

    @classmethod
    def now(cls) -> "CpuTime":
        return cls(time.process_time(), time.thread_time())


class StepStart(NamedTuple):
    """When a step was given to the device, and since when its requests waited."""

    start_s: float  # where the host itself computes, when it began to
    waiting_since_s: float  # arrival of its oldest request
    cpu: CpuTime


class GapMonitor:
    """Measures the gap before each step. One thread reports steps; `stats` and operations may come from any thread."""

    def __init__(self, log_over_ms: float, cpu_time: Callable[[], CpuTime] = CpuTime.now) -> None:
        self._log_over_ms = log_over_ms
        self._cpu_time = cpu_time
        self._operations: deque[Operation] = deque(maxlen=_KEPT_OPERATIONS)
        self._last_end_s = -math.inf  # of all operations
        self._idle_since_s: float | None = None  # when the device ended its last step; None: it runs one, or ran none
        self._cpu = CpuTime(0.0, 0.0)  # when the last step ended
        self._logged_s, self._num_unlogged = -_LOG_EVERY_S, 0
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        with self._lock:
            self._tallies: dict[Cause, _Tally] = {}
            self._suspended_s = self._longest_suspended_s = 0.0
            self._recent: deque[tuple[float, float, Cause]] = deque()  # end, milliseconds, cause; falling in length

    def note(self, operation: Operation) -> None:
        """Record an operation that has ended."""
        self._operations.append(operation)
        self._last_end_s = max(self._last_end_s, operation.end_s)

    def note_work(self, cause: Cause, start_s: float, end_s: float) -> None:
        """Record work that has ended as an operation, unless it was too short to matter."""
        if end_s - start_s > NOTED_S:
            self.note(Operation(cause, start_s, end_s))

    @contextmanager
    def operation(self, cause: Cause, now: Callable[[], float]) -> Iterator[None]:
        """Record the work inside the context as an operation."""
        start_s = now()
        try:
            yield
        finally:
            self.note_work(cause, start_s, now())

    def starting(self, start_s: float, waiting_since_s: float) -> StepStart:
        """Record that the device runs a step from `start_s` on."""
        step = StepStart(start_s, waiting_since_s, self._cpu_time())
        if self._idle_since_s is not None:
            self._measure(self._idle_since_s, step)
            self._idle_since_s = None
        return step

    def ended(self, end_s: float, following: StepStart | None = None) -> None:
        """Record that a step ended at `end_s`. following: the next step, if it was given to the device already."""
        if following is None:
            self._idle_since_s = end_s
        else:
            self._measure(end_s, following)
        self._cpu = self._cpu_time()

    def _measure(self, idle_since_s: float, step: StepStart) -> None:
        begin_s = max(idle_since_s, step.waiting_since_s)
        gap_s = step.start_s - begin_s
        if gap_s <= 0:
            return
        # Processor time counts from before the gap, so what the operating system took is never overstated.
        suspended_s = max(0.0, gap_s - (step.cpu.process_s - self._cpu.process_s))
        by_cause = self._blocked_by(begin_s, step.start_s)
        rest_s = max(0.0, gap_s - suspended_s - sum(by_cause.values()))
        by_cause["other"] = min(rest_s, step.cpu.thread_s - self._cpu.thread_s)
        by_cause["other threads"] = rest_s - by_cause["other"]
        cause = max(by_cause, key=lambda each: by_cause[each])
        self._count(step.start_s, gap_s - suspended_s, suspended_s, cause)
        if (gap_s - suspended_s) * 1e3 > self._log_over_ms:
            self._log(step.start_s, gap_s, suspended_s, by_cause)

    def _blocked_by(self, start_s: float, end_s: float) -> dict[Cause, float]:
        """Return the seconds of each cause between two times. Time in which all threads stop counts once."""
        by_cause: dict[Cause, float] = {}
        if self._last_end_s <= start_s:
            return by_cause
        inside = [each for each in tuple(self._operations) if each.overlap_s(start_s, end_s) > 0]
        stops = [each for each in inside if each.cause in _STOPS_EVERY_THREAD]
        for each in inside:
            own_s = each.overlap_s(start_s, end_s)
            if each.cause not in _STOPS_EVERY_THREAD:
                own_s -= sum(stop.overlap_s(max(start_s, each.start_s), min(end_s, each.end_s)) for stop in stops)
            by_cause[each.cause] = by_cause.get(each.cause, 0.0) + max(0.0, own_s)
        return by_cause

    def _count(self, now_s: float, gap_s: float, suspended_s: float, cause: Cause) -> None:
        gap_ms = gap_s * 1e3
        with self._lock:
            self._tallies.setdefault(cause, _Tally()).add(gap_ms)
            self._suspended_s += suspended_s
            self._longest_suspended_s = max(self._longest_suspended_s, suspended_s)
            while self._recent and self._recent[-1][1] <= gap_ms:
                self._recent.pop()
            self._recent.append((now_s, gap_ms, cause))
            while self._recent[0][0] < now_s - _RECENT_S:
                self._recent.popleft()

    def _log(self, now_s: float, gap_s: float, suspended_s: float, by_cause: dict[Cause, float]) -> None:
        if now_s - self._logged_s < _LOG_EVERY_S:
            self._num_unlogged += 1
            return
        parts = sorted(by_cause.items(), key=lambda item: -item[1])
        log.warning(
            "no step ran for %.1f ms while requests waited: %s; not run by the operating system %.1f ms%s",
            gap_s * 1e3,
            ", ".join(f"{cause} {seconds * 1e3:.1f} ms" for cause, seconds in parts if seconds > 0),
            suspended_s * 1e3,
            f"; {self._num_unlogged} such gaps were not logged" if self._num_unlogged else "",
        )
        self._logged_s, self._num_unlogged = now_s, 0

    def stats(self, now_s: float) -> PauseStats:
        with self._lock:
            while self._recent and self._recent[0][0] < now_s - _RECENT_S:
                self._recent.popleft()
            recent = self._recent[0] if self._recent else (0.0, 0.0, "")
            return PauseStats(
                gaps={
                    cause: GapHistogram(tuple(tally.counts), tally.total_s, tally.longest_ms)
                    for cause, tally in self._tallies.items()
                },
                suspended_s=self._suspended_s,
                longest_suspended_ms=self._longest_suspended_s * 1e3,
                recent_ms=recent[1],
                recent_cause=recent[2],
            )


_MONITORS: "WeakSet[GapMonitor]" = WeakSet()
_collecting_since_s = 0.0


def follow_process(monitor: GapMonitor) -> None:
    """Report everything that stops all threads of this process to a monitor, as long as the monitor exists."""
    _MONITORS.add(monitor)
    if _follow_collections not in gc.callbacks:
        gc.callbacks.append(_follow_collections)


def note_process(operation: Operation) -> None:
    """Report an operation that has stopped every thread of this process. Times are those of `time.monotonic`."""
    for monitor in tuple(_MONITORS):
        monitor.note(operation)


def _follow_collections(phase: str, info: dict[str, int]) -> None:
    """Called by the interpreter before and after each collection."""
    global _collecting_since_s  # noqa: PLW0603 - there is one collector in a process
    now_s = time.monotonic()
    if phase == "start":
        _collecting_since_s = now_s
    elif now_s - _collecting_since_s > NOTED_S:
        note_process(Operation("collector", _collecting_since_s, now_s))
