"""Where adapting pays: simulated runs of 20 minutes and of four hours, ours against the best constant in hindsight.

    helmrec bench run long-runs --quick --out build/long-runs.json              # one seed, three runs of 20 minutes
    helmrec bench run long-runs --processes 2 --log movietweetings/ratings.dat  # five seeds, four hours too

Histories grow at a constant rate of arrivals; over the hours of a day, and while the catalogue turns over, the rate
follows what the best constant bears of each mix. Scenarios are drawn (`drawn`) from the test range, under numbers that
nothing was tuned on. Hours are simulated in full: four hours are the same drift, twelve times as slow.

The best constant is the one with the least P99 over all seeds, out of a grid of 0.05, on the very requests it is judged
on. Its limit is the largest load at which its P99 is within the SLO, found on a seed of its own; constants that missed
the SLO at that load or a smaller one are not run at it. Ours starts at the untuned 0.5. Every finished piece is kept in
build/, so a run that was stopped goes on.

With `--log`, a log of MovieTweetings is served as well: every rating is a request, years are compressed into the time,
and each user has 4,000 made-up events before the first, since ratings alone are a few events a user.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ByteSize

from helmrec.config import EngineConfig
from helmrec.control.rebalancer import LOOK_EVERY
from helmrec.control.static import UNTUNED_ALPHA, Static, StaticSettings
from helmrec.costs.calibrated import CostModel, default_cost
from helmrec.model.profiles import profile
from helmrec.sim.curves import record_curves
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.simulate import SimResult, simulate
from helmrec.traffic.generate import generate
from helmrec.traffic.imported import ImportConfig, trace_of_log
from helmrec.traffic.importers import READERS
from helmrec.traffic.trace import Trace, index_histories
from helmrec.traffic.workload import Phase, Workload
from helmrec_bench.baselines.service_cost import service_cost
from helmrec_bench.experiments.results import plain
from helmrec_bench.judging.contest import Shown
from helmrec_bench.judging.first_times import OPENING_S
from helmrec_bench.judging.judge import Interval, interval, paired_change, with_refused
from helmrec_bench.lab.policies import started_policy
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import Store, finish
from helmrec_bench.measure.controller.cases import BUILD, CONTROLLER, SIMULATOR, Case
from helmrec_bench.report.files import markdown_table

ALPHAS = tuple(round(0.05 * step, 2) for step in range(1, 20))
SHARES = (0.85, 0.95, 1.0)  # of the best constant's limit
LOADS = tuple(round(0.5 + 0.05 * step, 2) for step in range(21))  # multiples of what was drawn
LIMIT_SEED, NUM_SEEDS = 100, 5
OURS, HOURS = "helm", 12  # four hours are twelve times twenty minutes
BACKLOG, LOG_S, LOG_POOL = 4_000, 1_200.0, 4 << 30
PAPER = (-0.24, -0.38)
KINDS = {
    "histories grow": (1201, 1211),
    "hours of a day": (1203, 1209),
    "catalogue turns over": (1205, 1217),
}


class LongCase(NamedTuple):
    """A drawn scenario at its own pace or slower, or a log."""

    title: str
    number: int  # of the test range
    times: int = 1
    log: str | None = None

    @property
    def name(self) -> str:
        what = self.log if self.log is not None else f"test {self.number} x {self.times}"
        return f"long {what} {SIMULATOR}"

    @property
    def length(self) -> str:
        return f"{20 * self.times} min" if self.times == 1 else f"{20 * self.times / 60:g} h"


class LongPiece(NamedTuple):
    """One run: a case at a load, a seed and a policy, whose name is `static:ALPHA` for a constant."""

    case: LongCase
    load: float
    seed: int
    policy: str

    @property
    def name(self) -> str:
        code = "" if self.policy.startswith("static:") else f" {CONTROLLER}"
        return f"{self.policy}{code} x {self.load:g} seed {self.seed} of {self.case.name}"


class LongScene(NamedTuple):
    """What a run is made of."""

    trace: Trace
    config: NodeConfig
    cost: CostModel

    def node_at(self, alpha: float) -> NodeConfig:
        return self.config.model_copy(update={"engine": self.config.engine.model_copy(update={"alpha": alpha})})


def slower(workload: Workload, times: int) -> Workload:
    """The same drift, so many times as slow: the opening and the rates stay."""
    users = workload.users.model_copy(update={"new_events": workload.users.new_events / times})
    phases = [
        phase
        if phase.name == "opening"
        else phase.model_copy(
            update={
                "duration_s": phase.duration_s * times,
                "drift_items_per_hour": phase.drift_items_per_hour / times,
            }
        )
        for phase in workload.phases
    ]
    return workload.model_copy(update={"users": users, "phases": tuple(phases)})


def denser(workload: Workload, load: float) -> Workload:
    def scaled(phase: Phase) -> Phase:
        low, high = phase.rate
        return phase.model_copy(update={"rate": (low * load, high * load)})

    return workload.model_copy(update={"phases": tuple(map(scaled, workload.phases))})


def lengthened(trace: Trace, num_events: int) -> Trace:
    """The trace with so many derived events before the first request of each user."""
    is_first = index_histories(trace).visit == 0
    num_new = trace.num_new + np.where(is_first, num_events, 0).astype(np.int32)
    return replace(trace, num_new=num_new, backlog=trace.backlog + np.int32(num_events))


@lru_cache(maxsize=1)
def long_scene(case: LongCase, load: float, seed: int) -> LongScene:
    if case.log is not None:
        return _logged(Path(case.log), load, seed)
    drawn = Case("test", case.number, 0, 1.0).drawn()
    return LongScene(generate(denser(slower(drawn.workload, case.times), load), seed), drawn.config, drawn.cost)


def _logged(path: Path, load: float, seed: int) -> LongScene:
    """A log in as much time as the load leaves it, on a node of the wide shape."""
    settings = ImportConfig(source="MovieTweetings", duration_s=LOG_S / load, num_candidates=1_000, seed=seed)
    trace = lengthened(trace_of_log(READERS["movietweetings"](path), settings), BACKLOG)
    trace = replace(trace, catalogue=trace.catalogue.model_copy(update={"seed": seed}))
    engine = EngineConfig(pool_bytes=ByteSize(LOG_POOL), max_batch_requests=8)
    config = NodeConfig(model=profile("wide", trace.catalogue.num_items), engine=engine, row_sample=1 / 16)
    return LongScene(trace, config, default_cost())


def run_piece(piece: LongPiece) -> dict[str, Any]:
    scene = long_scene(piece.case, piece.load, piece.seed)
    name, _, value = piece.policy.partition(":")
    if name == "static":
        alpha = float(value)
        if alpha > scene.config.alpha_max:
            return {"p99_ms": None, "mean_ms": None, "within_slo": 0.0, "slo_ms": scene.config.slo_ms, "alphas": []}
        result = simulate(scene.trace, scene.node_at(alpha), scene.cost, Static(StaticSettings(alpha=alpha)))
        return _figures(result)
    config = scene.node_at(UNTUNED_ALPHA)
    curves = record_curves(scene.trace, config, scene.cost, LOOK_EVERY)
    policy = started_policy(piece.policy, service_cost(scene.cost, config, scene.trace)).policy
    return _figures(simulate(scene.trace, config, scene.cost, Shown(policy, curves, tick_s=LOOK_EVERY)))


def _figures(result: SimResult) -> dict[str, Any]:
    """After the opening; refused requests count as ten seconds."""
    latency_ms = with_refused(result.outcomes.latency_ms)[result.arrived_s >= OPENING_S]
    alphas = [window.stats.alpha for window in result.windows]
    return {
        "num": int(latency_ms.size),
        "mean_ms": float(latency_ms.mean()),
        "p99_ms": float(np.percentile(latency_ms, 99)),
        "within_slo": float(np.mean(latency_ms <= result.slo_ms)),
        "slo_ms": result.slo_ms,
        "alphas": [round(alpha, 3) for alpha in alphas[:: max(1, len(alphas) // 20)]],
    }


RunPieces = Callable[[Sequence[LongPiece], str], Sequence[Mapping[str, Any]]]


class HeldLimit(NamedTuple):
    """The largest load that a constant holds."""

    load: float
    missed: dict[float, float]  # by alpha: the least load that was tried at which its P99 is beyond the SLO

    def may_hold(self, load: float) -> list[float]:
        """Return the constants that are not known to miss the SLO at this load, or at a smaller one."""
        return [alpha for alpha in ALPHAS if self.missed.get(alpha, np.inf) > load]


def limit_of(case: LongCase, run: RunPieces) -> HeldLimit | None:
    """Bisect the loads: one is held if a constant holds it. None if none holds the least one.

    Supposes that a constant that holds a load holds every smaller one.
    """
    left, missed = ALPHAS, dict[float, float]()
    low, high = -1, len(LOADS)
    while high - low > 1:
        middle = (low + high) // 2
        pieces = [LongPiece(case, LOADS[middle], LIMIT_SEED, f"static:{alpha:g}") for alpha in left]
        found = run(pieces, f"{case.title}, {case.length}: limit, load {LOADS[middle]:g}")
        held = [alpha for alpha, one in zip(left, found, strict=True) if _holds(one)]
        for alpha in set(left) - set(held):
            missed[alpha] = min(LOADS[middle], missed.get(alpha, np.inf))
        if held:
            low, left = middle, tuple(held)
        else:
            high = middle
    return HeldLimit(LOADS[low], missed) if low >= 0 else None


def _holds(one: Mapping[str, Any]) -> bool:
    return one["p99_ms"] is not None and bool(one["p99_ms"] <= one["slo_ms"])


def contest(case: LongCase, limit: HeldLimit, share: float, seeds: Sequence[int], run: RunPieces) -> dict[str, Any]:
    """Ours against every constant that may be the best at this share of the limit."""
    load = round(share * limit.load, 4)
    constants = [f"static:{alpha:g}" for alpha in (*limit.may_hold(load), UNTUNED_ALPHA)]
    policies = [*dict.fromkeys([*constants, OURS])]
    pieces = [LongPiece(case, load, seed, policy) for seed in seeds for policy in policies]
    found = dict(zip(pieces, run(pieces, f"{case.title}, {case.length}, {share:.0%} of the limit"), strict=True))
    by_policy = {name: [found[LongPiece(case, load, seed, name)] for seed in seeds] for name in policies}
    return {"load": load, "share": share, "seeds": len(seeds), **compared(by_policy), "runs": by_policy}


def compared(by_policy: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Ours over the best constant by P99, and by mean over the best one by that."""
    constants = [name for name, runs in by_policy.items() if name != OURS and all(one["p99_ms"] for one in runs)]

    def values(name: str, what: str) -> list[float]:
        return [float(one[what]) for one in by_policy[name]]

    best = {what: min(constants, key=lambda name: np.mean(values(name, what))) for what in ("p99_ms", "mean_ms")}
    p99 = paired_change(values(OURS, "p99_ms"), values(best["p99_ms"], "p99_ms"))
    untuned = values(f"static:{UNTUNED_ALPHA:g}", "p99_ms")
    return {
        "best_constant": best["p99_ms"],
        "best_p99_ms": float(np.mean(values(best["p99_ms"], "p99_ms"))),
        "our_p99_ms": float(np.mean(values(OURS, "p99_ms"))),
        "p99_change": _plainly(p99),
        "mean_change": _plainly(paired_change(values(OURS, "mean_ms"), values(best["mean_ms"], "mean_ms"))),
        "p99_over_untuned": _plainly(paired_change(values(OURS, "p99_ms"), untuned)),
        "within_slo": _plainly(interval(values(OURS, "within_slo"))),
        "best_within_slo": float(np.mean(values(best["p99_ms"], "within_slo"))),
        "verdict": verdict_of(p99),
    }


