"""RelayGR's two figures: how much more traffic, and how much longer histories, signals ahead of ranks allow."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helmrec.sim.scenario import Scenario
from helmrec_bench.cascade import CascadeConfig, Relaying, simulate_cascade
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.judging.contest import scaled
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.store import digest_of
from helmrec_bench.lab.tiers import with_traffic
from helmrec_bench.report.blocks import Block, Chart, Table, grouped, legend_above
from helmrec_bench.report.claims import Rule, Verdict, judged

SCENARIOS = ("evaluation/relay", "evaluation/relay-tight")
_LOADS = tuple(round(0.25 * 1.12**step, 3) for step in range(31))  # x the scenario's arrivals: five bisections
_HISTORIES = (
    1_000,
    1_500,
    2_000,
    2_500,
    3_000,
    3_500,
    4_000,
    5_000,
    6_000,
    7_000,
    8_000,
    9_000,
    10_000,
    11_000,
    12_000,
)
_WAYS = {"inline": False, "ahead": True}
_REFUSED_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class Cascade:
    """Signals, if there are any, and the ranks that follow them on one node."""

    scenario: Scenario
    seed: int
    has_signals: bool
    load: float = 1.0
    history: int | None = None  # None: as the scenario says

    @property
    def name(self) -> str:
        details = self.scenario.model_dump_json() + digest_of(self.scenario.cost())
        details += json.dumps([self.seed, self.has_signals, self.load, self.history])
        way = "ahead" if self.has_signals else "inline"
        return f"{way}, {self.scenario.name} x {self.load:g}, {hashlib.sha256(details.encode()).hexdigest()[:16]}"


def perform_cascade(one: Cascade) -> dict[str, float]:
    """Latency of ranks, from when each is asked for."""
    scenario = one.scenario
    assert scenario.workload is not None
    length = {} if one.history is None else {"history": one.history}
    workload = with_traffic(scaled(scenario.workload, one.load), **length)
    trace = scenario.model_copy(update={"workload": workload}).make_trace(one.seed)
    relaying = Relaying(
        CascadeConfig(budget_ms=scenario.slo_ms), one.has_signals, warm_up_s=scenario.warm_up_s, seed=one.seed
    )
    result = simulate_cascade(trace, scenario.node_config(trace), scenario.cost(), relaying)
    latency_ms = np.minimum(result.latency_ms, _REFUSED_MS)
    return {
        "p99_ms": float(np.percentile(latency_ms, 99)),
        "mean_ms": float(latency_ms.mean()),
        "ahead_busy": result.ahead_busy,
    }


def _largest(lab: Lab, values: Sequence[float], make: Callable[[bool, int, Any], Cascade], what: str) -> dict[str, Any]:
    """By way and seed: the largest value whose P99 keeps the budget; 0 if none does."""
    bounds = {(way, seed): (-1, len(values)) for way in _WAYS for seed in lab.seeds}
    while open_ones := [key for key, (low, high) in bounds.items() if high - low > 1]:
        middles = {key: sum(bounds[key]) // 2 for key in open_ones}
        runs = [make(_WAYS[way], seed, values[middles[way, seed]]) for way, seed in open_ones]
        for key, run, found in zip(open_ones, runs, lab.compute(runs, perform_cascade, what), strict=True):
            low, high = bounds[key]
            is_met = found["p99_ms"] <= run.scenario.slo_ms
            bounds[key] = (middles[key], high) if is_met else (low, middles[key])
    return {
        way: [values[bounds[way, seed][0]] if bounds[way, seed][0] >= 0 else 0.0 for seed in lab.seeds] for way in _WAYS
    }


def measure_relay(lab: Lab) -> Figures:
    found = {}
    for name in SCENARIOS:
        scenario = lab.scenario(name)

        def at_load(has_signals: bool, seed: int, load: Any, scenario: Scenario = scenario) -> Cascade:
            return Cascade(scenario, seed, has_signals, load)

        loads = _largest(lab, _LOADS, at_load, f"{name}, loads")
        # Histories are stretched at the load that is the inline node's largest: there its P99 is spent.
        edge = float(np.median(loads["inline"])) or _LOADS[0]

        def of_length(
            has_signals: bool,
            seed: int,
            history: Any,
            scenario: Scenario = scenario,
            edge: float = edge,
        ) -> Cascade:
            return Cascade(scenario, seed, has_signals, edge, int(history))

        histories = _largest(lab, _HISTORIES, of_length, f"{name}, histories")
        found[name] = {"budget_ms": scenario.slo_ms, "loads": loads, "edge": edge, "histories": histories}
    return {"scenarios": found}


def _ratio(one: dict[str, Any], what: str) -> float:
    inline = float(np.mean(one[what]["inline"]))
    return float(np.mean(one[what]["ahead"])) / inline if inline else float("nan")


def judge_relay(figures: Figures) -> Sequence[Verdict]:
    ones = {f"{one['budget_ms']:g} ms": one for one in figures["scenarios"].values()}

    def details(what: str) -> str:
        return ", ".join(f"budget {budget}: {_ratio(one, what):.2f} x" for budget, one in ones.items())

    return (
        judged(
            "Throughput within the budget grows by computing prefixes ahead",
            "up to 3.6 x (RelayGR)",
            max(_ratio(one, "loads") for one in ones.values()),
            Rule(3.6, 1.1, unit="ratio"),
            f"largest load with signals over without: {details('loads')}; the same work is "
            "done on the same device, so it grows only as the budget nears what one rank takes inline",
        ),
        judged(
            "Longer histories keep the budget",
            "up to 1.5 x (RelayGR)",
            max(_ratio(one, "histories") for one in ones.values()),
            Rule(1.5, 1.1, unit="ratio"),
            f"longest median history with signals over without, at the load that is the largest without: "
            f"{details('histories')}",
        ),
    )


def show_relay(figures: Figures, measured: Measured) -> Sequence[Block]:
    ones = figures["scenarios"]
    budgets = [f"budget {one['budget_ms']:g} ms" for one in ones.values()]

    def draw(figure: Any) -> None:
        labels = (("loads", "largest load, x the arrivals"), ("histories", "longest median history (events)"))
        for axes, (what, label) in zip(figure.subplots(1, 2), labels, strict=True):
            series = {way: [float(np.mean(one[what][way])) for one in ones.values()] for way in _WAYS}
            grouped(axes, budgets, series, ylabel=label)
        legend_above(figure)

    rows = [
        [budget, *(f"{np.mean(one[what][way]):,.2f}" for what in ("loads", "histories") for way in _WAYS)]
        for budget, one in zip(budgets, ones.values(), strict=True)
    ]
    header = ("", "largest load inline", "ahead", "longest history inline", "ahead")
    chart = Chart(draw, "P99 of ranks within the budget, with and without signals.")
    return (chart, Table(header, rows, "Mean over seeds."), *_measured(measured))


def _measured(measured: Measured) -> list[Block]:
    kept = measured.get("gpu-relay-h200.json", {})
    rows = [
        [one["way"], f"{one['rate']:,.0f}", f"{one['at_it']['p99_ms']:.1f}"]
        for one in kept.get("throughput_at_base", ())
        if one.get("at_it")
    ]
    if not rows:
        return []
    caption = f"Ranks of 6,700 tokens within {kept['base']['budget_ms']:.1f} ms on the card (gpu-relay-h200.json)."
    return [Table(("way", "largest rate, requests/s", "P99 ms"), rows, caption, "measured on an H200")]


EXPERIMENTS = (
    Experiment(
        "relay",
        "Computing prefixes ahead of their ranks",
        "RelayGR's headline figures",
        "1.5 x longer sequences and 3.6 x SLO-compliant throughput at a fixed P99.",
        "A cascade on one node: signals when retrieval begins, ranks about 70 ms later; two budgets for ranking.",
        measure_relay,
        judge_relay,
        show_relay,
    ),
)
