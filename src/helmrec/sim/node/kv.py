"""KV prefixes of a simulated node: compiled versions of `KVCache`, `PageLedger` and `VisitLog`.

Histories of a trace only grow, and row updates wait for running steps as in the engine. So a request starts, extends or
reuses a prefix; the forks and overwrites of `memory/kv_cache.py` cannot happen, and pages are counted, not identified.
All other decisions equal those of `memory/kv_cache.py`, which `tests/sim/node/test_conformance.py` checks.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.memory.kv_admission import MOST_VISITORS
from helmrec.sim.node.jit import NONE, inner
from helmrec.sim.node.links import Links, link_first, link_last, make_links, unlink
from helmrec.types import IntArray

SHORT = -2  # too few pages can be freed now


class Kv(IntEnum):
    """Indices into `KVState.counts`."""

    FREE = 0  # pages
    EMB = 1
    HELD = 2
    DRAINING = 3
    RESERVE = 4  # kept free for the next step
    IDLE = 5  # pages of kept prefixes that no step uses
    RUNNING = 6  # pages of prefixes whose admission is not decided yet
    REUSED = 7  # tokens
    TOTAL = 8
    EVICTED = 9  # pages
    REFUSED = 10  # prefixes
    STALE = 11  # prefixes cut because a row changed
    UNMATCHED = 12  # lookups of resident users that matched no prefix
    USERS = 13
    EPOCH = 14  # of the rows
    SPARE = 15  # slots on the stack


class P(IntEnum):
    """Fields of a prefix."""

    USER = 0
    WINDOW = 1
    TOKENS = 2
    PAGES = 3
    SETTLED = 4
    PINS = 5
    KIND = 6
    MATE = 7  # next prefix of the same user
    GENERATION = 8  # distinguishes prefixes that used the same slot
    VERIFIED = 9  # row epoch up to which its rows were compared with updates
    MADE = 10  # row epoch of its first token
    PROBATIONARY = 11  # not admitted: it was computed ahead of a request, or kept because pages were free


SPARE, KEPT, RUNNING = 0, 1, 2  # kinds


class KVRules(NamedTuple):
    """Settings of the KV cache, for compiled code."""

    page_tokens: int
    max_forks: int
    admission: int  # 0 always, 1 second visit, 2 expected benefit
    linear_tokens: int


class Visits(NamedTuple):
    """Recent users and their number of visits. Bounded: the least recent user is forgotten first."""

    place: NDArray[np.int32]  # (users,) line of a user plus one; zero is none
    user: IntArray  # (limit,) user of each line
    num_visits: IntArray  # (limit + 1,) visits; the last one is the number of lines in use
    links: Links  # least recent first
    last_s: NDArray[np.float64]  # (limit,)


class VisitCount(NamedTuple):
    """How often a user has visited, and when last."""

    num: int  # including this visit
    last_s: float  # time of the previous visit, or of this one if it is the first


class KVState(NamedTuple):
    """All prefixes of a node in LRU order, by user, and how many pages they hold."""

    counts: IntArray
    prefix: IntArray  # (slots, fields)
    links: Links  # kept prefixes, coldest first
    last_use_s: NDArray[np.float64]  # (slots,)
    head: NDArray[np.int32]  # (users,) slot of a user's first prefix plus one; zero is none
    spare: NDArray[np.int32]  # stack of empty slots
    visits: Visits


def make_kv(num_pages: int, num_users: int) -> KVState:
    """An empty cache with all pages free. A prefix has at least one page, so `num_pages` slots are enough."""
    counts = np.zeros(len(Kv), np.int64)
    counts[Kv.FREE] = counts[Kv.SPARE] = num_pages
    return KVState(
        counts=counts,
        prefix=np.zeros((num_pages, len(P)), np.int64),
        links=make_links(num_pages),
        last_use_s=np.zeros(num_pages),
        head=np.zeros(num_users, np.int32),
        spare=np.arange(num_pages - 1, -1, -1).astype(np.int32),
        visits=make_visits(num_users),
    )


def make_visits(num_users: int) -> Visits:
    """A log without visits."""
    limit = min(MOST_VISITORS, max(1, num_users))
    return Visits(
        place=np.zeros(num_users, np.int32),
        user=np.zeros(limit, np.int64),
        num_visits=np.zeros(limit + 1, np.int64),
        links=make_links(limit),
        last_s=np.zeros(limit),
    )


@inner
def find_prefix(kv: KVState, user: int, window: int) -> int:
    """Return the slot of a user's prefix of this window, or NONE."""
    slot = int(kv.head[user]) - 1
    while slot != NONE and kv.prefix[slot, P.WINDOW] != window:
        slot = kv.prefix[slot, P.MATE]
    return slot


