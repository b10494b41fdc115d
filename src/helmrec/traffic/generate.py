"""Generates a trace from a workload and a seed; the same inputs give the same bytes.

NumPy draws everything that is independent per request; one compiled pass assigns users, another writes events.
"""

import os
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.traffic.epochs import Stretch, lay_out, plan_epochs
from helmrec.traffic.popularity import Draws, draw_action, draw_event, prepare_draws, rules_at, user_word
from helmrec.traffic.trace import Catalogue, Trace
from helmrec.traffic.workload import Workload
from helmrec.types import IntArray

Floats = NDArray[np.float64]

_REQUEST_BYTES = 100  # that a request takes at least, while a trace is generated


def generate(workload: Workload, seed: int) -> Trace:
    """Generate a trace of all phases of the workload; ConfigError if it cannot fit in memory."""
    _check_size(workload)
    rng = np.random.Generator(np.random.PCG64(seed))
    stretches = lay_out(workload)
    plan = plan_epochs(workload, stretches, seed)
    catalogue = Catalogue(
        source=f"synthetic: {workload.name}, seed {seed}",
        num_items=workload.num_items,
        num_lanes=workload.lanes,
        num_actions=workload.num_actions,
        seed=seed,
        laws=plan.laws,
        epochs=plan.epochs,
    )
    arrivals = _arrivals(stretches, rng)
    visitors = _draw_visitors(workload, arrivals, rng)
    visits = _visits(workload, arrivals, visitors, rng)
    epoch = plan.epoch[np.searchsorted(plan.start_s, arrivals.time_s, side="right") - 1]
    events = _write_events(prepare_draws(catalogue), arrivals.time_s, visitors.user, epoch, visits)
    names = tuple(dict.fromkeys(phase.name for phase in workload.all_phases))
    codes = np.array([names.index(stretch.phase.name) for stretch in stretches], np.int16)
    return Trace(
        catalogue=catalogue,
        phase_names=names,
        time_s=arrivals.time_s,
        user=visitors.user,
        num_new=visits.num_own + np.where(visitors.is_first, visits.backlog[visitors.user], 0).astype(np.int32),
        num_candidates=np.full(arrivals.time_s.size, workload.num_candidates, np.int32),
        candidate_seed=rng.integers(0, 2**64, arrivals.time_s.size, np.uint64),
        phase=codes[arrivals.stretch],
        epoch=epoch,
        backlog=visits.backlog,
        item=events.item,
        action=events.action,
        timestamp_s=events.timestamp_s,
    )


def _check_size(workload: Workload) -> None:
    num_requests = sum(phase.duration_s * sum(phase.rate) / 2 for phase in workload.all_phases)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_requests * _REQUEST_BYTES > memory_bytes:
        raise ConfigError(
            f"a trace of {num_requests:,.0f} requests (rate times duration) does not fit in the memory of this "
            f"machine, {memory_bytes:,} bytes: lower the rate or the duration"
        )


class _Arrivals(NamedTuple):
    """Times of all requests."""

    stretches: list[Stretch]
    time_s: Floats
    stretch: IntArray  # index into stretches

    def ramp(self, setting: str) -> Floats:
        """The value of a ramped setting at each request."""
        pairs = np.array([getattr(s.phase, setting) for s in self.stretches])
        start_s = np.array([s.start_s for s in self.stretches])[self.stretch]
        duration_s = np.array([s.phase.duration_s for s in self.stretches])[self.stretch]
        share = (self.time_s - start_s) / duration_s
        start, end = pairs[self.stretch].T
        return start + (end - start) * share

    def constant(self, setting: str) -> IntArray:
        """The value of a constant setting at each request."""
        return np.array([getattr(s.phase, setting) for s in self.stretches], np.int64)[self.stretch]


def _arrivals(stretches: list[Stretch], rng: np.random.Generator) -> _Arrivals:
    """Poisson arrivals whose rate follows each phase's ramp."""
    times, numbers = [], []
    for number, (phase, start_s) in enumerate(stretches):
        first, last = phase.rate
        count = rng.poisson(phase.duration_s * (first + last) / 2)
        share = np.sort(rng.random(count))
        if first != last:  # invert the integral of the rate
            share = (np.sqrt(first**2 + (last**2 - first**2) * share) - first) / (last - first)
        times.append(start_s + share * phase.duration_s)
        numbers.append(np.full(count, number, np.int64))
    return _Arrivals(stretches, np.concatenate(times), np.concatenate(numbers))


class _Visitors(NamedTuple):
    """The user of each request."""

    user: IntArray
    is_first: NDArray[np.bool_]


