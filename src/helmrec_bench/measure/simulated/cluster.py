"""Every router on simulated clusters; a run that was stopped continues.

    helmrec bench run cluster routers      three presets x three families x every router, 32 nodes, paired seeds
    helmrec bench run cluster stale        ours with reports 5 s old, or none at all
    helmrec bench run cluster joint        controller and router together against constants and other routers
    helmrec bench run cluster tables       the tables of docs/cluster.md

Runs are short and pools small, so that caches turn over within a run: 32 nodes answer thousands of requests a second.
Loads are per node. Nodes of `routers` hold different splits, from 0.15 to 0.55.
"""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from helmrec.config import EngineConfig
from helmrec.control.policy import Policy
from helmrec.control.static import Static, StaticSettings
from helmrec.costs.calibrated import default_cost
from helmrec.model.profiles import profile
from helmrec.policies import make_policy
from helmrec.sim.cluster import ClusterResult, ClusterSimConfig, Fleet, simulate_cluster
from helmrec.sim.cluster_router import Reporting
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.node.state import Status
from helmrec.traffic.families import Shape, family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec_bench.experiments.routing import make_reporting_router
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.simulated.cluster_tables import ROUTERS, show_tables

SLO_MS = 20.0
WARM_UP = 0.4  # share of a run that is not counted


class ClusterCell(NamedTuple):
    """A cluster and its traffic, but for the seed."""

    preset: str = "taobao"
    family: str = "steady"
    num_nodes: int = 32
    rate: float = 450.0  # requests/s of a node
    duration_s: float = 1.0
    hot_users: int = 100  # for each node
    hot_share: float = 0.7
    pool_bytes: str = "8GB"
    rows: str = "wide"  # the model's profile
    num_lanes: int | None = None
    row_sample: float = 1 / 256
    history: float = 6_700.0


_SMALL: dict[str, Any] = {"pool_bytes": "4GB", "hot_users": 50}
PRESETS: dict[str, dict[str, Any]] = {
    "taobao": {"preset": "taobao", "rate": 280.0, "duration_s": 1.0, **_SMALL},
    "amazon-video-games": {
        "preset": "amazon-video-games",
        "rate": 450.0,
        "duration_s": 0.6,
        "num_lanes": 256,
        "row_sample": 1 / 256,
        **_SMALL,
    },
    "amazon-books": {"preset": "amazon-books", "rate": 360.0, "duration_s": 0.8, **_SMALL},
}


@lru_cache(maxsize=1)
def make_trace(cell: ClusterCell, seed: int) -> Trace:
    settings = {
        "hot_users": cell.hot_users * cell.num_nodes,
        "hot_share": cell.hot_share,
        "rate": cell.rate * cell.num_nodes,
        "duration_s": cell.duration_s,
        "burst_s": cell.duration_s / 12,
    }
    shape = Shape(**preset(cell.preset).stretched(cell.history).model_dump() | settings)
    workload = family(cell.family, shape)
    return generate(workload.model_copy(update={"num_lanes": cell.num_lanes or workload.num_lanes}), seed)


def node_config(cell: ClusterCell, trace: Trace, alpha: float) -> NodeConfig:
    engine = EngineConfig(pool_bytes=cell.pool_bytes, alpha=alpha, max_batch_requests=8, move_bytes_per_step="64MiB")
    model = profile(cell.rows, trace.catalogue.num_items)
    return NodeConfig(model=model, engine=engine, row_sample=cell.row_sample, slo_ms=SLO_MS)


class RouterTrial(NamedTuple):
    """What is tried on a cell."""

    router: str
    policy_for: Callable[[int], Policy]
    alpha: float = 0.35  # at the start
    reporting: Reporting = Reporting(every_s=0.05, sketch_every_s=0.3)
    has_curves: bool = False
    tick_s: float = 0.05


def run(job: "Job") -> dict[str, Any]:
    _, cell, tried, seed = job
    trace = make_trace(cell, seed)
    started_s = time.process_time()
    config, cost = node_config(cell, trace, tried.alpha), default_cost()
    router = make_reporting_router(tried.router, trace, config, cost, tried.reporting, seed)
    cluster = ClusterSimConfig(num_nodes=cell.num_nodes, slice_s=0.05, tick_s=tried.tick_s)
    result = simulate_cluster(trace, Fleet(config, cost, tried.policy_for, tried.has_curves), router, cluster)
    router.state.check()
    return {**figures(result, trace, len(config.model.features)), "cpu_s": round(time.process_time() - started_s, 1)}


