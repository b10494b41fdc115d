"""Time steps of a running engine: prepare the caches for a case, queue requests, step, read the clock.

Uses the engine's public interface only. The work of a step (tokens, hits, misses, pages) is taken from its results, so
a measurement is valid even if the caches were not exactly as the case intended.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from helmrec.calibrate.cases import STEP_REQUESTS, Case
from helmrec.calibrate.requests import Rows, User
from helmrec.calibrate.timed import MeasuredWork, Timed
from helmrec.engine.engine import Engine
from helmrec.types import RankRequest, RankResult

_HOT_SHARE = 0.4  # of the row slots: the rest is for rows that miss
_PASSES = 3  # the second read of a row admits it, the third one hits
_GROUPS = 3  # of users, in which a burst of returning users cycles


@dataclass(slots=True)
class _PendingRequest:
    """A submitted request, and when its result was available."""

    request: RankRequest
    future: "Future[RankResult]"
    end_s: float = 0.0

    @property
    def result(self) -> RankResult:
        return self.future.result(timeout=0)


@dataclass(slots=True, eq=False)
class _Visitor:
    """A user of a case, whose history grows with every visit."""

    user: User
    resident: int
    new: int
    num_visits: int = 0

    def next_events(self) -> int:
        self.num_visits += 1
        return self.resident + self.new * self.num_visits


class Probe:
    """Times cases on one engine, which must have no other load."""

    def __init__(self, engine: Engine, wait: Callable[[], None], seed: int = 0) -> None:
        """`wait` returns when the device is idle."""
        self._engine = engine
        self._model = engine.model_config
        self._wait = wait
        self._ids = itertools.count(1 << 32)
        self._rows = Rows(self._model, int(engine.stats().pool.row_capacity * _HOT_SHARE), seed)
        self.intake_ms: list[float] = []
        self.overlaps = False  # whether a step was launched before the previous one had ended

    def warm_up(self) -> None:
        """Make the hot rows resident and the pool full, so that only returning users are kept."""
        size = self._model.window // 2
        for _ in range(_PASSES):
            spans = range(0, self._rows.num_hot_events, size)
            for batch in range(0, len(spans), STEP_REQUESTS):
                chosen = spans[batch : batch + STEP_REQUESTS]
                users = [self._user(self._rows.hot(begin, begin + size)) for begin in chosen]
                self._engine.rank([self._request(user, size, 1, 0.0) for user in users])
        self._fill_pool()

    def run(self, case: Case, repeats: int) -> list[Timed]:
        """Time the case `repeats` times, after one run that is not counted."""
        num = repeats + 1
        if case.is_reloaded:
            groups = [[self._returning(case) for _ in range(case.num_steps)] for _ in range(num)]
            self._fill_pool()
            return [self._time(case, each) for each in groups][1:]
        return [self._time(case, self._groups(case)) for _ in range(num)][1:]

    def _groups(self, case: Case) -> list[list[_Visitor]]:
        """Return the users of each step."""
        if not case.resident:
            return [self._visitors(case) for _ in range(case.num_steps)]
        groups = [self._returning(case) for _ in range(min(_GROUPS, case.num_steps))]
        return [groups[step % len(groups)] for step in range(case.num_steps)]

    def _visitors(self, case: Case) -> list[_Visitor]:
        visits = -(-case.num_steps // _GROUPS) if case.resident else 1
        new = case.spread(case.new, self._model.window)
        resident = case.spread(case.resident, max(0, self._model.window - visits * max(new)))
        return [
            _Visitor(self._user(self._rows.draw(old + visits * more, case.fresh)), old, more)
            for old, more in zip(resident, new, strict=True)
        ]

    def _returning(self, case: Case) -> list[_Visitor]:
        """Return users who have made two requests, so that their prefixes are kept."""
        visitors = self._visitors(case)
        for events in ([min(1, each.resident) for each in visitors], [each.resident for each in visitors]):
            visits = zip(visitors, events, strict=True)
            self._engine.rank([self._request(visitor.user, num, 1, case.fresh) for visitor, num in visits])
        return visitors

    def _fill_pool(self) -> None:
        """Fill all KV pages with returning users, which evicts all others."""
        pool, report = self._engine.stats().pool, self._engine.report()
        events = int(self._model.window * 0.42)
        num_tokens = (pool.num_pages - pool.emb_pages) * report.page_tokens
        case = Case("filler", STEP_REQUESTS, events, 1, 1, 0.0)
        for _ in range(-(-num_tokens * 5 // (4 * events * STEP_REQUESTS))):
            self._returning(case)

    def _user(self, events: np.ndarray) -> User:
        return User(self._model, next(self._ids), events)

    def _request(self, user: User, num_events: int, candidates: int, fresh: float) -> RankRequest:
        return user.request(num_events, self._rows.draw(candidates, fresh))

    def _time(self, case: Case, groups: Sequence[Sequence[_Visitor]]) -> Timed:
        requests = [
            self._request(visitor.user, visitor.next_events(), case.candidates, case.fresh)
            for group in groups
            for visitor in group
        ]
        self._wait()
        pending = [self._submit(request) for request in requests]
        before = self._engine.stats().pool.bytes_by_cause.get("kv-reload", 0)
        begin_s = time.perf_counter()
        self._engine.step()
        launched_s = time.perf_counter()
        is_over = pending[0].future.done()
        self.overlaps |= not is_over
        while not pending[-1].future.done():
            self._engine.step()
        end_s = time.perf_counter()
        loaded = self._engine.stats().pool.bytes_by_cause.get("kv-reload", 0) - before
        steps = _by_step(pending)
        timing = pending[0].result.timing
        host_ms = timing.plan_ms if is_over else (launched_s - begin_s) * 1e3
        is_burst = len(steps) > 1
        return Timed(
            case=case.name,
            steps=tuple(_work(self._engine, step, loaded / len(steps)) for step in steps),
            ends_ms=tuple((step[-1].end_s - begin_s) * 1e3 for step in steps),
            host_ms=None if is_burst else host_ms,
            background_ms=None if is_burst else (end_s - pending[-1].end_s) * 1e3,
        )

    def _submit(self, request: RankRequest) -> _PendingRequest:
        begin_s = time.perf_counter()
        pending = _PendingRequest(request, self._engine.submit(request))
        self.intake_ms.append((time.perf_counter() - begin_s) * 1e3)
        pending.future.add_done_callback(lambda _: setattr(pending, "end_s", time.perf_counter()))
        return pending


def _by_step(pending: Sequence[_PendingRequest]) -> list[list[_PendingRequest]]:
    """Group requests by step: those of one step have the same timing."""
    steps: list[list[_PendingRequest]] = []
    last: tuple[float, float] | None = None
    for each in pending:
        timing = each.result.timing
        mark = (timing.plan_ms, timing.compute_ms)
        if mark != last:
            steps.append([])
        steps[-1].append(each)
        last = mark
    return steps


def _work(engine: Engine, step: Sequence[_PendingRequest], loaded_bytes: float) -> MeasuredWork:
    num_context = len(engine.model_config.user_context)
    num_pairs = 0.0
    for each in step:
        resident = each.result.reused_tokens
        total = len(each.request.items) + num_context
        new = total - resident
        num_pairs += new * (resident + new / 2) + (each.result.computed_tokens - new) * total
    return MeasuredWork(
        num_requests=len(step),
        num_tokens=sum(each.result.computed_tokens for each in step),
        num_pairs=num_pairs,
        hit_rows=sum(each.result.row_hits for each in step),
        missed_rows=sum(each.result.row_misses for each in step),
        loaded_bytes=loaded_bytes,
    )
