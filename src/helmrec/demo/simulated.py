"""The same comparison in the calibrated simulator: one H200 with wide feature rows, read over a bus."""

from dataclasses import dataclass, field
from pathlib import Path

from helmrec.control.static import UNTUNED_ALPHA
from helmrec.policies import make_policy, needs_curves
from helmrec.sim.scenario import load_scenario
from helmrec.sim.simulate import Options, simulate

SCENARIO = Path(__file__).parent / "scenario.toml"
ALPHAS = (0.2, 0.35, UNTUNED_ALPHA, 0.65, 0.8)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Latency of one policy on the simulated GPU."""

    name: str
    mean_ms: float
    p99_ms: float
    in_slo: float
    path: list[tuple[float, float, float]] = field(default_factory=list)  # by window: its end, alpha, P99


def simulate_ways(policy: str, seed: int) -> list[Simulated]:
    """Simulate every constant split, then the policy."""
    scenario = load_scenario(SCENARIO)
    trace, cost = scenario.make_trace(seed), scenario.cost()
    config = scenario.node_config(trace)
    found = []
    for name in (*(f"static:{alpha}" for alpha in ALPHAS), policy):
        alpha = float(name.partition(":")[2] or UNTUNED_ALPHA)
        engine = config.engine.model_copy(update={"alpha": alpha})
        decider = make_policy(name)
        options = Options(has_curves=needs_curves(name))
        node = config.model_copy(update={"engine": engine})
        result = simulate(trace, node, cost, decider, scenario.tick_s, options)
        path = [
            (window.stats.traffic.end_s, window.stats.alpha, window.stats.traffic.p99_ms) for window in result.windows
        ]
        seen = result.summary(scenario.warm_up_s)
        found.append(Simulated(name, seen.mean_ms, seen.p99_ms, seen.slo_satisfaction, path))
    return found


def best_static(found: list[Simulated]) -> Simulated:
    return min((each for each in found if each.name.startswith("static:")), key=lambda each: each.mean_ms)


def shown_ways(found: list[Simulated]) -> list[Simulated]:
    """The untuned split, the best constant one (once, if they are the same), and the policy."""
    untuned = next(each for each in found if each.name == f"static:{UNTUNED_ALPHA}")
    return [untuned, *(each for each in (best_static(found),) if each is not untuned), found[-1]]
