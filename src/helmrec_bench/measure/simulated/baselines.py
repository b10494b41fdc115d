"""Every policy on the frozen scenarios: the same requests, limits and tuning for all.

    helmrec bench run baselines                      # hours of one core; a run that was stopped continues
    helmrec bench run baselines --processes 16

Baselines are tuned, and those that learn are trained, on days they are not scored on. Arrivals are a fixed share of
what a well-chosen constant serves within the SLO. Finished runs are kept in build/baselines.jsonl. The tables of
docs/baselines.md are printed.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from helmrec.control.static import UNTUNED_ALPHA
from helmrec_bench.judging.contest import Score
from helmrec_bench.judging.contest_report import Hindsight, hindsight, row, spent
from helmrec_bench.judging.judge import interval, largest_of
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import digest_of, spread
from helmrec_bench.map.shifts import PRICES
from helmrec_bench.measure.simulated.baseline_runs import (
    ALPHAS,
    BASELINES,
    BUDGET,
    HELMREC,
    TAUGHT,
    RunPlace,
    Runs,
    plan,
    scenario,
    warm_up,
)
from helmrec_bench.measure.simulated.baseline_tables import as_markdown

SEEDS, LOAD_SEEDS = range(5), (50,)
SCENARIOS = ("main-steady", "main-trend", "main-burst-20s", "main-flash-items", "main-cold-flood")
Run = Callable[[RunPlace], Score]
LOADED = ("main-trend", "main-burst-20s", "main-steady")  # where the largest load is looked for
LOADS = tuple(round(0.80 + 0.05 * step, 2) for step in range(12))  # multiples of the scenario's arrivals
BARE, PLAN = "no admission ", "plan "  # before names


def places_of(name: str) -> list[RunPlace]:
    return [RunPlace(name, seed) for seed in SEEDS]


def constants(runs: Runs, place: RunPlace) -> dict[float, Score]:
    return {alpha: runs.constant(place, alpha) for alpha in ALPHAS}


def seen_of(runs: Runs, name: str) -> Hindsight:
    by_seed = [constants(runs, place) for place in places_of(name)]
    return hindsight({alpha: [one[alpha] for one in by_seed] for alpha in ALPHAS})


def policies(runs: Runs) -> dict[str, Run]:
    found: dict[str, Run] = {name: partial(runs.baseline, name=name) for name in BASELINES}
    return found | {HELMREC: runs.ours}


def others(runs: Runs, name: str, seen: Hindsight) -> dict[str, Run]:
    """Everyone who needs to know how constants did, or miss curves; plans have moves for free or at several prices."""
    near = {alpha for alpha in ALPHAS if abs(alpha - seen.best_alpha) < 0.15} | {UNTUNED_ALPHA}
    found: dict[str, Run] = {
        f"{BARE}{alpha:g}": partial(runs.constant, alpha=alpha, has_admission=False) for alpha in sorted(near)
    }
    first, num = places_of(name)[0], len(SEEDS)
    paths = {"quasi-static": seen.exact.alpha}
    paths |= {f"price x {price:g}": plan(first, seen, price * num) for price in PRICES}
    found |= {f"{PLAN}{kind}": partial(runs.replay, path=path.tolist()) for kind, path in paths.items()}
    return found | policies(runs)


def table(runs: Runs, name: str) -> dict[str, Any]:
    seen = seen_of(runs, name)
    found = {f"static {alpha:g}": [runs.constant(place, alpha) for place in places_of(name)] for alpha in ALPHAS}
    found |= {who: [run(place) for place in places_of(name)] for who, run in others(runs, name, seen).items()}
    best = found[f"static {seen.best_alpha:g}"]
    bare = min((who for who in found if who.startswith(BARE)), key=lambda who: spent(found[who]))
    oracle = min((*(found[who] for who in found if who.startswith(PLAN)), best), key=spent)
    named = {
        f"best static in hindsight ({seen.best_alpha:g})": best,
        f"best static without admission ({bare.removeprefix(BARE)})": found[bare],
        "untuned 0.5 without admission": found[f"{BARE}{UNTUNED_ALPHA:g}"],
        "tracks alpha* at once (replayed)": found[f"{PLAN}quasi-static"],
        "oracle with moves paid (replayed)": oracle,
    }
    named |= {who: one for who, one in found.items() if not who.startswith((BARE, PLAN))}
    return {
        "scenario": name,
        "best_static_alpha": seen.best_alpha,
        "alpha_star": seen.exact.alpha.tolist(),
        "band": np.column_stack((seen.exact.low, seen.exact.high)).round(3).tolist(),
        "policies": {who: finite(asdict(row(one, best, seen, spent(oracle)))) for who, one in named.items()},
    }


def largest_loads(runs: Runs, name: str, seed: int) -> dict[str, float]:
    """As multiples of the scenario's arrivals; 0 where not even the lowest is met."""
    slo_ms = scenario(name).slo_ms

    def largest(run: Run) -> float:
        return largest_of(LOADS, lambda load: run(RunPlace(name, seed, load)).meets(slo_ms)) or 0.0

    found = {f"static {alpha:g}": largest(partial(runs.constant, alpha=alpha)) for alpha in ALPHAS}
    best = max(ALPHAS, key=lambda alpha: found[f"static {alpha:g}"])
    for alpha in {UNTUNED_ALPHA, best}:
        found[f"static {alpha:g}, no admission"] = largest(partial(runs.constant, alpha=alpha, has_admission=False))
    return found | {who: largest(run) for who, run in policies(runs).items()}


