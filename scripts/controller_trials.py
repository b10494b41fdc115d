"""Policies against constant splits on simulated scenarios: drawn at random (`helmrec.sim.drawn`), and the frozen ones.

    python -m scripts.controller_trials                                # 36 scenarios of the validation range, one seed
    python -m scripts.controller_trials --range test --numbers 60 --seeds 3 --out docs/measurements/controller-test.json
    python -m scripts.controller_trials --range frozen --seeds 3 --out docs/measurements/controller-frozen.json
    python -m scripts.controller_trials --policies helm "helm base" "helm without bursts" --starts 0.1 0.5 0.9

Constants lie on a grid of 0.05, and 0.03: every second one is run, then the neighbours of the two best. The best is the
one with the least mean latency, in hindsight, over all seeds. Everyone sees the same requests; a policy starts at one
of `--starts` and looks at miss curves recorded once per scenario and seed. The first minute is not counted, and the
first burst is counted apart, against an untuned 0.5. Finished pieces are kept in build/, so a run that was stopped goes
on.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from helmrec.bench.contest import Shown
from helmrec.bench.service_cost import service_cost
from helmrec.control.static import UNTUNED_ALPHA, Static, StaticSettings
from helmrec.experiments.curve_file import load_curves, save_curves
from helmrec.experiments.entrants import entrant
from helmrec.experiments.kept import Store, digest_of_code, finish
from helmrec.sim.drawn import OPENING_S, RANGES, Drawn, Range, draw
from helmrec.sim.scenario import Scenario, load_scenario
from helmrec.sim.simulate import SimResult, simulate, summarise
from helmrec.sim.simulate_curves import record_curves
from helmrec.sim.trace import Trace
from scripts.provenance import write_measurement

BUILD, SCENARIOS = Path("build"), Path("scenarios")
FROZEN = tuple(sorted(path.stem for path in SCENARIOS.glob("*.toml")))
BURSTS = ("burst", "flood", "flash")  # names of phases
COARSE = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FINE_STEP, LEAST, MOST = 0.05, 0.03, 0.95
AFTER_BURST_S = 10.0  # that the first burst's queue may take to drain

SIMULATOR, CONTROLLER = digest_of_code("sim", "memory"), digest_of_code("control")  # as they are when a run begins


class Ground(NamedTuple):
    """All constants on one scenario and seed."""

    which: Range | Literal["frozen"]
    number: int
    seed: int

    @property
    def name(self) -> str:
        return f"constants {self.which} {self.number} seed {self.seed} {SIMULATOR}"

    @property
    def curves_path(self) -> Path:
        return BUILD / "curves" / f"drawn-{self.which}-{self.number}-{self.seed}-{SIMULATOR}.npz"


class Trial(NamedTuple):
    """A policy on one of them."""

    ground: Ground
    policy: str
    start: float

    @property
    def name(self) -> str:
        return f"{self.policy} from {self.start:g}, {CONTROLLER}, on {self.ground.name}"


@cache
def scene(ground: Ground) -> tuple[Drawn, Trace]:
    if ground.which != "frozen":
        drawn = draw(ground.which, ground.number)
        return drawn, drawn.make_trace(ground.seed)
    scenario = load_scenario(SCENARIOS / f"{FROZEN[ground.number]}.toml")
    trace = scenario.make_trace(ground.seed)
    assert scenario.workload is not None
    return Drawn(
        name=scenario.name,
        kind=scenario.name,
        load=float("nan"),
        workload=scenario.workload,
        config=scenario.node_config(trace),
        cost=scenario.cost(),
        bursts_s=first_burst(scenario),
        scored_from_s=OPENING_S,
    ), trace


def first_burst(scenario: Scenario) -> tuple[tuple[float, float], ...]:
    """From and until; none, if the scenario has none."""
    workload = scenario.workload
    assert workload is not None
    now_s = sum(phase.duration_s for phase in workload.opening)
    for phase in workload.phases:
        if phase.name in BURSTS:
            return ((now_s, now_s + phase.duration_s),)
        now_s += phase.duration_s
    return ()


def sweep(ground: Ground) -> dict[str, Any]:
    """Scores of constants, by alpha; miss curves are recorded on the way."""
    drawn, trace = scene(ground)
    save_curves(ground.curves_path, record_curves(trace, drawn.node_at(UNTUNED_ALPHA), drawn.cost))
    scores: dict[float, dict[str, float]] = {}

    def run(alphas: Sequence[float]) -> None:
        for alpha in alphas:
            if alpha not in scores and LEAST <= alpha <= min(MOST, drawn.config.alpha_max):
                policy = Static(StaticSettings(alpha=alpha))
                scores[alpha] = score(drawn, simulate(trace, drawn.node_at(alpha), drawn.cost, policy))

    run(COARSE)
    for alpha in sorted(scores, key=lambda one: scores[one]["mean_ms"])[:2]:
        run([round(alpha - FINE_STEP, 2), round(alpha + FINE_STEP, 2)])
    return {f"{alpha:g}": one for alpha, one in scores.items()}


def judge(trial: Trial) -> dict[str, Any]:
    drawn, trace = scene(trial.ground)
    config = drawn.node_at(trial.start)
    policy = entrant(trial.policy, service_cost(drawn.cost, config, trace)).policy
    shown = Shown(policy, load_curves(trial.ground.curves_path), tick_s=1.0)
    result = simulate(trace, config, drawn.cost, shown)
    alphas = [window.stats.alpha for window in result.windows]
    path = [round(alpha, 3) for alpha in alphas[:: max(1, len(alphas) // 20)]]
    return {**score(drawn, result), "alphas": path, "decision_us": shown.decision_us}


def score(drawn: Drawn, result: SimResult) -> dict[str, float]:
    counted = result.arrived_s >= drawn.scored_from_s
    told: dict[str, float] = {}
    if drawn.bursts_s:
        begin_s, end_s = drawn.bursts_s[0]
        is_first = (result.arrived_s >= begin_s) & (result.arrived_s < end_s + AFTER_BURST_S)
        told = {f"first_burst_{name}": value for name, value in _figures(result, is_first).items()}
        counted &= ~is_first
    return {**told, **_figures(result, counted)}


def _figures(result: SimResult, chosen: NDArray[np.bool_]) -> dict[str, float]:
    found = summarise(result.outcomes, chosen, result.slo_ms)
    return {
        "num": found.num_requests,
        "mean_ms": found.mean_ms,
        "p99_ms": found.p99_ms,
        "within_slo": found.slo_satisfaction,
    }


def compare(scores: Sequence[dict[str, Any]], constants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One scenario over its seeds: the policy's figures over those of the best constant."""
    known = set.intersection(*(set(one) for one in constants))
    best = min(known, key=lambda alpha: _mean(constants, alpha, "mean_ms"))
    mean_ms, p99_ms, within = (
        _mean([{"": one} for one in scores], "", name) for name in ("mean_ms", "p99_ms", "within_slo")
    )
    told = {
        "best_constant": float(best),
        "mean_ms": mean_ms,
        "mean_over_best": mean_ms / _mean(constants, best, "mean_ms") - 1,
        "p99_over_best": p99_ms / _mean(constants, best, "p99_ms") - 1,
        "within_slo_less_best": within - _mean(constants, best, "within_slo"),
        "untuned_over_best": _mean(constants, f"{UNTUNED_ALPHA:g}", "mean_ms") / _mean(constants, best, "mean_ms") - 1,
        "alphas": scores[0]["alphas"],
        "decision_p99_us": max(one["decision_us"][1] for one in scores),
    }
    if "first_burst_p99_ms" in scores[0]:
        first_ms = np.mean([one["first_burst_p99_ms"] for one in scores])
        untuned_ms = _mean(constants, f"{UNTUNED_ALPHA:g}", "first_burst_p99_ms")
        told["first_burst_p99_over_untuned"] = float(first_ms / untuned_ms - 1)
    return told


