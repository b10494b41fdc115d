"""The KV cache: per-user prefixes in pages, verified, shared, pinned while used, evicted from the coldest tail.

Bookkeeping only. It returns plans (which pages hold a history, which tokens are new, what to copy first) and never
touches K/V. It does not know layers, heads or devices.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from helmrec.memory.kv_admission import Admission, VisitLog, has_room, idle_s, is_admitted, is_evicted_last
from helmrec.memory.kv_host_tier import KVHostTier, PageKey, PageSave
from helmrec.memory.ledger import PageLedger
from helmrec.memory.prefix import NO_HISTORY, EpochRun, KVPlan, Match, PageCopy, PageLoad, Prefix, epoch_per_token
from helmrec.memory.prefix_hash import History, RowEpochs, common_tokens
from helmrec.memory.shared_pages import SharedPages
from helmrec.types import UserId


@dataclass(frozen=True, slots=True)
class KVLimits:
    """Fixed limits of a KV cache."""

    page_tokens: int
    max_forks: int
    lag_s: float  # time by which reused KV may lag behind row updates; 0 is exact


class KVCache:
    """Resident prefixes by user, and their order of eviction."""

    def __init__(
        self,
        limits: KVLimits,
        ledger: PageLedger,
        epochs: RowEpochs,
        admission: int,  # an `Admission`
        host_tier: KVHostTier | None = None,
    ) -> None:
        self.limits = limits
        self._host_tier = host_tier or KVHostTier(num_slots=0)
        self.reserve_pages = 1  # kept free for the next step, so that one-time users evict no other prefix
        self._ledger, self._pages = ledger, SharedPages(ledger)
        self._epochs = epochs
        self._admission = admission
        self._visits = VisitLog()
        self._users: dict[UserId, list[Prefix]] = {}  # kept prefixes
        self._order: OrderedDict[int, Prefix] = OrderedDict()  # id(prefix) -> kept prefix, coldest first
        self._new: dict[UserId, list[Prefix]] = {}  # of running steps, not yet admitted or refused
        self._unsaved: deque[tuple[Prefix, int]] = deque()  # full pages not yet offered to the host tier
        self.reused_tokens = self.total_tokens = 0
        self.evicted_pages = 0
        self.stale_cuts = self.stale_tokens = 0
        self.refused_prefixes = 0
        self.returns = self.unmatched = 0  # lookups of resident users, and how many of them matched no prefix

    @property
    def num_users(self) -> int:
        return len(self._users)

    def begin_step(self) -> None:
        """Start planning a step: its first plans may reload as much as they compute."""
        self._host_tier.costs.begin_step()

    def plan(self, history: History, now: float) -> KVPlan | None:
        """Find the longest verified prefix, and allocate pages for the rest; None if too few pages can be freed now.

        The prefix and its donor stay pinned until `commit` or `abort`. Tokens planned by an earlier request
        of the same step count as resident: every layer appends before it attends.
        """
        if not history.num_tokens:
            return NO_HISTORY
        match = self._match(history, now)
        if match is None:
            plan = self._start(history, now)
        elif match.num_tokens == history.num_tokens:
            plan = self._reuse(match)
        elif match.num_tokens == match.prefix.num_tokens:
            plan = self._extend(match.prefix, history)
        else:
            plan = self._fork(match, history) or self._overwrite(match.prefix, match.num_tokens, history)
        if plan is not None and self._host_tier.num_pages:
            plan = self._reload(plan, history)
            self._host_tier.costs.note_planned(plan.num_resident, plan.num_tokens, len(plan.loads))
        return plan

    def _reload(self, plan: KVPlan, history: History) -> KVPlan:
        """Reload pages that the host holds instead of computing them, if they are fresh and a reload is cheaper."""
        page_tokens, prefix = self.limits.page_tokens, plan.prefix
        if prefix is None or (plan.num_resident % page_tokens and prefix.pins > 1):
            return plan  # other steps still read or write the page that would be overwritten
        first = plan.num_resident // page_tokens
        found = self._host_tier.find(history.user_id, history.states, first, page_tokens)
        if not found:
            return plan
        end = (first + len(found)) * page_tokens
        # A page depends on all tokens before it: no row of the whole history may have changed since it was computed,
        # not even a row whose token has been recomputed.
        oldest = np.full(end, min(page.epoch for page in found), np.uint32)
        end = self._epochs.fresh_tokens(history, oldest) // page_tokens * page_tokens
        num_pages = end // page_tokens - first
        if end <= plan.num_resident or not self._host_tier.is_worth_it(plan.num_resident, end, num_pages):
            return plan
        loads = tuple(PageLoad(page.slot, prefix.pages[first + i]) for i, page in enumerate(found[:num_pages]))
        self._host_tier.reloaded_pages += len(loads)
        return plan._replace(num_resident=end, copy=None, loads=loads)

    def next_saves(self, limit: int) -> list[PageSave]:
        """Return up to `limit` full pages to copy to the host tier now, oldest first."""
        saves: list[PageSave] = []
        page_tokens = self.limits.page_tokens
        while self._unsaved and len(saves) < limit:
            prefix, i = self._unsaved.popleft()
            end = (i + 1) * page_tokens
            if end > (prefix.sound if prefix.is_suspect else prefix.settled):  # evicted, truncated or rejected since
                continue
            epoch = int(epoch_per_token(prefix.made_at, end).min())  # oldest of all tokens that the page depends on
            key = PageKey(prefix.user_id, int(prefix.states[end - 1]), prefix.pages[i], epoch)
            if (save := self._host_tier.save(key)) is not None:
                saves.append(save)
        return saves

    def _note_unsaved(self, start: int, end: int, prefix: Prefix) -> None:
        """Queue the pages that tokens [start, end) have filled for saving, if there is a tier."""
        if self._host_tier.num_slots:
            page_tokens = self.limits.page_tokens
            self._unsaved.extend((prefix, i) for i in range(start // page_tokens, end // page_tokens))

    def resident_tokens(self, history: History) -> int:
        """Return the most tokens that `plan` could find resident; changes nothing."""
        found = self._longest(history)
        return found.num_tokens if found else 0

    def commit(self, plan: KVPlan, now: float, *, is_ahead: bool = False) -> None:
        """End a plan whose step has ended: unpin its prefix, keep or drop it. `restore_reserve` follows the last."""
        prefix = plan.prefix
        if prefix is None:
            return
        self._settle(prefix, plan)
        prefix.last_use_s = now
        was_probationary = prefix.is_probationary
        if not is_ahead:  # a prefix computed ahead has no scores yet that show it to be finite
            prefix.sound = max(prefix.sound, min(plan.num_tokens, prefix.settled))
        stays = is_ahead or self._count_visit(plan, prefix, now)
        if stays and not prefix.is_kept:
            self._keep(prefix)
            prefix.is_probationary |= is_ahead
        if prefix.is_kept:
            self._order.move_to_end(id(prefix), last=is_evicted_last(prefix.is_probationary, is_ahead))
            if not prefix.is_probationary:  # once admitted, all of it is saved
                self._note_unsaved(0 if was_probationary else plan.num_resident, plan.num_tokens, prefix)
        self._unpin(plan)
        self._limit_forks(prefix.user_id)

    def reject(self, plan: KVPlan) -> None:
        """End a plan whose scores are not finite: keep only tokens known to be sound.

        The rest is dropped at its last unpin, unless finite scores of another plan show it to be sound before.
        """
        if plan.prefix is None:
            return
        self._settle(plan.prefix, plan)
        plan.prefix.is_suspect |= plan.num_tokens > plan.prefix.sound
        if plan.donor is not None:
            plan.donor.is_suspect |= plan.num_resident > plan.donor.sound
        self._unpin(plan)

    def _settle(self, prefix: Prefix, plan: KVPlan) -> None:
        """Mark the plan's tokens as written, except those that the abort of a later step has truncated."""
        prefix.settled = max(prefix.settled, min(plan.num_tokens, prefix.num_tokens))

    def _count_visit(self, plan: KVPlan, prefix: Prefix, now: float) -> bool:
        """Count a visit; return whether the prefix is kept: it is admitted, or probationary while pages are free."""
        self.reused_tokens += plan.num_resident
        self.total_tokens += plan.num_tokens
        seen = self._visits.record(prefix.user_id, now)
        if prefix.is_kept and not prefix.is_probationary:
            return True
        coldest = self._coldest_idle() if self._admission == Admission.BENEFIT else None  # others do not ask for it
        coldest_s = 0.0 if coldest is None else idle_s(coldest.is_probationary, coldest.last_use_s, now)
        prefix.is_probationary = not is_admitted(self._admission, seen, prefix.num_tokens, coldest_s)
        if not prefix.is_probationary:
            return True
        others_pages = sum([len(other.pages) for mates in self._new.values() for other in mates]) - len(prefix.pages)
        return has_room(self._admission, self._ledger.num_free + others_pages, self.reserve_pages)

    def hold(self, user_id: UserId) -> None:
        """Move a user's prefixes to the warm end of the eviction order."""
        for prefix in self._users.get(user_id, ()):
            self._order.move_to_end(id(prefix))

    def release(self, user_id: UserId) -> None:
        """Move a user's probationary prefixes to the cold end of the eviction order."""
        for prefix in self._users.get(user_id, ()):
            if prefix.is_probationary:
                self._order.move_to_end(id(prefix), last=False)

    def restore_reserve(self) -> None:
        """Evict until `reserve_pages` are free for the next step."""
        self.evict(self.reserve_pages - self._ledger.num_free)

    def abort(self, plan: KVPlan) -> None:
        """End a plan whose step failed or did not use it: drop the tokens that only it would have written.

        Plans of one step are aborted in the order they were made, or the last one alone.
        """
        if plan.prefix is not None:
            self._truncate(plan.prefix, plan.num_before)
            self._unpin(plan)

    def forget(self, user_id: UserId) -> None:
        """Drop a user's prefixes, here and on the host. No step may be running."""
        for prefix in list(self._users.get(user_id, ())):
            assert prefix.pins == 0, "a running step still reads a prefix that is forgotten"
            self._drop(prefix)
        self._visits.forget(user_id)
        self._host_tier.forget(user_id)

    def clear(self) -> None:
        """Evict every prefix and forget all visits; the host tier keeps its pages. No step may be running."""
        assert self.is_idle, "a step still reads what is to be evicted"
        self.evict(1 << 40)
        self._visits = VisitLog()

    @property
    def is_idle(self) -> bool:
        """Whether no running step holds a pin."""
        return not self._new and all(prefix.pins == 0 for prefix in self._order.values())

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, tail first, from the coldest unpinned prefixes; return how many."""
        freed = 0
        while freed < num_pages and (victim := self._coldest_idle()) is not None:
            keep = max(0, len(victim.pages) - (num_pages - freed))
            freed += self._drop_pages(victim, keep)  # fewer than dropped if a fork shares some
            self._discard_if_empty(victim)
        self.evicted_pages += freed
        return freed

    def _coldest_idle(self) -> Prefix | None:
        for prefix in self._order.values():  # a plain loop: a generator takes as long again
            if not prefix.pins:
                return prefix
        return None

    def _match(self, history: History, now: float) -> Match | None:
        """Return the user's prefix that shares the most tokens with `history`, cut to its fresh tokens."""
        found = self._longest(history)
        if history.user_id in self._users:
            self.returns += 1
            self.unmatched += found is None
        if found is None:
            return None
        fresh = self._fresh_tokens(found.prefix, history, found.num_tokens, now)
        if fresh == found.num_tokens:
            return found
        return Match(found.prefix, fresh) if fresh else None

    def _longest(self, history: History) -> Match | None:
        user_id, best, most = history.user_id, None, 0
        known = self._users.get(user_id, ())
        if user_id in self._new:
            known = (*known, *self._new[user_id])
        for prefix in known:
            offered = prefix.sound if prefix.is_suspect else prefix.num_tokens
            shared = min(common_tokens(prefix.states, history.states), offered)
            if shared > most:
                best, most = prefix, shared
        return None if best is None else Match(best, most)

    def _fresh_tokens(self, prefix: Prefix, history: History, shared: int, now: float) -> int:
        """Cut `shared` at the first token whose rows have changed; drop the stale tail if the prefix is not pinned."""
        if self._epochs.current == prefix.verified_epoch or now - prefix.verified_s < self.limits.lag_s:
            return shared
        fresh = self._epochs.fresh_tokens(history, epoch_per_token(prefix.made_at, shared))
        if fresh < shared:
            self.stale_cuts += 1
            self.stale_tokens += shared - fresh
            if prefix.pins == 0:
                self._truncate(prefix, fresh)
                self._discard_if_empty(prefix)
        if fresh >= prefix.num_tokens:
            prefix.verified_s, prefix.verified_epoch = now, self._epochs.current
        return min(fresh, prefix.num_tokens)

    def _reuse(self, match: Match) -> KVPlan:
        match.prefix.pins += 1
        pages = match.prefix.pages[: self._pages_for(match.num_tokens)]
        return KVPlan(match.prefix, match.num_tokens, match.num_tokens, pages, match.prefix.num_tokens)

    def _extend(self, prefix: Prefix, history: History) -> KVPlan | None:
        resident = prefix.num_tokens
        prefix.pins += 1
        if not self._grow(prefix, history):
            prefix.pins -= 1
            return None
        return KVPlan(prefix, resident, history.num_tokens, prefix.pages[:], resident)

    def _start(self, history: History, now: float) -> KVPlan | None:
        prefix = Prefix(history.user_id, history.states, [], pins=1)
        prefix.verified_s, prefix.verified_epoch = now, self._epochs.current
        if not self._grow(prefix, history):
            return None
        self._new.setdefault(prefix.user_id, []).append(prefix)
        return KVPlan(prefix, 0, history.num_tokens, prefix.pages[:])

    def _fork(self, match: Match, history: History) -> KVPlan | None:
        """Plan a new prefix that shares the donor's full pages and copies its part of a partial page."""
        donor, resident = match
        page_tokens = self.limits.page_tokens
        if resident > donor.settled:  # a page that a running step still writes cannot be copied yet
            resident = max(resident - resident % page_tokens, donor.settled)
        shared = donor.pages[: resident // page_tokens]
        prefix = Prefix(history.user_id, history.states, list(donor.made_at), shared[:], resident, pins=1)
        prefix.settled, prefix.sound = min(resident, donor.settled), min(resident, donor.sound)
        prefix.verified_s, prefix.verified_epoch = donor.verified_s, donor.verified_epoch
        donor.pins += 1
        if not self._grow(prefix, history):
            donor.pins -= 1
            return None
        self._pages.hold(shared)
        self._new.setdefault(prefix.user_id, []).append(prefix)
        partial = resident % page_tokens
        copy = PageCopy(donor.pages[len(shared)], prefix.pages[len(shared)], partial) if partial else None
        return KVPlan(prefix, resident, history.num_tokens, prefix.pages[:], resident, copy, donor=donor)

    def _overwrite(self, prefix: Prefix, resident: int, history: History) -> KVPlan | None:
        """Replace a prefix by another history of its user, when there are too few pages for both."""
        if prefix.pins:
            return None
        self._truncate(prefix, resident)
        plan = self._extend(prefix, history)
        self._discard_if_empty(prefix)
        return plan

    def _grow(self, prefix: Prefix, history: History) -> bool:
        """Give the prefix pages for all of `history`; False, with nothing changed, if there are not enough."""
        missing = self._pages_for(history.num_tokens) - len(prefix.pages)
        short = missing - self._ledger.num_free
        if short > 0 and not self._make_room(short):
            return False
        if missing:
            prefix.pages.extend(self._pages.take(missing))
        made_at, epoch = prefix.made_at, self._epochs.current
        while made_at and made_at[-1].first >= prefix.num_tokens:
            made_at.pop()
        if not made_at or made_at[-1].epoch != epoch:
            made_at.append(EpochRun(prefix.num_tokens, epoch))
        prefix.states = history.states
        prefix.num_tokens = history.num_tokens
        return True

    def _make_room(self, num_pages: int) -> bool:
        """Evict to free `num_pages` more; False, with nothing evicted, if too few can be freed."""
        idle = (prefix.pages for prefix in self._order.values() if not prefix.pins)
        return self._pages.would_free(idle, num_pages) and self.evict(num_pages) >= num_pages

    def _keep(self, prefix: Prefix) -> None:
        """Enter a new prefix in the order of eviction."""
        _take_out(self._new, prefix)
        prefix.is_kept = True
        self._order[id(prefix)] = prefix
        self._users.setdefault(prefix.user_id, []).append(prefix)

    def _limit_forks(self, user_id: UserId) -> None:
        mates = self._users.get(user_id, ())
        surplus = len(mates) - self.limits.max_forks
        if surplus <= 0:
            return
        idle = sorted((p for p in mates if p.pins == 0), key=lambda prefix: prefix.last_use_s)
        for old in idle[:surplus]:
            self._drop(old)

    def _unpin(self, plan: KVPlan) -> None:
        for prefix in (plan.prefix, plan.donor):
            if prefix is None:
                continue
            prefix.pins -= 1
            assert prefix.pins >= 0
            if prefix.pins:
                continue
            if prefix.is_suspect:
                self._cut_to_sound(prefix)
            if not prefix.is_kept:
                self.refused_prefixes += 1
                self._truncate(prefix, 0)
            self._discard_if_empty(prefix)

    def _cut_to_sound(self, prefix: Prefix) -> None:
        """Drop the tokens beyond `sound` of a suspect prefix, here and on the host."""
        page_tokens = self.limits.page_tokens
        ends = range((prefix.sound // page_tokens + 1) * page_tokens, prefix.num_tokens + 1, page_tokens)
        self._host_tier.discard(prefix.user_id, [int(prefix.states[end - 1]) for end in ends])
        self._truncate(prefix, prefix.sound)
        prefix.is_suspect = False

    def _discard_if_empty(self, prefix: Prefix) -> None:
        if prefix.pages:
            return
        if prefix.is_kept:
            del self._order[id(prefix)]
        _take_out(self._users if prefix.is_kept else self._new, prefix)

    def _drop(self, prefix: Prefix) -> None:
        self._truncate(prefix, 0)
        self._discard_if_empty(prefix)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_tokens)

    def _truncate(self, prefix: Prefix, num_tokens: int) -> None:
        """Keep the first tokens; only whole pages if a fork shares the page that would become partial."""
        num_tokens = min(num_tokens, prefix.num_tokens)
        partial = num_tokens % self.limits.page_tokens
        if partial and self._pages.is_shared(prefix.pages[num_tokens // self.limits.page_tokens]):
            num_tokens -= partial
        self._drop_pages(prefix, self._pages_for(num_tokens))
        self._shorten(prefix, num_tokens)

    def _drop_pages(self, prefix: Prefix, keep: int) -> int:
        """Keep the first pages; return how many have become free."""
        dropped = prefix.pages[keep:]
        del prefix.pages[keep:]
        self._shorten(prefix, keep * self.limits.page_tokens)
        return self._pages.release(dropped)

    def _shorten(self, prefix: Prefix, num_tokens: int) -> None:
        prefix.num_tokens = min(prefix.num_tokens, num_tokens)
        prefix.settled = min(prefix.settled, prefix.num_tokens)
        prefix.sound = min(prefix.sound, prefix.num_tokens)

    def check(self) -> None:
        new = [prefix for mates in self._new.values() for prefix in mates]
        prefixes = [*self._order.values(), *new]
        assert all(prefix.is_kept for prefix in self._order.values()), "a prefix in the order does not know it"
        assert all(prefix.pins and not prefix.is_kept for prefix in new), "a new prefix outlived its step"
        for prefix in prefixes:
            assert prefix.pages, "an empty prefix is kept"
            assert len(prefix.pages) == self._pages_for(prefix.num_tokens), "a prefix has pages it does not fill"
            assert prefix.settled <= prefix.num_tokens, "more tokens are settled than held"
            assert prefix.sound <= prefix.settled, "a sound token has not been written"
            assert prefix.pins or not prefix.is_suspect, "a suspect prefix outlived its step"
            assert prefix.num_tokens <= prefix.states.size, "a token is held without a chain state"
            assert prefix.made_at[0].first == 0, "a token has no row epoch"
            assert len(set(prefix.pages)) == len(prefix.pages), "a page appears twice in one prefix"
        self._pages.check(prefix.pages for prefix in prefixes)
        kept = [prefix for mates in self._users.values() for prefix in mates]
        assert len(kept) == len(self._order)
        assert all(self._order.get(id(p)) is p for p in kept), "a user's prefix is not in the eviction order"
        tails = [p.pages[-1] for p in prefixes if p.num_tokens % self.limits.page_tokens]
        assert len(set(tails)) == len(tails), "two prefixes write one partial page"


def _take_out(by_user: dict[UserId, list[Prefix]], prefix: Prefix) -> None:
    """Remove a prefix from the prefixes of its user."""
    mates = by_user[prefix.user_id]
    mates.remove(prefix)
    if not mates:
        del by_user[prefix.user_id]
