"""Prefixes computed ahead on a simulated node: compiled versions of the trigger and leases of `helmrec.engine.relay`.

All decisions equal those of the engine, which `tests/sim/node/test_relay.py` checks. All leases of a run last equally
long, so they end in the order in which they were granted.
"""

from enum import IntEnum
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.config import EngineConfig
from helmrec.engine.relay.trigger import SHARE_S
from helmrec.jit import NONE, inner
from helmrec.memory.links import link, unlink
from helmrec.memory.prefix_book import KEPT, P, PrefixBook
from helmrec.types import IntArray


class R(IntEnum):
    """Indices into `RelayState.counts`."""

    SIGNAL_NEXT = 0
    SIGNAL_END = 1
    GRANT_NEXT = 2  # the first lease granted that may not have ended
    GRANT_END = 3
    JOB_NEXT = 4
    JOB_END = 5
    LEASES = 6
    HELD_PAGES = 7
    USED = 8
    EXPIRED = 9
    STEPS = 10
    MOST_HELD_PAGES = 11  # ever
    ADMITTED = 12  # from here on: signals by verdict
    RESIDENT = 13
    NOT_AT_RISK = 14
    HELD_ALREADY = 15
    NO_ROOM = 16
    TOO_BUSY = 17
    LOST = 18  # leases whose prefix was evicted


VERDICTS = (R.ADMITTED, R.RESIDENT, R.NOT_AT_RISK, R.HELD_ALREADY, R.NO_ROOM, R.TOO_BUSY)


class J(IntEnum):
    """Columns of `RelayState.job`."""

    REQUEST = 0  # request whose history is to be computed
    LEASE = 1  # as in `RelayState.lease`
    REACHED = 2  # tokens of its history that were resident after its last chunk


class T(IntEnum):
    """Indices into `RelayState.clocks`."""

    AHEAD_BUSY_S = 0  # decays, as in `ComputeShare`
    AHEAD_AT_S = 1
    LATE_BUSY_S = 2  # the same, of steps of any kind
    LATE_AT_S = 3
    BUSY_S = 4  # total time of steps that computed ahead
    MOST_SHARE = 5  # ever
    PROMISED_S = 6  # compute time promised to leases and not yet spent
    STEPS_S = 7  # total time of all steps


class RelayRules(NamedTuple):
    """`RelayConfig` as plain numbers, for compiled code."""

    budget_ms: float
    risk: float
    hold_s: float
    chunk_tokens: int
    max_held: float
    max_compute: float
    max_leases: int


class RelayState(NamedTuple):
    """Signals sent to a node, the leases granted and the histories to compute; arrays grow as signals are sent."""

    counts: IntArray
    clocks: NDArray[np.float64]
    request: IntArray  # (signals,)
    time_s: NDArray[np.float64]  # (signals,) when they arrive
    granted: IntArray  # (signals,) users with a lease, in order of grant
    end_s: NDArray[np.float64]  # (signals,) end of the leases granted
    job: IntArray  # (signals, 3) histories to be computed, in order
    lease: IntArray  # (users,) index into `granted` plus one; zero is none
    pages: IntArray  # (users,) pages of the lease
    promised_s: NDArray[np.float64]  # (users,) compute time promised to the lease


def relay_rules(engine: EngineConfig) -> RelayRules:
    """The relay's settings of an engine."""
    config = engine.relay
    return RelayRules(
        config.budget_ms,
        config.risk,
        config.hold_ms / 1e3,
        engine.chunk_tokens,
        config.max_held,
        config.max_compute,
        config.max_leases,
    )


def make_relay(num_users: int) -> RelayState:
    """A relay without signals."""
    clocks = np.zeros(len(T))
    clocks[T.AHEAD_AT_S] = clocks[T.LATE_AT_S] = -np.inf
    none, never = np.empty(0, np.int64), np.empty(0)
    lease, pages = np.zeros((2, num_users), np.int64)
    jobs = np.empty((0, len(J)), np.int64)
    return RelayState(
        np.zeros(len(R), np.int64), clocks, none, never, none, never, jobs, lease, pages, np.zeros(num_users)
    )


def with_signals(relay: RelayState, requests: IntArray, times_s: NDArray[np.float64]) -> RelayState:
    """The relay with these signals added after the existing ones."""
    room, empty = np.zeros(requests.size, np.int64), np.zeros(requests.size)
    relay.counts[R.SIGNAL_END] += requests.size
    return relay._replace(
        request=np.append(relay.request, requests),
        time_s=np.append(relay.time_s, times_s),
        granted=np.append(relay.granted, room),
        end_s=np.append(relay.end_s, empty),
        job=np.append(relay.job, np.zeros((requests.size, len(J)), np.int64), axis=0),
    )


@inner
def share(relay: RelayState, busy: int, now_s: float) -> float:
    """The share of recent time counted by a pair of clocks, of which `busy` is the first."""
    late_s = max(0.0, now_s - relay.clocks[busy + 1])
    return relay.clocks[busy] * exp(-late_s / SHARE_S) / SHARE_S


@inner
def add_share(relay: RelayState, busy: int, now_s: float, busy_s: float) -> None:
    """Add busy time to a pair of clocks."""
    relay.clocks[busy] = share(relay, busy, now_s) * SHARE_S + busy_s
    relay.clocks[busy + 1] = now_s


