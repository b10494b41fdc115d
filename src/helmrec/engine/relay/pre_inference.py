"""Pre-inference on one engine: computes prefixes while no request waits, and holds them until their rank request.

`trigger` decides and `leases` does the bookkeeping; planned chunks run as ordinary steps. Calls need the engine's lock
unless their docstring says otherwise.
"""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from helmrec.config import RelayConfig
from helmrec.costs.steps import StepCosts
from helmrec.engine.intake import Prepared
from helmrec.engine.relay.leases import ComputeShare, Leases
from helmrec.engine.relay.trigger import LEAST_IDLE, SHARE_S, PrefillSignal, RelayLoad, Verdict, decide
from helmrec.engine.scheduler import Batch, Reply, Scheduled, Scheduler
from helmrec.errors import HelmRecError
from helmrec.memory.kv_cache import KVCache
from helmrec.types import Lease, PrefillRequest, PrefillResult, UserId


@dataclass(frozen=True, slots=True)
class RelayStats:
    """Counts since the start, and the leases of now."""

    verdicts: dict[str, int]  # signals by verdict
    leases: int
    held_pages: int
    used: int  # leases whose rank request arrived in time
    expired: int
    lost: int  # leases whose prefix was evicted while it was computed
    compute_share: float  # share of time spent recently on, or promised to, computing ahead
    steps: int  # steps that computed ahead
    busy_s: float  # time of these steps
    failed: int  # steps that failed


class _WaitingSignal(NamedTuple):
    """A signal that waits for the end of the running step."""

    request: PrefillRequest
    history: Prepared
    future: "Future[PrefillResult]"


@dataclass(slots=True, eq=False)
class _Job:
    """A history to be computed for a lease."""

    whole: Prepared
    lease: Lease
    reached: int = 0  # resident tokens after its last chunk

    @property
    def user_id(self) -> UserId:
        return self.lease.user_id


