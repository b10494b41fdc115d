"""Pre-inference on one engine: prefixes computed while nobody waits, and held until their rank.

Decides through `trigger` and `leases`; what it plans goes the way of every other step. All calls are made with the
engine's lock held.
"""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from helmrec.config import RelayConfig
from helmrec.engine.intake import Prepared
from helmrec.engine.relay.leases import ComputeShare, Leases
from helmrec.engine.relay.trigger import SHARE_S, Load, Signal, Verdict, decide
from helmrec.engine.scheduler import Batch, Reply, Scheduled, Scheduler
from helmrec.errors import HelmRecError
from helmrec.memory.expander import StepCosts
from helmrec.memory.kv_cache import KVCache
from helmrec.types import Lease, PrefillRequest, PrefillResult

_LEAST_IDLE = 0.05  # share of the time: what is expected of a busier node is beyond any budget anyway


@dataclass(frozen=True, slots=True)
class RelayStats:
    """Counts since the start, and what is held now."""

    verdicts: dict[str, int]  # signals by what became of them
    leases: int
    held_pages: int
    used: int  # leases whose rank came in time
    expired: int
    lost: int  # leases dropped because what was computed for them did not stay in the pool
    compute_share: float  # of late time that went, or is about to go, into computing ahead
    steps: int  # that computed ahead
    busy_s: float  # that they took
    failed: int  # steps that did not


class _Signal(NamedTuple):
    """A signal that waits for the step that runs."""

    request: PrefillRequest
    history: Prepared
    future: "Future[PrefillResult]"


@dataclass(slots=True, eq=False)
class _Job:
    """A history to be computed for a lease."""

    whole: Prepared
    lease: Lease
    reached: int = 0  # tokens that were there when its last chunk had been computed

    @property
    def user_id(self) -> int:
        return self.lease.user_id


