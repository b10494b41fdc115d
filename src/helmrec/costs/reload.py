"""Whether a KV page is reloaded from the host or computed again, from what earlier steps of this engine took.

Part of a reload overlaps with other work, and how much depends on the load, so its delay is learned from steps. Each
rejected reload lowers the learned delay a little, so that reloads are tried again after some time. A step reloads for
at most as long as it computes, because only that much can overlap. The simulated node follows the same rules.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from helmrec.jit import rule

DOUBT = 0.99  # factor on the learned delay of a page each time a reload is rejected
_SMOOTHING = 0.2


@rule
def is_cheaper(num_pages: int, page_s: float, computing_s: float) -> bool:
    """Whether loading pages delays a step by less than computing their tokens would."""
    return num_pages * page_s < computing_s


@rule
def can_overlap(loading_s: float, computing_s: float) -> bool:
    """Whether a step computes for as long as it loads."""
    return loading_s <= computing_s


@rule
def with_delay(page_s: float, num_pages: int, exposed_s: float) -> float:
    """The delay of a page, learned from a step that took `exposed_s` longer because it loaded `num_pages`."""
    return page_s + _SMOOTHING * (max(0.0, exposed_s) / num_pages - page_s)


class StepWork(NamedTuple):
    """The work of one step, as cost models count it."""

    tokens: int  # computed
    pairs: float  # of tokens that attention reads, in one layer
    num_reloaded: int  # pages that came from the host


class StepCosts:
    """Predicts the seconds of a step, as a linear function of tokens and token pairs fitted to earlier steps.

    Least squares of the relative error with exponentially decaying weights; a ridge term regularises the first fits.
    A step that something else delayed has little weight, since its error is relative to its own time.
    """

    _FADE = 0.99
    _RIDGE = 1e-9  # relative to the trace of the moments
    _SHORTEST_S = 1e-6
    _SCALE = np.array([1.0, 1e3, 1e6])  # brings the three terms to one magnitude

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._floor_s = self._token_s = self._pair_s = 0.0

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Update the fit with a step that has ended."""
        expected_s = self.seconds(num_tokens, num_pairs, is_whole_step=True)
        weight = 1 / max(seconds, expected_s, self._SHORTEST_S)
        x = weight * np.array([1.0, num_tokens, num_pairs]) / self._SCALE
        self._moments = self._FADE * self._moments + np.outer(x, x)
        self._target = self._FADE * self._target + weight * seconds * x
        ridge = self._RIDGE * np.trace(self._moments) * np.eye(3)
        fitted = np.maximum(np.linalg.solve(self._moments + ridge, self._target), 0.0) / self._SCALE
        self._floor_s, self._token_s, self._pair_s = fitted.tolist()

    def seconds(self, num_tokens: int, num_pairs: float, *, is_whole_step: bool = False) -> float:
        """Predict the seconds that these tokens and pairs add to a step, or the seconds of a step of only these."""
        return is_whole_step * self._floor_s + num_tokens * self._token_s + num_pairs * self._pair_s


@dataclass(slots=True)
class ReloadCosts:
    """Decides between reloading pages and computing them, from the delay that reloads caused in earlier steps."""

    steps: StepCosts
    page_s: float = 0.0  # delay of a step per reloaded page; starts as the time on an idle device

    bus_page_s: float = field(init=False)  # time of a page on an idle device
    _computing_s: float = field(default=0.0, init=False)  # planned so far for the next step
    _loading_s: float = field(default=0.0, init=False)

    _MAX_EXPOSED = 3  # a reload adds at most this many times the step's own time; more has another cause

    def __post_init__(self) -> None:
        self.set_bus_time(self.page_s)

    def set_bus_time(self, page_s: float) -> None:
        """Start from the time that a page takes on an idle device."""
        self.page_s = self.bus_page_s = page_s

    def begin_step(self) -> None:
        """Start planning a step: nothing is computed or reloaded in it yet."""
        self._computing_s = self._loading_s = 0.0

    def note_planned(self, start: int, end: int, num_pages: int) -> None:
        """Add to the planned step: it computes tokens [start, end) of a history and reloads `num_pages` pages."""
        self._computing_s += self._computing(start, end)
        self._loading_s += num_pages * self.bus_page_s

    def observe_step(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that has ended: the cost of its tokens, or, if it reloaded pages, of the reload."""
        if not work.num_reloaded:
            self.steps.observe(work.tokens, work.pairs, seconds)
            return
        expected_s = self.steps.seconds(work.tokens, work.pairs, is_whole_step=True)
        self.observe_reload(work.num_reloaded, min(seconds - expected_s, self._MAX_EXPOSED * expected_s))

    def observe_reload(self, num_pages: int, exposed_s: float) -> None:
        """Learn from a step that reloaded `num_pages` pages and took `exposed_s` longer than its tokens explain."""
        self.page_s = with_delay(self.page_s, num_pages, exposed_s)

    def prefers_reload(self, start: int, end: int, num_pages: int) -> bool:
        """Whether reloading `num_pages` pages is cheaper than computing tokens [start, end) of a history."""
        computing_s = self._computing(start, end)
        if not is_cheaper(num_pages, self.page_s, computing_s):
            self.page_s *= DOUBT
            return False
        return can_overlap(self._loading_s + num_pages * self.bus_page_s, self._computing_s + computing_s)

    def _computing(self, start: int, end: int) -> float:
        return self.steps.seconds(end - start, (end - start) * (start + end) / 2)
