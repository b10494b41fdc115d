"""Routing policies: the protocol of all, and `EmbKVAware`, which compares caches and queues in milliseconds.

Pure: a choice is a function of the request, the nodes and the clock. It fails for no state of the nodes.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numba
import numpy as np

from helmrec.costs.routing import RequestWork, RouterCost, expected_ms, service_ms, stages_of
from helmrec.router.hashing import NO_NODE, first_of, rendezvous_scores, within_bound
from helmrec.router.nodes import Flags, Floats, Nodes, RouteRequest
from helmrec.router.settings import RouterSettings
from helmrec.router.sketch import RowPrior, SketchTable, absent_rows, count_clear, shared_rate

# For functions that only compiled code calls: without an entry from Python there is less to compile.
_inner = partial(numba.njit, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)()


class Choice(NamedTuple):
    """A node, the expected latency of the request there, and the time it adds to the node's queue."""

    node: int
    expected_ms: float
    service_ms: float


class RoutingPolicy(Protocol):
    """Chooses the node that serves a request."""

    def choose(self, request: RouteRequest, nodes: Nodes, now_s: float) -> Choice | None:
        """Return a node that is alive; None only if there is none."""


@runtime_checkable
class LearnsCosts(Protocol):
    """A policy that takes what nodes have learned of their own costs."""

    def learn(self, cost: RouterCost) -> None: ...


class Prices(NamedTuple):
    """Milliseconds of a request on each node, dead nodes included."""

    alone_ms: Floats  # both stages, without queue
    service_ms: Floats  # added to the queue
    expected_ms: Floats  # with queue
    absent_rows: Floats


class Weighing(NamedTuple):
    """Parameters by which a request is priced."""

    terms: RouterCost
    sketch_weight: float  # weight of the reported hit rate, in samples of a sketch
    hit_rate: float  # assumed where no node has reported one


@numba.njit(cache=True)
def price(weighing: Weighing, request: RouteRequest, nodes: Nodes) -> Prices:
    """Price a request on every node. Reports of stale nodes are not used: the mean of fresh nodes stands in."""
    count, terms = nodes.ids.size, weighing.terms
    prices = Prices(np.empty(count), np.empty(count), np.empty(count), np.empty(count))
    usual, resident = _usual_hit_rate(weighing, nodes), np.minimum(nodes.resident_tokens, request.num_tokens)
    table = SketchTable(nodes.sketch_words, nodes.sketch_threshold, nodes.sketch_fill)
    clear = count_clear(table, request.sample, resident)
    for i in range(count):
        rate, hit_rate = 0.0, usual
        if nodes.is_fresh[i]:
            rate = shared_rate(nodes.sketch_threshold[i], request.sample.threshold)
            hit_rate = usual if np.isnan(nodes.row_hit_rate[i]) else nodes.row_hit_rate[i]
        new_tokens = request.num_tokens - resident[i]
        num_rows = (new_tokens + request.num_candidates) * float(request.rows_per_token)
        prior = RowPrior(num_rows, 1 - hit_rate, weighing.sketch_weight)
        absent = absent_rows(clear[i], nodes.sketch_fill[i], rate, prior)
        stages = stages_of(terms, RequestWork(resident[i], new_tokens, request.num_candidates, absent))
        prices.alone_ms[i] = stages.compute_ms + stages.bus_ms
        prices.service_ms[i] = service_ms(terms, stages)
        prices.expected_ms[i] = expected_ms(terms, stages, nodes.queue_ms[i])
        prices.absent_rows[i] = absent
    return prices


@_inner
def _usual_hit_rate(weighing: Weighing, nodes: Nodes) -> float:
    total, count = 0.0, 0
    for i in range(nodes.ids.size):
        if nodes.is_fresh[i] and nodes.is_alive[i] and not np.isnan(nodes.row_hit_rate[i]):
            total += nodes.row_hit_rate[i]
            count += 1
    return total / count if count else weighing.hit_rate


