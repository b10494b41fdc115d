"""All rivals on the main scenario's Steady, Trend, Burst and adversarial traffic: the same requests, limits and tuning.

    python -m scripts.rivals                     # about forty minutes of one core
    python -m scripts.rivals --processes 2
    python -m scripts.rivals --extra "PPO only=ppo:FILE"      # a policy by the name `helmrec simulate` knows it by

Rivals are tuned, and those that learn are trained, on days they are not judged on. Arrivals are a fixed share of what
the best constant serves within the SLO (`scripts.freeze_scenarios`). Finished pieces are kept in build/rivals.jsonl: a
run that was stopped goes on where it was. Writes docs/measurements/rivals.json and prints the table of docs/rivals.md.
"""

import argparse
import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.bench.contest import WINDOW_S, Course, Score, Wanderer
from helmrec.bench.contest_report import Hindsight, hindsight, row, spent
from helmrec.bench.features import Episode
from helmrec.bench.judge import largest_of
from helmrec.bench.rivals import learned_rivals, simple_rivals, solver_rivals
from helmrec.bench.shifts import PRICES, Planned, switch_prices
from helmrec.bench.tune import Family, Value, tune
from helmrec.control.by_name import make_policy
from helmrec.control.policy import Policy
from helmrec.control.static import UNTUNED_ALPHA, Static
from helmrec.sim.families import Shape, family
from helmrec.sim.oracle import cheapest_path, switching_costs
from helmrec.sim.scenario import Scenario, load_scenario
from scripts.kept import Store, Unit, digest_of, finish
from scripts.provenance import write_measurement
from scripts.rivals_table import as_markdown

OUT, KEPT, SCENARIOS = Path("docs/measurements/rivals.json"), Path("build/rivals.jsonl"), Path("scenarios")
VARIANTS = ("steady", "trend", "burst-20s", "cold-flood")
LOADED = ("burst-20s",)  # where the largest load is looked for
NUM_SEEDS, BUDGET, LOAD_SEED = 5, 4, 50
LOADS = tuple(round(0.80 + 0.05 * step, 2) for step in range(12))  # multiples of the scenario's arrivals
NO_ADMISSION = (0.5, 0.8)  # splits tried without KV admission
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of sweeps
TAUGHT = {"mixed-day": 0.65, "diurnal": 0.85}  # with their base rate as a share of the steady scenario's
RIVALS = (
    "untuned 0.5", "static", "kv-only", "emb-only", "pid", "hill climber", "marginal utility", "miss-curve argmin",
    "bayesian optimisation", "milp", "xgboost", "lstm",
)  # fmt: skip
PPO_ONLY = "PPO only"  # always in the table; run if a policy is given


@cache
def scenario(name: str) -> Scenario:
    return load_scenario(SCENARIOS / f"main-{name}.toml")


@cache
def lesson(name: str, seed: int) -> Course:
    """A day that nobody is judged on, over the main scenario's node, items and users."""
    main = scenario("steady")
    assert main.workload is not None
    calm = main.workload.phases[0]
    shape = Shape(
        num_items=main.workload.num_items,
        item_exponent=calm.item_exponent[0],
        item_shift=main.workload.item_shift,
        hot_users=calm.hot_users,
        rate=calm.rate[0] * TAUGHT[name],
        duration_s=240,
    )
    workload = family(name, shape).model_copy(update={"num_lanes": main.workload.num_lanes})
    return Course(main.model_copy(update={"workload": workload, "warm_up_s": 40.0}), seed)


@cache
def episodes() -> tuple[Episode, ...]:
    """A wanderer's windows, labelled with the path that is cheapest with moves paid."""
    taught = []
    for name in TAUGHT:
        course = lesson(name, 100)
        seen = hindsight({alpha: [course.static(alpha)] for alpha in ALPHAS})
        labels = np.repeat(plan(course, seen, 1.0), round(WINDOW_S))
        stats = course.watch(Wanderer(0))[: labels.size]
        taught.append(Episode(name, tuple(stats), labels[: len(stats)]))
    return tuple(taught)


def plan(course: Course, seen: Hindsight, price: float) -> Any:
    prices = switching_costs(seen.alphas, switch_prices(course.node(), course.scenario.cost(), 0.85))
    return cheapest_path(seen.costs, seen.alphas, prices * price).alpha


@cache
def rival_families() -> Mapping[str, Family]:
    cost = lesson("mixed-day", 101).service_cost
    every = (*simple_rivals(cost), *solver_rivals(cost), *learned_rivals(episodes()))
    return {one.name: one for one in every}


class TuneUnit(NamedTuple):
    rival: str

    @property
    def name(self) -> str:
        return f"tuning {self.rival}, {BUDGET} trials"


def tuned(unit: TuneUnit) -> dict[str, Value]:
    course = lesson("mixed-day", 101)

    def loss(policy: Policy) -> float:
        return judged(course, policy).mean_ms

    return dict(tune(rival_families()[unit.rival], loss, BUDGET, np.random.default_rng(1)).best.settings)


