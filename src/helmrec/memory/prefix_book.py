"""Page-level bookkeeping of KV prefixes, compiled: who holds how many pages, in which order prefixes are evicted.

Pages are counted, not identified, and a prefix is known by its user and window: enough for histories that only grow,
as those of a trace do. A simulated node keeps one book, and the estimates of other splits one for each share of the
pool. The engine's `KVCache` also knows which page holds which tokens, verifies, shares and copies them; what both
decide is decided by `kv_admission`, and `tests/sim/node/test_conformance.py` compares them request by request.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.jit import NONE, inner
from helmrec.memory.kv_admission import VisitCount, has_room, idle_s, is_admitted, is_evicted_last
from helmrec.memory.links import Links, link_first, link_last, make_links, unlink
from helmrec.types import IntArray

SHORT = -2  # too few pages can be freed now


class Kv(IntEnum):
    """Indices into `PrefixBook.counts`."""

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
    admission: int  # an `Admission`


class PrefixBook(NamedTuple):
    """Prefixes in order of eviction and by user, and how many pages they hold."""

    counts: IntArray
    prefix: IntArray  # (slots, fields)
    links: Links  # kept prefixes, coldest first
    last_use_s: NDArray[np.float64]  # (slots,)
    head: NDArray[np.int32]  # (users,) slot of a user's first prefix plus one; zero is none
    spare: NDArray[np.int32]  # stack of empty slots


def make_book(num_pages: int, num_users: int, num_slots: int) -> PrefixBook:
    """An empty book with all pages free and room for `num_slots` prefixes, each of which has at least one page."""
    counts = np.zeros(len(Kv), np.int64)
    counts[Kv.FREE], counts[Kv.SPARE] = num_pages, num_slots
    return PrefixBook(
        counts=counts,
        prefix=np.zeros((num_slots, len(P)), np.int64),
        links=make_links(num_slots),
        last_use_s=np.zeros(num_slots),
        head=np.zeros(num_users, np.int32),
        spare=np.arange(num_slots - 1, -1, -1).astype(np.int32),
    )


@inner
def find_prefix(book: PrefixBook, user: int, window: int) -> int:
    """Return the slot of a user's prefix of this window, or NONE."""
    slot = int(book.head[user]) - 1
    while slot != NONE and book.prefix[slot, P.WINDOW] != window:
        slot = book.prefix[slot, P.MATE]
    return slot


@inner
def note_lookup(book: PrefixBook, user: int, slot: int) -> None:
    """Count lookups of resident users that matched nothing."""
    book.counts[Kv.UNMATCHED] += slot == NONE and _num_kept(book, user) > 0


class PinnedPrefix(NamedTuple):
    """A prefix that is pinned for a step."""

    slot: int  # SHORT if too few pages can be freed
    resident: int  # tokens of the history that need not be computed
    before: int  # tokens the prefix had before


@inner
def plan(book: PrefixBook, rules: KVRules, user: int, window: int, num_tokens: int) -> PinnedPrefix:
    """Pin pages for a history."""
    slot = find_prefix(book, user, window)
    prefix = book.prefix
    is_new = slot == NONE
    if is_new:
        slot = _take_slot(book, user, window)
    before = prefix[slot, P.TOKENS]
    resident = min(before, num_tokens)
    _pin(book, slot)
    if resident < num_tokens and not _grow(book, rules, slot, num_tokens):
        if is_new:
            prefix[slot, P.PINS] = 0
            _release_slot(book, slot)
        else:
            unpin(book, rules, slot)
        return PinnedPrefix(SHORT, 0, 0)
    return PinnedPrefix(slot, resident, before)


@inner
def _grow(book: PrefixBook, rules: KVRules, slot: int, num_tokens: int) -> bool:
    counts, prefix = book.counts, book.prefix
    missing = pages_for(rules, num_tokens) - prefix[slot, P.PAGES]
    short = missing - counts[Kv.FREE]
    if short > counts[Kv.IDLE]:
        return False
    if short > 0:
        evict(book, rules, short)
    counts[Kv.FREE] -= missing
    counts[Kv.HELD] += missing
    prefix[slot, P.PAGES] += missing
    if prefix[slot, P.KIND] == RUNNING:
        counts[Kv.RUNNING] += missing
    prefix[slot, P.TOKENS] = num_tokens
    return True


