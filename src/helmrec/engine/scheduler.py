"""Which requests run next: a bounded queue, deadlines, ragged micro-batches under a token budget.

Pure bookkeeping: time comes in as an argument and scores as values. It takes what is queued and never waits
for a fuller batch.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from helmrec.config import EngineConfig
from helmrec.engine.intake import Prepared
from helmrec.errors import DeadlineExceeded, HelmRecError, QueueFull
from helmrec.memory.kv_cache import KVCache
from helmrec.memory.prefix import KVPlan
from helmrec.types import RankResult

_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request in the queue."""

    request: Prepared
    future: "Future[RankResult]"
    arrived_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A request in a batch, its history pinned in pages."""

    waiting: Waiting
    plan: KVPlan

    @property
    def request(self) -> Prepared:
        return self.waiting.request

    @property
    def num_tokens(self) -> int:
        """Tokens this request computes."""
        return self.plan.num_new + self.request.request_rows.size + self.request.num_candidates

    @property
    def num_pairs(self) -> float:
        """Token pairs its attention looks at."""
        plan = self.plan
        others = self.num_tokens - plan.num_new
        return plan.num_new * (plan.num_resident + plan.num_new / 2) + others * plan.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run in one step."""

    members: list[Scheduled]
    started_s: float


class Scheduler:
    """First come, first served."""

    def __init__(self, config: EngineConfig, kv: KVCache) -> None:
        self._config = config
        self._kv = kv
        self._queue: deque[Waiting] = deque()
        self._ms_per_request = 0.0
        self.refused = 0

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def submit(self, request: Prepared, now: float) -> "Future[RankResult]":
        """Queue a request, or refuse it at once if it has no chance."""
        if len(self._queue) >= self._config.queue_limit:
            self.refused += 1
            raise QueueFull(
                f"the queue is full: {len(self._queue)} requests wait, the limit is {self._config.queue_limit}"
            )
        deadline_ms = request.deadline_ms or self._config.deadline_ms
        expected_ms = self._ms_per_request * (len(self._queue) + 1)
        if self._queue and deadline_ms is not None and expected_ms > deadline_ms:  # an idle engine always tries
            self.refused += 1
            raise DeadlineExceeded(
                f"a deadline of {deadline_ms:g} ms cannot be met: {len(self._queue)} requests wait, "
                f"about {expected_ms:.1f} ms"
            )
        deadline_s = None if deadline_ms is None else now + deadline_ms / 1e3
        waiting = Waiting(request, Future(), now, deadline_s)
        self._queue.append(waiting)
        return waiting.future

    def next_batch(self, now: float) -> Batch | None:
        """The oldest requests that fit one step, planned and pinned; None if nothing waits."""
        members: list[Scheduled] = []
        budget = self._config.max_batch_tokens
        while self._queue and len(members) < self._config.max_batch_requests:
            head = self._queue[0]
            if head.deadline_s is not None and now > head.deadline_s:
                self._expire(self._queue.popleft(), now)
                continue
            if members and not self._fits(head.request, budget):
                break
            if head.future.cancelled():
                self._queue.popleft()
                continue
            plan = self._kv.plan(head.request.history, now)
            if plan is None:
                assert members, "one request must always fit an idle pool"
                break
            if not head.future.set_running_or_notify_cancel():
                self._kv.abort(plan)
                continue
            members.append(Scheduled(self._queue.popleft(), plan))
            budget -= members[-1].num_tokens
        return Batch(members, now) if members else None

    def _fits(self, request: Prepared, budget: int) -> bool:
        """Looks for resident tokens only if the request would not fit without any."""
        most = request.history.num_tokens + request.request_rows.size + request.num_candidates
        return most <= budget or most - self._kv.resident_tokens(request.history) <= budget

    def _expire(self, waiting: Waiting, now: float) -> None:
        self.refused += 1
        late_ms = (now - waiting.arrived_s) * 1e3
        waiting.future.set_exception(DeadlineExceeded(f"the deadline passed after {late_ms:.1f} ms in the queue"))

    def commit(self, batch: Batch, results: list[RankResult], now: float) -> None:
        """The step has ended: settle its pages and hand out the results."""
        for member, result in zip(batch.members, results, strict=True):
            self._kv.commit(member.plan, now)
            member.waiting.future.set_result(result)
        took_ms = (now - batch.started_s) * 1e3 / len(batch.members)
        self._ms_per_request += _SMOOTHING * (took_ms - self._ms_per_request)

    def fail(self, batch: Batch, error: BaseException) -> None:
        """The step failed: nothing it wrote counts, and each of its requests hears why."""
        for member in batch.members:
            self._kv.abort(member.plan)
            member.waiting.future.set_exception(error)

    def withdraw(self, futures: "list[Future[RankResult]]") -> None:
        """Take back what was submitted and has not started."""
        for future in futures:
            future.cancel()
        self._queue = deque(waiting for waiting in self._queue if not waiting.future.cancelled())

    def drain(self, error: HelmRecError) -> None:
        """Refuse everything that still waits."""
        while self._queue:
            self._queue.popleft().future.set_exception(error)