def judged(course: Course, policy: Policy) -> Score:
    if isinstance(policy, Static):  # born there, as a tuned node would be
        return course.static(policy.settings.alpha)
    policy.reset()
    return course.judge(policy)


class ContestUnit(NamedTuple):
    """All constants and all rivals on one scenario and seed."""

    variant: str
    seed: int
    settings: Mapping[str, Mapping[str, Value]]

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"


def contest(unit: ContestUnit) -> dict[str, Any]:
    course = Course(scenario(unit.variant), unit.seed)
    found = {f"static {alpha:g}": course.static(alpha) for alpha in ALPHAS}
    found |= {f"static {a:g}, no admission": course.static(a, kv_admission="always") for a in NO_ADMISSION}
    found |= {name: judged(course, policy) for name, policy in policies(unit.settings).items()}
    return {name: asdict(score) for name, score in found.items()}


def policies(settings: Mapping[str, Mapping[str, Value]]) -> dict[str, Policy]:
    return {name: rival_families()[name].build(chosen) for name, chosen in settings.items()}


class ExtraUnit(NamedTuple):
    """A policy that is not one of the rivals, under the name `make_policy` knows it by."""

    variant: str
    seed: int
    policy: str

    @property
    def name(self) -> str:
        return f"{self.policy} on {self.variant}, seed {self.seed}"


def extra(unit: ExtraUnit) -> dict[str, Any]:
    course = Course(scenario(unit.variant), unit.seed)
    return asdict(course.judge(make_policy(unit.policy, course.service_cost)))


class OracleUnit(NamedTuple):
    """Paths of least cost, with moves for free and at several prices, replayed."""

    variant: str
    seed: int
    num_seeds: int  # that the plan was made over
    paths: Mapping[str, tuple[float, ...]]

    @property
    def name(self) -> str:
        return f"oracles on {self.variant}, seed {self.seed} of {self.num_seeds}"


def replayed(unit: OracleUnit) -> dict[str, Any]:
    course = Course(scenario(unit.variant), unit.seed)
    start_s = course.scenario.warm_up_s
    return {
        name: asdict(course.replay(Planned(np.array(path), WINDOW_S, start_s), path[0]))
        for name, path in unit.paths.items()
    }


class LoadUnit(NamedTuple):
    """The largest load each policy serves within the SLO."""

    variant: str
    settings: Mapping[str, Mapping[str, Value]]

    @property
    def name(self) -> str:
        return f"largest load on {self.variant}, seed {LOAD_SEED}"


def largest_loads(unit: LoadUnit) -> dict[str, float]:
    """As multiples of the scenario's arrivals; 0 where not even the lowest is met."""
    courses = {load: Course(scenario(unit.variant), LOAD_SEED, load) for load in LOADS}
    found = {}
    for alpha in ALPHAS:
        found[f"static {alpha:g}"] = largest(lambda load, a=alpha: courses[load].static(a))
    for alpha in NO_ADMISSION:
        found[f"static {alpha:g}, no admission"] = largest(
            lambda load, a=alpha: courses[load].static(a, kv_admission="always")
        )
    for name, policy in policies(unit.settings).items():
        found[name] = largest(lambda load, p=policy: judged(courses[load], p))
    return found


def largest(run: Any) -> float:
    return largest_of(LOADS, lambda load: bool(run(load).meets(scenario("steady").slo_ms))) or 0.0


class ExtraLoadUnit(NamedTuple):
    variant: str
    policy: str

    @property
    def name(self) -> str:
        return f"largest load of {self.policy} on {self.variant}, seed {LOAD_SEED}"


def extra_load(unit: ExtraLoadUnit) -> float:
    def run(load: float) -> Score:
        course = Course(scenario(unit.variant), LOAD_SEED, load)
        return course.judge(make_policy(unit.policy, course.service_cost))

    return largest(run)


def scores(store: Store, variant: str, num_seeds: int) -> dict[str, list[Score]]:
    by_seed = [store.found[ContestUnit(variant, seed, {}).name] for seed in range(num_seeds)]
    return {name: [Score(**found[name]) for found in by_seed] for name in by_seed[0]}


def statics_of(found: Mapping[str, list[Score]]) -> dict[float, list[Score]]:
    return {alpha: found[f"static {alpha:g}"] for alpha in ALPHAS}


def oracle_units(store: Store, num_seeds: int) -> list[OracleUnit]:
    units = []
    for variant in VARIANTS:
        seen, course = hindsight(statics_of(scores(store, variant, num_seeds))), Course(scenario(variant), 0)
        paths = {"quasi-static": tuple(seen.exact.alpha.tolist())}
        paths |= {f"price x {price:g}": tuple(plan(course, seen, price * num_seeds).tolist()) for price in PRICES}
        units += [OracleUnit(variant, seed, num_seeds, paths) for seed in range(num_seeds)]
    return units


