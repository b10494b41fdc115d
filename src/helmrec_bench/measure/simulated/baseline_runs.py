"""Runs behind the baselines' table: the policies, the scenarios, and a store of results by name.

A name holds a digest of what was tuned or trained; for our own controller, of its code. So a run
that was stopped goes on where it was, and what has changed since is run again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.control.policy import Policy
from helmrec.control.static import Static
from helmrec.policies import make_policy
from helmrec.sim.scenario import Scenario, load_scenario
from helmrec.traffic.families import Shape, family
from helmrec_bench import scenarios
from helmrec_bench.baselines.features import Episode
from helmrec_bench.baselines.oracle import cheapest_path, switching_costs
from helmrec_bench.baselines.tune import Family, Value, tune
from helmrec_bench.baselines.tuned import learned_baselines, simple_baselines, solver_baselines
from helmrec_bench.judging.contest import WINDOW_S, Course, Score, Wanderer
from helmrec_bench.judging.contest_report import Hindsight, hindsight
from helmrec_bench.lab.curve_file import load_curves, save_curves
from helmrec_bench.lab.store import Store, digest_of, digest_of_code
from helmrec_bench.lab.tiers import with_traffic
from helmrec_bench.map.shifts import Planned, switch_prices

KEPT, CURVES, SCENARIOS = Path("build/baselines.jsonl"), Path("build/curves"), Path(scenarios.__file__).parent
CONTROLLER = digest_of_code("control")  # as it is when a run begins
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of sweeps
BUDGET = 16  # trials of each baseline
EPISODE = "episode"  # days that nobody is judged on
TAUGHT = {"mixed-day": 0.65, "diurnal": 0.85}  # with their base rate as a share of the steady scenario's
BASELINES = (
    "untuned 0.5", "static", "kv-only", "emb-only", "pid", "hill climber", "marginal utility", "miss-curve argmin",
    "bayesian optimisation", "milp", "xgboost", "lstm",
)  # fmt: skip
HELMREC = "HelmRec"


class RunPlace(NamedTuple):
    """A scenario, a seed and a multiple of the scenario's arrivals."""

    scenario: str
    seed: int
    load: float = 1.0

    def __str__(self) -> str:
        ending = "" if self.load == 1 else f", load x {self.load:g}"
        return f"{self.scenario}, seed {self.seed}{ending}"


def _digest(details: Any) -> str:
    return hashlib.sha256(json.dumps(details, sort_keys=True).encode()).hexdigest()[:8]


@cache
def scenario(name: str) -> Scenario:
    if name.startswith(EPISODE):
        return _episode(name.split()[1])
    return load_scenario(SCENARIOS / f"{name}.toml")


def _episode(name: str) -> Scenario:
    """Over the main scenario's node, items and users."""
    main = scenario("main-steady")
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
    return main.model_copy(update={"workload": workload, "warm_up_s": 40.0})


@lru_cache(maxsize=4)
def course(place: RunPlace) -> Course:
    return Course(scenario(place.scenario), place.seed, place.load)


def shown(place: RunPlace) -> Course:
    """With miss curves, recorded once."""
    found = course(place)
    if "curves" not in found.__dict__:
        details = digest_of(found.scenario.cost()) + found.scenario.model_dump_json()
        path = CURVES / f"{str(place).replace(', ', '-').replace(' ', '-')}-{_digest(details)}.npz"
        if not path.exists():
            save_curves(path, found.curves)
        found.__dict__["curves"] = load_curves(path)
    return found


