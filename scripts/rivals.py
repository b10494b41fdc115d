"""All rivals on Steady, Trend and Burst: the same traces, the same limits, the same tuning. A first, small run.

    python -m scripts.rivals

Load is a share of the largest Steady load that some constant split serves within the SLO. Rivals are tuned, and those
that learn are trained, on families they are not judged on. Everyone but the constants starts at 0.5. Miss curves see
requests, which are the same at any split, so they are recorded once per trace and shown to every policy.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from helmrec.bench.features import Episode
from helmrec.bench.judge import Search, interval, largest_load, paired_change
from helmrec.bench.rivals import learned_rivals, simple_rivals, solver_rivals
from helmrec.bench.tune import Value, tune
from helmrec.config import EngineConfig
from helmrec.control.policy import Limited, Limits, Move, Policy, WindowStats
from helmrec.control.service_cost import ServiceCost
from helmrec.control.static import GRID, UNTUNED_ALPHA, Static, StaticSettings
from helmrec.memory.miss_curves import JointCurves
from helmrec.model.profiles import profile
from helmrec.sim.cost import default_cost
from helmrec.sim.families import Shape, family
from helmrec.sim.generate import generate
from helmrec.sim.node_config import NodeConfig
from helmrec.sim.oracle import SwitchPrices, best_static, cheapest_path, quasi_static, switching_costs
from helmrec.sim.simulate import Options, SimResult, simulate
from helmrec.sim.trace import Trace
from scripts.provenance import write_measurement

Floats = NDArray[np.float64]

NUM_ITEMS = 10_000_000
POOL_BYTES = 20 << 30
WINDOW_S = 10.0  # of sweeps and oracles; policies look every second
JUDGED, TAUGHT = ("steady", "trend", "burst"), ("mixed-day", "diurnal")
ALPHAS = np.array(GRID)


@dataclass(frozen=True)
class Study:
    """What is run."""

    duration_s: float
    warmup_s: float
    load: float
    num_seeds: int
    budget: int
    slo_ms: float = 80.0

    def shape(self, rate: float) -> Shape:
        """Hot prefixes and hot rows are each about as large as the pool."""
        return Shape(
            num_items=NUM_ITEMS,
            item_exponent=1.0,
            hot_users=300,
            rate=rate,
            duration_s=self.duration_s,
            burst_s=self.duration_s / 12,
        )

    @cache  # noqa: B019 - one study lives as long as the script
    def trace(self, name: str, seed: int, rate: float) -> Trace:
        return generate(family(name, self.shape(rate)), seed)

    def node(self, alpha: float) -> NodeConfig:
        engine = EngineConfig(pool_bytes=POOL_BYTES, alpha=alpha)
        return NodeConfig(model=profile("wide", NUM_ITEMS), engine=engine, slo_ms=self.slo_ms)


def run(
    study: Study, trace: Trace, policy: Policy, alpha: float = UNTUNED_ALPHA, has_curves: bool = False
) -> SimResult:
    return simulate(trace, study.node(alpha), default_cost(), policy, options=Options(has_curves=has_curves))


class Shown:
    """A policy within limits that is shown recorded miss curves, and how long it took to decide."""

    def __init__(self, policy: Policy, curves: Sequence[JointCurves | None]) -> None:
        self._limited = Limited(policy, Limits())
        self._curves = curves
        self.decision_us: list[float] = []

    def decide(self, stats: WindowStats) -> Move | None:
        number = min(round(stats.traffic.end_s), len(self._curves)) - 1
        shown = replace(stats, curves=self._curves[number])
        started = time.perf_counter()
        move = self._limited.decide(shown)
        self.decision_us.append((time.perf_counter() - started) * 1e6)
        return move

    def reset(self) -> None:
        self._limited.reset()


class Wanderer:
    """Walks over the splits at random: what learners watch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.reset()

    def decide(self, stats: WindowStats) -> Move | None:
        return Move(stats.alpha_target + float(self._rng.normal(0, 0.05)), "wander")

    def reset(self) -> None:
        self._rng = np.random.default_rng(self._seed)


