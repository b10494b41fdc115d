"""The controller on the frozen scenarios: regret, gap, P99 against the best constant, ablations, decision latency.

    python -m scripts.controller                         # all that is listed below, two processes, finished pieces kept
    python -m scripts.controller --seeds 3 --only main-trend --only main-burst-20s
    python -m scripts.controller --timing                # decision latency alone

Everyone sees the same requests and miss curves and is held to the same limits; all but the constants start at 0.5.
Networks were trained on lessons drawn at random (`helmrec train`), never on these families or seeds. The largest load
within the SLO is measured by `python -m scripts.rivals --extra HelmRec=helm`. Writes docs/measurements/controller.json.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
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
from helmrec.control.policy import Limited, Limits, Policy, WindowStats
from helmrec.control.service_cost import ServiceCost
from helmrec.memory.miss_curves import JointCurves
from helmrec.sim.oracle import cheapest_path, quasi_static, switching_costs
from helmrec.sim.scenario import Scenario, load_scenario
from scripts.kept import Store, digest_of, finish
from scripts.provenance import write_measurement

OUT, TIMING = Path("docs/measurements/controller.json"), Path("docs/measurements/controller-timing.json")
BUILD, SCENARIOS = Path("build"), Path("scenarios")
NETWORKS = Path("src/helmrec/control/policies")
ALL = (
    "main-trend",
    "main-burst-20s",
    "main-steady",
    "control-steady",
    "main-burst-3s",
    "main-cold-flood",
    "stress-trend",
    "stress-burst-20s",
    "main-flash-items",
    "main-burst-60s",
    "control-trend",
    "stress-steady",
)
SPLITS = (0.03, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
FINE = np.linspace(0.03, 0.9, 88)  # the oracle's path is read to a hundredth
BARE = HelmSettings(has_residual=False, has_burst=False, has_guardrail=False)
_CURVES = tuple(field.name for field in fields(JointCurves) if field.name not in {"alphas", "num_requests"})


def network(name: str) -> BasePolicy:
    path = NETWORKS / f"{name}.safetensors"
    return load_base(path) if path.exists() else shipped_base()


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
# Networks of `helmrec train` that were not shipped are judged too if they lie beside the shipped one.
VARIANTS |= {
    f"{name}, base only": (BARE, name)
    for name in ("following", "distilled", "distilled-and-ppo", "ppo-alone")
    if (NETWORKS / f"{name}.safetensors").exists()
}
POLICIES = (*VARIANTS, "miss-curve argmin")


@cache
def scenario(name: str) -> Scenario:
    return load_scenario(SCENARIOS / f"{name}.toml")


def digest(name: str) -> str:
    """Of costs and scenario: pieces of others are not mixed in."""
    told = digest_of(scenario(name).cost()) + (SCENARIOS / f"{name}.toml").read_text()
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
    course = Course(scenario(unit.scenario), unit.seed)
    save_curves(unit.curves_path, course.curves)
    return {f"{alpha:g}": asdict(course.static(alpha)) for alpha in SPLITS}


def save_curves(path: Path, curves: Sequence[JointCurves | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    known = next(one for one in curves if one is not None)
    table = np.full((len(curves), 1 + len(_CURVES), known.alphas.size), np.nan)
    for at, one in enumerate(curves):
        if one is not None:
            table[at, 0] = one.num_requests
            table[at, 1:] = [getattr(one, name) for name in _CURVES]
    np.savez_compressed(path, alphas=known.alphas, table=table)


def load_curves(path: Path) -> list[JointCurves | None]:
    with np.load(path) as kept:
        alphas, table = kept["alphas"], kept["table"]
    return [
        None
        if np.isnan(one[0, 0])
        else JointCurves(alphas, float(one[0, 0]), **dict(zip(_CURVES, one[1:].copy(), strict=True)))
        for one in table
    ]


def recorded(unit: Ground) -> Course:
    course = Course(scenario(unit.scenario), unit.seed)
    course.__dict__["curves"] = load_curves(unit.curves_path)
    return course


class Judged(NamedTuple):
    """One policy on one scenario and seed."""

    scenario: str
    seed: int
    policy: str

    @property
    def name(self) -> str:
        told = ""
        if self.policy in VARIANTS:
            told = hashlib.sha256(network(VARIANTS[self.policy][1]).weights.tobytes()).hexdigest()[:8]
        return f"{self.policy} {told} on {self.scenario} {digest(self.scenario)}, seed {self.seed}"


def judge(unit: Judged) -> dict[str, Any]:
    course = recorded(Ground(unit.scenario, unit.seed))
    return asdict(course.judge(variant(unit.policy, course.service_cost)))


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
    return {alpha: [Score(**one[f"{alpha:g}"]) for one in found] for alpha in SPLITS}


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


def table(store: Store, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    constants = statics(store, name, seeds)
    seen = hindsight(constants)
    units = oracles(store, name, seeds)
    replays = {path: [Score(**store.found[unit.name][path]) for unit in units] for path in units[0].paths}
    best, exact = constants[seen.best_alpha], quasi_static(fine(seen), FINE)
    oracle_name = min(replays, key=lambda path: spent(replays[path]))
    oracle = min((replays[oracle_name], best), key=spent)
    path = np.array(units[0].paths[oracle_name]) if oracle is not best else np.full(len(best[0].costs), seen.best_alpha)
    found = {policy: [Score(**store.found[Judged(name, s, policy).name]) for s in seeds] for policy in POLICIES}
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
        gain = rows["best constant in hindsight"]["p99_ms"]["mean"] if rows else 0.0
        if policy not in {"best constant in hindsight", "untuned 0.5"}:
            won = gain - np.mean([score.p99_ms for score in oracle])
            one["share_of_oracle_p99_gain"] = (gain - one["p99_ms"]["mean"]) / won if won > 0.01 * gain else None
        rows[policy] = one
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


class _Keeps:
    """Lets a policy decide and keeps what it was shown."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.windows: list[WindowStats] = []

    def decide(self, stats: WindowStats) -> Any:
        self.windows.append(stats)
        return self._policy.decide(stats)

    def reset(self) -> None:
        self._policy.reset()