class Runs:
    """Scores by policy and place. What is not kept yet is run and kept."""

    def __init__(self) -> None:
        details = {path.name: path.read_text() for path in sorted(SCENARIOS.glob("*.toml"))}
        self.store = Store(KEPT, _digest({"cost": digest_of(scenario("main-steady").cost()), "scenarios": details}))

    def constant(self, place: RunPlace, alpha: float, has_admission: bool = True) -> Score:
        if has_admission:
            return self._score(f"static {alpha:g}", place, lambda: course(place).static(alpha))
        name = f"static {alpha:g}, no admission"
        return self._score(name, place, lambda: course(place).static(alpha, kv_admission="always"))

    def baseline(self, place: RunPlace, name: str) -> Score:
        settings = self.tuned(name)

        def run() -> Score:
            policy = _built(name, json.dumps(settings))
            policy.reset()
            if isinstance(policy, Static):  # born there, as a tuned node would be
                return course(place).static(policy.settings.alpha)
            return shown(place).judge(policy)

        return self._score(f"{name} {_digest(dict(settings))}", place, run)

    def ours(self, place: RunPlace) -> Score:
        return self._score(f"{HELMREC} {CONTROLLER}", place, lambda: shown(place).judge(make_policy("helm")))

    def replay(self, place: RunPlace, path: Sequence[float]) -> Score:
        """A planned path, for the oracles."""

        def run() -> Score:
            found = course(place)
            return found.replay(Planned(np.array(path), WINDOW_S, found.scenario.warm_up_s), path[0])

        return self._score(f"plan {_digest(list(path))}", place, run)

    def tuned(self, name: str) -> Mapping[str, Value]:
        """The best of BUDGET settings on a mixed day."""
        key = f"tuning {name}, {BUDGET} trials"
        if key not in self.store.found:
            place = RunPlace(f"{EPISODE} mixed-day", 101)

            def loss(policy: Policy) -> float:
                if isinstance(policy, Static):
                    return course(place).static(policy.settings.alpha).mean_ms
                return shown(place).judge(policy).mean_ms

            found = tune(families()[name], loss, BUDGET, np.random.default_rng(1))
            self.store.put(
                key, {"settings": dict(found.best.settings), "losses": [trial.loss for trial in found.trials]}
            )
        settings: dict[str, Value] = self.store.found[key]["settings"]
        return settings

    def _score(self, name: str, place: RunPlace, run: Callable[[], Score]) -> Score:
        key = f"{name} on {place}"
        if key not in self.store.found:
            self.store.put(key, asdict(run()))
        return Score(**self.store.found[key])


@cache
def families() -> Mapping[str, Family]:
    """Every baseline, those that learn with what they learn from."""
    cost = course(RunPlace(f"{EPISODE} mixed-day", 101)).service_cost
    every = (*simple_baselines(cost), *solver_baselines(cost), *learned_baselines(_episodes()))
    return {one.name: one for one in every}


@cache
def _built(name: str, settings: str) -> Policy:
    """Training takes longer than a run."""
    return families()[name].build(json.loads(settings))


def _episodes() -> tuple[Episode, ...]:
    """A wanderer's windows, labelled with the path that is cheapest with moves paid."""
    runs, taught = Runs(), []
    for name in TAUGHT:
        place = RunPlace(f"{EPISODE} {name}", 100)
        seen = hindsight({alpha: [runs.constant(place, alpha)] for alpha in ALPHAS})
        labels = np.repeat(plan(place, seen, 1.0), round(WINDOW_S))
        stats = shown(place).watch(Wanderer(0))[: labels.size]
        taught.append(Episode(name, tuple(stats), labels[: len(stats)]))
    return tuple(taught)


def warm_up() -> None:
    """Tune, teach and compile before work is spread over processes."""
    runs = Runs()
    for name in BASELINES:
        _built(name, json.dumps(runs.tuned(name)))
    short = scenario("main-steady")
    assert short.workload is not None
    workload = with_traffic(short.workload, duration_s=2.0)
    tiny = Course(short.model_copy(update={"workload": workload, "warm_up_s": 1.0}), 0)
    tiny.judge(make_policy("helm"))


def plan(place: RunPlace, seen: Hindsight, price: float) -> Any:
    found = course(place)
    prices = switching_costs(seen.alphas, switch_prices(found.node(), found.scenario.cost(), 0.85))
    return cheapest_path(seen.costs, seen.alphas, prices * price).alpha
