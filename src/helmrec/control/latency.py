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
_EVERY, _PARTS = 2, 2 * 2  # which of them are played; and in how many parts, where a prediction is only shown
_PLAYED: FloatArray = ALPHAS[::_EVERY].copy()
RECENT_S = 5.0  # half-life of miss curves and arrivals: shorter is noise, longer misses bursts
_NUM_PLAYED, _NUM_STREAMS = 512, 16  # requests that are played at each split: fewer form no queue; orders of them
_FEW = 1 / _NUM_PLAYED  # share of requests below which nothing is said of them
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
            self.value = self.value + (value - self.value) * (weight / self.weight)
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
    work: Work | None = None
    rate: float = 0.0  # arrivals per second
    _before: "_Seen" = field(default_factory=lambda: _Seen(0.0, 0.0, np.zeros(())))
    _newest: Work | None = None  # of the last window alone
    _recent: Fading = field(default_factory=lambda: Fading(RECENT_S))
    _rates: Fading = field(default_factory=lambda: Fading(RECENT_S))
    _most: int = 1  # requests of the largest step that was seen
    _turn: int = 0
    _history: float = 0.0  # as of `Requests`
    _others: float = 0.0
    _queued: int = 0
    _room: IntArray = field(default_factory=lambda: np.ones(_PLAYED.size, np.int64))  # as of `play`
    _plain_ms: FloatArray | None = None  # (1, splits that are played): without corrections

    def update(self, window: WindowStats) -> bool:
        """Take a window in. False: it says too little to predict from."""
        traffic = window.traffic
        dt_s = traffic.end_s - traffic.start_s
        self.estimator.update(window.steps)
        self._note_curves(window.curves, dt_s)
        steps = sum_steps(window.steps)
        if self.estimator.costs is None or self.work is None or not traffic.num_served or not steps.requests:
            return False
        self.rate = float(self._rates.add(np.array(traffic.arrival_rate), dt_s, dt_s))
        self._history = window.new_tokens_per_request + window.resident_tokens_per_request
        self._others = max(0.0, steps.tokens / steps.requests - window.new_tokens_per_request)
        self._most = max(self._most, int(steps.most_requests))
        self._queued = min(traffic.num_queued, _NUM_PLAYED)  # as many more would wait longer at every split
        kv_pages = window.num_pages * (1 - _PLAYED)
        request_pages = self._history / window.page_tokens + 1 / 2  # the last one is half full on average
        self._room = np.maximum(1, kv_pages / request_pages).astype(np.int64)
        self._turn = (self._turn + 1) % _NUM_STREAMS
        return True

    def _note_curves(self, curves: JointCurves | None, dt_s: float) -> None:
        """Average the curves of the requests since the last window with those of the windows before."""
        if curves is None:
            return
        total = curves.num_requests * _stacked(curves)
        before, self._before = self._before, _Seen(curves.num_requests, curves.faded, total)
        keep = math.exp(curves.faded - before.faded)  # of what came before then, which counts in both
        weight = curves.num_requests - keep * before.num_requests
        if weight >= _ONE_REQUEST:
            own = np.maximum(0.0, total - keep * before.total) / weight
            recent = self._recent.add(own, weight, dt_s)
            self.work, self._newest = (Work(*between(one, curves.alphas, ALPHAS)) for one in (recent, own))

    def offered_ms(self, window: WindowStats) -> FloatArray:
        """Work that came in per second of the last window, at each of ALPHAS, in milliseconds of all stages."""
        costs, work = self.estimator.costs, self._newest
        assert costs is not None and work is not None
        token_ms = costs.host_token_ms + costs.token_ms + costs.pair_ms * self._history / 2
        missed_row_ms = costs.host_missed_row_ms + costs.missed_row_ms
        rows_ms = costs.read_row_ms * work.read_rows + missed_row_ms * work.missed_rows
        request_ms = costs.host_request_ms + rows_ms + token_ms * (self._others + work.computed_tokens)
        return window.traffic.arrival_rate * request_ms

    def start_over(self) -> None:
        """Traffic has changed: what came before the last window no longer counts."""
        self._recent.start_over()
        self._rates.start_over()
        self.work = self._newest
        assert self._rates.value is not None
        self.rate = float(self._rates.value)

    def predict(self, bias: Bias) -> Prediction:
        """With corrections, once `update` has returned True."""
        return Prediction(*between(self._play(bias, 0, 1), _PLAYED, ALPHAS))

    def uncorrected_ms(self) -> FloatArray:
        """Mean latency at ALPHAS without corrections. It is only shown: to save time, a window renews a part of it."""
        if self._plain_ms is None:
            self._plain_ms = self._play(Bias(), 0, 1)[1:]
        part = self._turn % _PARTS
        self._plain_ms[0, part::_PARTS] = self._play(Bias(), part, _PARTS)[1]
        return between(self._plain_ms, _PLAYED, ALPHAS)[0]

    def _play(self, bias: Bias, part: int, num_parts: int) -> FloatArray:
        """Stage time and mean latency, at a part of the splits that are played."""
        costs, work = self.estimator.costs, self.work
        assert costs is not None and work is not None
        there = Work(*(one[_EVERY * part :: _EVERY * num_parts] for one in work))
        requests = Requests(MS_PER_S / self.rate, self._history, self._others, self._most, self._queued)
        return predict_at(_streams()[self._turn], there, costs, requests, bias, self._room[part::num_parts])


