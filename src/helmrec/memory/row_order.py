"""Eviction orders of cached rows: exact LRU, or decayed frequency.

An order ranks slots; it does not know rows, pages or tables. The array loops are Numba; their plain twins are in
`tests/memory`.
"""

from typing import Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.links import Links, link, link_first, link_last, make_links, unlink

Slots = NDArray[np.int32]


class EvictionOrder(Protocol):
    """Ranks the slots in use from cold to hot."""

    def touch(self, slots: Slots) -> None:
        """Record that slots were read, in this order."""

    def insert(self, slots: Slots) -> None:
        """Add slots that were filled, the most recent last."""

    def insert_coldest(self, slots: Slots) -> None:
        """Add slots that were filled ahead of demand at the cold end; the first is the hottest of them."""

    def remove(self, slots: Slots) -> None: ...

    def coldest(self, num: int) -> Slots:
        """Return the `num` coldest slots, coldest first; they stay in the order."""

    def relocate(self, source: Slots, target: Slots) -> None:
        """Give the ranks of `source` slots to `target` slots, to which their rows have moved."""


class LruOrder:
    """Exact least-recently-used: a doubly linked list over slots, coldest at the head."""

    def __init__(self, num_slots: int) -> None:
        self._links = make_links(num_slots)

    def touch(self, slots: Slots) -> None:
        _relink(self._links, slots)

    def insert(self, slots: Slots) -> None:
        _link_last(self._links, slots)

    def insert_coldest(self, slots: Slots) -> None:
        _link_first(self._links, slots)

    def remove(self, slots: Slots) -> None:
        _unlink(self._links, slots)

    def coldest(self, num: int) -> Slots:
        return _walk(self._links, num)

    def relocate(self, source: Slots, target: Slots) -> None:
        _replace(self._links, source, target)


@numba.njit(cache=True)
def _unlink(links: Links, slots: Slots) -> None:
    for slot in slots:
        unlink(links, slot)


@numba.njit(cache=True)
def _link_last(links: Links, slots: Slots) -> None:
    for slot in slots:
        link_last(links, slot)


@numba.njit(cache=True)
def _link_first(links: Links, slots: Slots) -> None:
    for slot in slots:
        link_first(links, slot)


@numba.njit(cache=True)
def _relink(links: Links, slots: Slots) -> None:
    for slot in slots:
        unlink(links, slot)
        link_last(links, slot)


@numba.njit(cache=True)
def _walk(links: Links, num: int) -> Slots:
    out = np.empty(num, np.int32)
    slot = links[-1, 1]
    for i in range(num):
        out[i] = slot
        slot = links[slot, 1]
    return out


@numba.njit(cache=True)
def _replace(links: Links, source: Slots, target: Slots) -> None:
    for i in range(source.size):
        link(links, links[source[i], 0], target[i], links[source[i], 1])


_NUDGE = 1e-9  # in half-lives: distinguishes slots of otherwise equal score


class DecayedFrequencyOrder:
    """Least-frequently-used with exponential decay.

    A slot's score is log2 of the sum of 2**(time / half_life) over its touches, so that scores only grow and
    old touches fade without ever being visited. Time counts touches. One partial sort serves many evictions:
    the coldest slots are kept as a queue, and `bound` is the score that everything else is at or above.
    """

    def __init__(self, num_slots: int, half_life: int | None = None) -> None:
        self._score = np.full(num_slots, np.inf, np.float64)  # inf: not in use
        self._half_life = float(half_life or 8 * max(num_slots, 1))
        self._time = 0.0
        self._queue = np.empty(0, np.int32)
        self._queued_score = np.empty(0, np.float64)
        self._bound = -np.inf

    def touch(self, slots: Slots) -> None:
        self._keep_queue_only_above_now()
        self._time = _add_touches(self._score, slots, self._time, self._half_life)

    def insert(self, slots: Slots) -> None:
        self._keep_queue_only_above_now()
        self._score[slots] = self._time / self._half_life

    def insert_coldest(self, slots: Slots) -> None:
        lowest = min(float(self._score.min()), self._time / self._half_life)
        self._score[slots] = lowest - np.arange(1, slots.size + 1) * _NUDGE
        self._bound = -np.inf

    def remove(self, slots: Slots) -> None:
        self._score[slots] = np.inf

    def relocate(self, source: Slots, target: Slots) -> None:
        self._score[target] = self._score[source]
        self._score[source] = np.inf
        self._bound = -np.inf

    def coldest(self, num: int) -> Slots:
        if self._bound > -np.inf:
            unchanged = self._score[self._queue] == self._queued_score
            self._queue, self._queued_score = self._queue[unchanged], self._queued_score[unchanged]
        if self._bound == -np.inf or self._queue.size < num:
            self._select(max(num, self._score.size // 64))
        return self._queue[:num]

    def _select(self, num: int) -> None:
        num = min(num, int(np.isfinite(self._score).sum()))
        chosen = np.argpartition(self._score, num - 1)[:num] if num else np.empty(0, np.int64)
        self._queue = chosen[np.argsort(self._score[chosen], kind="stable")].astype(np.int32)
        self._queued_score = self._score[self._queue]
        self._bound = self._queued_score[-1] if num else -np.inf

    def _keep_queue_only_above_now(self) -> None:
        """Discard the queue if a slot read or filled now could score below its bound."""
        if self._time / self._half_life < self._bound:
            self._bound = -np.inf


@numba.njit(cache=True)
def _add_touches(score: NDArray[np.float64], slots: Slots, time: float, half_life: float) -> float:
    for slot in slots:
        time += 1.0
        now = time / half_life
        high, low = max(score[slot], now), min(score[slot], now)
        score[slot] = high + np.log2(1.0 + 2.0 ** (low - high))
    return time


def make_order(name: str, num_slots: int) -> EvictionOrder:
    return LruOrder(num_slots) if name == "lru" else DecayedFrequencyOrder(num_slots)
