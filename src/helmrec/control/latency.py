"""Predict the mean latency at every split, from recent miss curves and the measured costs of the node's own steps.

A short stream of made-up requests is played through a model of the engine at every split (`play`).
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numba
import numpy as np

from helmrec.control.policy import WindowStats
from helmrec.costs.learned import Estimator, StageCosts
from helmrec.memory.curve_shape import between
from helmrec.memory.miss_curves import GRID, JointCurves
from helmrec.steps import MS_PER_S, sum_steps
from helmrec.types import FloatArray, IntArray

ALPHAS: FloatArray = np.linspace(GRID[0], GRID[-1], 31)
_EVERY, _PARTS = 2, 2  # which of them are played; and in how many parts, where a prediction is only shown
_SPLITS: IntArray = np.arange(0, ALPHAS.size, _EVERY)  # those that are played
_SPLITS_OF = [_SPLITS[part::_PARTS].copy() for part in range(_PARTS)]  # and those of each part
_PLAYED: FloatArray = ALPHAS[_SPLITS]
RECENT_S = 5.0  # half-life of miss curves and arrivals: shorter is noise, longer misses bursts
_NUM_PLAYED, _NUM_STREAMS = 512, 16  # requests that are played at each split: fewer form no queue; orders of them
_FEW = 1 / _NUM_PLAYED  # share of requests below which nothing is said of them
_LOOKED_AT = 8  # arrivals that are compared with the time at once: as many as steps usually hold
_ONE_REQUEST = 1 / 2  # a weight that rounding cannot make


class Fading:
    """A mean over requests, older ones fading with time."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self.weight = 0.0
        self.value: FloatArray | None = None
        self._newest: tuple[FloatArray, float] | None = None  # value and weight that were added last

    def fade(self, dt_s: float) -> None:
        self.weight *= 2.0 ** (-dt_s / self._half_life_s)

    def add(self, value: FloatArray, weight: float, dt_s: float) -> FloatArray:
        self.fade(dt_s)
        self.weight += weight
        self._newest = value, weight
        if self.value is None:
            self.value = value
        elif weight > 0:
            self.value = _toward(self.value, value, weight / self.weight)
        return self.value

    def start_over(self) -> None:
        """Forget all but what was added last."""
        if self._newest is not None:
            self.value, self.weight = self._newest


class Bias(NamedTuple):
    """What was measured over what the shadow caches promised at the present split."""

    tokens: float = 1.0
    rows: float = 1.0
    pace: float = 1.0  # of all stages: by how much latency was longer than stage times explain


class Work(NamedTuple):
    """Of recent requests at each of ALPHAS, per request, as the shadow caches saw it."""

    computed_tokens: FloatArray
    missed_rows: FloatArray
    read_rows: FloatArray
    new_users: FloatArray  # share of requests that find none of their history


class _Seen(NamedTuple):
    """Miss curves of all requests so far: their weight, that of the first one (its logarithm), and their sum."""

    num_requests: float
    faded: float
    total: FloatArray


class EngineModel(NamedTuple):
    """What of an engine does not depend on the split: a step whatever it holds, and how steps follow each other."""

    host_ms: float
    rows_ms: float
    compute_ms: float
    most: int  # requests of a step
    overlaps: bool  # a step is launched while another one computes


class Requests(NamedTuple):
    """What of requests does not depend on the split."""

    gap_ms: float  # between two arrivals
    history: float  # tokens
    others: float  # tokens that are computed whatever is resident: candidates, mostly
    most: int  # in one step
    queued: int  # that wait when the first one comes
    pool_pages: int
    pages: float  # of KV of each


