"""Every policy on the frozen scenarios: the same requests, limits and tuning for all.

    helmrec bench run baselines                      # hours of one core; a run that was stopped continues
    helmrec bench run baselines --minutes 10         # as far as ten minutes go
    helmrec bench run baselines --minutes 0          # write what is there
    helmrec bench run baselines --processes 16

Baselines are tuned, and those that learn are trained, on days they are not scored on. Arrivals are a fixed share of
what a well-chosen constant serves within the SLO. Finished runs are kept in build/baselines.jsonl. The tables of
docs/baselines.md are printed; what was not run is named.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from helmrec.control.static import UNTUNED_ALPHA
from helmrec_bench.judging.contest import Score
from helmrec_bench.judging.contest_report import Hindsight, hindsight, row, spent
from helmrec_bench.judging.judge import interval, largest_of
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import digest_of
from helmrec_bench.map.shifts import PRICES
from helmrec_bench.measure.simulated.baseline_runs import (
    ALPHAS,
    BASELINES,
    BUDGET,
    OURS,
    TAUGHT,
    OutOfTime,
    RunPlace,
    Runs,
    plan,
    scenario,
    warm_up,
)
from helmrec_bench.measure.simulated.baseline_tables import as_markdown

SEEDS, LOAD_SEEDS = range(5), range(50, 53)
MAIN = ("main-steady", "main-trend", "main-burst-20s", "main-flash-items", "main-cold-flood")
MAIN_BURSTS = ("main-burst-3s", "main-burst-60s")
OTHERS = tuple(f"{kind}-{name}" for kind in ("stress", "control") for name in ("trend", "burst-20s", "steady"))
OTHERS += tuple(f"{kind}-{name}" for kind in ("stress", "control") for name in ("flash-items", "cold-flood"))
FEW = ("untuned 0.5", "static", "marginal utility", "miss-curve argmin")  # who runs on OTHERS
Run = Callable[[RunPlace], Score]
LOADED = ("main-trend", "main-burst-20s", "main-steady")  # where the largest load is looked for
LOADS = tuple(round(0.80 + 0.05 * step, 2) for step in range(12))  # multiples of the scenario's arrivals


class Compared(NamedTuple):
    baselines: tuple[str, ...]
    ours: tuple[str, ...]


class BaselineContest(NamedTuple):
    """A scenario and who takes part in it, on all seeds."""

    scenario: str
    baselines: tuple[str, ...]
    ours: tuple[str, ...]

    @property
    def places(self) -> list[RunPlace]:
        return [RunPlace(self.scenario, seed) for seed in SEEDS]

    def hindsight(self, runs: Runs) -> Hindsight:
        return hindsight({alpha: [runs.constant(place, alpha) for place in self.places] for alpha in ALPHAS})

    def constants(self, runs: Runs, place: RunPlace) -> dict[str, Score]:
        return {f"static {alpha:g}": runs.constant(place, alpha) for alpha in ALPHAS}

    def others(self, runs: Runs, seen: Hindsight) -> dict[str, Run]:
        """Everyone who needs to know how constants did, or miss curves."""
        near = {alpha for alpha in ALPHAS if abs(alpha - seen.best_alpha) < 0.15} | {UNTUNED_ALPHA}
        found: dict[str, Run] = {
            f"{BARE}{alpha:g}": partial(runs.constant, alpha=alpha, has_admission=False) for alpha in sorted(near)
        }
        found |= {f"{PLAN}{name}": partial(runs.replay, path=path) for name, path in self._paths(seen).items()}
        found |= {name: partial(runs.baseline, name=name) for name in self.baselines}
        return found | {name: partial(runs.ours, name=name) for name in self.ours}

    def _paths(self, seen: Hindsight) -> dict[str, list[float]]:
        """Of least cost, with moves for free and at several prices."""
        paths: dict[str, list[float]] = {"quasi-static": seen.exact.alpha.tolist()}
        for price in PRICES:
            paths[f"price x {price:g}"] = plan(self.places[0], seen, price * len(self.places)).tolist()
        return paths


BARE, PLAN = "no admission ", "plan "  # before names


def table(runs: Runs, contest: BaselineContest) -> dict[str, Any]:
    """Of those who ran on all seeds; who did not is named."""
    seen, not_run = contest.hindsight(runs), []
    constants = [contest.constants(runs, place) for place in contest.places]
    found = {name: [one[name] for one in constants] for name in constants[0]}
    for name, run in contest.others(runs, seen).items():
        try:
            found[name] = [run(place) for place in contest.places]
        except OutOfTime:
            not_run.append(name)
    if any(name.startswith((BARE, PLAN)) for name in not_run):
        raise OutOfTime
    best = found[f"static {seen.best_alpha:g}"]
    bare = min((name for name in found if name.startswith(BARE)), key=lambda name: spent(found[name]))
    oracle = min((*(found[name] for name in found if name.startswith(PLAN)), best), key=spent)
    named = {
        f"best static in hindsight ({seen.best_alpha:g})": best,
        f"best static without admission ({bare.removeprefix(BARE)})": found[bare],
        "untuned 0.5 without admission": found[f"{BARE}{UNTUNED_ALPHA:g}"],
        "tracks alpha* at once (replayed)": found[f"{PLAN}quasi-static"],
        "oracle with moves paid (replayed)": oracle,
    }
    named |= {name: one for name, one in found.items() if not name.startswith((BARE, PLAN))}
    return {
        "scenario": contest.scenario,
        "not_run": not_run,
        "best_static_alpha": seen.best_alpha,
        "alpha_star": seen.exact.alpha.tolist(),
        "band": np.column_stack((seen.exact.low, seen.exact.high)).round(3).tolist(),
        "policies": {name: finite(asdict(row(one, best, seen, spent(oracle)))) for name, one in named.items()},
    }


def largest_loads(runs: Runs, name: str, seed: int, compared: Compared) -> dict[str, float | None]:
    """As multiples of the scenario's arrivals; 0 where not even the lowest is met, None where it was not looked for."""
    slo_ms = scenario(name).slo_ms

    def largest(run: Run) -> float:
        return largest_of(LOADS, lambda load: run(RunPlace(name, seed, load)).meets(slo_ms)) or 0.0

    found: dict[str, float | None] = {}
    constants = {alpha: largest(partial(runs.constant, alpha=alpha)) for alpha in ALPHAS}
    for alpha in {UNTUNED_ALPHA, max(constants, key=lambda one: constants[one])}:
        found[f"static {alpha:g}, no admission"] = largest(partial(runs.constant, alpha=alpha, has_admission=False))
    others: dict[str, Run] = {one: partial(runs.baseline, name=one) for one in compared.baselines}
    others |= {one: partial(runs.ours, name=one) for one in compared.ours}
    for one, run in others.items():
        try:
            found[one] = largest(run)
        except OutOfTime:
            found[one] = None
    return {f"static {alpha:g}": load for alpha, load in constants.items()} | found


