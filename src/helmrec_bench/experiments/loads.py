"""The largest load within the SLO: what an operator pays for, and what each part adds to it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from helmrec_bench.experiments.ablations import EXPANDER
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.experiments.routing import BY_USER, NUM_NODES, largest_cluster_loads
from helmrec_bench.experiments.routing import OURS as ROUTER
from helmrec_bench.experiments.strategies import FAMILIES, OURS
from helmrec_bench.judging.judge import interval, largest_of_each
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.runs import Run, Settings
from helmrec_bench.report.blocks import Block, Chart, Table, bars
from helmrec_bench.report.claims import Rule, Verdict, judged

_LRU: Settings = (("kv_admission", "always"), ("row_admission", "always"))
_TUNED = (0.7, 0.8, 0.9)  # splits an operator would try: lower ones bear less here (`latency-vs-ratio`)
Entry = tuple[str, Settings]  # policy and engine


def largest_loads(lab: Lab, scenario: str, entries: Mapping[str, Entry], what: str) -> dict[str, list[float]]:
    """By seed, as multiples of the scenario's arrivals. All searches go on together, so runs share their setups."""
    slo_ms = lab.scenario(scenario).slo_ms

    def are_met(asked: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], bool]:
        runs = {(name, seed): Run(lab.setup(scenario, seed, at), *entries[name]) for (name, seed), at in asked.items()}
        found = lab.run(list(runs.values()), what)
        return {key: found[run].score.meets(slo_ms) for key, run in runs.items()}

    loads = largest_of_each(itertools.product(entries, lab.seeds), lab.tier.loads, are_met)
    return {name: [loads[name, seed] for seed in lab.seeds] for name in entries}


def _spread(loads: Sequence[float]) -> str:
    return f"{np.mean(loads):.2f} ({min(loads):.2f} to {max(loads):.2f})"


RUNGS = ("untuned split, LRU", "tuned split, LRU", "+ admission", "+ host_tier", "+ controller")


def measure_ladder(lab: Lab) -> Figures:
    """Tuned: the split that bears most, tried on the very traffic it is judged on, which favours it."""
    host: Settings = tuple((name, int(value * lab.tier.size)) for name, value in EXPANDER)
    entries: dict[str, Entry] = {RUNGS[0]: ("static:0.5", _LRU), RUNGS[4]: (OURS, host)}
    kinds: dict[str, Settings] = {RUNGS[1]: _LRU, RUNGS[2]: (), RUNGS[3]: host}
    tried = {f"{rung} at {alpha:g}": (rung, alpha) for rung in kinds for alpha in _TUNED}
    entries |= {name: (f"static:{alpha:g}", kinds[rung]) for name, (rung, alpha) in tried.items()}
    loads = largest_loads(lab, FAMILIES["Burst"], entries, "ladder")
    rungs = {RUNGS[0]: {"alpha": 0.5, "loads": loads[RUNGS[0]]}}
    for rung in kinds:
        best = max((name for name in tried if tried[name][0] == rung), key=lambda name: float(np.mean(loads[name])))
        rungs[rung] = {"alpha": tried[best][1], "loads": loads[best]}
    rungs[RUNGS[4]] = {"alpha": None, "loads": loads[RUNGS[4]]}
    return {
        "scenario": FAMILIES["Burst"],
        "rungs": rungs,
        "tried": loads,
        "num_nodes": NUM_NODES[lab.tier.name],
        "cluster": largest_cluster_loads(lab, FAMILIES["Burst"], host),
    }


def judge_ladder(figures: Figures) -> Sequence[Verdict]:
    mean = {rung: float(np.mean(one["loads"])) for rung, one in figures["rungs"].items()}
    details = ", ".join(f"{rung} {load:.2f}" for rung, load in mean.items())
    last, cluster = mean[RUNGS[4]], figures["cluster"]
    return (
        judged(
            "What a user gains over an untuned split with LRU",
            None,
            last / mean[RUNGS[0]] if mean[RUNGS[0]] else float("nan"),
            Rule(1.1, 1.02, unit="ratio"),
            f"largest load at P99 within the SLO: {details}",
        ),
        judged(
            "What a user gains over a tuned split with LRU, as peers deploy it",
            None,
            last / mean[RUNGS[1]] if mean[RUNGS[1]] else float("nan"),
            Rule(1.05, 1.0, unit="ratio"),
            f"the split was tuned on the traffic it is judged on: {details}",
        ),
        judged(
            "What the router adds on a cluster, over routing by user hash",
            None,
            cluster[ROUTER] / cluster[BY_USER] if cluster[BY_USER] else float("nan"),
            Rule(1.05, 1.0, unit="ratio"),
            f"largest load of each of {figures['num_nodes']} nodes with admission and host_tier, splits that stay, one "
            f"seed: {cluster[ROUTER]:.2f} against {cluster[BY_USER]:.2f}",
        ),
    )


def show_ladder(figures: Figures, measured: Measured) -> Sequence[Block]:
    rungs = figures["rungs"]

    def draw(figure: Any) -> None:
        values = [float(np.mean(one["loads"])) for one in rungs.values()]
        ours = frozenset(list(rungs)[2:])
        bars(
            figure.subplots(),
            list(rungs),
            values,
            ours,
            xlabel=f"largest load, x the arrivals of {figures['scenario']}",
        )

    first = float(np.mean(rungs[RUNGS[0]]["loads"])) or float("nan")
    rows = []
    for rung, one in rungs.items():
        alpha = "moves" if one["alpha"] is None else f"{one['alpha']:g}"
        seen = interval([load / first for load in one["loads"]])
        rows.append([rung, alpha, _spread(one["loads"]), f"{seen.mean:.2f} x"])
    nodes = f"each of {figures['num_nodes']} nodes"
    for router, load in figures["cluster"].items():
        rows.append([f"{nodes}, {router} router", "stays", f"{load:.2f}", f"{load / first:.2f} x"])
    return (
        Chart(draw, "Largest load at P99 within the SLO as parts are switched on one after another."),
        Table(
            ("rung", "alpha", "largest load", "over the first"),
            rows,
            "Mean over seeds, least and largest; clusters: one seed.",
        ),
    )


EXPERIMENTS = (
    Experiment(
        "ladder",
        "What a user gains, part by part",
        "our question",
        "From what one would deploy instead (a fixed split with LRU) to everything switched on.",
        "Largest load of each rung on bursts; then of nodes behind two routers.",
        measure_ladder,
        judge_ladder,
        show_ladder,
    ),
)
