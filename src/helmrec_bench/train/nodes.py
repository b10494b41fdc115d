"""Draw simple nodes, their traffic and the errors of the model that predicts them.

A node is a few curves: the share of requests that find no prefix falls with the KV share of the pool, the share of rows
that miss falls with the EMB share. Traffic drifts, steps or bursts between two mixes. Knows no policy and no reward.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from helmrec.control.latency import ALPHAS
from helmrec.steps import MS_PER_S
from helmrec.types import FloatArray

EPISODE_S = (600.0, 1_200.0)
WITHIN_SLO = 0.92  # share of the throughput that a node can bear, as of the drawn scenarios
_COSTS = (
    "host_step",
    "host_request",
    "host_token",
    "rows_step",
    "read_row",
    "missed_row",
    "compute_step",
    "token",
    "pair",
)
_ENGINE = ("most", "overlaps", "others", "rows_per_token", "rate", "fill_s")
_COURSE = ("kind", "period_s", "phase_s", "burst_s", "burst_rate", "other_rate")
_ERRORS = ("kv_stretch", "kv_bend", "emb_stretch", "emb_bend", "late_s", "noise", "learn_s")
_COST_ERRORS = ("host_error", "rows_error", "compute_error")  # factors at the start
_STATE = ("time_s", "left_s", "alpha", "emb", "kv", "host_free", "bus_free", "device_free", "predicted_ms", "rate_seen")
_RESIDUAL = ("pace", "tokens_seen", "tokens_promised", "rows_seen", "rows_promised", "kv_noise", "emb_noise")
_BURSTS = ("mean_weight", "calm_rate", "burst_weight", "calm_weight")
_MOVES = ("stage_ms", "before_ms", "moved_s", "move_from", "move_gain", "is_open", "realised_ms", "promised_ms")
NODE = np.dtype([
    (name, np.float64)
    for name in (*_COSTS, *_ENGINE, *_COURSE, *_ERRORS, *_COST_ERRORS, *_STATE, *_RESIDUAL, *_BURSTS, *_MOVES)
])  # fmt: skip
Nodes = NDArray[np.void]  # of NODE


class Kind(IntEnum):
    """How traffic goes from one mix to the other."""

    STEADY = 0
    RAMP = 1
    SINE = 2
    STEP = 3
    BURST = 4


class NodeMix(IntEnum):
    """Columns of what requests are like."""

    HISTORY = 0  # tokens of a request
    COLD = 1  # share of requests that no cache holds
    KV_SCALE = 2  # KV share of the pool over which misses fall
    KV_POWER = 3  # how suddenly
    FRESH = 4  # tokens since the last visit
    EMB_FLOOR = 5  # share of rows that miss whatever the share
    EMB_SCALE = 6
    EMB_POWER = 7


_LOW = np.array((1_500.0, 0.05, 0.08, 0.7, 5.0, 0.0, 0.03, 0.35))
_HIGH = np.array((9_000.0, 0.6, 1.2, 4.0, 200.0, 0.3, 0.8, 1.3))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def draw_mixes(rng: np.random.Generator) -> FloatArray:
    """Two mixes, (2, columns of NodeMix); the second differs in some columns."""
    logarithmic = [NodeMix.HISTORY, NodeMix.KV_SCALE, NodeMix.FRESH, NodeMix.EMB_SCALE]
    drawn = rng.uniform(_LOW, _HIGH, (2, _LOW.size))
    drawn[:, logarithmic] = np.exp(rng.uniform(np.log(_LOW[logarithmic]), np.log(_HIGH[logarithmic]), (2, 4)))
    drawn[1] = np.where(rng.random(_LOW.size) < 0.5, drawn[0], drawn[1])
    longer = _log_uniform(rng, 0.5, 3.0) if rng.random() < 0.5 else 1.0
    drawn[1, [NodeMix.HISTORY, NodeMix.KV_SCALE]] = drawn[0, [NodeMix.HISTORY, NodeMix.KV_SCALE]] * longer
    return drawn


def draw_node(rng: np.random.Generator, node: Nodes, mixes: FloatArray) -> None:
    """Fill one node of an array and its two mixes."""
    mixes[:] = draw_mixes(rng)
    node[()] = np.zeros((), NODE)
    _draw_costs(rng, node, float(mixes[0, NodeMix.HISTORY]))
    kinds = (Kind.STEADY, Kind.RAMP, Kind.SINE, Kind.SINE, Kind.STEP, Kind.BURST, Kind.BURST)
    kind = kinds[int(rng.integers(len(kinds)))]
    is_slow = kind in (Kind.RAMP, Kind.SINE)
    node["kind"], node["left_s"] = kind, rng.uniform(*EPISODE_S)
    node["period_s"] = rng.uniform(600, 1_200) if is_slow else _log_uniform(rng, 40, 300)
    node["phase_s"] = rng.uniform(0, node["period_s"]) if kind != Kind.RAMP else 0.0
    node["burst_s"] = min(_log_uniform(rng, 2, 120), node["period_s"] / 2)
    node["burst_rate"] = _log_uniform(rng, 0.7, 3.0) if kind == Kind.BURST else 1.0
    node["other_rate"] = rng.uniform(0.7, 1.0)
    for name in ("kv_stretch", "kv_bend", "emb_stretch", "emb_bend"):
        node[name] = np.exp(rng.normal(0.0, 0.2))
    for name in _COST_ERRORS:
        node[name] = _log_uniform(rng, 0.5, 2.0)
    node["late_s"], node["noise"], node["learn_s"] = rng.uniform((0, 0, 5), (10, 0.08, 20))
    node["fill_s"], load = _log_uniform(rng, 2, 20), rng.uniform(0.5, 0.95)
    capacity = _log_uniform(rng, 40, 300)
    slower = WITHIN_SLO * MS_PER_S / capacity / _cycle_ms(node, mixes)
    for name in _COSTS:
        node[name] *= slower
    node["rate"] = load * capacity / max(1.0, float(node["burst_rate"]))
    node["alpha"] = node["emb"] = rng.uniform(ALPHAS[0], ALPHAS[-1])
    node["kv"] = 1 - node["alpha"]
    node["pace"], node["moved_s"] = 1.0, -np.inf
    node["calm_rate"] = node["rate_seen"] = node["rate"]


def _draw_costs(rng: np.random.Generator, node: Nodes, history: float) -> None:
    """Relative to what it takes to compute one request in full."""
    node["most"], node["overlaps"] = rng.choice([8, 8, 16, 32]), rng.random() < 0.75
    node["others"] = rng.uniform(100, 2_000)
    node["rows_per_token"] = rng.choice([1, 2, 6, 12, 24, 24, 32])
    tokens = history + node["others"]
    of_pairs = rng.uniform(0.1, 0.7)
    node["token"] = (1 - of_pairs) / tokens
    node["pair"] = of_pairs / (node["others"] * history + history * history / 2)
    node["missed_row"] = _log_uniform(rng, 0.1, 4.0) / (tokens * node["rows_per_token"])
    node["read_row"] = node["missed_row"] * _log_uniform(rng, 0.005, 0.1)
    node["host_request"], node["host_token"] = _log_uniform(rng, 0.005, 0.1), _log_uniform(rng, 0.005, 0.1) / tokens
    node["host_step"], node["rows_step"], node["compute_step"] = rng.uniform(0.005, 0.1, 3)


def _cycle_ms(node: Nodes, mixes: FloatArray) -> float:
    """Time between two requests that the best constant can bear in both mixes, steps being full."""
    worst = np.zeros(ALPHAS.size)
    for mix in mixes:
        found = np.exp(-(((1 - ALPHAS) / mix[NodeMix.KV_SCALE]) ** mix[NodeMix.KV_POWER]))
        new = mix[NodeMix.COLD] + (1 - mix[NodeMix.COLD]) * found
        computed = new * mix[NodeMix.HISTORY] + (1 - new) * mix[NodeMix.FRESH]
        tokens = node["others"] + computed
        missing = np.exp(-((ALPHAS / mix[NodeMix.EMB_SCALE]) ** mix[NodeMix.EMB_POWER]))
        missed = mix[NodeMix.EMB_FLOOR] + (1 - mix[NodeMix.EMB_FLOOR]) * missing
        host = node["host_step"] / node["most"] + node["host_request"] + node["host_token"] * tokens
        rows = node["rows_step"] / node["most"]
        rows = rows + tokens * node["rows_per_token"] * (node["read_row"] + node["missed_row"] * missed)
        pairs = node["others"] * mix[NodeMix.HISTORY] + computed * mix[NodeMix.HISTORY] / 2
        compute = node["compute_step"] / node["most"] + node["token"] * tokens + node["pair"] * pairs
        cycle = np.maximum(host + rows, compute) if node["overlaps"] else host + rows + compute
        worst = np.maximum(worst, cycle)
    return float(worst.min())