@inner
def note_lookup(kv: KVState, user: int, slot: int) -> None:
    """Count lookups of resident users that matched nothing."""
    kv.counts[Kv.UNMATCHED] += slot == NONE and _num_kept(kv, user) > 0


class PinnedPrefix(NamedTuple):
    """A prefix that is pinned for a step."""

    slot: int  # SHORT if too few pages can be freed
    resident: int  # tokens of the history that need not be computed
    before: int  # tokens the prefix had before


@inner
def plan(kv: KVState, rules: KVRules, user: int, window: int, num_tokens: int) -> PinnedPrefix:
    """Pin pages for a history."""
    slot = find_prefix(kv, user, window)
    prefix = kv.prefix
    is_new = slot == NONE
    if is_new:
        slot = _take_slot(kv, user, window)
    before = prefix[slot, P.TOKENS]
    resident = min(before, num_tokens)
    _pin(kv, slot)
    if resident < num_tokens and not _grow(kv, rules, slot, num_tokens):
        if is_new:
            prefix[slot, P.PINS] = 0
            _release_slot(kv, slot)
        else:
            unpin(kv, rules, slot)
        return PinnedPrefix(SHORT, 0, 0)
    return PinnedPrefix(slot, resident, before)


@inner
def _grow(kv: KVState, rules: KVRules, slot: int, num_tokens: int) -> bool:
    counts, prefix = kv.counts, kv.prefix
    missing = pages_for(rules, num_tokens) - prefix[slot, P.PAGES]
    short = missing - counts[Kv.FREE]
    if short > counts[Kv.IDLE]:
        return False
    if short > 0:
        evict(kv, rules, short)
    counts[Kv.FREE] -= missing
    counts[Kv.HELD] += missing
    prefix[slot, P.PAGES] += missing
    if prefix[slot, P.KIND] == RUNNING:
        counts[Kv.RUNNING] += missing
    prefix[slot, P.TOKENS] = num_tokens
    return True


@inner
def commit(kv: KVState, rules: KVRules, served: PinnedPrefix, num_tokens: int, now_s: float, is_ahead: bool) -> int:
    """End a step: unpin the prefix, then keep or drop it. Return the token from which to save it, or NONE."""
    slot = served.slot
    prefix, user, was_probationary = kv.prefix, kv.prefix[slot, P.USER], kv.prefix[slot, P.PROBATIONARY]
    prefix[slot, P.SETTLED] = max(prefix[slot, P.SETTLED], num_tokens)
    kv.last_use_s[slot] = now_s
    is_kept = is_ahead or _count_visit(kv, rules, served, num_tokens, now_s)
    if prefix[slot, P.KIND] == RUNNING and is_kept:
        _adopt(kv, slot)
        prefix[slot, P.PROBATIONARY] |= is_ahead
    is_saved = prefix[slot, P.KIND] == KEPT and not prefix[slot, P.PROBATIONARY]
    if prefix[slot, P.KIND] == KEPT:
        unlink(kv.links, slot)
        if is_ahead or not prefix[slot, P.PROBATIONARY]:
            link_last(kv.links, slot)
        else:
            link_first(kv.links, slot)
    unpin(kv, rules, slot)
    _limit_forks(kv, rules, user)
    return (0 if was_probationary else served.resident) if is_saved else NONE


@inner
def _count_visit(kv: KVState, rules: KVRules, served: PinnedPrefix, num_tokens: int, now_s: float) -> bool:
    """Count a visit; return whether its prefix is kept: it is admitted, or probationary while pages are free."""
    counts, prefix, slot = kv.counts, kv.prefix, served.slot
    counts[Kv.REUSED] += served.resident
    counts[Kv.TOTAL] += num_tokens
    visits = record_visit(kv.visits, prefix[slot, P.USER], now_s)
    if prefix[slot, P.KIND] == KEPT and not prefix[slot, P.PROBATIONARY]:
        return True
    prefix[slot, P.PROBATIONARY] = not _admits(kv, rules, slot, visits, now_s)
    others = counts[Kv.RUNNING] - prefix[slot, P.PAGES]
    return not prefix[slot, P.PROBATIONARY] or counts[Kv.FREE] + others >= counts[Kv.RESERVE]


