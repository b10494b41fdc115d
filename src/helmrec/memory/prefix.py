"""The values of KV bookkeeping: a resident prefix, and the plan of one request in a step."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from helmrec.memory.prefix_hash import Epochs, States
from helmrec.types import UserId

# Numbers of 32 bits: a step copies the pages of whole histories, and of a list every number is an object to touch.
PageNumbers: TypeAlias = "array[int]"


def page_numbers(pages: Iterable[int] = ()) -> PageNumbers:
    """Return these page numbers as an array."""
    return array("i", pages)


class EpochRun(NamedTuple):
    """A run of tokens, from `first` on, computed at one row epoch; epochs change rarely, so runs are few and long."""

    first: int
    epoch: int


@dataclass(slots=True, eq=False)
class Prefix:
    """One resident history of one user. The last page may be partial; only this prefix writes to it."""

    user_id: UserId
    states: States  # chain states; the first `num_tokens` are in pages
    made_at: list[EpochRun]  # the row epochs its tokens were computed at
    pages: PageNumbers = field(default_factory=page_numbers)
    num_tokens: int = 0
    settled: int = 0  # tokens whose K/V were written by steps that have ended
    sound: int = 0  # tokens that gave finite scores, so their K/V are finite; at most `settled`
    is_suspect: bool = False  # it gave non-finite scores: tokens beyond `sound` are neither reused nor kept
    pins: int = 0
    is_kept: bool = False  # in the order of eviction; until then it is new in a running step
    is_probationary: bool = False  # not admitted by the policy: kept while pages are free, or computed ahead
    last_use_s: float = 0.0
    verified_s: float = 0.0  # time at which all its rows were last compared with updates
    verified_epoch: int = 0  # row epoch at that time


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `num_tokens` tokens of page `source` to page `target` before the step."""

    source: int
    target: int
    num_tokens: int


class PageLoad(NamedTuple):
    """Copy host slot `slot` into page `page` before the step."""

    slot: int
    page: int


class KVPlan(NamedTuple):
    """Where a request's history lies during one step."""

    prefix: Prefix | None  # None: there is no history
    num_resident: int
    num_tokens: int
    pages: PageNumbers
    num_before: int = 0  # tokens of the prefix before this plan, including those that a running step computes
    copy: PageCopy | None = None
    loads: tuple[PageLoad, ...] = ()  # resident pages that must be loaded from the host first
    donor: Prefix | None = None  # pinned too: its pages are shared or copied

    @property
    def num_new(self) -> int:
        return self.num_tokens - self.num_resident


NO_HISTORY = KVPlan(prefix=None, num_resident=0, num_tokens=0, pages=page_numbers())


class Match(NamedTuple):
    """The best resident prefix for a history, and the number of its leading tokens that may be reused."""

    prefix: Prefix
    num_tokens: int


def epoch_per_token(runs: list[EpochRun], num_tokens: int) -> Epochs:  # (num_tokens,)
    """Return the epoch of each of the first `num_tokens` tokens."""
    epochs = np.empty(num_tokens, np.uint32)
    for first, epoch in runs:
        epochs[first:] = epoch
    return epochs
