"""Requests of made-up users: popular items, features that follow from the item, histories that grow."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.types import IntArray, RankRequest

NEW_EVENTS = 16  # of a returning user between two visits
VISITS = 200  # after which a user's history starts again at its first length
SPREAD = 2_654_435_761  # popular items are spread over the table
_Made = TypeVar("_Made")


def popular_items(rng: np.random.Generator, num: int, num_items: int) -> IntArray:
    """Items by Zipf's law with exponent one: the logarithm of the rank is uniform."""
    ranks = np.exp(rng.random(num) * np.log(num_items)).astype(np.int64) - 1
    return ranks * SPREAD % num_items


def in_threads(make: Callable[..., _Made], arguments: Sequence[tuple[object, ...]]) -> list[_Made]:
    """Results in order, made by eight threads."""
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda each: make(*each), arguments))


class Crowd(NamedTuple):
    """How many users return, and how long histories are."""

    num_hot: int
    shortest: int
    longest: int
    num_candidates: int
    num_kept: int = 0  # different histories of users who come once; 0: each has one of its own

    @classmethod
    def around(cls, num_hot: int, mean_events: int, num_candidates: int, num_kept: int = 0) -> "Crowd":
        shortest = mean_events // 3
        return cls(num_hot, shortest, 2 * mean_events - shortest, num_candidates, num_kept)


class Visitors:
    """Hot users who return with a few more events each time, and users who come once. Same seed, same requests."""

    def __init__(self, model: ModelConfig, crowd: Crowd, seed: int = 0) -> None:
        self.model, self.crowd = model, crowd
        self._rng = np.random.default_rng(seed)
        self._lengths = self._rng.integers(crowd.shortest, crowd.longest + 1, crowd.num_hot)
        self._items = [self._draw(int(length) + VISITS * NEW_EVENTS) for length in self._lengths]
        self._kept = [self._draw(self._length()) for _ in range(crowd.num_kept)]
        self._visits = np.zeros(crowd.num_hot, np.int64)
        self._next_new = 1 << 40

    def next(self, hot_share: float) -> RankRequest:
        return make_request(self.model, *self.next_parts(hot_share))

    def next_parts(self, hot_share: float) -> tuple[int, IntArray, IntArray]:
        """User, items and candidates of the next request: what `make_request` takes, for other threads to make."""
        return self.hot() if self._rng.random() < hot_share else self.new()

    def hot(self, user: int | None = None, number: int | None = None) -> tuple[int, IntArray, IntArray]:
        """The next visit of a hot user, or visit `number`."""
        user = int(self._rng.integers(self.crowd.num_hot)) if user is None else user
        if number is None:
            self._visits[user] += 1
            number = int(self._visits[user])
        end = int(self._lengths[user]) + number % VISITS * NEW_EVENTS
        return user, self._items[user][:end], self._draw(self.crowd.num_candidates)

    def new(self, num_events: int | None = None) -> tuple[int, IntArray, IntArray]:
        """A user who was not there before."""
        self._next_new += 1
        if self._kept and num_events is None:
            items = self._kept[int(self._rng.integers(len(self._kept)))]
        else:
            items = self._draw(self._length() if num_events is None else num_events)
        return self._next_new, items, self._draw(self.crowd.num_candidates)

    def _length(self) -> int:
        return int(self._rng.integers(self.crowd.shortest, self.crowd.longest + 1))

    def _draw(self, num: int) -> IntArray:
        return popular_items(self._rng, num, self.model.features[0].num_rows)
