"""A public log of ratings as histories to learn from and histories to be judged by."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helmrec.model.window import gap_bucket
from helmrec.traffic.importers import read_log
from helmrec.types import IntArray

HELD_OUT = 2  # of each user's events: the model is asked for them and never learns from them


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """One user's events, oldest first."""

    user: int
    items: IntArray
    actions: IntArray
    times: IntArray

    def gaps(self, num_buckets: int) -> IntArray:
        """Bucket of the time since the event before; 0 for the first."""
        waits = np.diff(self.times, prepend=self.times[0])
        return np.array([gap_bucket(wait, num_buckets) for wait in waits])


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    users: list[History]
    num_items: int
    num_actions: int

    def popularity(self) -> IntArray:  # (items,)
        """How often each item occurs in what may be learned from."""
        learned = [history.items[:-HELD_OUT] for history in self.users]
        return np.bincount(np.concatenate(learned), minlength=self.num_items)


def read_histories(kind: str, path: Path, min_ratings: int = 20, min_events: int = 5) -> Histories:
    """Items with fewer ratings are left out, then users with fewer events."""
    log = read_log(kind, path)
    counts = np.bincount(log.item)
    number = np.full(counts.size, -1)
    number[counts >= min_ratings] = np.arange(np.count_nonzero(counts >= min_ratings))
    order = np.lexsort((np.arange(log.user.size), log.timestamp_s, log.user))
    order = order[number[log.item[order]] >= 0]
    starts = np.flatnonzero(np.diff(log.user[order], prepend=-1))
    users = []
    for own in np.split(order, starts[1:]):
        if own.size >= min_events:
            items, actions = number[log.item[own]], log.action[own].astype(np.int64)
            users.append(History(int(log.user[own[0]]), items, actions, log.timestamp_s[own]))
    return Histories(users, int(number.max()) + 1, log.num_actions)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """For each event that may be learned from, what came before it: as many rows as a batch is large."""

    items: IntArray  # (batch, window), the first `lengths` of each row
    actions: IntArray
    gaps: IntArray  # time buckets
    lengths: IntArray  # (batch,)
    target: IntArray  # (batch,)
    target_gap: IntArray


def batches(data: Histories, window: int, num_buckets: int, batch: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Every event of every history once, in random order."""
    places = [(u, i) for u, history in enumerate(data.users) for i in range(1, history.items.size - HELD_OUT)]
    order, waits = rng.permutation(len(places)), [history.gaps(num_buckets) for history in data.users]
    for start in range(0, len(places) - batch + 1, batch):
        yield _make_batch(data, waits, [places[i] for i in order[start : start + batch]], window)


def _make_batch(data: Histories, waits: list[IntArray], places: list[tuple[int, int]], window: int) -> Batch:
    items, actions, gaps = np.zeros((3, len(places), window), np.int64)
    lengths, target, target_gap = np.zeros((3, len(places)), np.int64)
    for row, (user, end) in enumerate(places):
        history, start = data.users[user], max(0, end - window)
        lengths[row] = end - start
        items[row, : end - start] = history.items[start:end]
        actions[row, : end - start] = history.actions[start:end]
        gaps[row, 1 : end - start] = waits[user][start + 1 : end]  # the first of a window has none
        target[row], target_gap[row] = history.items[end], waits[user][end]
    return Batch(items, actions, gaps, lengths, target, target_gap)
