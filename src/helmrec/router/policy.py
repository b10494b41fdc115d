"""Which node serves a request: the protocol of all policies, and ours, which weighs both caches and queues in one unit.

Pure: a choice is a function of the request, the nodes as seen, and the clock. No state of the world makes it fail.
"""

from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol

import numba
import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.router.cost import CostTerms, RouterCost, Work, expected_ms, service_ms, stages_of
from helmrec.router.hashing import NOBODY, first_of, rendezvous_scores, within_bound
from helmrec.router.nodes import Flags, Floats, Nodes, RouteRequest
from helmrec.router.sketch import Belief, SketchTable, absent_rows, count_clear, shared_rate

# For functions that only compiled code calls: no way in from Python, less to compile.
_inner = partial(numba.njit, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)()


class Reason(StrEnum):
    """Why a node was chosen."""

    AFFINITY = "affinity"  # it knows the user
    YIELDED = "yielded"  # another knows the user, but is too busy
    COLD = "cold"  # nobody knows the user: hash, within a bound of load
    DEGRADED = "degraded"  # nobody knows the user, and no node's report is fresh
    SCORE = "score"
    HASH = "hash"
    LOAD = "load"
    RANDOM = "random"


class Choice(NamedTuple):
    """A node, what the request is expected to take there from arrival to answer, and what it adds to the queue."""

    node: int
    expected_ms: float
    reason: Reason
    service_ms: float


class Policy(Protocol):
    def choose(self, request: RouteRequest, nodes: Nodes, now_s: float) -> Choice | None:
        """A living node; None only if none is alive."""


class Prices(NamedTuple):
    """Milliseconds of a request, by node; of dead ones, too."""

    alone_ms: Floats  # both stages, no queue
    service_ms: Floats  # what it adds to the queue
    expected_ms: Floats  # queue included
    absent_rows: Floats


class Weighing(NamedTuple):
    """How a request is priced."""

    terms: CostTerms
    sketch_weight: float  # samples the reported hit rate is worth beside a sketch
    hit_rate: float  # where nobody has reported one


@numba.njit(cache=True)
def price(weighing: Weighing, request: RouteRequest, nodes: Nodes) -> Prices:
    """A request on every node. What stale nodes reported is not used: they are taken for average fresh ones."""
    count, num_tokens = nodes.ids.size, request.num_tokens
    prices = Prices(np.empty(count), np.empty(count), np.empty(count), np.empty(count))
    usual = _usual_hit_rate(weighing, nodes)
    resident, held, is_any_reloadable = np.empty(count, np.int64), np.empty(count, np.int64), False
    for i in range(count):
        resident[i] = min(nodes.resident_tokens[i], num_tokens)
        held[i] = max(resident[i], min(nodes.host_tokens[i], num_tokens))
        is_any_reloadable |= held[i] > resident[i]
    table = SketchTable(nodes.sketch_words, nodes.sketch_threshold, nodes.sketch_fill)
    clear = count_clear(table, request.sample, resident)
    clear_if_reloaded = count_clear(table, request.sample, held) if is_any_reloadable else clear
    for i in range(count):
        rate, hit_rate = 0.0, usual
        if nodes.is_fresh[i]:
            rate = shared_rate(nodes.sketch_threshold[i], request.sample.threshold)
            hit_rate = usual if np.isnan(nodes.row_hit_rate[i]) else nodes.row_hit_rate[i]
        rows = _Rows(float(request.rows_per_token), hit_rate, nodes.sketch_fill[i], rate)
        plan = _Plan(resident[i], num_tokens - resident[i], 0, request.num_candidates, clear[i])
        best = _priced(weighing, plan, rows, nodes.queue_ms[i])
        if held[i] > resident[i]:
            reloaded = held[i] - resident[i]
            plan = _Plan(held[i], num_tokens - held[i], reloaded, request.num_candidates, clear_if_reloaded[i])
            reloading = _priced(weighing, plan, rows, nodes.queue_ms[i])
            best = reloading if reloading.alone_ms < best.alone_ms else best
        prices.alone_ms[i], prices.service_ms[i] = best.alone_ms, best.service_ms
        prices.expected_ms[i], prices.absent_rows[i] = best.expected_ms, best.absent_rows
    return prices


