"""Open-loop load on an engine in this process: requests are submitted at given times, whether or not it keeps up.

Latency counts from the time a request was due, not from when it was submitted, so a stall counts for every request that
was due during it.
"""

import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from helmrec.control.rebalancer import Rebalancer
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError, DeadlineExceeded, EngineClosed, QueueFull
from helmrec.memory.stats import PoolStats
from helmrec.types import RankRequest, RankResult, UserId

_IDLE_WAIT_S = 0.001
_SWITCH_INTERVAL_S = 0.0005  # of threads: the stepping thread must not wait long for the interpreter lock
_REFUSALS: dict[type[BaseException], str] = {QueueFull: "queue full", DeadlineExceeded: "deadline"}


def arrival_times(trace_times_s: NDArray[np.float64], rate: float | None, seed: int) -> NDArray[np.float64]:
    """Return arrival times in seconds from the start: those of the trace, or Poisson at `rate` requests a second."""
    if rate is None:
        return trace_times_s - trace_times_s[:1]
    if not rate > 0:
        raise ConfigError(f"rate must be more than 0, got {rate:g}")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, trace_times_s.size))


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """State of a load run, live or at its end."""

    elapsed_s: float
    offered: int
    answered: int
    refused: dict[str, int]
    failed: int
    failures: dict[str, int]  # by cause
    p50_ms: float  # of all answered so far
    p99_ms: float
    recent_p99_ms: float  # of the last few hundred
    refused_p99_ms: float  # time until the refusal
    lag_p99_ms: float  # delay of the driver itself: beyond 1 or 2 ms, the driver is too slow
    pool: PoolStats


@dataclass(slots=True)
class LoadTally:
    """Outcomes of the requests so far. Times count from when each request was due.

    Numbers are kept in arrays: one object per request would slow the garbage collector down.
    """

    latencies_ms: "array[float]" = field(default_factory=lambda: array("d"))
    due_s: "array[float]" = field(default_factory=lambda: array("d"))  # of each answered request
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    refusals_ms: "array[float]" = field(default_factory=lambda: array("d"))
    lags_ms: "array[float]" = field(default_factory=lambda: array("d"))
    refused: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def answer(self, due_s: float, latency_ms: float) -> None:
        self.latencies_ms.append(latency_ms)
        self.due_s.append(due_s)
        self.recent_ms.append(latency_ms)

    def refuse(self, cause: str, latency_ms: float) -> None:
        self.refused[cause] += 1
        self.refusals_ms.append(latency_ms)

    @property
    def failed(self) -> int:
        return self.failures.total()

    def snapshot(self, elapsed_s: float, pool: PoolStats) -> LoadSnapshot:
        """Summarise the outcomes so far. Works on copies: NumPy views would keep the arrays from growing."""
        p50, p99 = _percentiles(self.latencies_ms[:], 50, 99)
        return LoadSnapshot(
            elapsed_s=elapsed_s,
            offered=len(self.lags_ms),
            answered=len(self.latencies_ms),
            refused=dict(self.refused),
            failed=self.failed,
            failures=dict(self.failures),
            p50_ms=p50,
            p99_ms=p99,
            recent_p99_ms=_percentiles(tuple(self.recent_ms), 99)[0],
            refused_p99_ms=_percentiles(self.refusals_ms[:], 99)[0],
            lag_p99_ms=_percentiles(self.lags_ms[:], 99)[0],
            pool=pool,
        )


class EngineLoad:
    """Submits requests to an engine at given times and records their outcomes."""

    def __init__(self, engine: Engine, rebalancer: Rebalancer | None = None) -> None:
        """`rebalancer`, if any, moves the engine's boundary during the run."""
        self._engine = engine
        self._rebalancer = rebalancer
        self.tally = LoadTally()
        self._has_work = threading.Event()
        self._is_over = False
        self._started_s = time.perf_counter()

    def run(
        self,
        requests: Iterator[RankRequest],
        times_s: NDArray[np.float64],
        watch: Callable[[LoadSnapshot], None] = lambda snapshot: None,
        watch_every_s: float = 0.5,
    ) -> LoadSnapshot:
        """Submit a request at each of the times. Returns when all are answered, refused or failed."""
        stepper = threading.Thread(target=self._step_until_over, name="helmrec-steps")
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._started_s, next_watch_s = time.perf_counter(), watch_every_s
        stepper.start()
        try:
            for due_s, request in zip(times_s.tolist(), requests, strict=False):
                while (left_s := due_s - self._elapsed_s()) > 0:
                    time.sleep(min(left_s, watch_every_s))
                    next_watch_s = self._watch(watch, next_watch_s, watch_every_s)
                next_watch_s = self._watch(watch, next_watch_s, watch_every_s)
                self._offer(request, due_s)
        finally:
            self._is_over = True
            self._has_work.set()
            stepper.join()
            sys.setswitchinterval(interval_s)
        return self.snapshot()

    def snapshot(self) -> LoadSnapshot:
        return self.tally.snapshot(self._elapsed_s(), self._engine.stats().pool)

    def _watch(self, watch: Callable[[LoadSnapshot], None], next_s: float, every_s: float) -> float:
        if self._elapsed_s() < next_s:
            return next_s
        watch(self.snapshot())
        return self._elapsed_s() + every_s

    def _offer(self, request: RankRequest, due_s: float) -> None:
        self.tally.lags_ms.append((self._elapsed_s() - due_s) * 1e3)
        try:
            future = self._engine.submit(request)
        except tuple(_REFUSALS) as error:
            self._report(request.user_id, None)
            self.tally.refuse(_REFUSALS[type(error)], (self._elapsed_s() - due_s) * 1e3)
            return
        future.add_done_callback(lambda done: self._record(done, request.user_id, due_s))
        self._has_work.set()

    def _record(self, done: "Future[RankResult]", user_id: UserId, due_s: float) -> None:
        error = done.exception()
        latency_ms = (self._elapsed_s() - due_s) * 1e3
        self._report(user_id, latency_ms if error is None else None)
        if error is None:
            self.tally.answer(due_s, latency_ms)
        elif type(error) in _REFUSALS:
            self.tally.refuse(_REFUSALS[type(error)], latency_ms)
        else:
            self.tally.failures[f"{type(error).__name__}: {error}"] += 1

    def _report(self, user_id: UserId, latency_ms: float | None) -> None:
        if self._rebalancer is not None:
            self._rebalancer.record(user_id, latency_ms)

    def _step_until_over(self) -> None:
        """Step until the last request is submitted and no work is left."""
        while True:
            is_over = self._is_over  # read before the step: requests submitted before it are in the queue
            try:
                had_work = self._engine.step()
            except EngineClosed:
                return
            if self._rebalancer is not None:
                self._rebalancer.tick(time.monotonic())  # the engine's clock
            if not had_work:
                if is_over:
                    return
                self._has_work.wait(_IDLE_WAIT_S)
                self._has_work.clear()

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s


def _percentiles(values: Sequence[float], *shares: float) -> list[float]:
    return [float(p) for p in np.percentile(values, shares)] if values else [float("nan")] * len(shares)
