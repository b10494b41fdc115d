"""The same comparison in the calibrated simulator: one H200 with wide feature rows, read over a bus."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helmrec.policies import make_policy, needs_curves
from helmrec.sim.scenario import load_scenario
from helmrec.sim.simulate import Options, simulate

SCENARIO = Path(__file__).parent / "scenario.toml"
ALPHAS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Latency of one policy on the simulated GPU."""

    name: str
    mean_ms: float
    p99_ms: float
    in_slo: float


def simulate_ways(policy: str, seed: int, progress: Callable[[], None]) -> list[Simulated]:
    """Simulate every constant split, then the policy; `progress` is called after each."""
    scenario = load_scenario(SCENARIO)
    trace, cost = scenario.make_trace(seed), scenario.cost()
    config = scenario.node_config(trace)
    found = []
    for name in (*(f"static:{alpha}" for alpha in ALPHAS), policy):
        alpha = float(name.partition(":")[2] or ALPHAS[len(ALPHAS) // 2])
        engine = config.engine.model_copy(update={"alpha": alpha})
        decider = make_policy(name)
        options = Options(has_curves=needs_curves(name))
        node = config.model_copy(update={"engine": engine})
        seen = simulate(trace, node, cost, decider, scenario.tick_s, options).summary(scenario.warm_up_s)
        found.append(Simulated(name, seen.mean_ms, seen.p99_ms, seen.slo_satisfaction))
        progress()
    return found


def best_static(found: list[Simulated]) -> Simulated:
    return min((each for each in found if each.name.startswith("static:")), key=lambda each: each.mean_ms)
