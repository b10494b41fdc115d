"""The host tier for KV of a simulated node: a compiled `KVHostTier`, and the queue of sealed pages to be saved.

The key of a page is its user, window and position. Histories only grow, so this key identifies a page as well as the
chain state that `memory/kv_host_tier.py` uses.
"""

from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.jit import NONE, inner
from helmrec.memory.links import Links, link_last, make_links, unlink
from helmrec.types import IntArray

MAX_POSITIONS = 4_096  # a prefix has fewer pages, and a user fewer windows


class Host(IntEnum):
    """Indices into `HostState.counts`."""

    PAGES = 0
    SAVED = 1
    RELOADED = 2
    EVICTED = 3
    WAITING_BEGIN = 4  # of the ring of sealed pages
    WAITING = 5


class HostState(NamedTuple):
    """Pages on the host in LRU order, a hash table to find them, and the ring of pages to be saved."""

    counts: IntArray
    key: IntArray  # (slots,)
    epoch: IntArray  # (slots,) row epoch at which the page was computed
    links: Links  # least recently used first
    bucket: NDArray[np.int32]  # (buckets,) first slot of each bucket
    follower: NDArray[np.int32]  # (slots,) next slot of the same bucket
    waiting: IntArray  # (ring, 4) prefix slot, its generation, first and end page


def make_host(num_slots: int) -> HostState:
    """An empty host tier of `num_slots` pages."""
    num_buckets = 1 << max(1, (2 * num_slots).bit_length())
    return HostState(
        counts=np.zeros(len(Host), np.int64),
        key=np.empty(num_slots, np.int64),
        epoch=np.empty(num_slots, np.int64),
        links=make_links(num_slots),
        bucket=np.full(num_buckets, NONE, np.int32),
        follower=np.empty(num_slots, np.int32),
        waiting=np.empty((1 << 16 if num_slots else 1, 4), np.int64),
    )


@inner
def page_key(user: int, window: int, page: int) -> int:
    return (user * MAX_POSITIONS + window) * MAX_POSITIONS + page


@inner
def _bucket_of(host: HostState, key: int) -> int:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return int((mixed ^ (mixed >> np.uint64(32))) & np.uint64(host.bucket.size - 1))


@numba.njit(cache=True)
def find(host: HostState, key: int) -> int:
    """Return the slot of a page, or NONE."""
    slot = host.bucket[_bucket_of(host, key)]
    while slot != NONE and host.key[slot] != key:
        slot = host.follower[slot]
    return slot


@inner
def touch(host: HostState, slot: int) -> None:
    """Make this page the most recently used one."""
    unlink(host.links, slot)
    link_last(host.links, slot)


@inner
def save(host: HostState, key: int, epoch: int) -> bool:
    """Store a page; return False if a copy that is at least as new is stored already."""
    slot = find(host, key)
    if slot != NONE and host.epoch[slot] >= epoch:
        return False
    if slot == NONE:
        slot = _take_slot(host)
        bucket = _bucket_of(host, key)
        host.key[slot] = key
        host.follower[slot] = host.bucket[bucket]
        host.bucket[bucket] = slot
        link_last(host.links, slot)
    else:
        touch(host, slot)
    host.epoch[slot] = epoch
    host.counts[Host.SAVED] += 1
    return True


@inner
def _take_slot(host: HostState) -> int:
    if host.counts[Host.PAGES] < host.key.size:
        host.counts[Host.PAGES] += 1
        return host.counts[Host.PAGES] - 1
    host.counts[Host.EVICTED] += 1
    slot = host.links[-1, 1]
    unlink(host.links, slot)
    bucket = _bucket_of(host, host.key[slot])
    if host.bucket[bucket] == slot:
        host.bucket[bucket] = host.follower[slot]
        return slot
    before = host.bucket[bucket]
    while host.follower[before] != slot:
        before = host.follower[before]
    host.follower[before] = host.follower[slot]
    return slot


@inner
def note_sealed(host: HostState, slot: int, generation: int, first: int, end: int) -> None:
    """Queue the full pages [first, end) of a prefix to be saved; drop them if the queue is full."""
    counts, waiting = host.counts, host.waiting
    if first >= end or counts[Host.WAITING] == waiting.shape[0]:
        return
    place = (counts[Host.WAITING_BEGIN] + counts[Host.WAITING]) % waiting.shape[0]
    waiting[place, 0], waiting[place, 1] = slot, generation
    waiting[place, 2], waiting[place, 3] = first, end
    counts[Host.WAITING] += 1


def check_host(host: HostState) -> None:
    """Assert the invariants of the host tier."""
    ends, slot, seen = host.key.size, int(host.links[-1, 1]), 0
    while slot != ends:
        assert find(host, int(host.key[slot])) == slot, "a stored page is not found"
        seen, slot = seen + 1, int(host.links[slot, 1])
    assert seen == host.counts[Host.PAGES] <= host.key.size, "a host slot is lost"