@_inner
def _usual_hit_rate(weighing: Weighing, nodes: Nodes) -> float:
    total, count = 0.0, 0
    for i in range(nodes.ids.size):
        if nodes.is_fresh[i] and nodes.is_alive[i] and not np.isnan(nodes.row_hit_rate[i]):
            total += nodes.row_hit_rate[i]
            count += 1
    return total / count if count else weighing.hit_rate


class _Plan(NamedTuple):
    """One way to serve a request on a node. Numbers only: compiled loops count references of every array they see."""

    held_tokens: int  # not computed
    new_tokens: int
    reloaded_tokens: int  # of those held
    num_candidates: int
    num_clear: int  # sampled rows that would be read and have no bit


class _Rows(NamedTuple):
    """What is known of the rows of a node."""

    rows_per_token: float
    hit_rate: float
    fill: float
    rate: float  # 0: no sketch


class _Price(NamedTuple):
    alone_ms: float
    service_ms: float
    expected_ms: float
    absent_rows: float


@_inner
def _priced(weighing: Weighing, plan: _Plan, rows: _Rows, queue_ms: float) -> _Price:
    num_rows = (plan.new_tokens + plan.num_candidates) * rows.rows_per_token
    belief = Belief(num_rows, 1 - rows.hit_rate, weighing.sketch_weight)
    absent = absent_rows(plan.num_clear, rows.fill, rows.rate, belief)
    work = Work(plan.held_tokens, plan.new_tokens, plan.reloaded_tokens, plan.num_candidates, absent)
    stages = stages_of(weighing.terms, work)
    return _Price(
        stages.compute_ms + stages.bus_ms,
        service_ms(weighing.terms, stages),
        expected_ms(weighing.terms, stages, queue_ms),
        absent,
    )


class RouterSettings(Frozen):
    """How ours trades affinity against load. Defaults are for answers due within tens of milliseconds."""

    load_gap_ms: float = Field(
        10.0, ge=0, description="a queue this much, and one mean queue, above the shortest breaks affinity"
    )
    load_factor: float = Field(1.0, ge=1, description="cold users go to queues of at most this times the mean")
    load_slack_ms: float = Field(0.0, ge=0, description="and this much more: fewer moves, longer queues")
    cold_scale_ms: float = Field(0.25, gt=0, description="a node this much dearer gets 1/e of the cold users")
    cold_floor: float = Field(0.25, gt=0, le=1, description="but no less than this share of a full one, so it fills")
    cold_choices: int = Field(8, ge=1, description="of so many, by hash, a cold user takes the shortest queue")
    work_weight: float = Field(2.0, ge=0, description="a ms of work counts once for itself and this for each who waits")
    sketch_weight: float = Field(8.0, ge=0, description="samples the reported hit rate is worth beside a sketch")
    hit_rate: float = Field(0.5, ge=0, le=1, description="of rows, where nobody has reported one")


class _Decision(NamedTuple):
    place: int
    expected_ms: float
    service_ms: float
    knows_user: bool  # the node chosen
    is_known: bool  # to any living node
    is_informed: bool  # some living node has reported lately


class EmbKVAware:
    """Ours. Known users go where they are answered first, among the least busy; unknown ones by weighted hash."""

    def __init__(self, cost: RouterCost, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        limits = [getattr(self.settings, name) for name in _Limits._fields]
        self._figures = np.array([*limits, self.settings.sketch_weight, self.settings.hit_rate, *cost.terms()])

    def choose(self, request: RouteRequest, nodes: Nodes, now_s: float) -> Choice | None:
        found = _Decision._make(_decide(self._figures, request, nodes))
        if found.place == NOBODY:
            return None
        return Choice(int(nodes.ids[found.place]), found.expected_ms, _reason(found), found.service_ms)


def _reason(found: _Decision) -> Reason:
    if found.is_known:
        return Reason.AFFINITY if found.knows_user else Reason.YIELDED
    return Reason.COLD if found.is_informed else Reason.DEGRADED


def choice_at(place: int, nodes: Nodes, prices: Prices, reason: Reason) -> Choice:
    return Choice(int(nodes.ids[place]), float(prices.expected_ms[place]), reason, float(prices.service_ms[place]))


class _Limits(NamedTuple):
    load_gap_ms: float
    load_factor: float
    load_slack_ms: float
    cold_scale_ms: float
    cold_floor: float
    cold_choices: float
    work_weight: float


@numba.njit(cache=True)
def _decide(figures: Floats, request: RouteRequest, nodes: Nodes) -> tuple[int, float, float, bool, bool, bool]:
    """All of a choice in one call, a plain tuple of a `_Decision`: a way in or out of compiled code costs microseconds.

    `figures`: the fields of `_Limits`, the last two of `Weighing`, those of `CostTerms`.
    """
    limits = _Limits(figures[0], figures[1], figures[2], figures[3], figures[4], figures[5], figures[6])
    c = figures[9:]
    terms = CostTerms(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9])
    prices = price(Weighing(terms, figures[7], figures[8]), request, nodes)
    near = _near_least_loaded(nodes, limits.load_gap_ms)
    is_known, is_held, is_informed = False, False, False
    for i in range(nodes.ids.size):
        if nodes.is_alive[i]:
            is_known |= _knows(nodes, i)
            is_held |= nodes.host_tokens[i] > 0 or nodes.resident_tokens[i] > 0
            is_informed |= nodes.is_fresh[i]
    best = NOBODY
    if is_held:
        best = _first_to_answer(nodes, prices, near, limits.work_weight)
    elif is_known:
        best = _most_visited(nodes, near)
    if best == NOBODY:
        best = _for_cold_user(limits, request.user, nodes, prices)
    if best == NOBODY:
        return NOBODY, 0.0, 0.0, False, False, False
    return best, prices.expected_ms[best], prices.service_ms[best], _knows(nodes, best), is_known, is_informed