def _draw_visitors(workload: Workload, arrivals: _Arrivals, rng: np.random.Generator) -> _Visitors:
    users, count = workload.users, arrivals.time_s.size
    is_hot = rng.random(count) < arrivals.ramp("hot_share")
    rank = _zipf_ranks(rng.random(count), arrivals.constant("hot_users"), users.hot_exponent)
    hot = np.where(is_hot, arrivals.ramp("hot_first").astype(np.int64) + rank, -1)
    lag_s = users.return_median_s * np.exp(users.return_sigma * rng.standard_normal(count))
    lag_s[rng.random(count) >= users.cold_return] = np.inf
    return _Visitors(*_assign_users(arrivals.time_s, hot, lag_s))


def _zipf_ranks(uniform: Floats, num_ranks: IntArray, exponent: float) -> IntArray:
    """Ranks from 0 with density (rank + 1)^-exponent, by inverting its integral."""
    power, top = 1 - exponent, num_ranks + 1.0
    x = np.exp(uniform * np.log(top)) if power == 0 else (1 + uniform * (top**power - 1)) ** (1 / power)
    return np.minimum((x - 1).astype(np.int64), num_ranks - 1)


@numba.njit(cache=True)
def _assign_users(time_s: Floats, hot: IntArray, lag_s: Floats) -> tuple[IntArray, NDArray[np.bool_]]:
    """Number users by first appearance. A returning cold user is the cold user whose request was `lag_s` ago."""
    user, is_first = np.empty(time_s.size, np.int64), np.zeros(time_s.size, np.bool_)
    hot_user = np.full(max(hot.max(), 0) + 1 if hot.size else 1, -1, np.int64)
    cold_time, cold_user = np.empty(time_s.size, np.float64), np.empty(time_s.size, np.int64)
    num_cold = num_users = 0
    for r in range(time_s.size):
        visitor = np.int64(-1)
        if hot[r] >= 0:
            visitor = hot_user[hot[r]]
        elif time_s[r] >= lag_s[r]:
            at = np.searchsorted(cold_time[:num_cold], time_s[r] - lag_s[r], side="right")
            visitor = cold_user[at - 1] if at else np.int64(-1)
        if visitor < 0:
            visitor, is_first[r] = np.int64(num_users), True
            num_users += 1
        user[r] = visitor
        if hot[r] >= 0:
            hot_user[hot[r]] = visitor
        else:
            cold_time[num_cold], cold_user[num_cold] = time_s[r], visitor
            num_cold += 1
    return user, is_first


class _Visits(NamedTuple):
    """Numbers of events."""

    backlog: NDArray[np.int32]  # (users,)
    num_own: NDArray[np.int32]  # (requests,)


def _visits(workload: Workload, arrivals: _Arrivals, visitors: _Visitors, rng: np.random.Generator) -> _Visits:
    """Draw the backlog of each user, and the number of events added before each request."""
    users, count = workload.users, arrivals.time_s.size
    length = arrivals.ramp("history") * np.exp(users.history_sigma * rng.standard_normal(count))
    backlog = np.clip(np.rint(length), users.min_history, users.max_history).astype(np.int32)
    num_own = rng.geometric(1 / users.new_events, count).astype(np.int32)
    num_own[visitors.is_first] = 0
    return _Visits(backlog[visitors.is_first], num_own)  # users are numbered by first appearance


class _Events(NamedTuple):
    """Appended events, by user and time."""

    item: IntArray
    action: NDArray[np.uint8]
    timestamp_s: IntArray


def _write_events(draws: Draws, time_s: Floats, user: IntArray, epoch: NDArray[np.int32], visits: _Visits) -> _Events:
    own_start = np.zeros(visits.backlog.size + 1, np.int64)
    own_start[1:] = np.cumsum(np.bincount(user, visits.num_own, visits.backlog.size))
    num_events = int(own_start[-1])
    events = _Events(np.empty(num_events, np.int64), np.empty(num_events, np.uint8), np.empty(num_events, np.int64))
    _fill_events(draws, _Requests(time_s, user, epoch), visits, own_start, events)
    return events


class _Requests(NamedTuple):
    """Columns of all requests."""

    time_s: Floats
    user: IntArray
    epoch: NDArray[np.int32]


@numba.njit(cache=True)
def _fill_events(draws: Draws, requests: _Requests, visits: _Visits, own_start: IntArray, events: _Events) -> None:
    """Place events in the seconds before their request, but not before the user's previous request."""
    time_s, user, epoch = requests
    done, last_s = own_start[:-1].copy(), np.zeros(visits.backlog.size, np.int64)
    for r in range(time_s.size):
        u, now = user[r], draws.start_time_s + np.int64(time_s[r])
        word, shift = user_word(draws, u), visits.backlog[u] - own_start[u]
        alias, rules = draws.alias[draws.law[epoch[r]]], rules_at(draws, epoch[r])
        for k in range(visits.num_own[r]):
            at = done[u] + k
            events.item[at] = draw_event(alias, rules, word, at + shift)
            events.action[at] = draw_action(draws.num_actions, word, at + shift)
            events.timestamp_s[at] = max(last_s[u], now - (visits.num_own[r] - 1 - k))
        done[u] += visits.num_own[r]
        last_s[u] = now
