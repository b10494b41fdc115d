"""The course of `scripts.gpu_adaptive` at 24 rows a token in the simulator: a pool of 6 GiB, quarter-second windows.

    python -m scripts.short_course            # about a minute; writes docs/measurements/short-course.json

Shows what the controller lost on the card, and why: with it once knowing how much KV the steps under way need, and once
not. On a pool this small two steps of eight take a sixth of it, and beyond that batches shrink.
"""

from pathlib import Path
from typing import Any

import numpy as np

from helmrec.config import EngineConfig
from helmrec.control.explain import Explanation
from helmrec.control.helm import HelmPolicy
from helmrec.control.policy import Limited, Limits, Move, Policy, WindowStats
from helmrec.control.static import Static, StaticSettings
from helmrec.model.profiles import profile
from helmrec.sim.cost import default_cost
from helmrec.sim.generate import generate
from helmrec.sim.node_config import NodeConfig
from helmrec.sim.scenario import service_cost
from helmrec.sim.simulate import Options, simulate
from helmrec.sim.trace import Trace
from helmrec.sim.workload import Phase, Users, Workload
from scripts.provenance import write_measurement

OUT = Path("docs/measurements/short-course.json")
ALPHAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
LOAD, CAPACITY = 0.85, {0.35: 483.0, 0.85: 907.0}  # of 0.4, the best constant there by the map of the card
WARM_UP_S, TICK_S, TRAVEL_PER_MINUTE = 1.0, 0.25, 4.0
LENGTHS_S = (7.0, 28.0)  # that of the run on the card, and one four times as long


class Told:
    """A controller within limits that remembers what it said."""

    def __init__(self, policy: HelmPolicy) -> None:
        self._policy, self._limited = policy, Limited(policy, Limits(travel_per_minute=TRAVEL_PER_MINUTE))
        self.told: list[Explanation] = []

    def decide(self, stats: WindowStats) -> Move | None:
        move = self._limited.decide(stats)
        if self._policy.explanation is not None:
            self.told.append(self._policy.explanation)
        return move

    def reset(self) -> None:
        self._limited.reset()


def course(seconds: float, num_items: int) -> Trace:
    low, high = (LOAD * rate for rate in CAPACITY.values())

    def phase(name: str, share: float, hot: Any, rate: Any) -> Phase:
        users = {"hot_users": 56, "history": 6_700, "item_exponent": 1.0}
        return Phase(name=name, duration_s=share * seconds, rate=rate, hot_share=hot, **users)

    phases = (
        phase("steady", 0.3, 0.35, low),
        phase("trend", 0.3, (0.35, 0.85), (low, high)),
        phase("burst", 0.2, 0.35, 1.1 * low),
        phase("after", 0.2, 0.85, high),
    )
    warm_up = phase("warm-up", WARM_UP_S / seconds, 0.35, 320.0)
    users = Users(min_history=2_000, max_history=11_400)
    named = {"name": "short course", "num_items": num_items, "item_shift": 1.0}
    return generate(Workload(users=users, opening=(warm_up,), phases=phases, **named), 0)


def run(trace: Trace, node: NodeConfig, policy: Policy, alpha: float) -> dict[str, Any]:
    born = node.model_copy(update={"engine": node.engine.model_copy(update={"alpha": alpha})})
    options = Options(has_curves=isinstance(policy, Told))
    result = simulate(trace, born, default_cost(), policy, TICK_S, options)
    latency_ms = np.nan_to_num(result.outcomes.latency_ms, nan=1e4)[result.arrived_s >= WARM_UP_S]
    found: dict[str, Any] = {
        "mean_ms": round(float(latency_ms.mean()), 2),
        "p99_ms": round(float(np.percentile(latency_ms, 99)), 2),
        "slo_satisfaction": round(float((latency_ms <= node.slo_ms).mean()), 4),
    }
    if isinstance(policy, Told):
        found["alpha_over_time"] = [(one.time_s, round(one.alpha, 3)) for one in policy.told]
    return found


def measure(seconds: float) -> dict[str, Any]:
    num_items = int((40 << 30) / 1_024 / 6.5)
    trace = course(seconds, num_items)
    engine = EngineConfig(pool_bytes=6 << 30, max_batch_requests=8, alpha=0.5)
    node = NodeConfig(model=profile("wide", num_items), engine=engine, row_sample=1 / 256)
    cost = service_cost(default_cost(), node, trace)
    found = {f"static {alpha:g}": run(trace, node, Static(StaticSettings(alpha=alpha)), alpha) for alpha in ALPHAS}
    found["helm"] = run(trace, node, Told(HelmPolicy(cost)), 0.5)
    unaware = cost.model_copy(update={"in_flight_requests": 0.0})
    found["helm that does not know of steps under way"] = run(trace, node, Told(HelmPolicy(unaware)), 0.5)
    for name, one in found.items():
        print(f"{seconds:g} s, {name}: mean {one['mean_ms']}, P99 {one['p99_ms']} ms", flush=True)
    return found


if __name__ == "__main__":
    write_measurement(OUT, {"load": LOAD, "courses": {f"{seconds:g} s": measure(seconds) for seconds in LENGTHS_S}})
