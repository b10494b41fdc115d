"""The controller on the frozen scenarios: regret, gap, P99 against the best constant, ablations, bytes by cause.

    python -m scripts.controller                         # all frozen scenarios, five seeds; finished pieces are kept
    python -m scripts.controller --seeds 3 --only main-trend --only main-burst-20s
    python -m scripts.controller_timing                  # decision latency
    python -m scripts.controller_plots                   # draws docs/images/controller-*.png

Everyone sees the same requests and miss curves and is held to the same limits; all but the constants start at 0.5.
Networks were trained on lessons drawn at random (`helmrec train`), never on these families or seeds. The largest load
within the SLO is in docs/rivals.md (`scripts.rivals`). Writes docs/measurements/controller.json.
"""

import argparse
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.bench.contest import WINDOW_S, Course, Floats, Score
from helmrec.bench.contest_report import Hindsight, hindsight, row, spent
from helmrec.bench.shifts import PRICES, Planned, switch_prices
from helmrec.control.helm import HelmPolicy, HelmSettings
from helmrec.control.model_based import MissCurveArgmin
from helmrec.control.network import BasePolicy, load_base, shipped_base
from helmrec.control.policy import Limits, Policy
from helmrec.control.service_cost import ServiceCost
from helmrec.control.static import UNTUNED_ALPHA, Static, StaticSettings
from helmrec.experiments.curve_file import load_curves, save_curves
from helmrec.experiments.kept import Store, digest_of, finish
from helmrec.sim.oracle import cheapest_path, quasi_static, switching_costs
from helmrec.sim.scenario import Scenario, load_scenario
from scripts.provenance import write_measurement