def _mean(scores: Sequence[dict[str, Any]], alpha: str, name: str) -> float:
    """Over seeds, by the number of requests."""
    return float(np.average([one[alpha][name] for one in scores], weights=[one[alpha]["num"] for one in scores]))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    mean = np.array([row["mean_over_best"] for row in rows])
    p99 = np.array([row["p99_over_best"] for row in rows])
    return {
        "scenarios": len(rows),
        "mean_within_5": float(np.mean(mean <= 0.05)),
        "p99_within_5": float(np.mean(p99 <= 0.05)),
        "p99_within_10": float(np.mean(p99 <= 0.10)),
        "worst_mean": float(mean.max()),
        "worst_p99": float(p99.max()),
        "average_mean": float(mean.mean()),
        "average_p99": float(p99.mean()),
        "least_within_slo_less_best": min(row["within_slo_less_best"] for row in rows),
        "decision_p99_us": max(row["decision_p99_us"] for row in rows),
    }


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    names = ("scenario", "best constant", "mean", "P99", "within SLO", "untuned 0.5", "first burst", "alpha")
    table = Table(*names, title=title)
    for name, row in rows.items():
        first = row.get("first_burst_p99_over_untuned")
        path = " ".join(f"{alpha:.2f}" for alpha in row["alphas"][::4])
        table.add_row(
            name,
            f"{row['best_constant']:g}",
            f"{row['mean_over_best']:+.1%}",
            f"{row['p99_over_best']:+.1%}",
            f"{100 * row['within_slo_less_best']:+.2f}",
            f"{row['untuned_over_best']:+.1%}",
            "" if first is None else f"{first:+.0%}",
            path,
        )
    console = Console(width=140)
    console.print(table)
    for name, value in summary(list(rows.values())).items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


