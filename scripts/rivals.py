"""All rivals on the frozen scenarios: the same requests, limits and tuning for all.

    python -m scripts.rivals                      # hours of one core; goes on where it was stopped
    python -m scripts.rivals --minutes 10         # as far as ten minutes go
    python -m scripts.rivals --minutes 0          # write what is there

Rivals are tuned, and those that learn are trained, on days they are not judged on. Arrivals are a fixed share of what
a well-chosen constant serves within the SLO (`scripts.freeze_scenarios`). Finished runs are kept in build/rivals.jsonl.
Writes docs/measurements/rivals.json and prints the tables of docs/rivals.md; what was not run is named.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.bench.contest import Score
from helmrec.bench.contest_report import Hindsight, hindsight, row, spent
from helmrec.bench.judge import interval, largest_of
from helmrec.bench.ppo_only import ppo_only_file
from helmrec.bench.shifts import PRICES
from helmrec.control.static import UNTUNED_ALPHA
from scripts.kept import digest_of
from scripts.provenance import write_measurement
from scripts.rivals_runs import (
    ALPHAS,
    BUDGET,
    HELMREC,
    PPO_ONLY,
    RIVALS,
    TAUGHT,
    OutOfTime,
    Place,
    Runs,
    plan,
    scenario,
)
from scripts.rivals_table import as_markdown

OUT = Path("docs/measurements/rivals.json")
SEEDS, LOAD_SEEDS = range(5), range(50, 53)
MAIN = ("main-steady", "main-trend", "main-burst-20s", "main-flash-items", "main-cold-flood")
MAIN_BURSTS = ("main-burst-3s", "main-burst-60s")
OTHERS = tuple(f"{kind}-{name}" for kind in ("stress", "control") for name in ("trend", "burst-20s", "steady"))
OTHERS += tuple(f"{kind}-{name}" for kind in ("stress", "control") for name in ("flash-items", "cold-flood"))
FEW = ("untuned 0.5", "static", "marginal utility", "miss-curve argmin")  # who runs on OTHERS
LOADED = ("main-trend", "main-burst-20s", "main-steady")  # where the largest load is looked for
LOADS = tuple(round(0.80 + 0.05 * step, 2) for step in range(12))  # multiples of the scenario's arrivals


class Contest(NamedTuple):
    """A scenario and who takes part in it; everyone's scores by seed are made by calling them."""

    scenario: str
    rivals: Sequence[str]
    trained: Sequence[str]

    @property
    def places(self) -> list[Place]:
        return [Place(self.scenario, seed) for seed in SEEDS]

    def constants(self, runs: Runs) -> dict[float, list[Score]]:
        return {alpha: [runs.constant(place, alpha) for place in self.places] for alpha in ALPHAS}

    def without_admission(self, runs: Runs, best: float) -> dict[float, list[Score]]:
        """At the untuned split and around the best one."""
        near = {alpha for alpha in ALPHAS if abs(alpha - best) < 0.15} | {UNTUNED_ALPHA}
        return {alpha: [runs.constant(place, alpha, False) for place in self.places] for alpha in sorted(near)}

    def policies(self, runs: Runs) -> dict[str, list[Score]]:
        by_place = [{name: runs.rival(place, name) for name in self.rivals} for place in self.places]  # curves once
        found = {name: [one[name] for one in by_place] for name in self.rivals}
        return found | {name: [runs.trained(place, name) for place in self.places] for name in self.trained}

    def oracles(self, runs: Runs, seen: Hindsight) -> dict[str, list[Score]]:
        """Paths of least cost, with moves for free and at several prices, replayed."""
        paths = {"quasi-static": seen.exact.alpha.tolist()}
        for price in PRICES:
            paths[f"price x {price:g}"] = plan(self.places[0], seen, price * len(self.places)).tolist()
        return {name: [runs.replay(place, path) for place in self.places] for name, path in paths.items()}


def table(runs: Runs, contest: Contest) -> dict[str, Any]:
    constants = contest.constants(runs)
    seen = hindsight(constants)
    best, oracles = constants[seen.best_alpha], contest.oracles(runs, seen)
    bare = contest.without_admission(runs, seen.best_alpha)
    best_bare = min(bare, key=lambda alpha: spent(bare[alpha]))
    oracle = min((*oracles.values(), best), key=spent)
    named = {
        f"best static in hindsight ({seen.best_alpha:g})": best,
        f"best static without admission ({best_bare:g})": bare[best_bare],
        "untuned 0.5 without admission": bare[UNTUNED_ALPHA],
        "tracks alpha* at once (replayed)": oracles["quasi-static"],
        "oracle with moves paid (replayed)": oracle,
    }
    named |= {f"static {alpha:g}": scores for alpha, scores in constants.items()} | contest.policies(runs)
    return {
        "scenario": contest.scenario,
        "best_static_alpha": seen.best_alpha,
        "alpha_star": seen.exact.alpha.tolist(),
        "band": np.column_stack((seen.exact.low, seen.exact.high)).round(3).tolist(),
        "policies": {name: finite(asdict(row(one, best, seen, spent(oracle)))) for name, one in named.items()},
    }