class Relay:
    """Takes signals, and plans chunks of prefixes while no request waits."""

    def __init__(self, config: RelayConfig, scheduler: Scheduler, kv: KVCache, costs: StepCosts) -> None:
        self._config = config
        self._scheduler = scheduler
        self._kv = kv
        self._costs = costs
        self._leases = Leases(config.longest_hold_ms)
        self._jobs: deque[_Job] = deque()
        self._in_step: list[_Job] = []  # jobs with planned or running chunks, in the order of the batch
        self._waiting: deque[_WaitingSignal] = deque()  # thread-safe without the engine's lock
        self._ended_by: HelmRecError | None = None
        self._share, self._busy_share = ComputeShare(), ComputeShare()
        self._verdicts: Counter[Verdict] = Counter()
        self._steps = self._failed = 0
        self._busy_s = 0.0

    @property
    def is_used(self) -> bool:
        return bool(self._verdicts)

    def submit(self, request: PrefillRequest, history: Prepared) -> "Future[PrefillResult]":
        """Take a signal, without the engine's lock; the next step decides about it."""
        future: Future[PrefillResult] = Future()
        future.set_running_or_notify_cancel()
        if len(self._waiting) >= self._config.max_leases:  # signals arrive faster than steps end
            self._verdicts[Verdict.TOO_BUSY] += 1
            future.set_result(PrefillResult(Verdict.TOO_BUSY, lease=None))
        else:
            self._waiting.append(_WaitingSignal(request, history, future))
            if self._ended_by is not None:  # closed in the meantime: no step will decide
                self.refuse_waiting(self._ended_by)
        return future

    def begin_step(self, kv_pages: int, now: float) -> list[Reply]:
        """End leases and decide about waiting signals; the caller completes their futures without any lock."""
        if not self._leases and not self._waiting:
            return []
        self.expire(now)
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return [Reply(each.future, self._taken(each, kv_pages, now)) for each in waiting]

    def _taken(self, signal: _WaitingSignal, kv_pages: int, now: float) -> PrefillResult | Exception:
        """The verdict, or the error of this signal, so that the other signals are decided too."""
        try:
            return self._take(signal.request, signal.history, kv_pages, now)
        except Exception as error:
            return error

    def refuse_waiting(self, error: Exception) -> None:
        """Fail all waiting signals; needs no lock."""
        with suppress(IndexError):  # empty, possibly emptied by another thread
            while True:
                self._waiting.popleft().future.set_exception(error)

    def close(self, error: HelmRecError) -> None:
        """Fail waiting signals and all later ones; needs no lock."""
        self._ended_by = error
        self.refuse_waiting(error)

    def signal(self, request: PrefillRequest, history: Prepared, kv_pages: int, now: float) -> PrefillResult:
        """Decide about a signal at once."""
        self.expire(now)
        return self._take(request, history, kv_pages, now)

    def _take(self, request: PrefillRequest, history: Prepared, kv_pages: int, now: float) -> PrefillResult:
        total, user_id = history.history.num_tokens, request.user_id
        missing = max(0, self._num_ahead(history) - self._kv.resident_tokens(history.history))
        num_pages = -(-total // self._kv.limits.page_tokens)
        signal = PrefillSignal(
            inline_ms=self._inline_ms(total, missing, request.num_candidates, now),
            budget_ms=request.budget_ms or self._config.budget_ms,
            ahead_s=self._ahead_s(total, missing),
            num_missing=missing,
            num_pages=num_pages,
            is_held=user_id in self._leases,
        )
        load = RelayLoad(self._leases.held_pages, kv_pages, len(self._leases), self._compute_share(now))
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
        """The share of time for computing ahead: what was spent recently, and what is promised."""
        return self._share.share(now) + self._leases.promised_s / SHARE_S

    def _ahead_s(self, total: int, missing: int) -> float:
        """Expected time to compute the rest of a history ahead, in chunks."""
        num_steps = -(-missing // self._scheduler.chunk_tokens)
        floor_s = self._costs.seconds(0, 0.0, is_whole_step=True)
        return self._costs.seconds(missing, missing * (total - missing / 2)) + num_steps * floor_s

    def _inline_ms(self, total: int, missing: int, num_candidates: int, now: float) -> float:
        """Expected latency of the rank request without computing ahead: its step, and its wait for others.

        The requests that wait now are known. Those that arrive before it are estimated from the recent load, which
        includes steps that compute ahead.
        """
        pairs = missing * (total - missing / 2) + num_candidates * total
        step_ms = 1e3 * self._costs.seconds(missing + num_candidates, pairs, is_whole_step=True)
        idle = max(LEAST_IDLE, 1 - self._busy_share.share(now))
        return self._scheduler.wait_ms + step_ms / idle

    def next_batch(self, now: float) -> Batch | None:
        """A step with the next chunk of the oldest prefix, and of later ones while there is room.

        None if there is nothing to compute, or if too few pages can be freed now.
        """
        members: list[Scheduled] = []
        looked_at: list[_Job] = []
        left, room = self._scheduler.chunk_tokens, self._scheduler.max_tokens
        self._scheduler.keep_rows_ahead(job.user_id for job in self._jobs)
        while self._jobs and left > 0 and len(members) < self._scheduler.max_requests:
            job = self._jobs.popleft()
            if not self._is_wanted(job):
                continue
            looked_at.append(job)
            chunk = self._next_chunk(job.whole, left)
            most = chunk.history.num_tokens + chunk.request_rows.size  # in case no resident token is fresh
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
        """Whether a job has a lease and tokens left to compute.

        If computed tokens were evicted, the pool is too small for them: the lease ends, since computing them again
        might never end. It ends too if rows cannot be read from disk.
        """
        if not self._leases.is_held(job.lease):
            return False
        resident = self._kv.resident_tokens(job.whole.history)
        if resident < job.reached or self._scheduler.has_unreadable_rows(job.user_id):
            self._leases.lose(job.user_id)
            self._kv.release(job.user_id)
            return False
        if resident >= self._num_ahead(job.whole):
            self._leases.end_promise(job.user_id)
            return False
        return True

    def _num_ahead(self, whole: Prepared) -> int:
        """Tokens of a history to compute ahead; never a whole number of pages.

        A step must compute at least one event, even if all full pages come from the host.
        """
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
        """End leases whose time is over, and make the prefixes of the others the last to be evicted."""
        for user_id in self._leases.expire(now):
            self._kv.release(user_id)
        for user_id in self._leases.users:
            self._kv.hold(user_id)

    def note_step(self, batch: Batch, took_s: float, now: float) -> None:
        """Record a step that has ended; end the leases of the users whose rank requests it served."""
        self._busy_share.add(now, took_s)
        if batch.is_ahead:
            self._steps += 1
            self._busy_s += took_s
            self._share.add(now, took_s)
            for job, member in zip(self._in_step, batch.members, strict=True):
                job.reached = member.plan.num_tokens
            return
        for member in batch.members if self._leases else ():
            self._leases.use(member.request.history.user_id)

    def note_failed(self, batches: Sequence[Batch]) -> None:
        """Drop the leases of failed steps that computed ahead."""
        for batch in batches:
            self._failed += batch.is_ahead
            for member in batch.members if batch.is_ahead else ():
                self.drop(member.request.history.user_id)

    def drop(self, user_id: UserId) -> None:
        """End the lease and the jobs of a user that is forgotten, or whose step failed."""
        self._leases.drop(user_id)
        self._jobs = deque(job for job in self._jobs if job.user_id != user_id)

    def forget(self, user_id: UserId) -> list[Reply]:
        """Drop a user and refuse its waiting signals; the caller completes their futures without any lock."""
        self.drop(user_id)
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._waiting.extendleft(reversed([each for each in waiting if each.request.user_id != user_id]))
        futures = [each.future for each in waiting if each.request.user_id == user_id]
        self._verdicts[Verdict.FORGOTTEN] += len(futures)
        return [Reply(future, PrefillResult(Verdict.FORGOTTEN, lease=None)) for future in futures]

    def stats(self, now: float) -> RelayStats:
        """Statistics since the start."""
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
        """Assert the invariants of the leases."""
        self._leases.check()


def _first_tokens(whole: Prepared, num_tokens: int) -> Prepared:
    """The history cut after `num_tokens` tokens."""
    history = whole.history
    num_events = max(0, num_tokens - history.context_rows.size)
    if num_events >= whole.num_events:
        return whole
    cut = replace(
        history,
        event_rows=history.event_rows[:, :num_events],
        states=history.states[: history.context_rows.size + num_events],
    )
    times = None if whole.times is None else whole.times[: num_events + 1]
    return replace(whole, history=cut, columns=whole.columns[:, :num_events], times=times)
