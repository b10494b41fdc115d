"""Pre-inference on one engine: prefixes computed while nobody waits, and held until their rank.

Decides through `helmrec.relay`; what it plans goes the way of every other step. All calls are made with the engine's
lock held.
"""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from helmrec.config import RelayConfig
from helmrec.engine.intake import Prepared
from helmrec.engine.scheduler import Batch, Scheduled, Scheduler, Waiting
from helmrec.memory.expander import StepCosts
from helmrec.memory.kv_cache import KVCache
from helmrec.relay.leases import ComputeShare, Leases
from helmrec.relay.trigger import Load, Signal, Verdict, decide
from helmrec.types import Lease, PrefillRequest, PrefillResult


@dataclass(frozen=True, slots=True)
class RelayStats:
    """Counts since the start, and what is held now."""

    verdicts: dict[str, int]
    leases: int
    held_pages: int
    used: int
    expired: int
    compute_share: float


class Relay:
    """Signals in, chunks of prefixes out, whenever no rank waits."""

    def __init__(self, config: RelayConfig, scheduler: Scheduler, kv: KVCache, costs: StepCosts) -> None:
        self._config = config
        self._scheduler = scheduler
        self._kv = kv
        self._costs = costs
        self._leases = Leases()
        self._jobs: deque[Prepared] = deque()
        self._share = ComputeShare()
        self._verdicts: Counter[Verdict] = Counter()

    @property
    def is_used(self) -> bool:
        return bool(self._verdicts)

    def signal(self, request: PrefillRequest, history: Prepared, kv_pages: int, now: float) -> PrefillResult:
        """Take a user's history to be computed ahead, or say why not."""
        self.expire(now)
        total, user_id = history.history.num_tokens, request.user_id
        missing = total - self._kv.resident_tokens(history.history)
        num_pages = -(-total // self._kv.limits.page_tokens)
        signal = Signal(
            inline_ms=self._scheduler.wait_ms + self._inline_ms(total, missing, request.num_candidates),
            budget_ms=request.budget_ms or self._config.budget_ms,
            num_missing=missing,
            num_pages=num_pages,
            is_held=user_id in self._leases,
        )
        load = Load(self._leases.held_pages, kv_pages, len(self._leases), self._share.share(now))
        verdict = decide(self._config, signal, load)
        self._verdicts[verdict] += 1
        if verdict not in (Verdict.ADMITTED, Verdict.RESIDENT):
            return PrefillResult(verdict, lease=None)
        lease = self._grant(user_id, num_pages, now + (request.hold_ms or self._config.hold_ms) / 1e3)
        if verdict is Verdict.ADMITTED:
            self._jobs.append(history)
            self._share.add(now, self._costs.seconds(missing, missing * (total - missing / 2)))
        return PrefillResult(verdict, lease)

    def _grant(self, user_id: int, num_pages: int, expires_s: float) -> Lease:
        self._kv.hold(user_id)
        return self._leases.grant(user_id, num_pages, expires_s)

    def _inline_ms(self, total: int, missing: int, num_candidates: int) -> float:
        """What the rank would take by itself, as steps so far tell."""
        pairs = missing * (total - missing / 2) + num_candidates * total
        return 1e3 * self._costs.seconds(missing + num_candidates, pairs, is_whole_step=True)

    def next_batch(self, now: float) -> Batch | None:
        """The next chunk of the oldest prefix; None if none is wanted, or its pages are held by others for now."""
        while self._jobs:
            whole = self._jobs[0]
            resident = self._kv.resident_tokens(whole.history)
            if resident == whole.history.num_tokens or whole.history.user_id not in self._leases:
                self._jobs.popleft()
                continue
            chunk = _first_tokens(whole, resident + self._config.chunk_tokens)
            plan = self._kv.plan(chunk.history, now)
            if plan is None:
                return None
            waiting = Waiting(chunk, Future(), now, deadline_s=None)
            return Batch([Scheduled(waiting, plan, plan.num_new + chunk.request_rows.size)], now, is_ahead=True)
        return None

    def expire(self, now: float) -> None:
        """Let go what no rank has come for, and keep what is held away from eviction."""
        for user_id in self._leases.expire(now):
            self._kv.release(user_id)
        for user_id in self._leases.users:
            self._kv.hold(user_id)

    def note_ranks(self, user_ids: Sequence[int]) -> None:
        """These users' ranks have been served: what was held for them has had its use."""
        for user_id in user_ids:
            if user_id in self._leases:
                self._leases.use(user_id)

    def note_failed(self, batches: Sequence[Batch]) -> None:
        """What these were to compute ahead is not held."""
        for batch in batches:
            for member in batch.members if batch.is_ahead else ():
                self.drop(member.request.history.user_id)

    def drop(self, user_id: int) -> None:
        """The user is forgotten, or computing ahead for it has failed: nothing of it is computed any more."""
        self._leases.drop(user_id)
        self._jobs = deque(job for job in self._jobs if job.history.user_id != user_id)

    def stats(self, now: float) -> RelayStats:
        leases = self._leases
        return RelayStats(
            verdicts={verdict.value: self._verdicts[verdict] for verdict in Verdict},
            leases=len(leases),
            held_pages=leases.held_pages,
            used=leases.used,
            expired=leases.expired,
            compute_share=self._share.share(now),
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
