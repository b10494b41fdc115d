"""The scheduler: a bounded queue with deadlines, and ragged micro-batches under a token budget.

Pure bookkeeping: time is an argument. It batches the requests that are queued and never waits for a fuller batch.
"""

import math
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from helmrec.config import EngineConfig
from helmrec.costs.reload import StepWork
from helmrec.engine.intake import Prepared
from helmrec.engine.row_waits import RowWaits
from helmrec.errors import DeadlineExceeded, Forgotten, HelmRecError, QueueFull
from helmrec.memory.kv_cache import KVCache
from helmrec.memory.prefix import KVPlan
from helmrec.memory.row_fetch import RowTicket
from helmrec.queueing import ADMITTED_SHARE, StepTimes, expected_ms, may_fit, needed_s, with_step
from helmrec.types import RankResult, UserId


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue."""

    request: Prepared
    future: "Future[RankResult]"
    arrived_s: float
    deadline_s: float | None
    is_claimed: bool = False

    def claim(self) -> bool:
        """Take the request so that it cannot be cancelled any more; False if its client has cancelled it."""
        if not self.is_claimed:
            self.is_claimed = self.future.set_running_or_notify_cancel()
        return self.is_claimed


class Scheduled(NamedTuple):
    """A request in a batch, its history pinned in pages."""

    waiting: Waiting
    plan: KVPlan
    num_tokens: int  # computed for this request in the step
    rows: RowTicket | None = None  # what keeps its rows in host memory, if rows are on disk

    @property
    def request(self) -> Prepared:
        return self.waiting.request


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run in one step."""

    members: list[Scheduled]
    started_s: float
    is_ahead: bool = False  # computed before its rank requests arrive

    def work(self) -> StepWork:
        """Count the work: a new token reads its history up to itself; candidates and request context read all of it."""
        tokens, pairs, num_reloaded = 0, 0.0, 0
        for member in self.members:  # one plain loop, since it runs for every step
            plan = member.plan
            total, resident = plan.num_tokens, plan.num_resident
            new = total - resident
            tokens += member.num_tokens
            pairs += new * (resident + new / 2) + member.waiting.request.num_attending * total
            num_reloaded += len(plan.loads)
        return StepWork(tokens, pairs, num_reloaded)


class Reply(NamedTuple):
    """The outcome of a request, to be sent once no lock is held."""

    future: "Future[Any]"
    outcome: Any  # a result, or the exception to raise

    def send(self) -> None:
        """Complete the future. Call it with no lock held: a callback of the future may call the engine."""
        if isinstance(self.outcome, BaseException):
            self.future.set_exception(self.outcome)
        else:
            self.future.set_result(self.outcome)


