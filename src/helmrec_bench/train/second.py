"""One second of one node: what requests find in its caches, and how long they take. Compiled; knows no policy."""

from typing import Any, NamedTuple

import numba
import numpy as np

from helmrec.control.latency import EngineModel
from helmrec.steps import MS_PER_S
from helmrec.types import FloatArray
from helmrec_bench.train.nodes import Kind, NodeMix

_MOST_BEHIND_MS = 5_000.0  # that a node may be late; who comes then is refused
_FEW = 1e-3
_TAIL = 0.99


class SecondWork(NamedTuple):
    """Per request."""

    new: float  # share of requests that find none of their history
    tokens: float  # computed, candidates among them
    missed: float  # rows


class ServedSecond(NamedTuple):
    """What was measured in a second."""

    mean_ms: float  # NaN: nobody came
    p99_ms: float
    num: int
    num_queued: int  # at its end
    busy: float  # share of the second with a step under way
    compute_busy: float
    bus_busy: float


@numba.njit(cache=True)
def share_of_other(node: Any, time_s: float) -> float:
    """How much of the second mix there is now, 0..1."""
    kind = int(node.kind)
    if kind == Kind.STEADY:
        return 0.0
    at = (time_s + node.phase_s) % node.period_s
    if kind == Kind.RAMP:
        return min(1.0, time_s / node.period_s)
    if kind == Kind.SINE:
        return 0.5 - 0.5 * np.cos(2 * np.pi * at / node.period_s)
    length_s = node.burst_s if int(node.kind) == Kind.BURST else node.period_s / 2
    return 1.0 if at >= node.period_s - length_s else 0.0


@numba.njit(cache=True)
def rate_of(node: Any, share: float) -> float:
    """Arrivals per second."""
    other = node.burst_rate if int(node.kind) == Kind.BURST else node.other_rate
    return node.rate * (1 + share * (other - 1))


@numba.njit(cache=True)
def work_of(node: Any, mix: FloatArray, emb: float, kv: float) -> SecondWork:
    """With these shares of the pool in use."""
    absent = np.exp(-((max(kv, 0.0) / mix[NodeMix.KV_SCALE]) ** mix[NodeMix.KV_POWER]))
    new = mix[NodeMix.COLD] + (1 - mix[NodeMix.COLD]) * absent
    tokens = node.others + new * mix[NodeMix.HISTORY] + (1 - new) * mix[NodeMix.FRESH]
    missing = np.exp(-((max(emb, 0.0) / mix[NodeMix.EMB_SCALE]) ** mix[NodeMix.EMB_POWER]))
    missing = mix[NodeMix.EMB_FLOOR] + (1 - mix[NodeMix.EMB_FLOOR]) * missing
    return SecondWork(new, tokens, tokens * node.rows_per_token * missing)


@numba.njit(cache=True)
def fill_stages(node: Any, history: float, work: SecondWork, factors: FloatArray, work_ms: FloatArray) -> None:
    """Stage times per request, (stages, new user or not), as `LatencyModel.predict` has them; `factors` of stages."""
    computed = work.tokens - node.others
    long = min(computed / max(work.new, _FEW), history)
    short = (computed - work.new * long) / max(1 - work.new, _FEW)
    rows_ms = node.read_row * node.rows_per_token * work.tokens + node.missed_row * work.missed
    for kind in range(2):
        tokens = node.others + (long if kind else short)
        pairs = node.others * history + (tokens - node.others) * history / 2
        work_ms[0, kind] = factors[0] * (node.host_request + node.host_token * tokens)
        work_ms[1, kind] = factors[1] * rows_ms * tokens / work.tokens
        work_ms[2, kind] = factors[2] * (node.token * tokens + node.pair * pairs)


@numba.njit(cache=True)
def engine_of(node: Any, factors: FloatArray) -> EngineModel:
    return EngineModel(
        node.host_step * factors[0],
        node.rows_step * factors[1],
        node.compute_step * factors[2],
        int(node.most),
        node.overlaps > 0,
    )


@numba.njit(cache=True)
def lone_ms(work_ms: FloatArray, new: float) -> float:
    """Stage time per request, without the fixed parts of steps."""
    total_ms = 0.0
    for stage in range(3):
        total_ms += work_ms[stage, 0] + new * (work_ms[stage, 1] - work_ms[stage, 0])
    return total_ms


@numba.njit(cache=True)
def serve(rng: np.random.Generator, node: Any, rate: float, new: float, work_ms: FloatArray) -> ServedSecond:
    """A second of random arrivals, in steps as of `control.latency.play`. Who is late keeps the next ones waiting."""
    arrived_ms = _arrivals(rng, rate)
    num, at, num_queued = arrived_ms.size, 0, 0
    latency_ms, ones = np.empty(num), np.ones(3)
    engine = engine_of(node, ones)
    host_ms, bus_ms, device_ms = node.host_free, node.bus_free, node.device_free
    busy_ms, until_ms, compute_busy_ms, bus_busy_ms = 0.0, 0.0, 0.0, 0.0
    running = 0  # first of the step that is computed
    while at < num or running < at:
        if running < at and (at == num or arrived_ms[at] > host_ms or not engine.overlaps):
            host_ms = max(host_ms, device_ms)
            latency_ms[running:at] = host_ms - arrived_ms[running:at]
            num_queued += at - running if host_ms > MS_PER_S else 0
            running = at
            continue
        host_ms = max(host_ms, arrived_ms[at])
        begin_ms, before, first = host_ms, running, at
        host_ms += engine.host_ms
        rows_ms, compute_ms = engine.rows_ms, engine.compute_ms
        while at < num and at - first < engine.most and arrived_ms[at] <= begin_ms:
            kind = 1 if rng.random() < new else 0
            host_ms, rows_ms = host_ms + work_ms[0, kind], rows_ms + work_ms[1, kind]
            compute_ms += work_ms[2, kind]
            at += 1
        bus_ms = max(host_ms, bus_ms) + rows_ms
        if before < first:
            host_ms = max(host_ms, device_ms)
            latency_ms[before:first] = host_ms - arrived_ms[before:first]
            num_queued += first - before if host_ms > MS_PER_S else 0
            running = first
        device_ms = max(bus_ms, device_ms) + compute_ms
        busy_ms += max(0.0, min(MS_PER_S, device_ms) - max(begin_ms, until_ms))
        until_ms = max(until_ms, device_ms)
        compute_busy_ms, bus_busy_ms = compute_busy_ms + compute_ms, bus_busy_ms + rows_ms
    node.host_free, node.bus_free, node.device_free = _left_ms(host_ms), _left_ms(bus_ms), _left_ms(device_ms)
    if not num:
        return ServedSecond(np.nan, np.nan, 0, 0, 0.0, 0.0, 0.0)
    tail_ms = np.sort(latency_ms)[int(_TAIL * (num - 1))]
    shares = np.minimum(1.0, np.array((busy_ms, compute_busy_ms, bus_busy_ms)) / MS_PER_S)
    return ServedSecond(latency_ms.mean(), tail_ms, num, num_queued, shares[0], shares[1], shares[2])


@numba.njit(cache=True)
def _left_ms(free_ms: float) -> float:
    return min(max(0.0, free_ms - MS_PER_S), _MOST_BEHIND_MS)


@numba.njit(cache=True)
def _arrivals(rng: np.random.Generator, rate: float) -> FloatArray:
    """Times within a second of a Poisson process."""
    return np.sort(rng.uniform(0.0, MS_PER_S, rng.poisson(rate)))