@inner
def record_visit(visits: Visits, user: int, now_s: float) -> VisitCount:
    """Count this visit of a user."""
    count, limit = visits.num_visits, visits.user.size
    line = int(visits.place[user]) - 1
    last_s = now_s
    if line >= 0:
        last_s = visits.last_s[line]
        unlink(visits.links, line)
    elif count[limit] < limit:
        line = count[limit]
        count[limit] += 1
    else:
        line = visits.links[limit, 1]
        unlink(visits.links, line)
        visits.place[visits.user[line]] = 0
        count[line] = 0
    visits.place[user] = line + 1
    visits.user[line] = user
    count[line] += 1
    visits.last_s[line] = now_s
    link_last(visits.links, line)
    return VisitCount(count[line], last_s)


@inner
def _admits(kv: KVState, rules: KVRules, slot: int, visits: VisitCount, now_s: float) -> bool:
    """Decide as `kv_admission` does when no pages are free."""
    if rules.admission < 2 or visits.num < 2:
        return rules.admission == 0 or visits.num >= 2
    coldest = _coldest_idle(kv)
    if coldest != NONE and kv.prefix[coldest, P.PROBATIONARY]:
        return True
    coldest_idle_s = 0.0 if coldest == NONE else now_s - kv.last_use_s[coldest]
    saving = 1 + kv.prefix[slot, P.TOKENS] / rules.linear_tokens
    return saving * coldest_idle_s >= now_s - visits.last_s


@inner
def _adopt(kv: KVState, slot: int) -> None:
    prefix = kv.prefix
    kv.counts[Kv.RUNNING] -= prefix[slot, P.PAGES]
    kv.counts[Kv.USERS] += _num_kept(kv, prefix[slot, P.USER]) == 0
    prefix[slot, P.KIND] = KEPT
    link_last(kv.links, slot)


@inner
def _num_kept(kv: KVState, user: int) -> int:
    num, slot = 0, int(kv.head[user]) - 1
    while slot != NONE:
        num += kv.prefix[slot, P.KIND] == KEPT
        slot = kv.prefix[slot, P.MATE]
    return num


@inner
def _limit_forks(kv: KVState, rules: KVRules, user: int) -> None:
    """Drop the least recently used windows of a user. A user has few prefixes, so each round looks at all of them."""
    prefix = kv.prefix
    for _ in range(_num_kept(kv, user) - rules.max_forks):
        oldest, slot = NONE, int(kv.head[user]) - 1
        while slot != NONE:
            is_idle = prefix[slot, P.KIND] == KEPT and prefix[slot, P.PINS] == 0
            if is_idle and (oldest == NONE or kv.last_use_s[slot] <= kv.last_use_s[oldest]):
                oldest = slot
            slot = prefix[slot, P.MATE]
        if oldest == NONE:
            return
        truncate(kv, rules, oldest, 0)


@inner
def evict(kv: KVState, rules: KVRules, num_pages: int) -> int:
    """Free up to `num_pages` pages, tail first, from the coldest unpinned prefixes; return how many."""
    freed = 0
    while freed < num_pages:
        victim = _coldest_idle(kv)
        if victim == NONE:
            break
        dropped = min(kv.prefix[victim, P.PAGES], num_pages - freed)
        _drop(kv, rules, victim, kv.prefix[victim, P.PAGES] - dropped)
        _release_if_empty(kv, victim)
        freed += dropped
    kv.counts[Kv.EVICTED] += freed
    return freed


@inner
def _coldest_idle(kv: KVState) -> int:
    links, ends = kv.links, kv.prefix.shape[0]
    slot = links[ends, 1]
    while slot != ends and kv.prefix[slot, P.PINS]:
        slot = links[slot, 1]
    return NONE if slot == ends else slot


@inner
def truncate(kv: KVState, rules: KVRules, slot: int, num_tokens: int) -> None:
    """Keep the first tokens; release the prefix if it is empty and unpinned."""
    prefix = kv.prefix
    num_tokens = min(num_tokens, prefix[slot, P.TOKENS])
    _drop(kv, rules, slot, pages_for(rules, num_tokens))
    prefix[slot, P.TOKENS] = num_tokens
    prefix[slot, P.SETTLED] = min(prefix[slot, P.SETTLED], num_tokens)
    if prefix[slot, P.PINS] == 0:
        _release_if_empty(kv, slot)


