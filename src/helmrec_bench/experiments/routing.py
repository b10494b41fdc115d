"""Routers beside each other on a simulated cluster: hits of both caches, P99, and the largest load of all nodes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from helmrec.control.static import Static, StaticSettings
from helmrec.costs.calibrated import CostModel
from helmrec.costs.routing import RouterCost
from helmrec.sim.cluster import ClusterResult, ClusterSimConfig, Fleet, simulate_cluster
from helmrec.sim.cluster_router import Reporting, ReportingRouter
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.scenario import Scenario
from helmrec.traffic.trace import Trace
from helmrec_bench.baselines.routers import policies
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.experiments.strategies import FAMILIES
from helmrec_bench.judging.judge import interval, largest_of_each, with_refused
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.runs import Settings
from helmrec_bench.lab.store import digest_of
from helmrec_bench.lab.tiers import for_nodes
from helmrec_bench.report.blocks import BLUE, GREY, Block, Chart, Table, bars
from helmrec_bench.report.claims import Rule, Verdict, judged

OURS, BY_USER = "emb-kv-aware", "session-hash"
_ROUTERS = ("emb-aware", "kv-aware", OURS, BY_USER, "least-loaded")
NUM_NODES = {"smoke": 2, "quick": 4, "full": 32}
_PRESSED = 0.6  # of the scenario's time: nodes fill as fast as one alone
_ALPHA = 0.7  # where the scenario is served best
_PAPER = {"emb-aware": (0.69, 0.04), "kv-aware": (0.42, 0.29), OURS: (0.66, 0.24)}  # EMB and KV hits


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A router over nodes that stay at one split; traffic is so many times one node's."""

    scenario: Scenario
    seed: int
    router: str
    num_nodes: int
    load: float = 1.0
    engine: Settings = ()

    @property
    def name(self) -> str:
        details = self.scenario.model_dump_json() + digest_of(self.scenario.cost())
        details += json.dumps([self.seed, self.router, self.num_nodes, self.load, self.engine])
        digest = hashlib.sha256(details.encode()).hexdigest()[:16]
        return f"{self.router} over {self.num_nodes} nodes x {self.load:g}, seed {self.seed}, {digest}"


def perform_cluster(run: ClusterRun) -> dict[str, float]:
    scenario = run.scenario
    assert scenario.workload is not None
    workload = for_nodes(scenario.workload, run.num_nodes, run.load)
    trace = scenario.model_copy(update={"workload": workload}).make_trace(run.seed)
    config = scenario.node_config(trace)
    engine = config.engine.model_copy(update={"alpha": _ALPHA, **dict(run.engine)})
    config = config.model_copy(update={"engine": engine})
    router = make_reporting_router(run.router, trace, config, scenario.cost(), Reporting(), run.seed)
    fleet = Fleet(config, scenario.cost(), lambda _: Static(StaticSettings(alpha=_ALPHA)))
    result = simulate_cluster(trace, fleet, router, ClusterSimConfig(num_nodes=run.num_nodes))
    return _figures(result, scenario, run.num_nodes)


def make_reporting_router(
    name: str, trace: Trace, config: NodeConfig, cost: CostModel, reporting: Reporting, seed: int
) -> ReportingRouter:
    """A router by its name, which knows nodes of this kind by their reports."""
    priced = RouterCost.from_calibration(cost.terms(), len(config.model.features), config.model.row_stride)
    known = policies(priced, np.random.default_rng(seed))
    return ReportingRouter(known[name](), prepare_requests(trace, config), config, reporting)


def _figures(result: ClusterResult, scenario: Scenario, num_nodes: int) -> dict[str, float]:
    start_s = scenario.warm_up_s
    summary, counted = result.summary(start_s), result.arrived_s >= start_s
    latency_ms = with_refused(result.outcomes.latency_ms[counted])
    windows = [w for ones in result.windows for w in ones if w.stats.traffic.start_s >= start_s]
    served = np.array([window.stats.traffic.num_served for window in windows])
    hits = np.array([window.stats.emb_hit_rate for window in windows])
    shares = np.bincount(result.node[counted], minlength=num_nodes) / max(1, int(counted.sum()))
    return {
        "mean_ms": float(latency_ms.mean()),
        "p99_ms": float(np.percentile(latency_ms, 99)),
        "slo_satisfaction": summary.slo_satisfaction,
        "num_refused": float(summary.num_refused),
        "kv_hit_rate": summary.token_reuse_rate,
        "emb_hit_rate": float((hits * served).sum() / max(1, served.sum())),
        "busiest_share": float(shares.max() * num_nodes),
    }


def _run(lab: Lab, name: str, router: str, seed: int = 0, load: float = 1.0) -> ClusterRun:
    return ClusterRun(lab.scenario(name, _PRESSED), seed, router, NUM_NODES[lab.tier.name], load)