@numba.njit(cache=True)
def value_at(curve: FloatArray, alpha: float) -> float:
    """A curve at ALPHAS, interpolated. Compiled: NumPy's own takes longer to call than to interpolate."""
    return np.interp(alpha, ALPHAS, curve)


def _stacked(curves: JointCurves) -> FloatArray:
    """The curves in the order of `Work`."""
    tokens, missed_rows = curves.computed_tokens_per_request, curves.missed_rows_per_request
    return np.array((tokens, missed_rows, curves.rows_per_request, 1 - curves.kv_user_hit_rate))


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


@numba.njit(cache=True, nogil=True)
def predict_at(
    stream: FloatArray, work: Work, costs: StageCosts, requests: Requests, bias: Bias, room: IntArray
) -> FloatArray:
    """(2, splits of `work`): stage time of a lone request, without the pace, and mean latency of a stream of them."""
    gap_ms, history, others, most, queued = requests
    pair_ms = costs.pair_ms * history / 2  # a history token sees half of its history, a candidate all
    new = np.minimum(np.maximum(work.new_users, _FEW), 1 - _FEW)
    computed = bias.tokens * work.computed_tokens
    of_new = np.minimum(computed / new, history)  # where none are found
    of_known = (computed - new * of_new) / (1 - new)
    tokens = np.stack((others + of_known, others + of_new))
    missed = bias.rows * work.missed_rows / (others + computed)  # per token, as those that are read
    row_ms = costs.read_row_ms * work.read_rows / (others + computed) + costs.missed_row_ms * missed
    request_ms = costs.host_request_ms + (costs.host_token_ms + costs.host_missed_row_ms * missed) * tokens
    compute_ms = (costs.token_ms + pair_ms) * tokens + pair_ms * others
    work_ms = np.stack((request_ms, row_ms * tokens, compute_ms))
    known_ms, new_ms = work_ms.sum(axis=0)
    host_ms, bus_ms, device_ms = costs.host_step_ms, costs.rows_step_ms, costs.compute_step_ms  # whatever a step holds
    stages_ms = host_ms + bus_ms + device_ms + known_ms + new * (new_ms - known_ms)
    engine = EngineModel(bias.pace * host_ms, bias.pace * bus_ms, bias.pace * device_ms, most, costs.overlap > 0)
    return np.stack((stages_ms, play(stream, Arrivals(gap_ms, queued), new, bias.pace * work_ms, engine, room)))


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
    """
    queued = arrivals.queued
    num, mean_ms = queued + stream.shape[1], np.empty(new_users.size)
    arrived_ms, kinds = np.zeros(num), np.concatenate((stream[1, :queued], stream[1]))
    arrived_ms[queued:] = np.cumsum(stream[0]) * arrivals.gap_ms
    num_new = np.zeros(num + 1)
    for split in range(new_users.size):
        num_new[1:] = np.cumsum(kinds < new_users[split])
        (known_host, new_host), (known_rows, new_rows), (known_compute, new_compute) = work_ms[:, :, split]
        host_ms = bus_ms = device_ms = total_ms = 0.0  # when each is free; when requests were answered, in sum
        num_running, at = 0, 0  # requests of the step that is computed, which came before `at`
        while at < num or num_running:
            room_left = room[split] - num_running
            if num_running and (at == num or arrived_ms[at] > host_ms or not engine.overlaps or room_left <= 0):
                host_ms = max(host_ms, device_ms)
                total_ms += min(num_running, max(0, at - queued)) * host_ms
                num_running = 0
                continue
            host_ms, first, end = max(host_ms, arrived_ms[at]), at, min(num, at + min(engine.most, room_left))
            while at < end and arrived_ms[at] <= host_ms:
                at += 1
            of_new = num_new[at] - num_new[first]
            of_known = at - first - of_new
            host_ms += engine.host_ms + of_known * known_host + of_new * new_host
            bus_ms = max(host_ms, bus_ms) + engine.rows_ms + of_known * known_rows + of_new * new_rows
            if num_running:
                host_ms = max(host_ms, device_ms)
                total_ms += min(num_running, max(0, first - queued)) * host_ms
            device_ms = max(bus_ms, device_ms) + engine.compute_ms + of_known * known_compute + of_new * new_compute
            num_running = at - first
        mean_ms[split] = (total_ms - arrived_ms.sum()) / (num - queued)
    return mean_ms
