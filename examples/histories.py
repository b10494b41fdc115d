"""A public log of ratings as histories to learn from and histories to be judged by."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helmrec.errors import HelmRecError, TraceError
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


def histories_or_exit(kind: str, path: Path, batch_size: int) -> Histories:
    """Read a log to learn from; end the program with one line if it cannot be read or does not fill a batch."""
    try:
        data = read_histories(kind, path)
        num_examples = len(examples_of(data))
        if num_examples < batch_size:
            raise TraceError(
                f"{path} has too few events: of users with 5 events or more, of items with 20 ratings or more, "
                f"{num_examples} can be learned from, and a batch takes {batch_size}"
            )
    except HelmRecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return data


class Example(NamedTuple):
    """An event to predict from the events before it."""

    history: History
    end: int  # its index in the history

    @property
    def target(self) -> int:
        return int(self.history.items[self.end])


def examples_of(data: Histories) -> list[Example]:
    """Every event that may be learned from."""
    return [Example(h, end) for h in data.users for end in range(1, h.items.size - HELD_OUT)]


def batches(data: Histories, size: int, rng: np.random.Generator) -> Iterator[list[Example]]:
    """Yield every event that may be learned from once, in random order."""
    examples = examples_of(data)
    order = rng.permutation(len(examples))
    for start in range(0, len(examples) - size + 1, size):
        yield [examples[i] for i in order[start : start + size]]