def measure_routing(lab: Lab) -> Figures:
    runs = {router: [_run(lab, FAMILIES["Steady"], router, seed) for seed in lab.seeds] for router in _ROUTERS}
    every = [run for ones in runs.values() for run in ones]
    found = dict(zip(every, lab.compute(every, perform_cluster, "routing"), strict=True))
    routers = {}
    for name, ones in runs.items():
        routers[name] = {key: asdict(interval([found[run][key] for run in ones])) for key in found[ones[0]]}
    return {"scenario": FAMILIES["Steady"], "num_nodes": NUM_NODES[lab.tier.name], "routers": routers}


def largest_cluster_loads(lab: Lab, name: str, engine: Settings) -> dict[str, float]:
    """By router, of one seed: every load runs a whole cluster. In multiples of the scenario's arrivals on a node."""
    slo_ms = lab.scenario(name).slo_ms

    def are_met(asked: Mapping[str, float]) -> dict[str, bool]:
        runs = [replace(_run(lab, name, router, load=load), engine=engine) for router, load in asked.items()]
        found = lab.compute(runs, perform_cluster, "load of a cluster")
        return {
            router: one["num_refused"] == 0 and one["p99_ms"] <= slo_ms
            for router, one in zip(asked, found, strict=True)
        }

    return largest_of_each((BY_USER, OURS), lab.tier.loads[::2], are_met)


def judge_routing(figures: Figures) -> Sequence[Verdict]:
    routers = {name: {key: value["mean"] for key, value in one.items()} for name, one in figures["routers"].items()}
    ours, kv, emb = routers[OURS], routers["kv-aware"], routers["emb-aware"]
    others = {name: one["p99_ms"] for name, one in routers.items() if name != OURS}
    details = ", ".join(f"{name} {one['p99_ms']:.1f} ms" for name, one in routers.items())
    return (
        judged(
            "Routing by both caches has a lower P99 than routing by either",
            "lowest P99 of the three (axis of 20-80 ms)",
            ours["p99_ms"] / min(kv["p99_ms"], emb["p99_ms"]) - 1,
            Rule(0.0, 0.05, is_more_better=False),
            f"against the better of the two: {details}",
        ),
        judged(
            "It keeps nearly all KV hits of KV-aware routing",
            "24% of 29%: 83%",
            ours["kv_hit_rate"] / max(1e-9, kv["kv_hit_rate"]),
            Rule(0.83, 0.6),
            f"KV hits: ours {ours['kv_hit_rate']:.1%}, KV-aware {kv['kv_hit_rate']:.1%}, "
            f"EMB-aware {emb['kv_hit_rate']:.1%}",
        ),
        judged(
            "and nearly all EMB hits of EMB-aware routing",
            "66% of 69%: 96%",
            ours["emb_hit_rate"] / max(1e-9, emb["emb_hit_rate"]),
            Rule(0.956, 0.8),
            f"EMB hits: ours {ours['emb_hit_rate']:.1%}, EMB-aware {emb['emb_hit_rate']:.1%}, "
            f"KV-aware {kv['emb_hit_rate']:.1%}",
        ),
        judged(
            "P99 against the best other router",
            None,
            ours["p99_ms"] / min(others.values()) - 1,
            Rule(0.0, 0.05, is_more_better=False),
            details,
        ),
    )


def show_routing(figures: Figures, measured: Measured) -> Sequence[Block]:
    routers = figures["routers"]

    def draw(figure: Any) -> None:
        hits, tail = figure.subplots(1, 2)
        for name, one in routers.items():
            x, y = one["emb_hit_rate"]["mean"], one["kv_hit_rate"]["mean"]
            hits.scatter(x, y, color=BLUE if name == OURS else GREY, s=36, zorder=3)
            hits.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
        hits.set(xlabel="EMB hit rate", ylabel="KV hit rate")
        hits.margins(0.25)
        bars(
            tail,
            list(routers),
            [one["p99_ms"]["mean"] for one in routers.values()],
            frozenset({OURS}),
            xlabel="P99 (ms)",
        )

    rows = []
    for name, one in routers.items():
        paper = _PAPER.get(name)
        rows.append([
            name,
            *(f"{one[key]['mean']:.1f}" for key in ("mean_ms", "p99_ms")),
            *(f"{one[key]['mean']:.1%}" for key in ("slo_satisfaction", "emb_hit_rate", "kv_hit_rate")),
            "-" if paper is None else f"{paper[0]:.0%} / {paper[1]:.0%}",
            f"{one['busiest_share']['mean']:.2f}",
        ])  # fmt: skip
    header = (
        "router",
        "mean ms",
        "P99 ms",
        "in SLO",
        "EMB hits",
        "KV hits",
        "paper's EMB / KV",
        "busiest node, x the mean",
    )
    return (
        Chart(draw, f"{figures['num_nodes']} nodes, {figures['scenario']} on each; splits stay."),
        Table(header, rows, "The paper's hit rates are of other models and traffic.", marked=frozenset({OURS})),
    )


EXPERIMENTS = (
    Experiment(
        "routing",
        "Routing study",
        "Figures 6 and 10",
        "Routing by KV alone starves EMB and the other way round; routing by both keeps both hit rates and P99 low.",
        "Nodes whose splits stay, with reports every 0.1 s and sketches of rows every 2 s, under each router.",
        measure_routing,
        judge_routing,
        show_routing,
    ),
)