@inner
def commit(
    book: PrefixBook, rules: KVRules, served: PinnedPrefix, num_tokens: int, now_s: float, visit: VisitCount
) -> int:
    """End a step: unpin the prefix, then keep or drop it. Return the token from which to save it, or NONE.

    visit: of the user; `NO_VISIT` if the step was ahead of a request.
    """
    slot, is_ahead = served.slot, visit.num == 0
    prefix, user, was_probationary = book.prefix, book.prefix[slot, P.USER], book.prefix[slot, P.PROBATIONARY]
    prefix[slot, P.SETTLED] = max(prefix[slot, P.SETTLED], num_tokens)
    book.last_use_s[slot] = now_s
    is_kept = is_ahead or _count_visit(book, rules, served, num_tokens, now_s, visit)
    if prefix[slot, P.KIND] == RUNNING and is_kept:
        _adopt(book, slot)
        prefix[slot, P.PROBATIONARY] |= is_ahead
    is_saved = prefix[slot, P.KIND] == KEPT and not prefix[slot, P.PROBATIONARY]
    if prefix[slot, P.KIND] == KEPT:
        unlink(book.links, slot)
        if is_evicted_last(prefix[slot, P.PROBATIONARY] != 0, is_ahead):
            link_last(book.links, slot)
        else:
            link_first(book.links, slot)
    unpin(book, rules, slot)
    _limit_forks(book, rules, user)
    return (0 if was_probationary else served.resident) if is_saved else NONE


@inner
def _count_visit(
    book: PrefixBook, rules: KVRules, served: PinnedPrefix, num_tokens: int, now_s: float, visit: VisitCount
) -> bool:
    """Count a visit; return whether its prefix is kept: it is admitted, or probationary while pages are free."""
    counts, prefix, slot = book.counts, book.prefix, served.slot
    counts[Kv.REUSED] += served.resident
    counts[Kv.TOTAL] += num_tokens
    if prefix[slot, P.KIND] == KEPT and not prefix[slot, P.PROBATIONARY]:
        return True
    coldest = _coldest_idle(book)
    coldest_s = (
        0.0 if coldest == NONE else idle_s(prefix[coldest, P.PROBATIONARY] != 0, book.last_use_s[coldest], now_s)
    )
    admitted = is_admitted(rules.admission, visit, prefix[slot, P.TOKENS], coldest_s)
    prefix[slot, P.PROBATIONARY] = not admitted
    num_free = counts[Kv.FREE] + counts[Kv.RUNNING] - prefix[slot, P.PAGES]
    return admitted or has_room(rules.admission, num_free, counts[Kv.RESERVE])


@inner
def _adopt(book: PrefixBook, slot: int) -> None:
    prefix = book.prefix
    book.counts[Kv.RUNNING] -= prefix[slot, P.PAGES]
    book.counts[Kv.USERS] += _num_kept(book, prefix[slot, P.USER]) == 0
    prefix[slot, P.KIND] = KEPT
    link_last(book.links, slot)


@inner
def _num_kept(book: PrefixBook, user: int) -> int:
    num, slot = 0, int(book.head[user]) - 1
    while slot != NONE:
        num += book.prefix[slot, P.KIND] == KEPT
        slot = book.prefix[slot, P.MATE]
    return num


@inner
def _limit_forks(book: PrefixBook, rules: KVRules, user: int) -> None:
    """Drop the least recently used windows of a user. A user has few prefixes, so each round looks at all of them."""
    prefix = book.prefix
    for _ in range(_num_kept(book, user) - rules.max_forks):
        oldest, slot = NONE, int(book.head[user]) - 1
        while slot != NONE:
            is_idle = prefix[slot, P.KIND] == KEPT and prefix[slot, P.PINS] == 0
            if is_idle and (oldest == NONE or book.last_use_s[slot] <= book.last_use_s[oldest]):
                oldest = slot
            slot = prefix[slot, P.MATE]
        if oldest == NONE:
            return
        truncate(book, rules, oldest, 0)


@inner
def evict(book: PrefixBook, rules: KVRules, num_pages: int) -> int:
    """Free up to `num_pages` pages, tail first, from the coldest unpinned prefixes; return how many."""
    freed = 0
    while freed < num_pages:
        victim = _coldest_idle(book)
        if victim == NONE:
            break
        dropped = min(book.prefix[victim, P.PAGES], num_pages - freed)
        _drop(book, rules, victim, book.prefix[victim, P.PAGES] - dropped)
        _release_if_empty(book, victim)
        freed += dropped
    book.counts[Kv.EVICTED] += freed
    return freed


@inner
def _coldest_idle(book: PrefixBook) -> int:
    links, ends = book.links, book.prefix.shape[0]
    slot = links[ends, 1]
    while slot != ends and book.prefix[slot, P.PINS]:
        slot = links[slot, 1]
    return NONE if slot == ends else slot