def largest_loads(runs: Runs, name: str, seed: int, trained: Sequence[str]) -> dict[str, float]:
    """As multiples of the scenario's arrivals; 0 where not even the lowest is met."""
    slo_ms = scenario(name).slo_ms

    def largest(run: Callable[[Place], Score]) -> float:
        return largest_of(LOADS, lambda load: run(Place(name, seed, load)).meets(slo_ms)) or 0.0

    found = {f"static {alpha:g}": largest(partial(runs.constant, alpha=alpha)) for alpha in ALPHAS}
    best = max(ALPHAS, key=lambda alpha: found[f"static {alpha:g}"])
    for alpha in {UNTUNED_ALPHA, best}:
        found[f"static {alpha:g}, no admission"] = largest(partial(runs.constant, alpha=alpha, has_admission=False))
    found |= {rival: largest(partial(runs.rival, name=rival)) for rival in RIVALS}
    return found | {one: largest(partial(runs.trained, name=one)) for one in trained}


def loads_table(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Each as a share of the best constant's on the same seed."""
    best = {seed: max(found[f"static {alpha:g}"] for alpha in ALPHAS) for seed, found in by_seed.items()}
    shares: dict[str, list[float]] = {}
    for seed, found in by_seed.items():
        told = dict(found) | {"best static in hindsight": best[seed]}
        told["best static, no admission"] = max(load for one, load in found.items() if one.endswith("no admission"))
        for one, load in told.items():
            shares.setdefault(one, []).append(load / best[seed])
    of_all = {one: values for one, values in shares.items() if len(values) == len(by_seed)}
    return {
        "seeds": list(by_seed),
        "best_static": {str(seed): load for seed, load in best.items()},
        "share_of_best_static": {one: finite(asdict(interval(values))) for one, values in of_all.items()},
    }


def finite(value: Any) -> Any:
    """Intervals of a single seed have no ends; JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


class Found(NamedTuple):
    tables: dict[str, Any]
    loads: dict[str, Any]
    not_run: list[str]


def run_all(runs: Runs, trained: Sequence[str]) -> Found:
    """In order of what matters most; what there was no time for is named."""
    contests = [Contest(name, RIVALS, trained) for name in MAIN]
    more = [Contest(name, FEW, trained) for name in OTHERS] + [Contest(name, RIVALS, trained) for name in MAIN_BURSTS]
    tables: dict[str, Any] = {}
    by_seed: dict[str, dict[int, dict[str, float]]] = {name: {} for name in LOADED}
    not_run = [] if PPO_ONLY in trained else [PPO_ONLY]

    def contest(one: Contest) -> None:
        tables[one.scenario] = table(runs, one)

    def load(name: str, seed: int) -> None:
        by_seed[name][seed] = largest_loads(runs, name, seed, trained)

    work: list[tuple[str, Callable[[], None]]] = [(one.scenario, partial(contest, one)) for one in contests]
    loads = [(name, seed) for seed in LOAD_SEEDS for name in LOADED]
    told = [(f"largest loads on {name}, seed {seed}", partial(load, name, seed)) for name, seed in loads]
    work += told[:3] + [(one.scenario, partial(contest, one)) for one in more] + told[3:]
    for name, do in work:
        try:
            do()
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        except OutOfTime:
            not_run.append(name)
    return Found(tables, {name: loads_table(found) for name, found in by_seed.items() if found}, not_run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--rivals-only", action="store_true", help="leave trained networks for later")
    flags = parser.parse_args()
    trained = [] if flags.rivals_only else [HELMREC, *([PPO_ONLY] if ppo_only_file().exists() else [])]
    runs = Runs(time.monotonic() + 60 * flags.minutes)
    found = run_all(runs, trained)
    if flags.rivals_only:
        return
    cost = scenario("main-steady").cost()
    write_measurement(
        OUT,
        {
            "calibration": cost.name,
            "calibration_digest": digest_of(cost),
            "seeds": len(SEEDS),
            "start_of_all_but_constants": UNTUNED_ALPHA,
            "tuning": {"trials": BUDGET, "on": "a mixed day", "learned from": list(TAUGHT)},
            "tuned": {name: runs.tuned(name) for name in RIVALS},
            "not_run": found.not_run,
            "variants": found.tables,
            "largest_loads": found.loads,
        },
    )
    print(as_markdown(found.tables, found.loads))


if __name__ == "__main__":
    main()