class SimulatedSignal(NamedTuple):
    """A signal as the trigger sees it (`trigger.PrefillSignal`)."""

    inline_ms: float
    ahead_s: float
    num_missing: int
    num_pages: int
    kv_pages: int  # pages that all prefixes may use


@inner
def decide(relay: RelayState, rules: RelayRules, user: int, signal: SimulatedSignal, now_s: float) -> int:
    """Return the verdict on a signal, as `trigger.decide` does."""
    counts = relay.counts
    if relay.lease[user]:
        return R.HELD_ALREADY
    if signal.inline_ms < rules.risk * rules.budget_ms:
        return R.NOT_AT_RISK
    if (
        counts[R.LEASES] >= rules.max_leases
        or counts[R.HELD_PAGES] + signal.num_pages > rules.max_held * signal.kv_pages
    ):
        return R.NO_ROOM
    if not signal.num_missing:
        return R.RESIDENT
    is_busy = compute_share(relay, now_s) + signal.ahead_s / SHARE_S > rules.max_compute
    return R.TOO_BUSY if is_busy else R.ADMITTED


@inner
def compute_share(relay: RelayState, now_s: float) -> float:
    """The share of time for computing ahead: what was spent recently, and what is promised."""
    return share(relay, T.AHEAD_BUSY_S, now_s) + relay.clocks[T.PROMISED_S] / SHARE_S


@inner
def promise(relay: RelayState, user: int, seconds: float) -> None:
    """Set the compute time promised to a user's lease."""
    relay.clocks[T.PROMISED_S] += seconds - relay.promised_s[user]
    relay.promised_s[user] = seconds


@inner
def grant(relay: RelayState, kv: PrefixBook, user: int, num_pages: int, end_s: float) -> None:
    """Give a user a lease and hold its prefixes."""
    counts = relay.counts
    place = counts[R.GRANT_END]
    counts[R.GRANT_END] += 1
    relay.granted[place], relay.end_s[place] = user, end_s
    relay.lease[user], relay.pages[user] = place + 1, num_pages
    counts[R.LEASES] += 1
    counts[R.HELD_PAGES] += num_pages
    counts[R.MOST_HELD_PAGES] = max(counts[R.MOST_HELD_PAGES], counts[R.HELD_PAGES])
    _hold(kv, user)


@inner
def end_lease(relay: RelayState, user: int, why: int) -> None:
    """End a user's lease, if it has one. `why`: R.USED, R.EXPIRED or R.LOST."""
    if relay.lease[user]:
        promise(relay, user, 0.0)
        relay.lease[user] = 0
        relay.counts[R.LEASES] -= 1
        relay.counts[R.HELD_PAGES] -= relay.pages[user]
        relay.counts[why] += 1


@inner
def lose_lease(relay: RelayState, kv: PrefixBook, user: int) -> None:
    """End the lease of a user whose prefix was evicted while it was computed."""
    end_lease(relay, user, R.LOST)
    _release(kv, user)


@inner
def expire(relay: RelayState, kv: PrefixBook, now_s: float) -> None:
    """End leases whose time is over, and make the prefixes of the others the hottest."""
    counts = relay.counts
    while counts[R.GRANT_NEXT] < counts[R.GRANT_END] and relay.end_s[counts[R.GRANT_NEXT]] <= now_s:
        place = counts[R.GRANT_NEXT]
        user = relay.granted[place]
        counts[R.GRANT_NEXT] += 1
        if relay.lease[user] == place + 1:
            end_lease(relay, user, R.EXPIRED)
            _release(kv, user)
    for place in range(counts[R.GRANT_NEXT], counts[R.GRANT_END]):
        if relay.lease[relay.granted[place]] == place + 1:
            _hold(kv, relay.granted[place])


@inner
def _hold(kv: PrefixBook, user: int) -> None:
    """Make a user's prefixes the hottest, the newest last, as `KVCache.hold` does."""
    links, after, slot = kv.links, kv.links.shape[0] - 1, int(kv.head[user]) - 1
    while slot != NONE:
        if kv.prefix[slot, P.KIND] == KEPT:
            unlink(links, slot)
            link(links, links[after, 0], slot, after)
            after = slot
        slot = kv.prefix[slot, P.MATE]


@inner
def _release(kv: PrefixBook, user: int) -> None:
    """Make a user's probationary prefixes the coldest, the newest first, as `KVCache.release` does."""
    links, before, slot = kv.links, kv.links.shape[0] - 1, int(kv.head[user]) - 1
    while slot != NONE:
        if kv.prefix[slot, P.KIND] == KEPT and kv.prefix[slot, P.PROBATIONARY]:
            unlink(links, slot)
            link(links, before, slot, links[before, 1])
            before = slot
        slot = kv.prefix[slot, P.MATE]


def check_relay(relay: RelayState) -> None:
    """Assert that leases, pages, jobs and signals are counted right."""
    counts, held = relay.counts, relay.lease > 0
    assert counts[R.LEASES] == np.count_nonzero(held), "leases are miscounted"
    assert counts[R.HELD_PAGES] == relay.pages[held].sum(), "held pages are miscounted"
    assert counts[R.JOB_NEXT] <= counts[R.JOB_END], "a job is lost"
    assert counts[list(VERDICTS)].sum() == counts[R.SIGNAL_NEXT], "a signal is not counted"
