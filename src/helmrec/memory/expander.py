"""The host tier for KV: sealed pages kept in DRAM, found by their user and the chain state at their end.

A page's state vouches for everything before it, so one lookup per page verifies it. No user is ever given a page of
another. Bookkeeping only: which host slot holds which page, which page leaves when the tier is full, and whether
taking a page back beats computing it again. It does not know tensors or devices.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from helmrec.memory.history import States


class HostPage(NamedTuple):
    slot: int
    epoch: int  # the oldest row epoch among its tokens and all before them: it was computed from those too


class PageKey(NamedTuple):
    """A sealed page in the pool that may be saved."""

    user_id: int
    state: int  # the chain state at its end
    page: int
    epoch: int


class PageSave(NamedTuple):
    """Copy page `page` to host slot `slot`."""

    page: int
    slot: int


class StepCosts:
    """Seconds a step takes, as a linear function of tokens and token pairs, learned from the steps that ran.

    Least squares of the relative error, whose memory fades; the ridge keeps it sane before it has seen enough. A step
    that something else held up weighs little, since its error is relative to its own time.
    """

    _FADE = 0.99
    _RIDGE = 1e-9  # of what was seen
    _SHORTEST_S = 1e-6
    _SCALE = np.array([1.0, 1e3, 1e6])  # so that the three terms are of one size

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._floor_s = self._token_s = self._pair_s = 0.0

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        expected_s = self.seconds(num_tokens, num_pairs, is_whole_step=True)
        weight = 1 / max(seconds, expected_s, self._SHORTEST_S)
        x = weight * np.array([1.0, num_tokens, num_pairs]) / self._SCALE
        self._moments = self._FADE * self._moments + np.outer(x, x)
        self._target = self._FADE * self._target + weight * seconds * x
        ridge = self._RIDGE * np.trace(self._moments) * np.eye(3)
        fitted = np.maximum(np.linalg.solve(self._moments + ridge, self._target), 0.0) / self._SCALE
        self._floor_s, self._token_s, self._pair_s = fitted.tolist()

    def seconds(self, num_tokens: int, num_pairs: float, *, is_whole_step: bool = False) -> float:
        """What adding so many tokens and pairs to a step costs, or a step of nothing else."""
        return is_whole_step * self._floor_s + num_tokens * self._token_s + num_pairs * self._pair_s


@dataclass(slots=True)
class ReloadCosts:
    """What taking pages back costs against computing them: what a step that did so took longer than it should have.

    Part of a reload is hidden behind other work, and how much depends on the load, so it is learned from steps. As
    long as no reload is tried, its cost is doubted a little more each time, until one is. What hides the first pages
    of a step does not hide the last: a step loads no longer than it would compute, so that neither waits for the other.
    """

    steps: StepCosts
    page_s: float = 0.0  # that a page from the host delays a step; timed on an idle device before the first request

    bus_page_s: float = field(init=False)  # that a page takes on an idle device
    _computing_s: float = field(default=0.0, init=False)  # what has been planned of the step so far
    _loading_s: float = field(default=0.0, init=False)

    _SMOOTHING = 0.2
    _DOUBT = 0.99

    def __post_init__(self) -> None:
        self.bus_page_s = self.page_s

    def begin_step(self) -> None:
        self._computing_s = self._loading_s = 0.0

    def note_planned(self, start: int, end: int, num_pages: int) -> None:
        """The step being planned computes tokens [start, end) of a history, and takes so many pages back."""
        self._computing_s += self._computing(start, end)
        self._loading_s += num_pages * self.bus_page_s

    def observe_reload(self, num_pages: int, exposed_s: float) -> None:
        """A step that took back so many pages lasted so much longer than its tokens account for."""
        self.page_s += self._SMOOTHING * (max(0.0, exposed_s) / num_pages - self.page_s)

    def prefers_reload(self, start: int, end: int, num_pages: int) -> bool:
        """Whether `num_pages` pages are cheaper than computing tokens [start, end) of a history."""
        computing_s = self._computing(start, end)
        is_cheaper = num_pages * self.page_s < computing_s
        if not is_cheaper:
            self.page_s *= self._DOUBT
        return is_cheaper and self._loading_s + num_pages * self.bus_page_s <= self._computing_s + computing_s

    def _computing(self, start: int, end: int) -> float:
        return self.steps.seconds(end - start, (end - start) * (start + end) / 2)


class Expander:
    """`num_slots` host pages, the least recently wanted leaving first."""

    def __init__(self, num_slots: int, policy: str = "measured") -> None:
        self.costs = ReloadCosts(StepCosts())
        self._policy = policy
        self._pages: OrderedDict[tuple[int, int], HostPage] = OrderedDict()  # (user, state) -> page, coldest first
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self.saved_pages = 0
        self.reloaded_pages = 0
        self.evicted_pages = 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def find(self, user_id: int, states: States, first: int, page_tokens: int) -> list[HostPage]:
        """The run of held pages from page `first` of a user's history on."""
        found: list[HostPage] = []
        if not self._pages:
            return found
        for end in range((first + 1) * page_tokens, states.size + 1, page_tokens):
            place = user_id, int(states[end - 1])
            page = self._pages.get(place)
            if page is None:
                break
            self._pages.move_to_end(place)
            found.append(page)
        return found

    def is_worth_it(self, start: int, end: int, num_pages: int) -> bool:
        """Whether to take back these pages, which hold tokens [start, end) of a history, or to compute them."""
        return self._policy == "always" or (
            self._policy == "measured" and self.costs.prefers_reload(start, end, num_pages)
        )

    def save(self, key: PageKey) -> PageSave | None:
        """Give a page a host slot; None if it is held already, computed no earlier, or there is no tier."""
        if not self._num_slots:
            return None
        place = key.user_id, key.state
        held = self._pages.get(place)
        if held is not None and held.epoch >= key.epoch:
            return None
        slot = held.slot if held is not None else self._take_slot()
        self._pages[place] = HostPage(slot, key.epoch)
        self._pages.move_to_end(place)
        self.saved_pages += 1
        return PageSave(key.page, slot)

    def discard(self, states: Iterable[int]) -> None:
        """Pages that end in these states are not to be used again."""
        for state in states:
            if (page := self._pages.pop(state, None)) is not None:
                self._free.append(page.slot)

    def withdraw(self, saves: Sequence[PageSave]) -> None:
        """These pages were not copied after all."""
        slots = {save.slot for save in saves}
        self._drop([place for place, page in self._pages.items() if page.slot in slots])

    def forget(self, user_id: int) -> None:
        """Drop all pages of a user."""
        self._drop([place for place in self._pages if place[0] == user_id])

    def _drop(self, places: list[tuple[int, int]]) -> None:
        self._free.extend(self._pages.pop(place).slot for place in places)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self.evicted_pages += 1
        return self._pages.popitem(last=False)[1].slot

    def check(self) -> None:
        slots = [*self._free, *(page.slot for page in self._pages.values())]
        assert sorted(slots) == list(range(self._num_slots)), "a host slot is lost or held twice"
