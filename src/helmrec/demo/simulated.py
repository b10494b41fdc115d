"""The same comparison in the calibrated simulator: one H200 with wide feature rows, read over a bus."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helmrec.config import EngineConfig
from helmrec.policies import make_policy, needs_curves
from helmrec.sim.scenario import Scenario
from helmrec.sim.simulate import Options, simulate
from helmrec.traffic.workload import Phase, Users, Workload

ALPHAS = (0.2, 0.4, 0.6, 0.8)
_CALM: dict[str, Any] = {"rate": 591, "hot_users": 600, "item_exponent": 1}
_BURST: dict[str, Any] = {
    "rate": 886.5,
    "hot_share": 0.35,
    "hot_users": 600,
    "hot_first": 600,
    "history": 3_350,
    "item_exponent": 0.7,
}
SCENARIO = Scenario(
    name="demo",
    profile="wide",
    warm_up_s=31,
    row_sample=1 / 1_024,
    engine=EngineConfig(pool_bytes="80GB", max_batch_requests=8, move_bytes_per_step="64MiB"),
    workload=Workload(
        name="demo",
        num_items=20_000_000,
        num_lanes=1_024,
        item_shift=500,
        users=Users(min_history=2_000, max_history=14_000),
        opening=(Phase(name="warm-up", duration_s=31, **_CALM),),
        phases=(Phase(name="calm", duration_s=40, **_CALM), Phase(name="burst", duration_s=20, **_BURST)) * 2,
    ),
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Latency of one policy on the simulated GPU."""

    name: str
    mean_ms: float
    p99_ms: float
    in_slo: float


def simulate_ways(policy: str, seed: int, progress: Callable[[], None]) -> list[Simulated]:
    """Simulate every constant split, then the policy; `progress` is called after each."""
    trace, cost = SCENARIO.make_trace(seed), SCENARIO.cost()
    config = SCENARIO.node_config(trace)
    found = []
    for name in (*(f"static:{alpha}" for alpha in ALPHAS), policy):
        alpha = float(name.partition(":")[2] or ALPHAS[len(ALPHAS) // 2])
        engine = config.engine.model_copy(update={"alpha": alpha})
        decider = make_policy(name)
        options = Options(has_curves=needs_curves(name))
        node = config.model_copy(update={"engine": engine})
        seen = simulate(trace, node, cost, decider, SCENARIO.tick_s, options).summary(SCENARIO.warm_up_s)
        found.append(Simulated(name, seen.mean_ms, seen.p99_ms, seen.slo_satisfaction))
        progress()
    return found


def best_static(found: list[Simulated]) -> Simulated:
    return min((each for each in found if each.name.startswith("static:")), key=lambda each: each.mean_ms)