@_inner
def _knows(nodes: Nodes, place: int) -> bool:
    return nodes.visits[place] > 0 or nodes.host_tokens[place] > 0 or nodes.resident_tokens[place] > 0


@_inner
def _first_to_answer(nodes: Nodes, prices: Prices, among: Flags, work_weight: float) -> int:
    """Where it is answered first, those who wait behind it counted in.

    Work on a node delays everybody who comes while it is busy: in the mean as many as wait there. Without that a user
    leaves its prefix for a queue that is a millisecond shorter, and the cluster computes the same history everywhere.
    """
    waiting, count = 0.0, 0
    for i in range(nodes.ids.size):
        if nodes.is_alive[i]:
            waiting += nodes.num_waiting[i]
            count += 1
    others = work_weight * waiting / max(1, count)
    best, lowest = NOBODY, np.inf
    for i in range(nodes.ids.size):
        cost = prices.expected_ms[i] + others * prices.service_ms[i]
        if among[i] and cost < lowest:
            best, lowest = i, cost
    return best


@_inner
def _most_visited(nodes: Nodes, among: Flags) -> int:
    """Where a user was seen but nothing is kept yet: elsewhere, the second visit would be a first one again."""
    best = NOBODY
    for i in range(nodes.ids.size):
        if among[i] and nodes.visits[i] > 0 and (best == NOBODY or nodes.visits[i] > nodes.visits[best]):
            best = i
    return best


@_inner
def _near_least_loaded(nodes: Nodes, gap_ms: float) -> Flags:
    """Queues at most the gap and one mean queue above the shortest: where all are long, a gap is no imbalance."""
    least, total, count = np.inf, 0.0, 0
    for i in range(nodes.ids.size):
        if nodes.is_alive[i]:
            least = min(least, nodes.queue_ms[i])
            total += nodes.queue_ms[i]
            count += 1
    bound = least + gap_ms + total / max(1, count)
    near = np.empty(nodes.ids.size, np.bool_)
    for i in range(nodes.ids.size):
        near[i] = nodes.is_alive[i] and nodes.queue_ms[i] <= bound
    return near


@_inner
def _for_cold_user(limits: _Limits, user: int, nodes: Nodes, prices: Prices) -> int:
    allowed = within_bound(nodes.queue_ms, nodes.is_alive, limits.load_factor, limits.load_slack_ms)
    cheapest = np.inf
    for i in range(nodes.ids.size):
        if allowed[i]:
            cheapest = min(cheapest, prices.alone_ms[i])
    weights = np.empty(nodes.ids.size)
    for i in range(nodes.ids.size):
        weights[i] = max(limits.cold_floor, np.exp(min(0.0, cheapest - prices.alone_ms[i]) / limits.cold_scale_ms))
    best, left, scores = NOBODY, allowed.copy(), rendezvous_scores(user, nodes.ids, weights)
    for _ in range(int(limits.cold_choices)):
        place = first_of(scores, nodes.ids, left)
        if place == NOBODY:
            break
        left[place] = False
        if best == NOBODY or nodes.queue_ms[place] < nodes.queue_ms[best]:
            best = place  # by queue alone: by price, a node without rows would stay without
    return best
