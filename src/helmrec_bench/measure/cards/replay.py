"""A replay of rank requests and prefill signals on one engine, each at its time, and what became of the ranks."""

import math
import time
from array import array
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from helmrec.collector import PROCESS
from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.types import IntArray, PrefillRequest, RankResult
from helmrec_bench.measure.controller.turns import BetweenSteps

GOAL = 0.99  # of the ranks keep the budget


class Event(NamedTuple):
    at_s: float
    request: Prepared
    is_rank: bool
    is_warm_up: bool


def without_candidates(request: Prepared) -> Prepared:
    return replace(request, candidate_rows=request.candidate_rows[:, :0], candidate_gap=0)


class Replayed(NamedTuple):
    """What became of the ranks."""

    latency_ms: IntArray  # of those that count, in order of their end; infinite if given up
    figures: dict[str, Any]

    def keeps(self, budget_ms: float) -> bool:
        return bool(np.mean(self.latency_ms <= budget_ms) >= GOAL)

    def describe(self) -> dict[str, Any]:
        p50, p99 = np.percentile(self.latency_ms, (50, 99), method="higher")
        return {
            "requests": self.latency_ms.size,
            "p50_ms": round(float(p50), 3),
            "p99_ms": round(float(p99), 3) if np.isfinite(p99) else None,
            **self.figures,
        }


class CascadeReplay:
    """Submits each event in its time and steps the engine; gives up where the queue only grows."""

    def __init__(
        self, probe: EngineProbe, events: list[Event], beside: BetweenSteps | None = None, most_late: float = math.inf
    ) -> None:
        """beside: called between steps. most_late: ranks beyond their budget after which the replay is cut off."""
        self._probe, self._events, self._beside, self._most_late = probe, events, beside, most_late
        self._budget_s = math.inf
        self._num_late = 0
        self._running: set[Future[RankResult]] = set()
        self._latencies_s, self._reused, self._total = array("d"), 0, 0
        self._start_s = 0.0

    def run(self, budget_ms: float) -> Replayed:
        engine, events, at = self._probe.engine, self._events, 0
        PROCESS.settle()
        before = engine.stats()
        give_up_s = events[-1].at_s + 20 * budget_ms / 1e3
        self._budget_s = budget_ms / 1e3
        self._start_s = time.perf_counter()
        while at < len(events) or self._running:
            now_s = self._elapsed_s()
            if now_s > give_up_s or engine.queue_length > 2_000 or self._num_late > self._most_late:
                break
            while at < len(events) and events[at].at_s <= now_s:
                self._send(events[at])
                at += 1
            had_work = engine.step()
            if self._beside is not None:
                self._beside.tick(time.monotonic())  # the engine's clock
            if not had_work and at < len(events):
                time.sleep(min(1e-4, max(0.0, events[at].at_s - self._elapsed_s())))
        seconds = self._elapsed_s()
        self._probe.withdraw(list(self._running))
        engine.check()
        num_lost = sum(event.is_rank and not event.is_warm_up for event in events) - len(self._latencies_s)
        latency_ms = np.array([took_s * 1e3 for took_s in self._latencies_s] + [np.inf] * num_lost)
        return Replayed(latency_ms, {"reused": round(self._reused / max(1, self._total), 3)}
                        | grown(before, engine.stats(), seconds))  # fmt: skip

    def _send(self, event: Event) -> None:
        if event.is_rank:
            future = self._probe.submit(event.request)
            self._running.add(future)
            future.add_done_callback(partial(self._note, event))
        else:
            num_candidates = self._events[0].request.num_candidates or self._events[-1].request.num_candidates
            user_id = event.request.history.user_id
            self._probe.signal(PrefillRequest(user_id, (), (), (), num_candidates=num_candidates), event.request)

    def _note(self, event: Event, future: "Future[RankResult]") -> None:
        """Keep numbers only: objects of all requests would make collections long."""
        self._running.discard(future)
        if future.cancelled():
            return
        latency_s = self._elapsed_s() - event.at_s
        if self._beside is not None:
            self._beside.record(event.request.history.user_id, 1e3 * latency_s)
        if not event.is_warm_up:
            self._num_late += latency_s > self._budget_s
            self._latencies_s.append(latency_s)
            self._reused += future.result().reused_tokens
            self._total += event.request.history.num_tokens

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s


def grown(before: EngineStats, after: EngineStats, seconds: float) -> dict[str, Any]:
    """What the engine did between two looks."""
    relay = {name: num - before.relay.verdicts[name] for name, num in after.relay.verdicts.items()}
    return {
        "busy": round((after.busy_s - before.busy_s) / seconds, 3),
        "reloaded_pages": after.pool.host_reloaded_pages - before.pool.host_reloaded_pages,
        "saved_pages": after.pool.host_saved_pages - before.pool.host_saved_pages,
        "signals": {name: num for name, num in relay.items() if num},
        "leases_used": after.relay.used - before.relay.used,
        "leases_expired": after.relay.expired - before.relay.expired,
        "ahead_share": round((after.relay.busy_s - before.relay.busy_s) / seconds, 3),
        "failed": after.relay.failed - before.relay.failed,
    }