OUT = Path("docs/measurements/controller.json")
BUILD, SCENARIOS, SOURCE = Path("build"), Path("scenarios"), Path("src/helmrec")
NETWORKS = Path("src/helmrec/control/policies")
KINDS = ("trend", "burst-20s", "steady", "cold-flood", "burst-3s", "burst-60s", "flash-items")
NODES = ("main", "control", "stress")  # written down one by one; the last is favourable to adapting
ALL = tuple(f"{node}-{kind}" for node, kind in itertools.product(NODES, KINDS))
SPLITS = (0.03, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
FINE = np.linspace(0.03, 0.9, 88)  # the oracle's path is read to a hundredth
BARE = HelmSettings(has_residual=False, has_burst=False, has_guardrail=False)


def network(name: str) -> BasePolicy:
    """A network that `helmrec train` has made; there must be one."""
    return load_base(NETWORKS / f"{name}.safetensors")


def variant(name: str, cost: ServiceCost) -> Policy:
    """A policy of the tables."""
    if name == "miss-curve argmin":
        return MissCurveArgmin(cost)
    settings, base = VARIANTS[name]
    return HelmPolicy(cost, settings, network(base))


VARIANTS: dict[str, tuple[HelmSettings, str]] = {
    "helm": (HelmSettings(), "base"),
    "base only": (BARE, "base"),
    "base + residual": (BARE.model_copy(update={"has_residual": True}), "base"),
    "base + residual + burst (no guardrail)": (HelmSettings(has_guardrail=False), "base"),
}
# The other networks of `helmrec train`, where they lie beside the shipped one.
OTHERS = {
    "distilled": "distillation without PPO",
    "distilled_and_ppo": "distillation and PPO",
    "ppo_only": "PPO without distillation",
}
THERE = [name for name in OTHERS if (NETWORKS / f"{name}.safetensors").exists()]
VARIANTS |= {f"{OTHERS[name]}, base only": (BARE, name) for name in THERE}
VARIANTS |= {f"{OTHERS[name]}, all layers": (HelmSettings(), name) for name in THERE if name == "distilled"}
POLICIES = (*VARIANTS, "miss-curve argmin")


@cache
def scenario(name: str) -> Scenario:
    return load_scenario(SCENARIOS / f"{name}.toml")


def digest_of_code(*packages: str) -> str:
    files = sorted(path for package in packages for path in (SOURCE / package).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


SIMULATOR, CONTROLLER = digest_of_code("sim", "memory"), digest_of_code("control")  # as they are when a run begins


@cache
def digest(name: str) -> str:
    """Of costs, scenario and simulator: pieces of others are not mixed in."""
    told = digest_of(scenario(name).cost()) + (SCENARIOS / f"{name}.toml").read_text() + SIMULATOR
    return hashlib.sha256(told.encode()).hexdigest()[:12]


class Ground(NamedTuple):
    """All constants on one scenario and seed; miss curves are recorded on the way."""

    scenario: str
    seed: int

    @property
    def name(self) -> str:
        return f"constants, {self.scenario} {digest(self.scenario)}, seed {self.seed}"

    @property
    def curves_path(self) -> Path:
        return BUILD / "curves" / f"{self.scenario}-{digest(self.scenario)}-{self.seed}.npz"


def sweep(unit: Ground) -> dict[str, Any]:
    course = recorded(unit)
    return {f"{alpha:g}": judged(course, Static(StaticSettings(alpha=alpha)), alpha) for alpha in SPLITS}


def judged(course: Course, policy: Policy, alpha: float) -> dict[str, Any]:
    """A score with the bytes that moved and the requests served, warm-up left out."""
    result = course._simulate(policy, alpha)
    start_s, windows = course.scenario.warm_up_s, result.windows
    counted = [one for one in windows if one.stats.traffic.start_s >= start_s]
    causes = {cause for one in counted for cause in one.bytes_by_cause}
    span_s = counted[-1].stats.traffic.end_s - start_s
    return {
        "score": asdict(course.score(result)),
        "gb_by_cause": {cause: sum(one.bytes_by_cause.get(cause, 0) for one in counted) / 1e9 for cause in causes},
        "served_per_s": sum(one.stats.traffic.num_served for one in counted) / span_s,
        "moved": sum(abs(b.stats.alpha - a.stats.alpha) for a, b in itertools.pairwise(counted)),
    }


def recorded(unit: Ground) -> Course:
    course = Course(scenario(unit.scenario), unit.seed)
    if unit.curves_path.exists():
        course.__dict__["curves"] = load_curves(unit.curves_path)
    else:
        save_curves(unit.curves_path, course.curves)
    return course


class Judged(NamedTuple):
    """One policy on one scenario and seed."""

    scenario: str
    seed: int
    policy: str

    @property
    def name(self) -> str:
        told = f"{self.policy} {digest_of_policy(self.policy)}"
        return f"{told} on {self.scenario} {digest(self.scenario)}, seed {self.seed}"


@cache
def digest_of_policy(name: str) -> str:
    """Of code, limits and, where there are any, settings and network."""
    told = CONTROLLER.encode() + Limits().model_dump_json().encode()
    if name in VARIANTS:
        settings, base = VARIANTS[name]
        found = network(base)
        told += settings.model_dump_json().encode() + found.weights.tobytes() + repr(found.crowding).encode()
    return hashlib.sha256(told).hexdigest()[:8]


def judge(unit: Judged) -> dict[str, Any]:
    course = recorded(Ground(unit.scenario, unit.seed))
    return judged(course, course.shown(variant(unit.policy, course.service_cost)), UNTUNED_ALPHA)


class Oracle(NamedTuple):
    """Paths of least cost at several prices of moving, replayed with their moves."""

    scenario: str
    seed: int
    paths: Mapping[str, tuple[float, ...]]

    @property
    def name(self) -> str:
        told = hashlib.sha256(repr(sorted(self.paths.items())).encode()).hexdigest()[:8]
        return f"oracles {told} on {self.scenario} {digest(self.scenario)}, seed {self.seed}"


def replay(unit: Oracle) -> dict[str, Any]:
    course = Course(scenario(unit.scenario), unit.seed)
    start_s = course.scenario.warm_up_s
    return {
        name: asdict(course.replay(Planned(np.array(path), WINDOW_S, start_s), path[0]))
        for name, path in unit.paths.items()
    }


def statics(store: Store, name: str, seeds: Sequence[int]) -> dict[float, list[Score]]:
    found = [store.found[Ground(name, seed).name] for seed in seeds]
    return {alpha: [Score(**one[f"{alpha:g}"]["score"]) for one in found] for alpha in SPLITS}


def fine(seen: Hindsight) -> Floats:
    """(windows, FINE) costs between the splits that were run; straight lines in the logarithm."""
    return np.exp([np.interp(FINE, seen.alphas, one) for one in np.log(seen.costs)])


def oracles(store: Store, name: str, seeds: Sequence[int]) -> list[Oracle]:
    seen, course = hindsight(statics(store, name, seeds)), Course(scenario(name), 0)
    prices = switching_costs(FINE, switch_prices(course.node(), course.scenario.cost(), 0.85))
    costs = fine(seen)
    paths = {"free": tuple(FINE[costs.argmin(axis=1)].tolist())}
    for price in PRICES:
        paths[f"price x {price:g}"] = tuple(cheapest_path(costs, FINE, prices * price * len(seeds)).alpha.tolist())
    return [Oracle(name, seed, paths) for seed in seeds]


def extras(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a row tells beside its scores; means over seeds."""
    causes = sorted({cause for one in pieces for cause in one["gb_by_cause"]})
    return {
        "gb_by_cause": {
            c: round(float(np.mean([one["gb_by_cause"].get(c, 0.0) for one in pieces])), 2) for c in causes
        },
        "served_per_s": round(float(np.mean([one["served_per_s"] for one in pieces])), 2),
        "moved": round(float(np.mean([one["moved"] for one in pieces])), 3),
    }


def table(store: Store, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    constants = statics(store, name, seeds)
    seen = hindsight(constants)
    units = oracles(store, name, seeds)
    replays = {path: [Score(**store.found[unit.name][path]) for unit in units] for path in units[0].paths}
    best, exact = constants[seen.best_alpha], quasi_static(fine(seen), FINE)
    oracle_name = min(replays, key=lambda path: spent(replays[path]))
    oracle = min((replays[oracle_name], best), key=spent)
    path = np.array(units[0].paths[oracle_name]) if oracle is not best else np.full(len(best[0].costs), seen.best_alpha)
    pieces = {policy: [store.found[Judged(name, seed, policy).name] for seed in seeds] for policy in POLICIES}
    found = {policy: [Score(**one["score"]) for one in every] for policy, every in pieces.items()}
    named = {"best constant in hindsight": best, "untuned 0.5": constants[0.5], "oracle, moves paid": oracle, **found}
    rows = dict[str, dict[str, Any]]()
    for policy, scores in named.items():
        one = asdict(row(scores, best, seen, spent(oracle)))
        alphas = [np.array(score.alphas) for score in scores]
        one["gap_to_oracle_path"] = float(np.mean([np.abs(one_path - path).mean() for one_path in alphas]))
        inside = [exact.share_inside(np.clip(one_path, FINE[0], FINE[-1])) for one_path in alphas]  # pages round
        one["share_inside"] = float(np.mean(inside))
        one["error_over_time"] = np.mean([np.abs(one_path - path) for one_path in alphas], axis=0).round(4).tolist()
        one["alphas"] = np.mean(alphas, axis=0).round(4).tolist()
        one |= share_of_gain(scores, best, oracle)
        one |= extras(pieces[policy]) if policy in pieces else {}
        rows[policy] = one
    ground = [store.found[Ground(name, seed).name] for seed in seeds]
    rows["best constant in hindsight"] |= extras([one[f"{seen.best_alpha:g}"] for one in ground])
    return {
        "best_constant": seen.best_alpha,
        "seeds": len(seeds),
        "alpha_star": exact.alpha.round(3).tolist(),
        "band": np.column_stack((exact.low, exact.high)).round(3).tolist(),
        "oracle_path": path.round(3).tolist(),
        "constants_p99_ms": {f"{a:g}": float(np.mean([s.p99_ms for s in one])) for a, one in constants.items()},
        "constants_mean_ms": {f"{a:g}": float(np.mean([s.mean_ms for s in one])) for a, one in constants.items()},
        "policies": rows,
    }


def share_of_gain(scores: Sequence[Score], best: Sequence[Score], oracle: Sequence[Score]) -> dict[str, float | None]:
    """Of what the oracle gains over the best constant, how much was had; None where it gains less than 1%."""

    def share(field: str) -> float | None:
        of, at_best, at_oracle = (
            float(np.mean([getattr(s, field) for s in every])) for every in (scores, best, oracle)
        )
        return (at_best - of) / (at_best - at_oracle) if at_best - at_oracle > 0.01 * at_best else None

    return {"share_of_oracle_p99_gain": share("p99_ms"), "share_of_oracle_mean_gain": share("mean_ms")}


def run(store: Store, names: Sequence[str], seeds: Sequence[int], processes: int) -> None:
    finish([Ground(name, seed) for name in names for seed in seeds], sweep, store, processes, "constants")
    plans = [unit for name in names for unit in oracles(store, name, seeds)]
    finish(plans, replay, store, processes, "oracles")
    units = [Judged(name, seed, policy) for name in names for seed in seeds for policy in POLICIES]
    finish(units, judge, store, processes, "policies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=ALL, help="scenarios; may repeat")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--kept", type=Path, default=BUILD / "controller.jsonl", help="finished pieces")
    parser.add_argument("--ground", action="store_true", help="only constants and miss curves, which need no network")
    flags = parser.parse_args()
    wanted, seeds = flags.only or list(ALL), range(flags.seeds)
    _ = Course(scenario(wanted[0]), 0).static(0.5)  # compiled once, before processes are forked
    store = Store(flags.kept, "2")
    if flags.ground:
        finish([Ground(name, seed) for seed in seeds for name in wanted], sweep, store, flags.processes, "constants")
        return
    told: dict[str, Any] = {}
    for node in NODES:
        names = [name for name in wanted if name.startswith(f"{node}-")]
        run(store, names, seeds, flags.processes)
        told |= {name: table(store, name, seeds) for name in names}
        if names:
            write_down(flags.out, told)


def write_down(path: Path, tables: dict[str, Any]) -> None:
    found = {
        "calibration": scenario(next(iter(tables))).cost().name,
        "network": shipped_base().record.get("chosen"),
        "limits": Limits().model_dump(),
        "settings": HelmSettings().model_dump(),
        "scenarios": tables,
    }
    write_measurement(path, found)


if __name__ == "__main__":
    main()