class EmbKVAware:
    """Sends known users to the node that answers first, among the least busy; unknown users by weighted hash."""

    def __init__(self, cost: RouterCost, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        limits = [getattr(self.settings, name) for name in _LoadLimits._fields]
        self._figures = np.array([*limits, self.settings.sketch_weight, self.settings.hit_rate, *cost])

    def learn(self, cost: RouterCost) -> None:
        """Predict with these costs from now on."""
        self._figures[-len(cost) :] = cost

    def choose(self, request: RouteRequest, nodes: Nodes, now_s: float) -> Choice | None:
        place, expected_ms, service_ms = _decide(self._figures, request, nodes)
        return None if place == NO_NODE else Choice(int(nodes.ids[place]), expected_ms, service_ms)


class _LoadLimits(NamedTuple):
    """Fields of `RouterSettings` that bound load."""

    load_gap_ms: float
    load_factor: float
    load_slack_ms: float
    cold_scale_ms: float
    cold_floor: float
    cold_choices: float
    work_weight: float


@numba.njit(cache=True)
def _decide(figures: Floats, request: RouteRequest, nodes: Nodes) -> tuple[int, float, float]:
    """Choose a node. Returns its index, or `NO_NODE`, and the fields of a `Choice`.

    One call with plain values, because each call into compiled code and each named tuple costs microseconds.
    `figures`: the fields of `_LoadLimits`, the last two of `Weighing`, those of `RouterCost`.
    """
    limits = _LoadLimits(figures[0], figures[1], figures[2], figures[3], figures[4], figures[5], figures[6])
    c = figures[9:]
    terms = RouterCost(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
    prices = price(Weighing(terms, figures[7], figures[8]), request, nodes)
    near = _near_least_loaded(nodes, limits.load_gap_ms)
    is_held = False
    for i in range(nodes.ids.size):
        is_held |= nodes.is_alive[i] and nodes.resident_tokens[i] > 0
    best = _first_to_answer(nodes, prices, near, limits.work_weight) if is_held else _most_visited(nodes, near)
    if best == NO_NODE:
        best = _for_cold_user(limits, request.user, nodes, prices)
    if best == NO_NODE:
        return NO_NODE, 0.0, 0.0
    return best, prices.expected_ms[best], prices.service_ms[best]


@_inner
def _first_to_answer(nodes: Nodes, prices: Prices, among: Flags, work_weight: float) -> int:
    """Return the node with the lowest expected latency, including the delay of requests that wait behind it.

    Work on a node delays the requests that arrive while it is busy: in the mean as many as wait there. Without that
    term a user leaves its prefix for a queue that is a millisecond shorter, and every node computes the same history.
    """
    waiting, count = 0.0, 0
    for i in range(nodes.ids.size):
        if nodes.is_alive[i]:
            waiting += nodes.num_waiting[i]
            count += 1
    others = work_weight * waiting / max(1, count)
    best, lowest = NO_NODE, np.inf
    for i in range(nodes.ids.size):
        cost = prices.expected_ms[i] + others * prices.service_ms[i]
        if among[i] and cost < lowest:
            best, lowest = i, cost
    return best


@_inner
def _most_visited(nodes: Nodes, among: Flags) -> int:
    """Return the node with the most visits of a user whose prefix is not kept yet.

    Admission counts visits per node: on another node the second visit would count as a first one.
    """
    best = NO_NODE
    for i in range(nodes.ids.size):
        if among[i] and nodes.visits[i] > 0 and (best == NO_NODE or nodes.visits[i] > nodes.visits[best]):
            best = i
    return best


@_inner
def _near_least_loaded(nodes: Nodes, gap_ms: float) -> Flags:
    """Flag nodes whose queue exceeds the shortest by at most the gap and one mean queue.

    The mean is added because a gap between long queues is no imbalance.
    """
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
def _for_cold_user(limits: _LoadLimits, user: int, nodes: Nodes, prices: Prices) -> int:
    """Return the shortest queue among the first `cold_choices` nodes of the user's weighted hash order."""
    allowed = within_bound(nodes.queue_ms, nodes.is_alive, limits.load_factor, limits.load_slack_ms)
    cheapest = np.inf
    for i in range(nodes.ids.size):
        if allowed[i]:
            cheapest = min(cheapest, prices.alone_ms[i])
    weights = np.empty(nodes.ids.size)
    for i in range(nodes.ids.size):
        weights[i] = max(limits.cold_floor, np.exp(min(0.0, cheapest - prices.alone_ms[i]) / limits.cold_scale_ms))
    best, left, scores = NO_NODE, allowed.copy(), rendezvous_scores(user, nodes.ids, weights)
    for _ in range(int(limits.cold_choices)):
        place = first_of(scores, nodes.ids, left)
        if place == NO_NODE:
            break
        left[place] = False
        if best == NO_NODE or nodes.queue_ms[place] < nodes.queue_ms[best]:
            best = place  # by queue alone: by price, a node without rows would never get any
    return best