def _plainly(seen: Interval) -> dict[str, float]:
    return {"mean": seen.mean, "low": seen.low, "high": seen.high}


def verdict_of(change: Interval) -> str:
    """Whether the paper's fall of P99 is there, as far as the interval says."""
    if not np.isfinite(change.low):
        return "one seed: not judged"
    if change.high <= PAPER[0]:
        return "real"
    if change.low <= PAPER[0] and change.mean <= PAPER[0]:
        return "real on average"
    if change.high < 0:
        return "smaller gain"
    return "no difference shown" if change.low <= 0 else "worse"


def table(cases: Mapping[str, Any]) -> str:
    rows = []
    for one in cases.values():
        for each in one["contests"]:
            p99, mean = each["p99_change"], each["mean_change"]
            rows.append(
                [
                    one["title"],
                    one["length"],
                    f"{each['share']:.0%}",
                    each["best_constant"].removeprefix("static:"),
                    f"{each['best_p99_ms']:.0f} / {each['our_p99_ms']:.0f}",
                    _change(p99),
                    _change(mean),
                    f"{each['best_within_slo']:.1%} / {each['within_slo']['mean']:.1%}",
                    each["verdict"],
                ]
            )
    header = (
        *("what changes", "length", "load", "best constant", "P99 ms, it / ours", "P99", "mean", "in SLO, it / ours"),
        "the paper's -24 to -38%",
    )
    return markdown_table(header, rows)


