"""The host tier for KV of a simulated node: `Expander` compiled, and the sealed pages that wait to be saved.

A page is found by whose it is, of which window, and its place: histories only grow, so that says as much as the chain
state `memory/expander.py` looks it up by.
"""

from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.sim.node.jit import inner
from helmrec.types import IntArray

NONE = -1
PLACES = 4_096  # pages of a prefix, and windows of a user, are fewer


class Host(IntEnum):
    """Places in `HostState.counts`."""

    PAGES = 0
    SAVED = 1
    RELOADED = 2
    EVICTED = 3
    WAITING_BEGIN = 4  # of the ring of sealed pages
    WAITING = 5
    DROPPED = 6  # sealed pages the ring had no room for


class HostState(NamedTuple):
    counts: IntArray
    key: IntArray  # (slots,)
    epoch: IntArray  # (slots,) row epoch the page was computed at
    links: NDArray[np.int32]  # (slots + 1, 2) least recently wanted first; the last line holds the ends
    bucket: NDArray[np.int32]  # (buckets,) first slot of each
    follower: NDArray[np.int32]  # (slots,) next slot of the same bucket
    waiting: IntArray  # (ring, 4) prefix, its generation, first and end page


def make_host(num_slots: int) -> HostState:
    num_buckets = 1 << max(1, (2 * num_slots).bit_length())
    return HostState(
        counts=np.zeros(len(Host), np.int64),
        key=np.empty(num_slots, np.int64),
        epoch=np.empty(num_slots, np.int64),
        links=np.full((num_slots + 1, 2), num_slots, np.int32),
        bucket=np.full(num_buckets, NONE, np.int32),
        follower=np.empty(num_slots, np.int32),
        waiting=np.empty((1 << 16 if num_slots else 1, 4), np.int64),
    )


@inner
def page_key(user: int, window: int, page: int) -> int:
    return (user * PLACES + window) * PLACES + page


@inner
def _bucket_of(host: HostState, key: int) -> int:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return int((mixed ^ (mixed >> np.uint64(32))) & np.uint64(host.bucket.size - 1))


@numba.njit(cache=True)
def find(host: HostState, key: int) -> int:
    """The slot of a page, or NONE."""
    slot = host.bucket[_bucket_of(host, key)]
    while slot != NONE and host.key[slot] != key:
        slot = host.follower[slot]
    return slot


@inner
def want(host: HostState, slot: int) -> None:
    """This page is now the last in line to leave."""
    links = host.links
    links[links[slot, 0], 1] = links[slot, 1]
    links[links[slot, 1], 0] = links[slot, 0]
    _put_last(links, slot)


@inner
def _put_last(links: NDArray[np.int32], slot: int) -> None:
    ends = links.shape[0] - 1
    last = links[ends, 0]
    links[slot, 0] = last
    links[slot, 1] = ends
    links[last, 1] = slot
    links[ends, 0] = slot


@inner
def save(host: HostState, key: int, epoch: int) -> bool:
    """Give a page a slot; False if it is held already, computed no earlier."""
    slot = find(host, key)
    if slot != NONE and host.epoch[slot] >= epoch:
        return False
    if slot == NONE:
        slot = _take_slot(host)
        bucket = _bucket_of(host, key)
        host.key[slot] = key
        host.follower[slot] = host.bucket[bucket]
        host.bucket[bucket] = slot
        _put_last(host.links, slot)
    else:
        want(host, slot)
    host.epoch[slot] = epoch
    host.counts[Host.SAVED] += 1
    return True


@inner
def _take_slot(host: HostState) -> int:
    if host.counts[Host.PAGES] < host.key.size:
        host.counts[Host.PAGES] += 1
        return host.counts[Host.PAGES] - 1
    host.counts[Host.EVICTED] += 1
    links, ends = host.links, host.links.shape[0] - 1
    slot = links[ends, 1]
    links[ends, 1] = links[slot, 1]
    links[links[slot, 1], 0] = ends
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
def note_sealed(host: HostState, owner: tuple[int, int], first: int, end: int) -> None:
    """Pages [first, end) of a prefix, named by slot and generation, are full and should be saved in their turn."""
    counts, waiting = host.counts, host.waiting
    if first >= end:
        return
    if counts[Host.WAITING] == waiting.shape[0]:
        counts[Host.DROPPED] += end - first
        return
    place = (counts[Host.WAITING_BEGIN] + counts[Host.WAITING]) % waiting.shape[0]
    waiting[place, 0], waiting[place, 1] = owner
    waiting[place, 2], waiting[place, 3] = first, end
    counts[Host.WAITING] += 1


def check_host(host: HostState) -> None:
    ends, slot, seen = host.key.size, int(host.links[-1, 1]), 0
    while slot != ends:
        assert find(host, int(host.key[slot])) == slot, "a held page is not found"
        seen, slot = seen + 1, int(host.links[slot, 1])
    assert seen == host.counts[Host.PAGES] <= host.key.size, "a host slot is lost"
