"""The values KV bookkeeping deals in: a resident prefix, and the plan of one request's step."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from helmrec.memory.history import Epochs, States


class EpochRun(NamedTuple):
    """Tokens from `first` on were computed at this row epoch; epochs change rarely, so runs are few and long."""

    first: int
    epoch: int


@dataclass(slots=True, eq=False)
class Prefix:
    """One resident history of one user. The last page may be partial; only this prefix writes to it."""

    user_id: int
    states: States  # chain states; the first `num_tokens` are in pages
    made_at: list[EpochRun]  # the row epochs its tokens were computed at
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    settled: int = 0  # tokens whose K/V were written by steps before the running one
    sound: int = 0  # tokens that finite scores were computed from, so their K/V are finite; never more than settled
    is_suspect: bool = False  # scores computed from it were not finite: beyond `sound`, nothing is offered or kept
    pins: int = 0
    is_probationary: bool = False  # has not earned its pages: it was computed before anybody asked, or there was room
    last_use_s: float = 0.0
    verified_s: float = 0.0  # when, and
    verified_epoch: int = 0  # at which row epoch, all its rows were last held against updates


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
    pages: list[int]
    copy: PageCopy | None = None
    loads: tuple[PageLoad, ...] = ()  # of those resident, pages that must come from the host first
    donor: Prefix | None = None  # pinned too: its pages are shared or copied
    num_before: int = 0  # tokens the prefix had, some of them perhaps still being computed by a step ahead

    @property
    def num_new(self) -> int:
        return self.num_tokens - self.num_resident


NO_HISTORY = KVPlan(prefix=None, num_resident=0, num_tokens=0, pages=[])


class Match(NamedTuple):
    """The best resident prefix for a history, and how many of its leading tokens may be reused."""

    prefix: Prefix
    num_tokens: int


def epoch_per_token(runs: list[EpochRun], num_tokens: int) -> Epochs:  # (num_tokens,)
    """The epoch of each of the first tokens."""
    epochs = np.empty(num_tokens, np.uint32)
    for first, epoch in runs:
        epochs[first:] = epoch
    return epochs