class Arrivals(NamedTuple):
    """How requests come."""

    gap_ms: float  # between two of them, on average
    queued: int = 0  # those that wait when the first one comes


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Per request, at each of ALPHAS."""

    stages_ms: FloatArray  # host, rows and compute of a lone request, one after another
    mean_ms: FloatArray  # latency: stages and waits

    def at(self, alpha: float) -> float:
        return value_at(self.mean_ms, alpha)


@dataclass(slots=True, eq=False)
class LatencyModel:
    """Learns from windows; predicts the window after the last one it saw."""

    estimator: Estimator = field(default_factory=Estimator)
    rate: float = 0.0  # arrivals per second
    _before: "_Seen" = field(default_factory=lambda: _Seen(0.0, 0.0, np.zeros((1, 1))))
    _work: FloatArray | None = None  # (curves of `Work`, ALPHAS)
    _newest: FloatArray | None = None  # of the last window alone
    _recent: Fading = field(default_factory=lambda: Fading(RECENT_S))
    _rates: Fading = field(default_factory=lambda: Fading(RECENT_S))
    most_requests: int = 1  # of the largest step that was seen
    _turn: int = 0
    _history: float = 0.0  # as of `Requests`
    _others: float = 0.0
    _queued: int = 0
    _pool_pages: int = 1
    _pages: float = 1.0
    _plain_ms: FloatArray | None = None  # (1, splits that are played): without corrections

    @property
    def work(self) -> Work | None:
        return None if self._work is None else Work(*self._work)

    def update(self, window: WindowStats) -> bool:
        """Take a window in. False: it says too little to predict from."""
        traffic = window.traffic
        dt_s = traffic.end_s - traffic.start_s
        self.estimator.update(window.steps)
        self._note_curves(window.curves, dt_s)
        steps = sum_steps(window.steps)
        if self.estimator.costs is None or self._work is None or not traffic.num_served or not steps.requests:
            return False
        self.rate = float(self._rates.add(np.array([traffic.arrival_rate]), dt_s, dt_s)[0])
        self._history = window.new_tokens_per_request + window.resident_tokens_per_request
        self._others = max(1.0, steps.tokens / steps.requests - window.new_tokens_per_request)  # counted at other times
        self.most_requests = max(self.most_requests, int(steps.most_requests))
        self._queued = min(traffic.num_queued, _NUM_PLAYED)  # as many more would wait longer at every split
        self._pool_pages = window.num_pages
        self._pages = self._history / window.page_tokens + 1 / 2  # the last one is half full on average
        self._turn = (self._turn + 1) % _NUM_STREAMS
        return True

    def _note_curves(self, curves: JointCurves | None, dt_s: float) -> None:
        """Average the curves of the requests since the last window with those of the windows before."""
        if curves is None:
            return
        total = curves.num_requests * _stacked(curves)
        before, self._before = self._before, _Seen(curves.num_requests, curves.faded, total)
        if curves.faded > before.faded:  # new curves, in place of those that failed
            before = _Seen(0.0, curves.faded, np.zeros((1, 1)))
        keep = math.exp(curves.faded - before.faded)  # of what came before then, which counts in both
        weight = curves.num_requests - keep * before.num_requests
        if weight >= _ONE_REQUEST:
            own = _added(total, before.total, keep, weight)
            self._work, self._newest = _at_alphas(self._recent.add(own, weight, dt_s), own, curves.alphas)

    def offered_ms(self, window: WindowStats) -> FloatArray:
        """Work that came in per second of the last window, at each of ALPHAS, in milliseconds of all stages."""
        costs, work = self.estimator.costs, self._newest
        assert costs is not None and work is not None
        return _offered_ms(work, costs, self._history, self._others, window.traffic.arrival_rate)

    def fill_ms(self, window: WindowStats) -> float:
        """Return the stage time of the misses that fill a pool of rows and one of K/V as far as this one is filled."""
        costs = self.estimator.costs
        assert costs is not None
        rows = window.resident_rows / max(window.alpha, GRID[0])
        tokens = window.kv_pages * window.page_tokens / (1 - min(window.alpha, GRID[-1]))
        row_ms = costs.host_missed_row_ms + costs.missed_row_ms
        token_ms = costs.host_token_ms + costs.token_ms + costs.pair_ms * self._history / 2
        return rows * row_ms + tokens * token_ms

    def start_over(self) -> None:
        """Traffic has changed: what came before the last window no longer counts."""
        self._recent.start_over()
        self._rates.start_over()
        self._work = self._newest
        assert self._rates.value is not None
        self.rate = float(self._rates.value[0])

    def predict(self, bias: Bias) -> Prediction:
        """With corrections, once `update` has returned True."""
        return Prediction(*between(self._play(bias, _SPLITS), _PLAYED, ALPHAS))

    def uncorrected_ms(self) -> FloatArray:
        """Mean latency at ALPHAS without corrections. It is only shown: to save time, a window renews a part of it."""
        if self._plain_ms is None:
            self._plain_ms = self._play(Bias(), _SPLITS)[1:]
        part = self._turn % _PARTS
        self._plain_ms[0, part::_PARTS] = self._play(Bias(), _SPLITS_OF[part])[1]
        return between(self._plain_ms, _PLAYED, ALPHAS)[0]

    def _play(self, bias: Bias, splits: IntArray) -> FloatArray:
        """Stage time and mean latency, at some of ALPHAS."""
        costs, work = self.estimator.costs, self._work
        assert costs is not None and work is not None
        gap_ms, pages = MS_PER_S / self.rate, (self._pool_pages, self._pages)
        requests = Requests(gap_ms, self._history, self._others, self.most_requests, self._queued, *pages)
        return predict_at(_streams()[self._turn], splits, work, costs, requests, bias)


@numba.njit(cache=True)
def _toward(old: FloatArray, new: FloatArray, share: float) -> FloatArray:
    """A share of the way from one to the other. Compiled: NumPy's own takes longer to call than to calculate."""
    return old + (new - old) * share