def figures(result: ClusterResult, trace: Trace, rows_per_token: int) -> dict[str, Any]:
    begin_s = WARM_UP * trace.duration_s
    summary, outcomes = result.summary(begin_s), result.outcomes
    counted = (result.arrived_s >= begin_s) & (outcomes.status == Status.SERVED)
    read = outcomes.computed_tokens[counted].sum() * rows_per_token
    by_node = np.bincount(result.node[result.arrived_s >= begin_s], minlength=int(result.node.max()) + 1)
    return {
        "requests": summary.num_requests,
        "p50_ms": round(summary.p50_ms, 3),
        "p99_ms": round(summary.p99_ms, 3),
        "mean_ms": round(summary.mean_ms, 3),
        "slo_satisfaction": round(summary.slo_satisfaction, 5),
        "refused": summary.num_refused,
        "kv_hit": round(summary.token_reuse_rate, 4),
        "emb_hit": round(float(1 - outcomes.missed_rows[counted].sum() / max(1, read)), 4),
        "busiest_node": round(float(by_node.max() / by_node.mean()), 3),
        "alpha": round(float(np.mean([w[-1].stats.alpha for w in result.windows if w])), 4),
    }


def spread_splits(num_nodes: int) -> Callable[[int], Policy]:
    """Splits from 0.15 to 0.55, neighbours far apart."""
    alphas = 0.15 + 0.4 * (np.arange(num_nodes) * 7 % num_nodes) / max(1, num_nodes - 1)
    return lambda node: Static(StaticSettings(alpha=float(alphas[node])))


def constant(alpha: float) -> Callable[[int], Policy]:
    return lambda node: Static(StaticSettings(alpha=alpha))


class Job(NamedTuple):
    """One run, under the name it is kept by."""

    name: str
    cell: ClusterCell
    tried: RouterTrial
    seed: int


def router_jobs(seeds: int) -> Iterator[Job]:
    for seed, (name, settings), kind in product(range(seeds), PRESETS.items(), ("steady", "trend", "burst")):
        cell = ClusterCell(**settings | {"family": kind})
        for router in ROUTERS:
            tried = RouterTrial(router, spread_splits(cell.num_nodes))
            yield Job(f"routers/{name}/{kind}/{router}/{seed}", cell, tried, seed)


def stale_jobs(seeds: int) -> Iterator[Job]:
    """Long enough for reports to be 5 s old; fewer nodes."""
    ages = {
        "fresh": Reporting(every_s=0.05, sketch_every_s=0.5),
        "5 s old": Reporting(every_s=0.05, age_s=5.0, sketch_every_s=0.5),
        "absent": Reporting(is_absent=True),
    }
    cell = ClusterCell(num_nodes=4, duration_s=12.0, rate=500.0, pool_bytes="16GB", hot_users=200, rows="dlrmv3")
    for seed, (age, reporting) in product(range(seeds), ages.items()):
        tried = RouterTrial("emb-kv-aware", spread_splits(cell.num_nodes), reporting=reporting)
        yield Job(f"stale/{age}/{seed}", cell, tried, seed)


def joint_jobs(seeds: int) -> Iterator[Job]:
    """Constants with every good router, and the controller with ours; traffic that shifts."""
    cell = ClusterCell(family="trend", num_nodes=4, duration_s=16.0, rate=330.0, hot_users=100, hot_share=0.7)
    for seed in range(seeds):
        for router, alpha in product(("kv-aware", "emb-aware", "emb-kv-aware"), (0.2, 0.4, 0.6, 0.8)):
            tried = RouterTrial(router, constant(alpha), alpha, tick_s=0.5)
            yield Job(f"joint/static:{alpha}/{router}/{seed}", cell, tried, seed)
        ours = RouterTrial("emb-kv-aware", lambda _: make_policy("helm"), 0.5, has_curves=True, tick_s=0.5)
        yield Job(f"joint/helm/emb-kv-aware/{seed}", cell, ours, seed)


JOBS = {"routers": router_jobs, "stale": stale_jobs, "joint": joint_jobs}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("part", choices=(*JOBS, "tables"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=600.0)


def main(flags: Namespace) -> None:
    if flags.part == "tables":
        return show_tables(json.loads(flags.out.read_text())["runs"])
    runs: dict[str, Any] = json.loads(flags.out.read_text())["runs"] if flags.out.exists() else {}
    started_s = time.monotonic()
    for job in JOBS[flags.part](flags.seeds):
        name = job.name
        if name in runs:
            continue
        if time.monotonic() - started_s > flags.limit_s:
            print("stopped at the limit; start again to go on", flush=True)
            break
        runs[name] = run(job)
        print(
            name, {k: runs[name][k] for k in ("p99_ms", "slo_satisfaction", "kv_hit", "emb_hit", "cpu_s")}, flush=True
        )
        write_measurement(flags.out, {"slo_ms": SLO_MS, "warm_up": WARM_UP, "runs": runs})
    return None
