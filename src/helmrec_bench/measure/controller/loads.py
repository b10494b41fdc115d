"""The largest load within the SLO: constants and policies on the frozen steady, trend and burst scenarios.

    helmrec bench run controller-loads --processes 16 --out docs/measurements/controller-loads.json

Arrivals of a scenario are multiplied until the P99 exceeds the SLO or a request is refused. Each policy and each
constant of the grid of 0.05 is searched by itself, by bisection in steps of 2%. As everywhere, the first minute and the
first burst do not count.
"""

from argparse import ArgumentParser, Namespace
from functools import cache
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from helmrec.control.rebalancer import LOOK_EVERY
from helmrec.control.static import UNTUNED_ALPHA
from helmrec.sim.curves import record_curves
from helmrec.sim.scenario import Scenario, load_scenario
from helmrec.sim.simulate import SimResult, simulate, summarise
from helmrec_bench.baselines.service_cost import service_cost
from helmrec_bench.judging.contest import Shown, scaled
from helmrec_bench.judging.first_times import is_known
from helmrec_bench.judging.judge import largest_of
from helmrec_bench.lab.policies import started_policy
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import Store, finish
from helmrec_bench.measure.controller.cases import BUILD, CONTROLLER, SCENARIOS, SIMULATOR

NAMES = tuple(f"{node}-{kind}" for node in ("main", "stress") for kind in ("steady", "trend", "burst-20s", "burst-60s"))
CONSTANTS = tuple(f"static:{alpha / 100:g}" for alpha in range(5, 100, 5))
LOADS = tuple(round(0.5 + 0.02 * step, 2) for step in range(128))  # multiples of the frozen arrivals


class LoadSearch(NamedTuple):
    scenario: str
    policy: str
    seed: int

    @property
    def name(self) -> str:
        code = SIMULATOR if self.policy.startswith("static:") else f"{SIMULATOR} {CONTROLLER}"
        return f"largest load of {self.policy} on {self.scenario} seed {self.seed} {code}"


@cache
def at_load(name: str, load: float) -> Scenario:
    scenario = load_scenario(SCENARIOS / f"{name}.toml")
    assert scenario.workload is not None
    return scenario.model_copy(update={"workload": scaled(scenario.workload, load)})


def is_met(search: LoadSearch, load: float) -> bool:
    scenario = at_load(search.scenario, load)
    trace, cost = scenario.make_trace(search.seed), scenario.cost()
    config = scenario.node_config(trace)
    found = started_policy(search.policy, service_cost(cost, config, trace))
    policy = found.policy
    if found.has_curves:
        policy = Shown(policy, record_curves(trace, config, cost, LOOK_EVERY), tick_s=LOOK_EVERY)
    start = config.engine.model_copy(update={"alpha": found.alpha})
    return meets(scenario, simulate(trace, config.model_copy(update={"engine": start}), cost, policy))


def meets(scenario: Scenario, result: SimResult) -> bool:
    summary = summarise(result.outcomes, is_known(scenario, result.arrived_s), scenario.slo_ms)
    return summary.num_refused == 0 and summary.p99_ms <= scenario.slo_ms


def largest(search: LoadSearch) -> float:
    """0, where not even the lowest load is met."""
    return largest_of(LOADS, lambda load: is_met(search, load)) or 0.0


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--policies", nargs="+", default=["helm"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)


def main(flags: Namespace) -> None:
    searches = [
        LoadSearch(name, policy, flags.seed) for name in flags.scenarios for policy in (*flags.policies, *CONSTANTS)
    ]
    store = Store(BUILD / "controller-trials.jsonl", "2")
    finish(searches, largest, store, flags.processes, "largest loads")
    untuned, found = f"static:{UNTUNED_ALPHA:g}", dict[str, dict[str, Any]]()
    table = Table("scenario", *flags.policies, "best constant", "untuned 0.5", title="multiples of the frozen arrivals")
    for name in flags.scenarios:
        loads = {one.policy: store.found[one.name] for one in searches if one.scenario == name}
        best = max(CONSTANTS, key=lambda constant: loads[constant])
        found[name] = {"loads": loads, "best_constant": best}
        ours = [f"{loads[policy]:.2f} ({loads[policy] / loads[best]:.3f} of best)" for policy in flags.policies]
        table.add_row(name, *ours, f"{loads[best]:.2f} ({best})", f"{loads[untuned]:.2f}")
    Console(width=140).print(table)
    if flags.out is not None:
        write_measurement(flags.out, {"seed": flags.seed, "scenarios": found})