def by_kind(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Average over the scenarios of each kind, with a 95% interval (bootstrap over scenarios)."""
    rng, found = np.random.default_rng(0), dict[str, dict[str, float]]()
    for kind in sorted({row["kind"] for row in rows.values()}):
        own = [row for row in rows.values() if row["kind"] == kind]
        found[kind] = {"scenarios": len(own)}
        for name in ("mean_over_best", "p99_over_best"):
            values = np.array([row[name] for row in own])
            drawn = values[rng.integers(values.size, size=(2_000, values.size))].mean(axis=1)
            low, high = np.percentile(drawn, (2.5, 97.5))
            found[kind] |= {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--range", dest="which", choices=(*RANGES, "frozen"), default="validation")
    parser.add_argument("--numbers", type=int, default=36, help="scenarios, from the first on; all of the frozen ones")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=["helm"], help="as experiments name them")
    parser.add_argument("--starts", type=float, nargs="+", default=[UNTUNED_ALPHA], help="alpha at the start")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write figures there")
    args = parser.parse_args()
    numbers = range(len(FROZEN) if args.which == "frozen" else args.numbers)
    grounds = [Ground(args.which, number, seed) for number in numbers for seed in range(args.seeds)]
    store = Store(BUILD / "controller-trials.jsonl", "1")
    finish(grounds, sweep, store, args.processes, "constants")
    found: dict[str, Any] = {}
    for policy in args.policies:
        for start in args.starts:
            trials = [Trial(ground, policy, start) for ground in grounds]
            finish(trials, judge, store, args.processes, f"{policy} from {start:g}")
            rows = {}
            for number in numbers:
                own = [trial for trial in trials if trial.ground.number == number]
                scores, constants = (
                    [store.found[one.name] for one in own],
                    [store.found[one.ground.name] for one in own],
                )
                drawn = scene(own[0].ground)[0]
                rows[drawn.name] = {"kind": drawn.kind, **compare(scores, constants)}
            show(f"{policy} from {start:g}", rows)
            found[f"{policy} from {start:g}"] = {
                "summary": summary(list(rows.values())),
                "kinds": by_kind(rows),
                "scenarios": rows,
            }
    if args.out is not None:
        write_measurement(args.out, {"range": args.which, "seeds": args.seeds, "policies": found})


if __name__ == "__main__":
    main()