def service_cost() -> ServiceCost:
    """The calibration in the few coefficients policies reckon with; per request of a full batch."""
    cost, node = (
        default_cost(),
        NodeConfig(model=profile("wide", NUM_ITEMS), engine=EngineConfig(pool_bytes=POOL_BYTES)),
    )
    candidates, history = 2_048, 6_700
    token_ms = cost.compute_token_us / 1e3 + len(node.model.features) * cost.compute_row_ns / 1e6
    return ServiceCost(
        token_ms=token_ms,
        pair_ms=cost.compute_pair_ns / 1e6,
        floor_ms=candidates * (token_ms + history * cost.compute_pair_ns / 1e6),
        missed_row_ms=node.geometry.row_stride / (cost.sorted_beside_gb_per_s * 1e6),
        host_token_ms=cost.host_token_us / 1e3,
        host_floor_ms=cost.host_request_ms + candidates * cost.host_token_us / 1e3,
    )


def switch_prices(load: float) -> SwitchPrices:
    cost, tokens = service_cost(), 6_700
    prefix_ms = tokens * (cost.token_ms + cost.pair_ms * tokens / 2)
    prefix_bytes = tokens * 10_240  # ten KiB of KV a token
    row_bytes = 1_024
    return SwitchPrices(
        pool_bytes=POOL_BYTES,
        rewarm_ms_per_byte=prefix_ms / prefix_bytes,
        refill_ms_per_byte=cost.missed_row_ms / row_bytes,
        load=load,
    )


@dataclass(frozen=True)
class Sweep:
    """One trace at every constant split."""

    costs: Floats  # (windows, alphas) latency summed over requests, ms
    p99_ms: Floats  # (alphas,)
    mean_ms: Floats
    slo_satisfaction: Floats