def loads_table(by_seed: Mapping[int, Mapping[str, float | None]]) -> dict[str, Any]:
    """Each as a share of the best constant's on the same seed; over the seeds on which it was looked for."""
    best = {seed: max(found[f"static {alpha:g}"] or 0.0 for alpha in ALPHAS) for seed, found in by_seed.items()}
    shares: dict[str, list[float]] = {}
    for seed, found in by_seed.items():
        bare = max(load or 0.0 for one, load in found.items() if one.endswith("no admission"))
        details = {"best static in hindsight": best[seed], "best static, no admission": bare} | dict(found)
        for one, load in details.items():
            if load is not None:
                shares.setdefault(one, []).append(load / best[seed])
    return {
        "best_static": {str(seed): load for seed, load in best.items()},
        "share_of_best_static": {
            one: {"num_seeds": len(values), **finite(asdict(interval(values)))} for one, values in shares.items()
        },
    }


def finite(value: Any) -> Any:
    """Intervals of a single seed have no ends; JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


class Step(NamedTuple):
    """A piece of work for one process."""

    what: Literal["constants", "others", "loads"]
    contest: BaselineContest
    place: RunPlace


def work(step: Step, until_s: float) -> str | None:
    """What was done; None if there was no time for all of it."""
    runs = Runs(until_s)
    try:
        if step.what == "constants":
            step.contest.constants(runs, step.place)
        elif step.what == "others":
            for run in step.contest.others(runs, step.contest.hindsight(runs)).values():
                run(step.place)
        else:
            largest_loads(runs, step.place.scenario, step.place.seed, Compared(*step.contest[1:]))
    except OutOfTime:
        return None
    return f"{step.what} on {step.place}"


def stages(
    contests: Sequence[BaselineContest], loads: Sequence[BaselineContest], seeds: Sequence[int]
) -> list[list[Step]]:
    """The second needs all of the first."""
    constants = [Step("constants", one, place) for one in contests for place in one.places]
    others = [Step("others", one, place) for one in contests for place in one.places]
    return [constants, others + [Step("loads", one, RunPlace(one.scenario, seed)) for seed in seeds for one in loads]]


def in_turn(compared: Compared) -> list[list[Step]]:
    """What matters most first."""
    main, few, loaded = ([BaselineContest(name, *compared) for name in names] for names in (MAIN, MAIN_BURSTS, LOADED))
    others = [BaselineContest(name, _few(compared.baselines), compared.ours) for name in OTHERS]
    return [
        *stages(main, loaded, LOAD_SEEDS[:1]),
        *stages(others, [], ()),
        *stages(few, loaded, LOAD_SEEDS[1:]),
    ]


def _few(baselines: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in baselines if name in FEW)


def run_all(compared: Compared, until_s: float, processes: int) -> None:
    for steps in in_turn(compared):
        if processes == 1:
            for step in steps:
                _tell(work(step, until_s))
            continue
        with ProcessPoolExecutor(processes) as pool:
            for one in as_completed([pool.submit(work, step, until_s) for step in steps]):
                _tell(one.result())


def _tell(done: str | None) -> None:
    if done is not None:
        print(time.strftime("%H:%M:%S"), done, flush=True)


class Found(NamedTuple):
    tables: dict[str, Any]
    loads: dict[str, Any]
    not_run: list[str]


def gather(compared: Compared) -> Found:
    """What is there; the rest is named."""
    runs, not_run = Runs(until_s=0.0), list[str]()
    tables: dict[str, Any] = {}
    for name in (*MAIN, *MAIN_BURSTS, *OTHERS):
        baselines = _few(compared.baselines) if name in OTHERS else compared.baselines
        try:
            tables[name] = table(runs, BaselineContest(name, baselines, compared.ours))
        except OutOfTime:
            not_run.append(name)
    loads: dict[str, dict[int, dict[str, float | None]]] = {name: {} for name in LOADED}
    for name in LOADED:
        for seed in LOAD_SEEDS:
            try:
                loads[name][seed] = largest_loads(runs, name, seed, compared)
            except OutOfTime:
                not_run.append(f"largest loads on {name}, seed {seed}")
    return Found(tables, {name: loads_table(found) for name, found in loads.items() if found}, not_run)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave out for now; may repeat")
    parser.add_argument("--only-run", action="store_true", help="write no table")


def main(flags: Namespace) -> None:
    until_s = time.monotonic() + 60 * flags.minutes
    compared = Compared(*(tuple(one for one in names if one not in flags.without) for names in (BASELINES, OURS)))
    warm_up(compared.baselines, until_s)
    run_all(compared, until_s, flags.processes)
    if not flags.only_run:
        write(gather(compared), flags.out)


def write(found: Found, out: Path) -> None:
    runs, cost = Runs(until_s=0.0), scenario("main-steady").cost()
    write_measurement(
        out,
        {
            "calibration": cost.name,
            "calibration_digest": digest_of(cost),
            "seeds": len(SEEDS),
            "start_of_all_but_constants": UNTUNED_ALPHA,
            "tuning": {"trials": BUDGET, "on": "a mixed day", "learned from": list(TAUGHT)},
            "tuned": {name: runs.tuned(name) for name in BASELINES},
            "not_run": found.not_run,
            "variants": found.tables,
            "largest_loads": found.loads,
        },
    )
    print(as_markdown(found.tables, found.loads))