def timing(name: str, num_calls: int = 100_000) -> dict[str, Any]:
    """Whole decisions, features and limits included, over windows of a run, again and again."""
    course = recorded(Ground(name, 0))
    keeps = _Keeps(HelmPolicy(course.service_cost))
    course.judge(keeps)
    policy = Limited(HelmPolicy(course.service_cost), Limits())
    took_ns = np.empty(num_calls, np.int64)
    windows = [one for one in keeps.windows if one.curves is not None]
    for one in windows:
        policy.decide(one)
    clock = time.perf_counter_ns
    for call in range(num_calls):
        window = windows[call % len(windows)]
        started = clock()
        policy.decide(window)
        took_ns[call] = clock() - started
    took_us = took_ns / 1e3
    edges = np.concatenate((np.arange(0, 20.5, 0.5), [50, 100, 1_000, 1e9]))
    return {
        "num_calls": num_calls,
        "scenario": name,
        "load_of_the_machine": os.getloadavg()[0],
        "p50_us": float(np.percentile(took_us, 50)),
        "p99_us": float(np.percentile(took_us, 99)),
        "p999_us": float(np.percentile(took_us, 99.9)),
        "mean_us": float(took_us.mean()),
        "histogram_edges_us": edges.tolist(),
        "histogram": np.histogram(took_us, edges)[0].tolist(),
        "an_empty_call_us": float(np.median([-(clock() - clock()) / 1e3 for _ in range(1_000)])),
    }


def run(store: Store, names: Sequence[str], seeds: Sequence[int], processes: int) -> None:
    for name in names:  # scenario by scenario: what is finished can be read
        finish([Ground(name, seed) for seed in seeds], sweep, store, processes, f"constants of {name}")
        finish(oracles(store, name, seeds), replay, store, processes, f"oracles of {name}")
        units = [Judged(name, seed, policy) for seed in seeds for policy in POLICIES]
        finish(units, judge, store, processes, f"policies on {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=ALL, help="scenarios; may repeat")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--timing", action="store_true", help="measure decision latency alone")
    parser.add_argument("--ground", action="store_true", help="only constants and miss curves, which need no network")
    flags = parser.parse_args()
    names, seeds = flags.only or list(ALL), range(flags.seeds)
    if flags.timing:
        write_measurement(TIMING, timing(names[0]))
        return
    store = Store(BUILD / "controller.jsonl", "1")
    if flags.ground:
        units = [Ground(name, seed) for seed in seeds for name in names]
        finish(units, sweep, store, flags.processes, "constants")
        return
    run(store, names, seeds, flags.processes)
    write_measurement(
        OUT,
        {
            "calibration": scenario(names[0]).cost().name,
            "network": shipped_base().record.get("chosen"),
            "limits": Limits().model_dump(),
            "settings": HelmSettings().model_dump(),
            "scenarios": {name: table(store, name, seeds) for name in names},
        },
    )


if __name__ == "__main__":
    main()
