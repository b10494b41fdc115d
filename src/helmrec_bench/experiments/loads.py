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
from helmrec_bench.lab.runs import Outcome, Run, Settings
from helmrec_bench.report.blocks import Block, Chart, Table, bars
from helmrec_bench.report.claims import Rule, Verdict, judged

_LRU: Settings = (("kv_admission", "always"), ("row_admission", "always"))
_TUNED = (0.7, 0.8, 0.9)  # splits an operator would try: lower ones bear less here (`latency-vs-ratio`)
Entry = tuple[str, Settings]  # policy and engine


def largest_loads(
    lab: Lab, scenario: str, entries: Mapping[str, Entry], what: str, *, counts_first: bool = True
) -> dict[str, list[float]]:
    """By seed, as multiples of the scenario's arrivals. All searches go on together, so runs share their setups.

    counts_first: the P99 is over the first minute and the first burst, too.
    """
    slo_ms = lab.scenario(scenario).slo_ms

    def are_met(asked: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], bool]:
        runs = {(name, seed): Run(lab.setup(scenario, seed, at), *entries[name]) for (name, seed), at in asked.items()}
        found = lab.run(list(runs.values()), what)
        return {key: _meets(found[run], slo_ms, counts_first=counts_first) for key, run in runs.items()}

    loads = largest_of_each(itertools.product(entries, lab.seeds), lab.tier.loads, are_met)
    return {name: [loads[name, seed] for seed in lab.seeds] for name in entries}


def _meets(outcome: Outcome, slo_ms: float, *, counts_first: bool) -> bool:
    return outcome.score.meets(slo_ms) if counts_first else outcome.meets_when_known(slo_ms)


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

    def climb(*, counts_first: bool) -> dict[str, dict[str, Any]]:
        loads = largest_loads(lab, FAMILIES["Burst"], entries, "ladder", counts_first=counts_first)
        rungs: dict[str, dict[str, Any]] = {RUNGS[0]: {"alpha": 0.5, "loads": loads[RUNGS[0]]}}
        for rung in kinds:
            best = max((name for name in tried if tried[name][0] == rung), key=lambda name: float(np.mean(loads[name])))
            rungs[rung] = {"alpha": tried[best][1], "loads": loads[best]}
        return {**rungs, RUNGS[4]: {"alpha": None, "loads": loads[RUNGS[4]]}}

    return {
        "scenario": FAMILIES["Burst"],
        "rungs": climb(counts_first=True),
        "known_rungs": climb(counts_first=False),
        "num_nodes": NUM_NODES[lab.tier.name],
        "cluster": largest_cluster_loads(lab, FAMILIES["Burst"], host),
    }


def _gains(rungs: Mapping[str, Mapping[str, Any]], since: str) -> tuple[Verdict, Verdict]:
    """The last rung over an untuned and a tuned split. since: what is counted, for the claims."""
    mean = {rung: float(np.mean(one["loads"])) for rung, one in rungs.items()}
    details = ", ".join(f"{rung} {load:.2f}" for rung, load in mean.items())
    return (
        judged(
            f"What a user gains over an untuned split with LRU{since}",
            None,
            mean[RUNGS[4]] / mean[RUNGS[0]] if mean[RUNGS[0]] else float("nan"),
            Rule(1.1, 1.02, unit="ratio"),
            f"largest load at P99 within the SLO: {details}",
        ),
        judged(
            f"What a user gains over a tuned split with LRU, as peers deploy it{since}",
            None,
            mean[RUNGS[4]] / mean[RUNGS[1]] if mean[RUNGS[1]] else float("nan"),
            Rule(1.05, 1.0, unit="ratio"),
            f"the split was tuned on the traffic it is judged on: {details}",
        ),
    )


def judge_ladder(figures: Figures) -> Sequence[Verdict]:
    cluster = figures["cluster"]
    return (
        *_gains(figures["rungs"], ", start and first burst counted"),
        *_gains(figures["known_rungs"], ", from the second burst on"),
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
    rungs, known = figures["rungs"], figures["known_rungs"]

    def draw(figure: Any) -> None:
        ways = {"all requests": rungs, "from the second burst on": known}
        for axes, (title, found) in zip(figure.subplots(1, 2, sharex=True, sharey=True), ways.items(), strict=True):
            values = [float(np.mean(one["loads"])) for one in found.values()]
            label = f"largest load, x the arrivals of {figures['scenario']}"
            bars(axes, list(found), values, frozenset(RUNGS[2:]), xlabel=label)
            axes.set_title(title)

    rows = [[rung, *_cells(rungs, rung), *_cells(known, rung)] for rung in rungs]
    nodes, first = f"each of {figures['num_nodes']} nodes", _first(rungs)
    for router, load in figures["cluster"].items():
        over = f"{load / first:.2f} x"
        rows.append([f"{nodes}, {router} router", "stays", f"{load:.2f}", over, "-", "-", "-"])
    return (
        Chart(draw, "Largest load at P99 within the SLO as parts are switched on one after another."),
        Table(
            ("rung", *("alpha", "largest load", "over the first"), *("alpha", "from the second burst on", "over")),
            rows,
            "Mean over seeds, least and largest; clusters: one seed. Nobody can know the first burst of a run; only a "
            "split that was tuned on this very traffic fits it.",
        ),
    )


def _first(rungs: Mapping[str, Mapping[str, Any]]) -> float:
    return float(np.mean(rungs[RUNGS[0]]["loads"])) or float("nan")


def _cells(rungs: Mapping[str, Mapping[str, Any]], rung: str) -> tuple[str, str, str]:
    """Split, largest load, and how much that is over the first rung's."""
    alpha, loads = rungs[rung]["alpha"], rungs[rung]["loads"]
    seen = interval([load / _first(rungs) for load in loads])
    return "moves" if alpha is None else f"{alpha:g}", _spread(loads), f"{seen.mean:.2f} x"


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