@inner
def truncate(book: PrefixBook, rules: KVRules, slot: int, num_tokens: int) -> None:
    """Keep the first tokens; release the prefix if it is empty and unpinned."""
    prefix = book.prefix
    num_tokens = min(num_tokens, prefix[slot, P.TOKENS])
    _drop(book, rules, slot, pages_for(rules, num_tokens))
    prefix[slot, P.TOKENS] = num_tokens
    prefix[slot, P.SETTLED] = min(prefix[slot, P.SETTLED], num_tokens)
    if prefix[slot, P.PINS] == 0:
        _release_if_empty(book, slot)


@inner
def _drop(book: PrefixBook, rules: KVRules, slot: int, keep: int) -> None:
    counts, prefix = book.counts, book.prefix
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
def _pin(book: PrefixBook, slot: int) -> None:
    if book.prefix[slot, P.KIND] == KEPT and book.prefix[slot, P.PINS] == 0:
        book.counts[Kv.IDLE] -= book.prefix[slot, P.PAGES]
    book.prefix[slot, P.PINS] += 1


@inner
def unpin(book: PrefixBook, rules: KVRules, slot: int) -> None:
    """Release one pin; drop a prefix that was not kept once no step uses it."""
    prefix = book.prefix
    prefix[slot, P.PINS] -= 1
    if prefix[slot, P.PINS]:
        return
    if prefix[slot, P.KIND] == RUNNING:
        book.counts[Kv.REFUSED] += 1
        truncate(book, rules, slot, 0)
        return
    book.counts[Kv.IDLE] += prefix[slot, P.PAGES]
    _release_if_empty(book, slot)


@inner
def _take_slot(book: PrefixBook, user: int, window: int) -> int:
    counts, prefix = book.counts, book.prefix
    counts[Kv.SPARE] -= 1
    slot = int(book.spare[counts[Kv.SPARE]])
    generation = prefix[slot, P.GENERATION]
    prefix[slot] = 0
    prefix[slot, P.GENERATION] = generation
    prefix[slot, P.USER], prefix[slot, P.WINDOW] = user, window
    prefix[slot, P.KIND] = RUNNING
    prefix[slot, P.VERIFIED] = prefix[slot, P.MADE] = counts[Kv.EPOCH]
    prefix[slot, P.MATE] = int(book.head[user]) - 1
    book.head[user] = slot + 1
    return slot


@inner
def _release_if_empty(book: PrefixBook, slot: int) -> None:
    prefix = book.prefix
    if prefix[slot, P.PAGES]:
        return
    is_kept = prefix[slot, P.KIND] == KEPT
    if is_kept:
        unlink(book.links, slot)
    _release_slot(book, slot)
    book.counts[Kv.USERS] -= is_kept and _num_kept(book, prefix[slot, P.USER]) == 0


@inner
def _release_slot(book: PrefixBook, slot: int) -> None:
    counts, prefix = book.counts, book.prefix
    user = prefix[slot, P.USER]
    if book.head[user] == slot + 1:
        book.head[user] = prefix[slot, P.MATE] + 1
    else:
        before = int(book.head[user]) - 1
        while prefix[before, P.MATE] != slot:
            before = prefix[before, P.MATE]
        prefix[before, P.MATE] = prefix[slot, P.MATE]
    prefix[slot, P.KIND] = SPARE
    prefix[slot, P.SETTLED] = 0
    prefix[slot, P.GENERATION] += 1
    book.spare[counts[Kv.SPARE]] = slot
    counts[Kv.SPARE] += 1


@inner
def pages_for(rules: KVRules, num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // rules.page_tokens)


def check_book(book: PrefixBook, rules: KVRules, num_pages: int) -> None:
    """Assert the invariants of pages, prefixes and slots."""
    counts, lines = book.counts, book.prefix
    assert counts[[Kv.FREE, Kv.EMB, Kv.HELD, Kv.DRAINING]].sum() == num_pages, "a page is lost"
    held = lines[lines[:, P.KIND] != SPARE]
    kept = held[held[:, P.KIND] == KEPT]
    assert held[:, P.PAGES].sum() == counts[Kv.HELD], "pages held and prefixes disagree"
    assert np.array_equal(held[:, P.PAGES], -(-held[:, P.TOKENS] // rules.page_tokens)), "a page is not filled"
    assert (held[:, P.PAGES] > 0).all(), "an empty prefix is kept"
    assert kept[kept[:, P.PINS] == 0, P.PAGES].sum() == counts[Kv.IDLE], "idle pages are miscounted"
    assert held[held[:, P.KIND] == RUNNING, P.PAGES].sum() == counts[Kv.RUNNING], "running pages are miscounted"
    assert np.unique(kept[:, P.USER]).size == counts[Kv.USERS], "resident users are miscounted"
    assert counts[Kv.SPARE] + len(held) == len(lines), "a slot is lost"