class Scheduler:
    """A first-come, first-served queue. It has its own lock, so that submitting never waits for a running step."""

    def __init__(self, config: EngineConfig, kv: KVCache, rows: RowWaits | None = None) -> None:
        """`rows`: what brings rows from disk, if some are there."""
        self._config = config
        self._kv = kv
        self._rows = rows
        self._queue: deque[Waiting] = deque()
        self._lock = threading.Lock()
        self._expired: list[Reply] = []
        self._times = StepTimes()
        self._in_flight: list[Batch] = []  # planned and neither committed nor aborted, oldest first
        self._last_ended_s = -math.inf
        self._ended_by: HelmRecError | None = None
        self.refused = 0

    @property
    def max_requests(self) -> int:
        """Most requests of one step."""
        return self._config.max_batch_requests

    @property
    def max_tokens(self) -> int:
        """Most tokens computed in one step; a request that needs more runs alone."""
        return self._config.max_batch_tokens

    @property
    def chunk_tokens(self) -> int:
        """Most tokens computed ahead in one step."""
        return self._config.chunk_tokens

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def wait_ms(self) -> float:
        """Expected wait of a request that is submitted now."""
        return self._times.request_ms * len(self._queue)

    def submit_all(self, requests: Sequence[Prepared], now: float, spent_ms: float = 0.0) -> "list[Future[RankResult]]":
        """Queue all requests of a call, or none: one that is refused takes those before it out of the queue again.

        Their own deadlines count from `spent_ms` ago.
        """
        futures: list[Future[RankResult]] = []
        try:
            futures.extend(self.submit(request, now, spent_ms) for request in requests)
        except BaseException:
            self.withdraw(futures)
            raise
        return futures

    def submit(self, request: Prepared, now: float, spent_ms: float = 0.0) -> "Future[RankResult]":
        """Queue a request; raise Refused if the queue is full or its deadline is unlikely to be met."""
        with self._lock:
            if self._ended_by is not None:
                raise self._ended_by
            deadline_ms = self._config.deadline_ms if request.deadline_ms is None else request.deadline_ms - spent_ms
            self._refuse_if_hopeless(deadline_ms, spent_ms, now)
            deadline_s = None if deadline_ms is None else now + deadline_ms / 1e3
            waiting = Waiting(request, Future(), now, deadline_s)
            self._queue.append(waiting)
            return waiting.future

    def _refuse_if_hopeless(self, deadline_ms: float | None, spent_ms: float, now: float) -> None:
        """Raise Refused if the queue is full, or if the request is expected to miss its deadline."""
        if deadline_ms is not None and deadline_ms <= 0:
            raise DeadlineExceeded(f"the deadline passed {spent_ms:.1f} ms after the request came in, on its way")
        num, limit = len(self._queue), self._config.queue_limit
        if num >= limit:
            self.refused += 1
            raise QueueFull(f"the queue is full: {num} requests wait, the limit is {limit}")
        if deadline_ms is None or not (num or self._in_flight):  # an idle engine always tries
            return
        num_running = sum(len(batch.members) for batch in self._in_flight)
        spent_s = now - max(self._in_flight[0].started_s, self._last_ended_s) if num_running else 0.0
        wait_ms = expected_ms(self._times, num, num_running, spent_s)
        if wait_ms > ADMITTED_SHARE * deadline_ms:
            self.refused += 1
            raise DeadlineExceeded(
                f"a deadline of {deadline_ms:g} ms is unlikely to be met: {num} requests wait, about {wait_ms:.1f} ms"
            )

    def next_batch(self, now: float) -> Batch | None:
        """Plan the oldest requests that fit one step, and whose rows are there, and pin their pages.

        None if no request waits, if all wait for rows, or if a running step holds the pages.
        """
        members: list[Scheduled] = []
        passed: list[Waiting] = []  # over, since their rows are on disk
        budget = self._config.max_batch_tokens
        self._kv.begin_step()
        with self._lock:
            if self._rows is not None:
                wanted = ((each, each.request) for each in self._queue if not each.future.cancelled())
                self._rows.look_ahead(wanted, self._resident_tokens)
            while self._queue and len(members) < self._config.max_batch_requests:
                waiting = self._queue[0]
                if not self._is_live(waiting, now):
                    self._queue.popleft()
                    continue
                if self._rows is not None and not self._rows.are_there(waiting):
                    passed.append(self._queue.popleft())
                    continue
                member = self._plan(waiting, budget if members else None, now)
                if member is None:
                    is_possible = members or self._rows is not None or not self._kv.is_idle
                    assert is_possible, "one request must always fit an idle pool"
                    break
                self._queue.popleft()
                members.append(member)
                budget -= member.num_tokens
            self._queue.extendleft(reversed(passed))
            if not members:
                return None
            batch = Batch(members, now)
            self._in_flight.append(batch)
        return batch

    def _is_live(self, waiting: Waiting, now: float) -> bool:
        """Whether a request may still run: it is not cancelled, and its deadline is expected to hold."""
        if not waiting.claim():
            return False
        if waiting.deadline_s is None and self._rows is None:
            return True
        step_s = needed_s(self._times, len(self._queue))
        if self._is_stopped_by_disk(waiting, now + step_s):
            return False
        if waiting.deadline_s is None or now + step_s <= waiting.deadline_s:
            return True
        self.refused += 1
        waited = f"{(now - waiting.arrived_s) * 1e3:.1f} ms in the queue"
        is_past = now > waiting.deadline_s
        why = f"passed after {waited}" if is_past else f"would pass in a step of about {step_s * 1e3:.1f} ms, {waited}"
        self._expired.append(Reply(waiting.future, DeadlineExceeded(f"the deadline {why}")))
        return False

    def _is_stopped_by_disk(self, waiting: Waiting, start_s: float) -> bool:
        """Refuse a request whose rows cannot be read from disk, or not in time; start_s: if its step began now."""
        if self._rows is None:
            return False
        problem = self._rows.problem(waiting, None if waiting.deadline_s is None else waiting.deadline_s - start_s)
        if problem is not None:
            self.refused += isinstance(problem, DeadlineExceeded)
            self._expired.append(Reply(waiting.future, problem))
        return problem is not None

    def _resident_tokens(self, request: Prepared) -> int:
        return self._kv.resident_tokens(request.history)

    @property
    def waits_for_rows(self) -> bool:
        """Whether some request waits for rows from disk."""
        return self._rows is not None and self._rows.is_waiting

    def wait_for_rows(self, timeout_s: float) -> None:
        """Wait until the rows of a request are there; with no lock held."""
        if self._rows is not None:
            self._rows.wait(timeout_s)

    def keep_rows_ahead(self, users: Iterable[UserId]) -> None:
        """Give up rows for histories that are not computed ahead any more: those of all other users."""
        if self._rows is not None:
            self._rows.drop_ahead(users)

    def take_expired(self) -> list[Reply]:
        """Return the refusals of requests whose deadline passed in the queue since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def _plan(self, waiting: Waiting, budget: int | None, now: float) -> Scheduled | None:
        """Pin a request's pages if it fits the token budget; the first request of a batch has no budget."""
        request = waiting.request
        history, most = request.history, request.most_tokens
        if budget is not None and most > budget and not may_fit(budget, most, self._kv.resident_tokens(history)):
            return None
        plan = self._kv.plan(history, now)
        if plan is None:
            return None
        num_tokens = most - plan.num_resident
        if budget is not None and num_tokens > budget:  # less was fresh than was resident
            self._kv.abort(plan)
            return None
        if self._rows is None:
            return Scheduled(waiting, plan, num_tokens)
        rows = self._rows.take(waiting, request, plan.num_resident)
        if rows is None:  # less is fresh than its rows were asked for
            self._kv.abort(plan)
            return None
        return Scheduled(waiting, plan, num_tokens, rows)

    def has_unreadable_rows(self, user_id: UserId) -> bool:
        """Whether rows of a history that is computed ahead cannot be read from disk."""
        return self._rows is not None and self._rows.are_unreadable_ahead(user_id)

    def plan_ahead(self, chunk: Prepared, now: float) -> Scheduled | None:
        """Pin pages for a part of a history that is computed before its rank; None if pages or rows are not there."""
        if self._rows is not None and not self._rows.are_there_ahead(chunk, self._resident_tokens(chunk)):
            return None
        plan = self._kv.plan(chunk.history, now)
        if plan is None:
            return None
        if not plan.num_new:  # with one token a page, all of them may come from the host, but a step computes an event
            plan = plan._replace(num_resident=plan.num_resident - 1, loads=plan.loads[:-1])
        rows = None if self._rows is None else self._rows.take_ahead(chunk, plan.num_resident)
        if self._rows is not None and rows is None:
            self._kv.abort(plan)
            return None
        waiting = Waiting(chunk, Future(), now, deadline_s=None)
        return Scheduled(waiting, plan, plan.num_new + chunk.request_rows.size, rows)

    def batch_ahead(self, members: list[Scheduled], now: float) -> Batch:
        """Make a batch of parts from `plan_ahead`. Requests that arrive while it runs do not expect to wait for it."""
        return Batch(members, now, is_ahead=True)

    def commit(self, batch: Batch, now: float, non_finite: Collection[int] = ()) -> float:
        """Keep the pages of a step that has ended; return its seconds since it began or the step before it ended.

        non_finite: members whose scores are not finite; the KV computed for them is not kept.
        """
        kv, is_ahead = self._kv, batch.is_ahead
        for i, member in enumerate(batch.members):
            if i in non_finite:
                kv.reject(member.plan)
            else:
                kv.commit(member.plan, now, is_ahead=is_ahead)
            if member.rows is not None:
                self._release(member.rows)
        self._kv.restore_reserve()
        with self._lock:
            took_s = now - max(batch.started_s, self._last_ended_s)
            self._in_flight = [each for each in self._in_flight if each is not batch]
            self._last_ended_s = now
            self._times = with_step(self._times, took_s, 0 if batch.is_ahead else len(batch.members))
        return took_s

    def abort(self, batch: Batch) -> None:
        """Release the pages of a step that failed; nothing it wrote is kept."""
        for member in batch.members:
            self._kv.abort(member.plan)
            self._release(member.rows)
        with self._lock:
            self._in_flight = [each for each in self._in_flight if each is not batch]

    def _release(self, rows: RowTicket | None) -> None:
        if self._rows is not None and rows is not None:
            self._rows.release(rows)

    def withdraw(self, futures: "Sequence[Future[RankResult]]") -> None:
        """Cancel requests that have not started and take them out of the queue."""
        with self._lock:
            for future in futures:
                future.cancel()
            self._queue = deque(waiting for waiting in self._queue if not waiting.future.cancelled())

    def drain(self, error: HelmRecError) -> None:
        """Refuse all waiting requests, and all that are submitted later."""
        with self._lock:
            self._ended_by = error
            waiting, self._queue = self._queue, deque()
            if self._rows is not None:
                self._rows.close()
        for reply in _refusals(waiting, error):
            reply.send()

    def forget(self, user_id: UserId) -> list[Reply]:
        """Take a user's requests out of the queue and return their refusals."""
        with self._lock:
            taken = [waiting for waiting in self._queue if waiting.request.history.user_id == user_id]
            self._queue = deque(waiting for waiting in self._queue if waiting not in taken)
            self.refused += len(taken)
        return _refusals(taken, Forgotten(f"user {user_id} was forgotten while the request waited"))

    def check(self) -> None:
        assert len(self._queue) <= self._config.queue_limit
        done = [waiting for waiting in self._queue if waiting.future.done() and not waiting.future.cancelled()]
        assert not done, "a request waits that has been answered"


def _refusals(waiting: Iterable[Waiting], error: HelmRecError) -> list[Reply]:
    """Refusals of requests that left the queue, without those that their clients have cancelled."""
    return [Reply(each.future, error) for each in waiting if each.claim()]
