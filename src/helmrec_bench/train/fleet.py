"""Many simple nodes that are steered at once: a step is one second of each.

After each second every node has the curves a controller would predict for it, wrong as they may be, and the signals it
would see. Deterministic by its seed. Knows no network and no reward.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from helmrec.control.latency import ALPHAS, RECENT_S, Arrivals, EngineModel, play
from helmrec.control.layers import CHOICE_HALF_LIFE_S, JUDGED_S
from helmrec.ppo.observation import Signal
from helmrec.steps import MS_PER_S
from helmrec.types import FloatArray
from helmrec_bench.train.nodes import NODE, NodeMix, draw_node
from helmrec_bench.train.second import (
    SecondWork,
    ServedSecond,
    engine_of,
    fill_stages,
    lone_ms,
    rate_of,
    serve,
    share_of_other,
    work_of,
)

SPLITS: FloatArray = np.linspace(ALPHAS[0], ALPHAS[-1], 15)  # at which curves are played; straight lines between them
_NUM_PLAYED, _NUM_STREAMS = 128, 64
_MOST_BIAS = 2.0  # this and those below as in `control.layers`
_BURSTS_S, _BURST_FACTOR = 300.0, 1.25


class FleetOutcome(NamedTuple):
    """Of one second, one value per node. Latencies are logarithms, over the least expected one at any split."""

    expected: FloatArray  # at the present caches, without the queue that was left before
    measured: FloatArray
    tail: FloatArray  # P99, measured
    is_over: FloatArray  # whether the episode ended; the node is another one now


class Fleet:
    """`signals`, `mean_ms` and `newest_ms` are what a controller sees now."""

    def __init__(self, num_nodes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes = np.zeros(num_nodes, NODE)
        self.mixes = np.zeros((num_nodes, 2, len(NodeMix)))
        self.signals = np.zeros((num_nodes, len(Signal)))
        self.mean_ms, self.newest_ms, self.burst_ms = np.zeros((3, num_nodes, ALPHAS.size))
        self._averaged_ms = np.zeros((num_nodes, ALPHAS.size))
        self._streams = _make_streams(self.rng)
        for number in range(num_nodes):
            draw_node(self.rng, self.nodes[number : number + 1].reshape(()), self.mixes[number])
        self.nodes["left_s"] *= self.rng.random(num_nodes)  # so that they do not end together
        self.step(self.nodes["alpha"].copy())

    def step(self, targets: FloatArray) -> FleetOutcome:
        """Aim at these splits and serve for a second."""
        results = np.zeros((len(FleetOutcome._fields), targets.size))
        curves = (self.mean_ms, self.newest_ms, self._averaged_ms, self.burst_ms)
        _step_all(self.rng, (self.nodes, self.mixes, self.signals), curves, (targets, results), self._streams)
        for number in np.flatnonzero(self.nodes["left_s"] <= 0):
            results[-1, number] = 1.0
            draw_node(self.rng, self.nodes[number : number + 1].reshape(()), self.mixes[number])
            self.burst_ms[number] = 0.0
            chosen = slice(number, number + 1)
            parts = (self.nodes[chosen], self.mixes[chosen], self.signals[chosen])
            here = (self.nodes["alpha"][chosen].copy(), np.zeros((len(FleetOutcome._fields), 1)))
            _step_all(self.rng, parts, tuple(curve[chosen] for curve in curves), here, self._streams)
        return FleetOutcome(*results)


def _make_streams(rng: np.random.Generator) -> FloatArray:
    """As those of the latency model: evenly spread quantiles, in many orders."""
    quantiles = (np.arange(_NUM_PLAYED) + 0.5) / _NUM_PLAYED
    gaps = -np.log(1 - quantiles)
    gaps /= gaps.mean()
    return np.array([(rng.permutation(gaps), rng.permutation(quantiles)) for _ in range(_NUM_STREAMS)])


@numba.njit(cache=True)
def _step_all(rng: np.random.Generator, parts: Any, curves: Any, in_out: Any, streams: FloatArray) -> None:
    nodes, mixes, signals = parts
    targets, results = in_out
    for number in range(nodes.size):
        node = nodes[number]
        _move(node, targets[number])
        share = share_of_other(node, node.time_s)
        mix = mixes[number, 0] + share * (mixes[number, 1] - mixes[number, 0])
        served = _serve(rng, node, mix, rate_of(node, share))
        stream = streams[rng.integers(0, len(streams))]
        least_ms, here_ms = _true_latency(node, mix, rate_of(node, share), stream)
        results[0, number] = np.log(here_ms / least_ms)
        results[1, number] = np.log(max(served.mean_ms, least_ms / 2) / least_ms) if served.num else 0.0
        results[2, number] = np.log(max(served.p99_ms, least_ms / 2) / least_ms) if served.num else 0.0
        late = share_of_other(node, max(0.0, node.time_s - node.late_s))
        mix = mixes[number, 0] + late * (mixes[number, 1] - mixes[number, 0])
        known_ms = node.predicted_ms
        newest_ms = _predict(rng, node, mix, served, streams[rng.integers(0, len(streams))])
        own = (curves[0][number], curves[1][number], curves[2][number], curves[3][number])
        _average(node, newest_ms, served, own)
        _fill_signals(node, served, known_ms, signals[number])
        node.predicted_ms = np.interp(node.alpha, ALPHAS, newest_ms)


@numba.njit(cache=True)
def _move(node: Any, target: float) -> None:
    """Shrink at once, fill slowly."""
    node.time_s += 1.0
    node.left_s -= 1.0
    if target != node.alpha:
        if node.time_s - node.moved_s > JUDGED_S / 2 or not node.is_open:
            node.move_from, node.before_ms, node.move_gain = node.alpha, node.stage_ms, 0.0
        node.moved_s, node.is_open = node.time_s, 1.0
    node.alpha = target
    filled = 1 - np.exp(-1 / node.fill_s)
    node.emb = min(target, node.emb + filled * (target - node.emb))
    node.kv = min(1 - target, node.kv + filled * (1 - target - node.kv))


@numba.njit(cache=True)
def _serve(rng: np.random.Generator, node: Any, mix: FloatArray, rate: float) -> ServedSecond:
    work_ms = np.empty((3, 2))
    work = work_of(node, mix, node.emb, node.kv)
    fill_stages(node, mix[NodeMix.HISTORY], work, np.ones(3), work_ms)
    took_ms = lone_ms(work_ms, work.new)
    keep = 2.0 ** (-1 / JUDGED_S)
    node.tokens_seen = keep * node.tokens_seen + work.tokens - node.others
    node.rows_seen = keep * node.rows_seen + work.missed
    node.stage_ms = took_ms if node.stage_ms == 0 else took_ms + keep * (node.stage_ms - took_ms)
    if node.is_open and node.time_s - node.moved_s > 2 * JUDGED_S:
        node.realised_ms = node.realised_ms / 2 + node.before_ms - node.stage_ms
        node.promised_ms = node.promised_ms / 2 + node.move_gain
        node.is_open = 0.0
    return serve(rng, node, rate, work.new, work_ms)


@numba.njit(cache=True)
def _play(stream: FloatArray, rate: float, new: FloatArray, work_ms: FloatArray, engine: EngineModel) -> FloatArray:
    """Mean latency at splits, of `work_ms` (stages, known or new user, splits). KV of two steps fits everywhere."""
    room = np.full(new.size, 2 * engine.most)
    return play(stream, Arrivals(MS_PER_S / rate, 0), new, work_ms.reshape((3, 2, new.size)), engine, room)


@numba.njit(cache=True)
def _true_latency(node: Any, mix: FloatArray, rate: float, stream: FloatArray) -> tuple[float, float]:
    """Expected without a queue left from before: the least at any split, and that of the present caches."""
    num = SPLITS.size
    new, work_ms = np.empty(num + 1), np.empty((3, 2, num + 1))
    for split in range(num + 1):
        emb, kv = (SPLITS[split], 1 - SPLITS[split]) if split < num else (node.emb, node.kv)
        work = work_of(node, mix, emb, kv)
        fill_stages(node, mix[NodeMix.HISTORY], work, np.ones(3), work_ms[:, :, split])
        new[split] = work.new
    total_ms = _play(stream, rate, new, work_ms, engine_of(node, np.ones(3)))
    return min(total_ms[:num].min(), total_ms[num]), total_ms[num]


@numba.njit(cache=True)
def _predict(
    rng: np.random.Generator, node: Any, mix: FloatArray, served: ServedSecond, stream: FloatArray
) -> FloatArray:
    """Latency at ALPHAS, from miss curves and costs that are wrong and are corrected by what is measured here."""
    mix = mix.copy()
    mix[NodeMix.KV_SCALE] *= node.kv_stretch
    mix[NodeMix.KV_POWER] *= node.kv_bend
    mix[NodeMix.EMB_SCALE] *= node.emb_stretch
    mix[NodeMix.EMB_POWER] *= node.emb_bend
    keep = 2.0 ** (-1 / RECENT_S)
    node.kv_noise = keep * node.kv_noise + node.noise * np.sqrt(1 - keep * keep) * rng.normal(0.0, 1.0)
    node.emb_noise = keep * node.emb_noise + node.noise * np.sqrt(1 - keep * keep) * rng.normal(0.0, 1.0)
    mix[NodeMix.KV_SCALE] *= np.exp(node.kv_noise)
    mix[NodeMix.EMB_SCALE] *= np.exp(node.emb_noise)
    tokens_bias, rows_bias = _bias(node, mix, served)
    unlearned = 2.0 ** (-node.time_s / node.learn_s)
    factors = np.array((node.host_error, node.rows_error, node.compute_error)) ** unlearned * node.pace
    num = SPLITS.size
    new, work_ms, stages_ms = np.empty(num), np.empty((3, 2, num)), np.empty(num)
    for split in range(num):
        work = work_of(node, mix, SPLITS[split], 1 - SPLITS[split])
        tokens = node.others + (work.tokens - node.others) * tokens_bias
        missed = work.missed * rows_bias
        fill_stages(node, mix[NodeMix.HISTORY], SecondWork(work.new, tokens, missed), factors, work_ms[:, :, split])
        new[split], stages_ms[split] = work.new, lone_ms(work_ms[:, :, split], work.new)
    if node.moved_s == node.time_s:
        here_ms, there_ms = np.interp(node.move_from, SPLITS, stages_ms), np.interp(node.alpha, SPLITS, stages_ms)
        node.move_gain = here_ms - there_ms
    node.rate_seen = max(1.0, served.num + keep * (node.rate_seen - served.num))
    mean_ms = _play(stream, node.rate_seen, new, work_ms, engine_of(node, factors))
    return np.interp(ALPHAS, SPLITS, mean_ms)


@numba.njit(cache=True)
def _bias(node: Any, mix: FloatArray, served: ServedSecond) -> tuple[float, float]:
    """Measured over promised tokens and rows at the present split, and the pace, as `Residual` has them."""
    keep = 2.0 ** (-1 / JUDGED_S)
    promised = work_of(node, mix, node.alpha, 1 - node.alpha)
    if node.predicted_ms > 0 and served.num:
        ratio = min(max(served.mean_ms / node.predicted_ms, 1 / _MOST_BIAS), _MOST_BIAS)
        node.pace = min(max(node.pace * ratio ** (1 / JUDGED_S), 1 / _MOST_BIAS), _MOST_BIAS)
    node.tokens_promised = keep * node.tokens_promised + promised.tokens - node.others
    node.rows_promised = keep * node.rows_promised + promised.missed
    return (
        min(max(node.tokens_seen / node.tokens_promised, 1 / _MOST_BIAS), _MOST_BIAS),
        min(max(node.rows_seen / node.rows_promised, 1 / _MOST_BIAS), _MOST_BIAS),
    )


@numba.njit(cache=True)
def _average(node: Any, newest_ms: FloatArray, served: ServedSecond, curves: Any) -> None:
    """Average over seconds, and mix in the bursts that were seen, as `Helm` and `Bursts` do."""
    mean_ms, newest, averaged_ms, burst_ms = curves
    newest[:] = newest_ms
    node.mean_weight = node.mean_weight * 2.0 ** (-1 / CHOICE_HALF_LIFE_S) + served.num
    weight = served.num / max(1.0, node.mean_weight)
    averaged_ms += (newest_ms - averaged_ms) * (weight if node.time_s > 1 else 1.0)
    calm = node.calm_rate
    is_burst = served.num > _BURST_FACTOR * calm + 3 * np.sqrt(calm)
    node.calm_rate = served.num + (calm - served.num) * 2.0 ** (-1 / (JUDGED_S * (8 if is_burst else 2)))
    keep = 2.0 ** (-1 / _BURSTS_S)
    node.calm_weight, node.burst_weight = keep * node.calm_weight, keep * node.burst_weight
    if is_burst:
        node.burst_weight += served.num
        burst_ms += (newest_ms - burst_ms) * (served.num / node.burst_weight)
    else:
        node.calm_weight += served.num
    mean_ms[:] = averaged_ms
    if node.burst_weight > 0:
        mean_ms += node.burst_weight / (node.burst_weight + node.calm_weight) * (burst_ms - averaged_ms)


@numba.njit(cache=True)
def _fill_signals(node: Any, served: ServedSecond, known_ms: float, signals: FloatArray) -> None:
    """As `ppo.observation.signals_of` does."""
    signals[Signal.LOW], signals[Signal.HIGH], signals[Signal.ALPHA] = ALPHAS[0], ALPHAS[-1], node.alpha
    signals[Signal.BEHIND] = 0.0
    signals[Signal.BUSY], signals[Signal.COMPUTE_BUSY] = served.busy, served.compute_busy
    signals[Signal.BUS_BUSY] = served.bus_busy
    signals[Signal.QUEUED] = np.log(1 + served.num_queued / max(1, served.num))
    signals[Signal.IDLE] = np.log(1 + node.time_s - node.moved_s)
    is_known = served.num > 0 and known_ms > 0
    signals[Signal.SURPRISE] = np.log(served.mean_ms / known_ms) if is_known else 0.0
    signals[Signal.TAIL] = np.log(served.p99_ms / served.mean_ms) if served.num else 0.0
    signals[Signal.REALISED] = node.realised_ms / node.promised_ms if node.promised_ms > 0 else 1.0
