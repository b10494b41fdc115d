"""Capacity planning: the number of nodes that a load needs, by simulation.

Each of n nodes gets an equal share of the requests and of the returning users, so more nodes also hit more often.
The number of nodes is found by bisection, with constant splits. A small simulated cluster behind the router then gives
the P99 and hit rates of the plan.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ByteSize, Field

from helmrec.config import EngineConfig, FixedKVDtype, FixedRowDtype, Frozen
from helmrec.control.static import Static, StaticSettings
from helmrec.costs.calibrated import CostModel
from helmrec.costs.routing import RouterCost
from helmrec.errors import ConfigError
from helmrec.model.profiles import profile
from helmrec.router.policy import EmbKVAware
from helmrec.sim.cluster import ClusterSimConfig, Fleet, simulate_cluster
from helmrec.sim.cluster_router import Reporting, ReportingRouter
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.state import Outcomes, Status
from helmrec.sim.simulate import simulate
from helmrec.traffic.families import family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace, index_histories
from helmrec.types import FloatArray

MAX_NODES = 256
ALPHAS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8)
_WARM_UP = 0.5  # share of a run that fills the caches and is left out of the results
_UNLOADED = 200  # SLOs between two requests of a node without load
_CHECKED_NODES = 4  # size of the cluster simulated at the end
_FEW_USERS, _FEW_REQUESTS = 10, 200  # so that some requests find all they need


class PlanConfig(Frozen):
    """A load, its latency limit and its users."""

    rate: float = Field(gt=0, description="requests per second, in total")
    slo_ms: float = Field(80.0, gt=0, description="limit of the P99 latency")
    pool_bytes: Annotated[ByteSize, Field(gt=0)] = Field(ByteSize(80 * 10**9), description="of each node")
    host_rows_bytes: Annotated[ByteSize, Field(gt=0)] | None = Field(
        None, description="host memory for rows of each node, as in the engine's settings; unset: all rows"
    )
    disk_rows_per_s: float | None = Field(None, gt=0, description="random reads a second of each node's disk")
    kv_dtype: FixedKVDtype = Field("model", description="of K/V, as in the engine's settings")
    row_dtype: FixedRowDtype = Field("model", description="of rows in the pool, as in the engine's settings")
    profile: str = Field("dlrmv3", description="model shape")
    preset: str = Field("dlrmv3", description="data set whose items and candidates are used")
    history: float = Field(6_700.0, gt=0, description="median events of a user")
    hot_users: int = Field(2_000, ge=1, description="returning users, in total")
    hot_share: float = Field(0.7, ge=0, le=1, description="share of requests made by returning users")
    num_items: int | None = Field(None, ge=1, description="rows of the item table; default: the preset's")
    num_candidates: int | None = Field(None, ge=1, description="candidates of a request; default: the preset's")
    headroom: float = Field(0.15, ge=0, lt=1, description="share of each node's capacity that stays unused")
    max_nodes: int = Field(MAX_NODES, ge=1)
    requests_per_run: int = Field(4_000, ge=200)
    seed: int = Field(0, ge=0)


def settings_of_trace(trace: Trace) -> dict[str, Any]:
    """The settings that a trace determines: users who return, their share of the requests, history, items, candidates.

    Times and the popularity of items are not taken from it.
    """
    requests = np.bincount(trace.user, minlength=trace.num_users)
    returning = requests > 1
    return {
        "history": max(1.0, float(np.median(index_histories(trace).length))),
        "hot_users": max(1, int(returning.sum())),
        "hot_share": float(requests[returning].sum() / trace.num_requests),
        "num_items": trace.catalogue.num_items,
        "num_candidates": int(np.median(trace.num_candidates)),
    }


class Point(NamedTuple):
    """A number of nodes and its best split."""

    num_nodes: int
    alpha: float
    p99_ms: float


class Plan(NamedTuple):
    """The result of planning. `num_nodes` is None if `max_nodes` are too few."""

    pool_bytes: int
    num_nodes: int | None
    alpha: float
    p99_ms: float
    slo_satisfaction: float
    kv_hit: float
    emb_hit: float
    unloaded_p99_ms: float | None = None  # of a node without queue, where `num_nodes` is None


def make_plan(config: PlanConfig, cost: CostModel, on_run: Callable[[str], None] = lambda _: None) -> Plan:
    """Find the fewest nodes for a load. `on_run` gets a description of each simulation before it starts."""
    on_run("one node at a low load")
    if _fastest_ms(config, cost) > config.slo_ms:  # then a search would try every size in vain
        unloaded = _unloaded(config, cost, on_run)
        return _check(config, cost, unloaded)._replace(num_nodes=None, unloaded_p99_ms=unloaded.p99_ms)
    best = _fewest(config, lambda num: _best_split(config, cost, num, on_run))
    found = best or _best_split(config, cost, config.max_nodes, on_run)
    on_run(f"a cluster at {found.num_nodes} nodes")
    checked = _check(config, cost, found)
    if best is not None:
        return checked
    return checked._replace(num_nodes=None, unloaded_p99_ms=_unloaded(config, cost, on_run).p99_ms)


def _fastest_ms(config: PlanConfig, cost: CostModel) -> float:
    """Latency of the fastest request of a node with little to do: no split and no number of nodes has a lower P99."""
    lone = config.model_copy(update={"rate": 1.0, "hot_users": _FEW_USERS, "requests_per_run": _FEW_REQUESTS})
    trace = _share(lone, 1, 1)
    alpha = min(1 / 2, _node(lone, trace, 0.0).alpha_max)
    if alpha < ALPHAS[0]:
        return 0.0  # the search says that the pool is too small
    outcomes = simulate(trace, _node(lone, trace, alpha), cost, Static(StaticSettings(alpha=alpha))).outcomes
    return float(outcomes.latency_ms[outcomes.status == Status.SERVED].min(initial=np.inf))


def _unloaded(config: PlanConfig, cost: CostModel, on_run: Callable[[str], None]) -> Point:
    """So many nodes that a request finds a node busy in fewer than 1 of 200 cases, if it can meet the SLO."""
    num_nodes = math.ceil(config.rate / (1 - config.headroom) * _UNLOADED * config.slo_ms / 1e3)
    few = config.model_copy(update={"requests_per_run": min(1_000, config.requests_per_run)})
    return _best_split(few, cost, num_nodes, on_run)


def _fewest(config: PlanConfig, point: Callable[[int], Point]) -> Point | None:
    """The fewest nodes whose P99 is within the SLO; None if `max_nodes` are too few."""
    low, high, best = 1, config.max_nodes, None
    first = point(1)
    if first.p99_ms <= config.slo_ms:
        return first
    num = 2
    while best is None:  # doubling first: runs with few nodes are the fastest
        tried = point(min(num, config.max_nodes))
        if tried.p99_ms <= config.slo_ms:
            low, high, best = num // 2 + 1, num - 1, tried
        elif num >= config.max_nodes:
            return None
        num *= 2
    while low <= high:
        middle = (low + high) // 2
        tried = point(middle)
        if tried.p99_ms <= config.slo_ms:
            best, high = tried, middle - 1
        else:
            low = middle + 1
    return best


def _best_split(config: PlanConfig, cost: CostModel, num_nodes: int, on_run: Callable[[str], None]) -> Point:
    trace, points = _share(config, num_nodes, 1), []
    for alpha in ALPHAS:
        on_run(f"{num_nodes} nodes at alpha {alpha}")
        node = _node(config, trace, alpha)
        if alpha > node.alpha_max:
            continue
        result = simulate(trace, node, cost, Static(StaticSettings(alpha=alpha)))
        points.append(Point(num_nodes, alpha, _p99_ms(result.arrived_s, result.outcomes, trace)))
    if not points:
        raise ConfigError(f"pool_bytes must have room for one request at alpha {ALPHAS[0]}, got {config.pool_bytes}")
    return min(points, key=lambda point: point.p99_ms)


def _p99_ms(arrived_s: FloatArray, outcomes: Outcomes, trace: Trace) -> float:
    """P99 latency of requests after the warm-up; a refused request counts as infinite."""
    counted = arrived_s >= _WARM_UP * trace.duration_s
    latency_ms = np.where(outcomes.status == Status.SERVED, outcomes.latency_ms, np.inf)[counted]
    return float(np.percentile(latency_ms, 99, method="higher")) if latency_ms.size else np.inf


def _share(config: PlanConfig, num_nodes: int, num_simulated: int) -> Trace:
    """The traffic of `num_simulated` of the nodes."""
    per_node = config.rate / (1 - config.headroom) / num_nodes
    given = {"num_items": config.num_items, "num_candidates": config.num_candidates}
    settings = {name: value for name, value in given.items() if value is not None} | {
        "rate": per_node * num_simulated,
        "hot_users": max(1, config.hot_users * num_simulated // num_nodes),
        "hot_share": config.hot_share,
        "duration_s": config.requests_per_run / per_node,
    }
    shape = preset(config.preset).stretched(config.history)
    return generate(family("steady", type(shape)(**shape.model_dump() | settings)), config.seed)


def _node(config: PlanConfig, trace: Trace, alpha: float) -> NodeConfig:
    engine = EngineConfig(
        pool_bytes=config.pool_bytes,
        alpha=min(alpha, 0.9),
        max_batch_requests=8,
        kv_dtype=config.kv_dtype,
        row_dtype=config.row_dtype,
        host_rows_bytes=config.host_rows_bytes,
    )
    model = profile(config.profile, trace.catalogue.num_items)
    return NodeConfig(model=model, engine=engine, slo_ms=config.slo_ms, disk_rows_per_s=config.disk_rows_per_s)


def _check(config: PlanConfig, cost: CostModel, point: Point) -> Plan:
    """Simulate some of the nodes behind the router."""
    num = min(_CHECKED_NODES, point.num_nodes)
    trace = _share(config, point.num_nodes, num)
    node = _node(config, trace, point.alpha)
    num_features = len(node.model.features)
    policy = EmbKVAware(RouterCost.from_calibration(cost.terms(), num_features, node.model.row_stride))
    router = ReportingRouter(policy, prepare_requests(trace, node), node, Reporting())
    fleet = Fleet(node, cost, lambda _: Static(StaticSettings(alpha=point.alpha)))
    result = simulate_cluster(trace, fleet, router, ClusterSimConfig(num_nodes=num))
    summary, outcomes = result.summary(_WARM_UP * trace.duration_s), result.outcomes
    counted = (result.arrived_s >= _WARM_UP * trace.duration_s) & (outcomes.status == Status.SERVED)
    read = max(1, int(outcomes.computed_tokens[counted].sum()) * num_features)
    return Plan(
        pool_bytes=int(config.pool_bytes),
        num_nodes=point.num_nodes,
        alpha=point.alpha,
        p99_ms=_p99_ms(result.arrived_s, outcomes, trace),
        slo_satisfaction=summary.slo_satisfaction,
        kv_hit=summary.token_reuse_rate,
        emb_hit=float(1 - outcomes.missed_rows[counted].sum() / read),
    )