def table(store: Store, variant: str, num_seeds: int, extras: Mapping[str, str]) -> dict[str, Any]:
    found = scores(store, variant, num_seeds)
    for name, policy in extras.items():
        found[name] = [Score(**store.found[ExtraUnit(variant, seed, policy).name]) for seed in range(num_seeds)]
    seen = hindsight(statics_of(found))
    replays = [store.found[OracleUnit(variant, seed, num_seeds, {}).name] for seed in range(num_seeds)]
    oracles = {name: [Score(**by_seed[name]) for by_seed in replays] for name in replays[0]}
    best = f"static {seen.best_alpha:g}"
    bare = min((f"static {alpha:g}, no admission" for alpha in NO_ADMISSION), key=lambda name: spent(found[name]))
    oracle = min((*oracles.values(), found[best]), key=spent)
    named = {
        f"best static in hindsight ({seen.best_alpha:g})": found[best],
        f"best static without admission ({bare.split()[1].rstrip(',')})": found[bare],
        "untuned 0.5 without admission": found["static 0.5, no admission"],
        "tracks alpha* at once (replayed)": oracles["quasi-static"],
        "oracle with moves paid (replayed)": oracle,
    } | found
    loads = dict(store.found.get(LoadUnit(variant, {}).name, {}))
    if loads:
        loads |= {name: store.found.get(ExtraLoadUnit(variant, policy).name) for name, policy in extras.items()}
    reference = max((loads[f"static {alpha:g}"] for alpha in ALPHAS), default=0.0) if loads else 0.0
    rows = {name: finite(asdict(row(one, found[best], seen, spent(oracle)))) for name, one in named.items()}
    for name, one in rows.items():
        of = best if name.startswith("best static in") else bare if name.startswith("best static w") else name
        of = "static 0.5, no admission" if name.startswith("untuned 0.5 w") else of
        one["largest_load"] = loads[of] / reference if loads.get(of) is not None and reference else None
    return {
        "scenario": f"main-{variant}",
        "best_static_alpha": seen.best_alpha,
        "best_static_largest_load": reference or None,
        "alpha_star": seen.exact.alpha.tolist(),
        "band": np.column_stack((seen.exact.low, seen.exact.high)).round(3).tolist(),
        "policies": rows,
    }


def finite(value: Any) -> Any:
    """Intervals of a single seed have no ends; JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


def digest() -> str:
    """Of costs and scenarios: pieces of others are not mixed in."""
    texts = [(SCENARIOS / f"main-{variant}.toml").read_text() for variant in VARIANTS]
    told = digest_of(scenario("steady").cost()) + "".join(texts)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def run(store: Store, flags: argparse.Namespace, extras: Mapping[str, str]) -> None:
    processes, num_seeds = flags.processes, flags.seeds
    loaded_on = () if flags.skip_loads else LOADED
    tuning = [TuneUnit(name) for name in RIVALS]
    units = [ContestUnit(variant, seed, {}) for seed in range(num_seeds) for variant in VARIANTS]
    loads = [LoadUnit(variant, {}) for variant in loaded_on]
    everything: list[Unit] = [*tuning, *units, *loads]
    if any(unit.name not in store.found for unit in everything):
        assert set(rival_families()) == set(RIVALS)  # lessons are taken here, so that forked workers find them taken
    finish(tuning, tuned, store, processes, "tuning")
    settings = tuned_settings(store)
    finish([unit._replace(settings=settings) for unit in units], contest, store, processes, "contest")
    finish(oracle_units(store, num_seeds), replayed, store, processes, "oracles")
    finish([unit._replace(settings=settings) for unit in loads], largest_loads, store, processes, "loads")
    more = [ExtraUnit(v, seed, policy) for policy in extras.values() for v in VARIANTS for seed in range(num_seeds)]
    finish(more, extra, store, processes, "extras")
    loaded = [ExtraLoadUnit(variant, policy) for policy in extras.values() for variant in loaded_on]
    finish(loaded, extra_load, store, processes, "loads of extras")


def tuned_settings(store: Store) -> dict[str, dict[str, Value]]:
    return {name: store.found[TuneUnit(name).name] for name in RIVALS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--skip-loads", action="store_true", help="do not look for the largest loads")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=POLICY", help="may repeat")
    flags = parser.parse_args()
    extras = dict(one.split("=", 1) for one in flags.extra)
    store = Store(KEPT, digest())
    run(store, flags, extras)
    tables = {variant: table(store, variant, flags.seeds, extras) for variant in VARIANTS}
    write_measurement(
        OUT,
        {
            "calibration": scenario("steady").cost().name,
            "calibration_digest": digest_of(scenario("steady").cost()),
            "seeds": flags.seeds,
            "start_of_all_but_constants": UNTUNED_ALPHA,
            "tuning": {"trials": BUDGET, "on": "a mixed day", "learned from": list(TAUGHT)},
            "tuned": tuned_settings(store),
            "extras": extras,
            "not_run": [] if PPO_ONLY in extras else [PPO_ONLY],
            "variants": tables,
        },
    )
    print(as_markdown(tables))


if __name__ == "__main__":
    main()