def loads_table(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Each as a share of the best constant's on the same seed."""
    best = {seed: max(found[f"static {alpha:g}"] for alpha in ALPHAS) for seed, found in by_seed.items()}
    shares: dict[str, list[float]] = {}
    for seed, found in by_seed.items():
        bare = max(load for who, load in found.items() if who.endswith("no admission"))
        details = {"best static in hindsight": best[seed], "best static, no admission": bare} | dict(found)
        for who, load in details.items():
            shares.setdefault(who, []).append(load / best[seed])
    return {
        "best_static": {str(seed): load for seed, load in best.items()},
        "share_of_best_static": {
            who: {"num_seeds": len(values), **finite(asdict(interval(values)))} for who, values in shares.items()
        },
    }


def finite(value: Any) -> Any:
    """Intervals of a single seed have no ends; JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


class Step(NamedTuple):
    """A piece of work for one process; its results are in the store."""

    what: Literal["constants", "others", "loads"]
    place: RunPlace


def work(step: Step) -> None:
    runs, place = Runs(), step.place
    if step.what == "constants":
        constants(runs, place)
    elif step.what == "others":
        for run in others(runs, place.scenario, seen_of(runs, place.scenario)).values():
            run(place)
    else:
        largest_loads(runs, place.scenario, place.seed)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1)


def main(flags: Namespace) -> None:
    warm_up()
    every = [place for name in SCENARIOS for place in places_of(name)]
    loads = [Step("loads", RunPlace(name, seed)) for seed in LOAD_SEEDS for name in LOADED]
    for steps in ([Step("constants", place) for place in every], [*(Step("others", place) for place in every), *loads]):
        for step, _ in spread(steps, work, flags.processes):
            print(f"{step.what} on {step.place}", flush=True)
    runs, cost = Runs(), scenario("main-steady").cost()
    tables = {name: table(runs, name) for name in SCENARIOS}
    largest = {name: loads_table({seed: largest_loads(runs, name, seed) for seed in LOAD_SEEDS}) for name in LOADED}
    write_measurement(
        flags.out,
        {
            "calibration": cost.name,
            "calibration_digest": digest_of(cost),
            "seeds": len(SEEDS),
            "start_of_all_but_constants": UNTUNED_ALPHA,
            "tuning": {"trials": BUDGET, "on": "a mixed day", "learned from": list(TAUGHT)},
            "tuned": {name: runs.tuned(name) for name in BASELINES},
            "variants": tables,
            "largest_loads": largest,
        },
    )
    print(as_markdown(tables, largest))