class Relay:
    """Signals in, chunks of prefixes out, whenever no rank waits."""

    def __init__(self, config: RelayConfig, scheduler: Scheduler, kv: KVCache, costs: StepCosts) -> None:
        self._config = config
        self._scheduler = scheduler
        self._kv = kv
        self._costs = costs
        self._leases = Leases(config.longest_hold_ms)
        self._jobs: deque[_Job] = deque()
        self._in_step: list[_Job] = []  # whose chunks are planned or running, in the order of the batch
        self._waiting: deque[_Signal] = deque()  # its own calls are safe without the engine's lock
        self._ended_by: HelmRecError | None = None
        self._share, self._busy_share = ComputeShare(), ComputeShare()
        self._verdicts: Counter[Verdict] = Counter()
        self._steps = self._failed = 0
        self._busy_s = 0.0

    @property
    def is_used(self) -> bool:
        return bool(self._verdicts)

    def submit(self, request: PrefillRequest, history: Prepared) -> "Future[PrefillResult]":
        """Take a signal without waiting for the step that runs, so without the engine's lock; the next one decides."""
        future: Future[PrefillResult] = Future()
        future.set_running_or_notify_cancel()
        if len(self._waiting) >= self._config.max_leases:  # what comes faster than steps is not worth looking at
            self._verdicts[Verdict.TOO_BUSY] += 1
            future.set_result(PrefillResult(Verdict.TOO_BUSY, lease=None))
        else:
            self._waiting.append(_Signal(request, history, future))
            if self._ended_by is not None:  # since the caller looked: nobody else will tell it
                self.refuse_waiting(self._ended_by)
        return future

    def begin_step(self, kv_pages: int, now: float) -> list[Reply]:
        """End leases, and decide about signals submitted since; the caller tells them with no lock held."""
        self.expire(now)
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return [Reply(each.future, self._taken(each, kv_pages, now)) for each in waiting]

    def _taken(self, signal: _Signal, kv_pages: int, now: float) -> PrefillResult | Exception:
        """The verdict, or what went wrong with this signal: the others are decided all the same."""
        try:
            return self._take(signal.request, signal.history, kv_pages, now)
        except Exception as error:
            return error

    def refuse_waiting(self, error: Exception) -> None:
        """Needs no lock."""
        with suppress(IndexError):  # empty, perhaps because another thread does the same
            while True:
                self._waiting.popleft().future.set_exception(error)

    def close(self, error: HelmRecError) -> None:
        """Refuse signals that wait, and whatever is submitted after."""
        self._ended_by = error
        self.refuse_waiting(error)

    def signal(self, request: PrefillRequest, history: Prepared, kv_pages: int, now: float) -> PrefillResult:
        """Take a user's history to be computed ahead, or say why not."""
        self.expire(now)
        return self._take(request, history, kv_pages, now)

    def _take(self, request: PrefillRequest, history: Prepared, kv_pages: int, now: float) -> PrefillResult:
        total, user_id = history.history.num_tokens, request.user_id
        missing = max(0, self._num_ahead(history) - self._kv.resident_tokens(history.history))
        num_pages = -(-total // self._kv.limits.page_tokens)
        signal = Signal(
            inline_ms=self._inline_ms(total, missing, request.num_candidates, now),
            budget_ms=request.budget_ms or self._config.budget_ms,
            ahead_s=self._ahead_s(total, missing),
            num_missing=missing,
            num_pages=num_pages,
            is_held=user_id in self._leases,
        )
        load = Load(self._leases.held_pages, kv_pages, len(self._leases), self._compute_share(now))
        verdict = decide(self._config, signal, load)
        self._verdicts[verdict] += 1
        if verdict not in (Verdict.ADMITTED, Verdict.RESIDENT):
            return PrefillResult(verdict, lease=None)
        self._kv.hold(user_id)
        promised_s = signal.ahead_s if verdict is Verdict.ADMITTED else 0.0
        lease = self._leases.grant(user_id, num_pages, now, request.hold_ms or self._config.hold_ms, promised_s)
        if verdict is Verdict.ADMITTED:
            self._jobs.append(_Job(history, lease))
        return PrefillResult(verdict, lease)

    def _compute_share(self, now: float) -> float:
        """Of late time, that went into computing ahead, and what has been promised of the time to come."""
        return self._share.share(now) + self._leases.promised_s / SHARE_S

    def _ahead_s(self, total: int, missing: int) -> float:
        """What computing the rest of a history ahead would take, chunk by chunk."""
        num_steps = -(-missing // self._scheduler.chunk_tokens)
        floor_s = self._costs.seconds(0, 0.0, is_whole_step=True)
        return self._costs.seconds(missing, missing * (total - missing / 2)) + num_steps * floor_s

    def _inline_ms(self, total: int, missing: int, num_candidates: int, now: float) -> float:
        """What the rank would take by itself: its step, as steps so far tell, and its wait behind others.

        Those that wait now are known; those that will come before it are expected to be as many as of late, and what
        is computed ahead of ranks now would be part of them.
        """
        pairs = missing * (total - missing / 2) + num_candidates * total
        step_ms = 1e3 * self._costs.seconds(missing + num_candidates, pairs, is_whole_step=True)
        idle = max(_LEAST_IDLE, 1 - self._busy_share.share(now))
        return self._scheduler.wait_ms + step_ms / idle

    def next_batch(self, now: float) -> Batch | None:
        """The next chunk: of the oldest prefix, and of those after it while there is room in the step.

        None if none is wanted, or its pages are held by others for now.
        """
        members: list[Scheduled] = []
        looked_at: list[_Job] = []
        left, room = self._scheduler.chunk_tokens, self._scheduler.max_tokens
        while self._jobs and left > 0 and len(members) < self._scheduler.max_requests:
            job = self._jobs.popleft()
            if not self._is_wanted(job):
                continue
            looked_at.append(job)
            chunk = self._next_chunk(job.whole, left)
            most = chunk.history.num_tokens + chunk.request_rows.size  # if nothing that is resident were fresh
            member = None if members and most > room else self._scheduler.plan_ahead(chunk, now)
            if member is None:
                break
            members.append(member)
            left -= member.num_tokens
            room -= member.num_tokens
        self._jobs.extendleft(reversed(looked_at))
        self._in_step = looked_at[: len(members)]
        return self._scheduler.batch_ahead(members, now) if members else None

    def _is_wanted(self, job: _Job) -> bool:
        """Whether there is more to compute. A lease is dropped if what was computed for it is not there any more:
        the pool has become too small for it, and to compute it again would not end."""
        if not self._leases.is_held(job.lease):
            return False
        resident = self._kv.resident_tokens(job.whole.history)
        if resident < job.reached:
            self._leases.lose(job.user_id)
            self._kv.release(job.user_id)
            return False
        if resident >= self._num_ahead(job.whole):
            self._leases.keep_promise(job.user_id)
            return False
        return True

    def _num_ahead(self, whole: Prepared) -> int:
        """Tokens of a history to compute ahead. A step must compute an event, though pages may come from the host:
        so none ends with a page, and the rank computes a last token that does."""
        total = whole.history.num_tokens
        num_tokens = total - (total % self._kv.limits.page_tokens == 0)
        return num_tokens if num_tokens > whole.history.context_rows.size else 0

    def _next_chunk(self, whole: Prepared, num_tokens: int) -> Prepared:
        """The history up to the end of its next chunk."""
        resident = max(self._kv.resident_tokens(whole.history), whole.history.context_rows.size)
        end = resident + num_tokens
        end += end % self._kv.limits.page_tokens == 0
        return _first_tokens(whole, min(end, self._num_ahead(whole)))

    def expire(self, now: float) -> None:
        """Let go what no rank has come for, and keep what is held away from eviction."""
        for user_id in self._leases.expire(now):
            self._kv.release(user_id)
        for user_id in self._leases.users:
            self._kv.hold(user_id)

    def note_step(self, batch: Batch, took_s: float, now: float) -> None:
        """A step has ended. Where it served ranks, what was held for their users has had its use."""
        self._busy_share.add(now, took_s)
        if batch.is_ahead:
            self._steps += 1
            self._busy_s += took_s
            self._share.add(now, took_s)
            for job, member in zip(self._in_step, batch.members, strict=True):
                job.reached = member.plan.num_tokens
            return
        for member in batch.members:
            self._leases.use(member.request.history.user_id)

    def note_failed(self, batches: Sequence[Batch]) -> None:
        """What these were to compute ahead is not held."""
        for batch in batches:
            self._failed += batch.is_ahead
            for member in batch.members if batch.is_ahead else ():
                self.drop(member.request.history.user_id)

    def drop(self, user_id: int) -> None:
        """The user is forgotten, or computing ahead for it has failed: nothing of it is computed any more."""
        self._leases.drop(user_id)
        self._jobs = deque(job for job in self._jobs if job.user_id != user_id)

    def forget(self, user_id: int) -> list[Reply]:
        """Drop the user, and decide against its signals that wait; the caller tells them with no lock held."""
        self.drop(user_id)
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._waiting.extendleft(reversed([each for each in waiting if each.request.user_id != user_id]))
        futures = [each.future for each in waiting if each.request.user_id == user_id]
        self._verdicts[Verdict.FORGOTTEN] += len(futures)
        return [Reply(future, PrefillResult(Verdict.FORGOTTEN, lease=None)) for future in futures]

    def stats(self, now: float) -> RelayStats:
        leases = self._leases
        return RelayStats(
            verdicts={verdict.value: self._verdicts[verdict] for verdict in Verdict},
            leases=len(leases),
            held_pages=leases.held_pages,
            used=leases.used,
            expired=leases.expired,
            lost=leases.lost,
            compute_share=self._compute_share(now),
            steps=self._steps,
            busy_s=self._busy_s,
            failed=self._failed,
        )

    def check(self) -> None:
        self._leases.check()


def _first_tokens(whole: Prepared, num_tokens: int) -> Prepared:
    """The same history cut after so many tokens."""
    history = whole.history
    num_events = max(0, num_tokens - history.context_rows.size)
    if num_events >= whole.num_events:
        return whole
    cut = replace(
        history,
        event_rows=history.event_rows[:, :num_events],
        states=history.states[: history.context_rows.size + num_events],
    )
    return replace(whole, history=cut, columns=whole.columns[:, :num_events])
