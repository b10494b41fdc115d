"""Whether a KV page is reloaded from the host or computed again, from what earlier steps of this engine took.

Part of a reload overlaps with other work, and how much depends on the load, so its delay is learned from steps. Each
rejected reload lowers the learned delay a little, so that reloads are tried again after some time. A step reloads for
at most as long as it computes, because only that much can overlap. The simulated node follows the same rules.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from helmrec.costs.steps import StepCosts
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


NO_WORK = StepWork(0, 0.0, 0)


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