def by_window(result: SimResult, study: Study) -> Floats:
    """Latency summed over the requests of each scored window."""
    means = np.nan_to_num(result.mean_ms_by_arrival(WINDOW_S), nan=1e4)
    num = np.bincount((result.arrived_s // WINDOW_S).astype(np.int64), minlength=means.size)
    return (means * num)[round(study.warmup_s / WINDOW_S) : round(study.duration_s / WINDOW_S)]


def sweep(study: Study, trace: Trace) -> Sweep:
    runs = [run(study, trace, Static(StaticSettings(alpha=alpha)), alpha) for alpha in GRID]
    scored = [result.summary(study.warmup_s) for result in runs]
    return Sweep(
        costs=np.column_stack([by_window(result, study) for result in runs]),
        p99_ms=np.array([one.p99_ms for one in scored]),
        mean_ms=np.array([one.mean_ms for one in scored]),
        slo_satisfaction=np.array([one.slo_satisfaction for one in scored]),
    )


def capacity(study: Study) -> float:
    """Largest Steady load some constant split serves with its P99 within the SLO."""

    def is_met(rate: float) -> bool:
        trace = study.trace("steady", 50, rate)
        for alpha in (0.3, 0.4, 0.5, 0.6):
            summary = run(study, trace, Static(StaticSettings(alpha=alpha)), alpha).summary(study.warmup_s)
            if summary.num_refused == 0 and summary.p99_ms <= study.slo_ms:
                return True
        return False

    found = largest_load(is_met, Search(200, 900, tolerance=0.03))
    assert found is not None, "not even a light load is served within the SLO"
    return found


def record_curves(study: Study, trace: Trace) -> list[JointCurves | None]:
    result = run(study, trace, Static(StaticSettings(alpha=UNTUNED_ALPHA)), has_curves=True)
    return [window.stats.curves for window in result.windows]


def path(result: SimResult, study: Study) -> Floats:
    """Mean split of each scored window."""
    alphas = np.array([window.stats.alpha for window in result.windows])
    per = round(WINDOW_S)
    num = round(study.duration_s / WINDOW_S)
    return np.array([alphas[per * at : per * (at + 1)].mean() for at in range(round(study.warmup_s / WINDOW_S), num)])


def episode(study: Study, trace: Trace, name: str, curves: list[JointCurves | None]) -> Episode:
    """A wanderer's windows, labelled with the path that is cheapest with moves paid."""
    result = run(study, trace, Shown(Wanderer(0), curves))
    costs = sweep(study, trace).costs
    plan = cheapest_path(costs, ALPHAS, switching_costs(ALPHAS, switch_prices(study.load)))
    first = round(study.warmup_s)
    stats = [replace(window.stats, curves=curves[at]) for at, window in enumerate(result.windows)]
    labels = np.repeat(plan.alpha, round(WINDOW_S))
    seen = tuple(stats[first : first + labels.size])
    return Episode(name, seen, labels[: len(seen)])


def judge(result: SimResult, study: Study, shown: Shown) -> dict[str, Any]:
    summary, alphas = result.summary(study.warmup_s), path(result, study)
    return {
        "mean_ms": summary.mean_ms,
        "p99_ms": summary.p99_ms,
        "slo_satisfaction": summary.slo_satisfaction,
        "num_refused": summary.num_refused,
        "costs": by_window(result, study),
        "alpha": alphas,
        "decision_us": float(np.median(shown.decision_us)),
    }


class Tuned(NamedTuple):
    """A rival ready to be judged; reset it between runs."""

    policy: Policy
    settings: dict[str, Value]


def tuned_rivals(study: Study, rate: float, tell: Callable[[str], None]) -> dict[str, Tuned]:
    """Each family's best of `budget` trials on a mixed day; learners see two families for training."""
    lessons = []
    for name in TAUGHT:
        trace = study.trace(name, 100, rate)
        tell(f"curves of {name}")
        lessons.append(episode(study, trace, name, record_curves(study, trace)))
    trace = study.trace(TAUGHT[0], 101, rate)
    tell("curves to tune on")
    curves = record_curves(study, trace)

    def loss(policy: Policy) -> float:
        alpha = policy.settings.alpha if isinstance(policy, Static) else UNTUNED_ALPHA
        return run(study, trace, Shown(policy, curves), alpha).summary(study.warmup_s).mean_ms

    cost, ready = service_cost(), dict[str, Tuned]()
    for one in (*simple_rivals(cost), *solver_rivals(cost), *learned_rivals(lessons)):
        tell(f"tuning {one.name}")
        best = tune(one, loss, study.budget, np.random.default_rng(1)).best
        ready[one.name] = Tuned(one.build(best.settings), dict(best.settings))
    return ready


def judge_family(
    study: Study,
    name: str,
    rate: float,
    rivals: dict[str, Tuned],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Every rival on every seed of a family, beside sweeps and oracles."""
    sweeps, runs = [], {rival: list[dict[str, Any]]() for rival in rivals}
    for seed in range(study.num_seeds):
        trace = study.trace(name, seed, rate)
        tell(f"{name} {seed}: sweep")
        sweeps.append(sweep(study, trace))
        tell(f"{name} {seed}: curves")
        curves = record_curves(study, trace)
        for rival, (policy, _) in rivals.items():
            tell(f"{name} {seed}: {rival}")
            policy.reset()
            shown = Shown(policy, curves)
            alpha = policy.settings.alpha if isinstance(policy, Static) else UNTUNED_ALPHA
            runs[rival].append(judge(run(study, trace, shown, alpha), study, shown))
    return compare(study, sweeps, runs)


def compare(study: Study, sweeps: list[Sweep], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    costs = np.mean([one.costs for one in sweeps], axis=0)
    exact = quasi_static(costs, ALPHAS)
    static = best_static(costs, ALPHAS)
    planned = cheapest_path(costs, ALPHAS, switching_costs(ALPHAS, switch_prices(study.load)))
    at = int(static.index[0])
    p99_ms = [float(one.p99_ms[at]) for one in sweeps]
    rows: dict[str, Any] = {
        "best static in hindsight": {
            "alpha": float(ALPHAS[at]),
            "mean_ms": asdict(interval([float(one.mean_ms[at]) for one in sweeps])),
            "p99_ms": asdict(interval(p99_ms)),
            "slo_satisfaction": asdict(interval([float(one.slo_satisfaction[at]) for one in sweeps])),
            "regret_quasi_static": static.total / exact.cost.sum() - 1,
            "regret_switching": static.total / planned.total - 1,
            "gap": exact.gap(static.alpha),
            "share_inside": exact.share_inside(static.alpha),
        }
    }
    for rival, seen in runs.items():
        spent = np.mean([one["costs"] for one in seen], axis=0).sum()
        rows[rival] = {
            **{key: asdict(interval([one[key] for one in seen])) for key in ("mean_ms", "p99_ms", "slo_satisfaction")},
            "p99_change": asdict(paired_change([one["p99_ms"] for one in seen], p99_ms)),
            "regret_quasi_static": spent / exact.cost.sum() - 1,
            "regret_switching": spent / planned.total - 1,
            "gap": float(np.mean([exact.gap(one["alpha"]) for one in seen])),
            "share_inside": float(np.mean([exact.share_inside(one["alpha"]) for one in seen])),
            "num_refused": sum(one["num_refused"] for one in seen),
            "decision_us_p50": float(np.median([one["decision_us"] for one in seen])),
        }
    return {
        "alpha_star": exact.alpha.tolist(),
        "band": np.column_stack((exact.low, exact.high)).round(3).tolist(),
        "oracle_path": planned.alpha.tolist(),
        "static_mean_ms": np.mean([one.mean_ms for one in sweeps], axis=0).round(3).tolist(),
        "static_p99_ms": np.mean([one.p99_ms for one in sweeps], axis=0).round(2).tolist(),
        "policies": rows,
    }


def show(name: str, found: dict[str, Any]) -> None:
    table = Table(title=f"{name}: alpha* {min(found['alpha_star']):.1f}..{max(found['alpha_star']):.1f}")
    for column in ("policy", "mean ms", "P99 ms", "P99 change", "SLO", "regret", "with moves", "gap", "inside", "us"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for rival, row in found["policies"].items():
        change = row.get("p99_change")
        table.add_row(
            rival if "alpha" not in row else f"{rival} ({row['alpha']:.1f})",
            f"{row['mean_ms']['mean']:.1f}",
            f"{row['p99_ms']['mean']:.1f}",
            "" if change is None else f"{change['mean']:+.0%} [{change['low']:+.0%}, {change['high']:+.0%}]",
            f"{row['slo_satisfaction']['mean']:.1%}",
            f"{row['regret_quasi_static']:+.1%}",
            f"{row['regret_switching']:+.1%}",
            f"{row['gap']:.3f}",
            f"{row['share_inside']:.0%}",
            f"{row.get('decision_us_p50', 0):.0f}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=120, help="seconds of each trace")
    parser.add_argument("--warmup", type=float, default=40, help="seconds not scored")
    parser.add_argument("--load", type=float, default=0.75, help="share of the best constant's capacity on Steady")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=8, help="trials of each rival's tuning")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/rivals-small.json"))
    flags = parser.parse_args()
    study = Study(flags.duration, flags.warmup, flags.load, flags.seeds, flags.budget)
    num_rivals = 12
    steps = 1 + 3 + num_rivals + len(JUDGED) * study.num_seeds * (2 + num_rivals)
    with Progress() as progress:
        task = progress.add_task("capacity", total=steps)
        best = capacity(study)
        rate = study.load * best

        def tell(what: str) -> None:
            progress.update(task, advance=1, description=what)

        rivals = tuned_rivals(study, rate, tell)
        families = {name: judge_family(study, name, rate, rivals, tell) for name in JUDGED}
    for name, found in families.items():
        show(name, found)
    write_measurement(
        flags.out,
        {
            "note": "A first small run: one made-up scenario, short traces, few seeds. Not the published table.",
            "study": {**asdict(study), "pool_bytes": POOL_BYTES, "num_items": NUM_ITEMS, "profile": "wide"},
            "calibration": default_cost().name,
            "service_cost": service_cost().model_dump(),
            "switch_prices": switch_prices(study.load).model_dump(),
            "capacity_requests_per_s": best,
            "rate": rate,
            "alphas": list(GRID),
            "tuned": {rival: settings for rival, (_, settings) in rivals.items()},
            "families": families,
        },
    )


if __name__ == "__main__":
    main()