def _change(seen: Mapping[str, float | None]) -> str:
    text = f"{seen['mean']:+.0%}"
    low, high = seen["low"], seen["high"]
    is_bounded = low is not None and high is not None and np.isfinite(low)
    return f"{text} ({low:+.0%} to {high:+.0%})" if is_bounded else text


def cases_of(flags: Namespace) -> list[LongCase]:
    numbers = {title: each[:1] if flags.quick else each for title, each in KINDS.items()}
    cases = [LongCase(title, number) for title, each in numbers.items() for number in each]
    if not flags.quick:
        cases += [LongCase(title, each[0], HOURS) for title, each in numbers.items()]
    if flags.log is not None:
        cases.append(LongCase("MovieTweetings, lengthened", 0, 1, str(flags.log)))
    return cases


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="one seed, one run of each kind, 20 minutes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--log", type=Path, help="ratings.dat of MovieTweetings")


def main(flags: Namespace) -> None:
    store = Store(BUILD / "long-runs.jsonl", "long runs")

    def run(pieces: Sequence[LongPiece], what: str) -> list[Any]:
        finish(pieces, run_piece, store, flags.processes, what)
        return [store.found[piece.name] for piece in pieces]

    seeds = range(1 if flags.quick else NUM_SEEDS)
    found: dict[str, Any] = {}
    for case in cases_of(flags):
        limit = limit_of(case, run)
        if limit is None:
            print(f"{case.title}, {case.length}: no constant holds the SLO at the least load", flush=True)
            continue
        contests = [contest(case, limit, share, list(seeds), run) for share in SHARES]
        found[f"{case.title}, {case.length}, {case.number}"] = {
            "title": case.title,
            "length": case.length,
            "number": case.number,
            "limit": limit.load,
            "missed": {f"{alpha:g}": load for alpha, load in sorted(limit.missed.items())},
            "contests": contests,
        }
        print(table(found), flush=True)
        write_measurement(flags.out, plain({"paper": PAPER, "shares": SHARES, "cases": found}))