@numba.njit(cache=True)
def value_at(curve: FloatArray, alpha: float) -> float:
    """A curve at ALPHAS, interpolated. Compiled: NumPy's own takes longer to call than to interpolate."""
    return np.interp(alpha, ALPHAS, curve)


def _stacked(curves: JointCurves) -> FloatArray:
    """The curves in the order of `Work`."""
    tokens, missed_rows = curves.computed_tokens_per_request, curves.missed_rows_per_request
    return np.array((tokens, missed_rows, curves.rows_per_request, 1 - curves.kv_user_hit_rate))


@numba.njit(cache=True, nogil=True)
def _added(total: FloatArray, before: FloatArray, keep: float, weight: float) -> FloatArray:
    """The curves of the requests, of this weight in all, that came between two sums."""
    return np.maximum(0.0, total - keep * before) / weight


@numba.njit(cache=True, nogil=True)
def _at_alphas(recent: FloatArray, own: FloatArray, known_at: FloatArray) -> tuple[FloatArray, FloatArray]:
    return between(recent, known_at, ALPHAS), between(own, known_at, ALPHAS)


@numba.njit(cache=True, nogil=True)
def _offered_ms(work: FloatArray, costs: StageCosts, history: float, others: float, rate: float) -> FloatArray:
    """As `LatencyModel.offered_ms`; `work` is (curves of `Work`, splits)."""
    token_ms = costs.host_token_ms + costs.token_ms + costs.pair_ms * history / 2
    missed_row_ms = costs.host_missed_row_ms + costs.missed_row_ms
    rows_ms = costs.read_row_ms * work[2] + missed_row_ms * work[1]
    return rate * (costs.host_request_ms + rows_ms + token_ms * (others + work[0]))


@cache
def _streams() -> FloatArray:
    """(streams, 2, requests): gaps between Poisson arrivals with a mean of 1, and a number that says who is new.

    Of evenly spread quantiles, in another order in each stream: their means are exact.
    """
    quantiles = (np.arange(_NUM_PLAYED) + 1 / 2) / _NUM_PLAYED
    rng = np.random.default_rng(0)
    gaps = -np.log(1 - quantiles)
    gaps /= gaps.mean()
    return np.array([(rng.permutation(gaps), rng.permutation(quantiles)) for _ in range(_NUM_STREAMS)])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def predict_at(
    stream: FloatArray, splits: IntArray, work: FloatArray, costs: StageCosts, requests: Requests, bias: Bias
) -> FloatArray:
    """(2, splits): stage time of a lone request, without the pace, and mean latency of a stream of them.

    `splits` are some of ALPHAS, by their numbers; `work` is (curves of `Work`, ALPHAS).
    """
    gap_ms, history, others, most, queued, pool_pages, pages = requests
    pair_ms = costs.pair_ms * history / 2  # a history token sees half of its history, a candidate all
    host_ms, bus_ms, device_ms = costs.host_step_ms, costs.rows_step_ms, costs.compute_step_ms  # whatever a step holds
    room, share_new, stages_ms = np.empty(splits.size, np.int64), np.empty(splits.size), np.empty(splits.size)
    work_ms = np.empty((1 + 2, 2, splits.size))
    for split, place in enumerate(splits):
        computed_tokens, missed_rows, read_rows, new_users = work[:, place]
        room[split] = max(1, int(pool_pages * (1 - ALPHAS[place]) / pages))
        new = min(max(new_users, _FEW), 1 - _FEW)
        computed = bias.tokens * computed_tokens
        of_new = min(computed / new, history)  # where none are found
        of_known = (computed - new * of_new) / (1 - new)
        missed = bias.rows * missed_rows / (others + computed)  # per token, as those that are read
        row_ms = costs.read_row_ms * read_rows / (others + computed) + costs.missed_row_ms * missed
        token_ms = costs.host_token_ms + costs.host_missed_row_ms * missed
        for kind, tokens in enumerate((others + of_known, others + of_new)):
            work_ms[0, kind, split] = costs.host_request_ms + token_ms * tokens
            work_ms[1, kind, split] = row_ms * tokens
            work_ms[2, kind, split] = (costs.token_ms + pair_ms) * tokens + pair_ms * others
        known_ms, new_ms = work_ms[:, 0, split].sum(), work_ms[:, 1, split].sum()
        share_new[split] = new
        stages_ms[split] = host_ms + bus_ms + device_ms + known_ms + new * (new_ms - known_ms)
    engine = EngineModel(bias.pace * host_ms, bias.pace * bus_ms, bias.pace * device_ms, most, costs.overlap > 0)
    mean_ms = play(stream, Arrivals(gap_ms, queued), share_new, bias.pace * work_ms, engine, room)
    return np.stack((stages_ms, mean_ms))