@inner
def _drop(kv: KVState, rules: KVRules, slot: int, keep: int) -> None:
    counts, prefix = kv.counts, kv.prefix
    dropped = prefix[slot, P.PAGES] - keep
    prefix[slot, P.PAGES] = keep
    counts[Kv.FREE] += dropped
    counts[Kv.HELD] -= dropped
    if prefix[slot, P.KIND] == RUNNING:
        counts[Kv.RUNNING] -= dropped
    elif prefix[slot, P.PINS] == 0:
        counts[Kv.IDLE] -= dropped
    prefix[slot, P.TOKENS] = min(prefix[slot, P.TOKENS], keep * rules.page_tokens)
    prefix[slot, P.SETTLED] = min(prefix[slot, P.SETTLED], prefix[slot, P.TOKENS])


@inner
def _pin(kv: KVState, slot: int) -> None:
    if kv.prefix[slot, P.KIND] == KEPT and kv.prefix[slot, P.PINS] == 0:
        kv.counts[Kv.IDLE] -= kv.prefix[slot, P.PAGES]
    kv.prefix[slot, P.PINS] += 1


@inner
def unpin(kv: KVState, rules: KVRules, slot: int) -> None:
    """Release one pin; drop a prefix that was not kept once no step uses it."""
    prefix = kv.prefix
    prefix[slot, P.PINS] -= 1
    if prefix[slot, P.PINS]:
        return
    if prefix[slot, P.KIND] == RUNNING:
        kv.counts[Kv.REFUSED] += 1
        truncate(kv, rules, slot, 0)
        return
    kv.counts[Kv.IDLE] += prefix[slot, P.PAGES]
    _release_if_empty(kv, slot)


@inner
def _take_slot(kv: KVState, user: int, window: int) -> int:
    counts, prefix = kv.counts, kv.prefix
    counts[Kv.SPARE] -= 1
    slot = int(kv.spare[counts[Kv.SPARE]])
    generation = prefix[slot, P.GENERATION]
    prefix[slot] = 0
    prefix[slot, P.GENERATION] = generation
    prefix[slot, P.USER], prefix[slot, P.WINDOW] = user, window
    prefix[slot, P.KIND] = RUNNING
    prefix[slot, P.VERIFIED] = prefix[slot, P.MADE] = counts[Kv.EPOCH]
    prefix[slot, P.MATE] = int(kv.head[user]) - 1
    kv.head[user] = slot + 1
    return slot


@inner
def _release_if_empty(kv: KVState, slot: int) -> None:
    prefix = kv.prefix
    if prefix[slot, P.PAGES]:
        return
    is_kept = prefix[slot, P.KIND] == KEPT
    if is_kept:
        unlink(kv.links, slot)
    _release_slot(kv, slot)
    kv.counts[Kv.USERS] -= is_kept and _num_kept(kv, prefix[slot, P.USER]) == 0


@inner
def _release_slot(kv: KVState, slot: int) -> None:
    counts, prefix = kv.counts, kv.prefix
    user = prefix[slot, P.USER]
    if kv.head[user] == slot + 1:
        kv.head[user] = prefix[slot, P.MATE] + 1
    else:
        before = int(kv.head[user]) - 1
        while prefix[before, P.MATE] != slot:
            before = prefix[before, P.MATE]
        prefix[before, P.MATE] = prefix[slot, P.MATE]
    prefix[slot, P.KIND] = SPARE
    prefix[slot, P.SETTLED] = 0
    prefix[slot, P.GENERATION] += 1
    kv.spare[counts[Kv.SPARE]] = slot
    counts[Kv.SPARE] += 1


@inner
def pages_for(rules: KVRules, num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // rules.page_tokens)


def check_kv(kv: KVState, rules: KVRules) -> None:
    """Assert the invariants of pages, prefixes and slots."""
    counts, lines = kv.counts, kv.prefix
    held = lines[lines[:, P.KIND] != SPARE]
    kept = held[held[:, P.KIND] == KEPT]
    assert counts[[Kv.FREE, Kv.EMB, Kv.HELD, Kv.DRAINING]].sum() == len(lines), "a page is lost"
    assert held[:, P.PAGES].sum() == counts[Kv.HELD], "pages held and prefixes disagree"
    assert np.array_equal(held[:, P.PAGES], -(-held[:, P.TOKENS] // rules.page_tokens)), "a page is not filled"
    assert (held[:, P.PAGES] > 0).all(), "an empty prefix is kept"
    assert kept[kept[:, P.PINS] == 0, P.PAGES].sum() == counts[Kv.IDLE], "idle pages are miscounted"
    assert held[held[:, P.KIND] == RUNNING, P.PAGES].sum() == counts[Kv.RUNNING], "running pages are miscounted"
    assert np.unique(kept[:, P.USER]).size == counts[Kv.USERS], "resident users are miscounted"
    assert counts[Kv.SPARE] + len(held) == len(lines), "a slot is lost"