@numba.njit(cache=True, nogil=True)
def play(
    stream: FloatArray,
    arrivals: Arrivals,
    new_users: FloatArray,
    work_ms: FloatArray,
    engine: EngineModel,
    room: IntArray,
) -> FloatArray:
    """Mean latency, at each split, of a stream of requests that are served in steps as an engine does.

    A step takes all requests that wait, up to `engine.most`. The host lays it out, then its rows are read, then it is
    computed. While a step computes, the host launches the next one if anybody waits; then it waits for the step.
    Requests that were queued before are like the first ones of the stream, and their own latency does not count.
    `work_ms` is (stages, known or new user, splits) per request; `room` (splits,) is the number of requests whose KV
    fits the pool at once: those of both steps, since pages of a running step cannot be evicted.

    Splits take turns of one step each, and their steps hardly branch: so a processor works on several splits at once,
    while a step of one split needs what the step before it left.
    """
    queued, num, num_splits = arrivals.queued, arrivals.queued + stream.shape[1], new_users.size
    num_new = _count_new(np.concatenate((stream[1, :queued], stream[1])), new_users)
    arrived_ms = np.full(num + _LOOKED_AT, np.inf)  # after the last request none comes
    arrived_ms[:queued], arrived_ms[queued:num] = 0.0, np.cumsum(stream[0]) * arrivals.gap_ms
    host_ms, bus_ms, device_ms = np.zeros(num_splits), np.zeros(num_splits), np.zeros(num_splits)  # when each is free
    total_ms = np.zeros(num_splits)  # when requests were answered, in sum
    num_running = np.zeros(num_splits, np.int64)  # requests of the step that is computed, which came before
    waiting = np.zeros(num_splits, np.uint32)  # the first request that no step took; unsigned, so that none is negative
    num_ended = 0
    while num_ended < num_splits:
        for split in range(num_splits):
            first, running, free_ms, done_ms = waiting[split], num_running[split], host_ms[split], device_ms[split]
            if first == num:
                continue
            overlaps = engine.overlaps & (arrived_ms[first] <= free_ms) & (running < room[split])
            begin_ms = max(free_ms if overlaps else max(free_ms, done_ms), arrived_ms[first])
            end = min(num, first + min(engine.most, room[split] - (running if overlaps else 0)))
            at = _first_after(arrived_ms, begin_ms, first, end)
            new = num_new[split, at] - num_new[split, first]
            known = at - first - new
            end_ms = begin_ms + (engine.host_ms + known * work_ms[0, 0, split] + new * work_ms[0, 1, split])
            answer_ms = max(end_ms if overlaps else free_ms, done_ms)  # of the step before
            total_ms[split] += min(running, max(0, first - queued)) * answer_ms
            host_ms[split] = answer_ms if overlaps else end_ms
            end_ms = max(end_ms, bus_ms[split])
            end_ms = end_ms + engine.rows_ms + known * work_ms[1, 0, split] + new * work_ms[1, 1, split]
            bus_ms[split], end_ms = end_ms, max(end_ms, done_ms)
            end_ms = end_ms + engine.compute_ms + known * work_ms[2, 0, split] + new * work_ms[2, 1, split]
            device_ms[split], num_running[split], waiting[split] = end_ms, at - first, at
            num_ended += at == num
    total_ms += np.minimum(num_running, num - queued) * np.maximum(host_ms, device_ms)
    return (total_ms - arrived_ms[:num].sum()) / (num - queued)


@numba.njit(cache=True, nogil=True)
def _first_after(arrived_ms: FloatArray, now_ms: float, first: int, end: int) -> int:
    """The first request after `first` that comes after `now_ms`; `end`, if that is before it.

    It looks at several at once, since a processor cannot foresee after how many of them to stop.
    """
    at = first
    for place in range(_LOOKED_AT):
        at += arrived_ms[first + place] <= now_ms
    while at < end and arrived_ms[at] <= now_ms:
        at += 1
    return max(first + 1, min(at, end))  # `now_ms` may be no number, if steps are timed wrongly


@numba.njit(cache=True, nogil=True)
def _count_new(kinds: FloatArray, new_users: FloatArray) -> IntArray:
    """(splits, requests + 1): how many of the first requests are by new users."""
    num_new = np.zeros((new_users.size, kinds.size + 1), np.int64)
    for split, share in enumerate(new_users):
        num = 0
        for at, kind in enumerate(kinds):
            num += kind < share
            num_new[split, 1 + at] = num
    return num_new
