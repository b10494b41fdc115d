"""Policies against constant splits on simulated scenarios: drawn at random (`drawn`), and the frozen ones.

    helmrec bench run controller-trials                                # 36 scenarios of the validation range, one seed
    helmrec bench run controller-trials --range test --numbers 60 --seeds 3 --out docs/measurements/controller-test.json
    helmrec bench run controller-trials --range frozen --seeds 3 --out docs/measurements/controller-frozen.json
    helmrec bench run controller-trials --policies helm "helm base" "helm without bursts" --starts 0.1 0.5 0.9
    helmrec bench run controller-trials --range test --numbers 60 --kinds steady --loads 0.5 0.7 0.9 0.95
    helmrec bench run controller-trials --range test --numbers 60 --every 3 --scored-from 120 --wrong-costs

Constants lie on a grid of 0.05, and 0.03: every second one is run on the first seed, those within a quarter of the best
on all seeds, then those beside the two best. The best is the one with the least mean latency, in hindsight, over all
seeds. Everyone sees the same requests; a policy starts at one of `--starts` and looks at miss curves recorded once per
scenario and seed. The first minute is not counted, and the first burst is counted apart, against an untuned 0.5.
Finished pieces are kept in build/, so a run that was stopped goes on.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from helmrec.control.helm import Helm
from helmrec.control.policy import Limited
from helmrec.control.rebalancer import LOOK_EVERY
from helmrec.control.static import UNTUNED_ALPHA, Static, StaticSettings
from helmrec.costs.learned import Estimator
from helmrec.sim.node.config import prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import make_outcomes
from helmrec.sim.simulate import SimResult, simulate, summarise
from helmrec.steps import Step
from helmrec.traffic.trace import Trace
from helmrec_bench.baselines.service_cost import service_cost
from helmrec_bench.drawn import KINDS, RANGES, Drawn
from helmrec_bench.judging.contest import Shown
from helmrec_bench.judging.first_times import OPENING_S, is_in_burst
from helmrec_bench.lab.policies import started_policy
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import Store, finish
from helmrec_bench.measure.controller.cases import BUILD, FROZEN, Case, Finer, Trial, scene

COARSE = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FINE_STEP, LEAST, MOST = 0.05, 0.03, 0.95
NEAR_BEST = 1.25  # times the least mean latency of the first seed: what is above is not best over all seeds
WRONG, TAUGHT_S = " with ", 30.0
TERMS = {  # of `StageCosts`: the stage, and the work it is a price of
    "host_step_ms": (Step.HOST_MS, None),
    "host_request_ms": (Step.HOST_MS, Step.REQUESTS),
    "host_token_ms": (Step.HOST_MS, Step.TOKENS),
    "host_missed_row_ms": (Step.HOST_MS, Step.ROWS_MISSED),
    "rows_step_ms": (Step.ROWS_MS, None),
    "read_row_ms": (Step.ROWS_MS, Step.ROWS_READ),
    "missed_row_ms": (Step.ROWS_MS, Step.ROWS_MISSED),
    "compute_step_ms": (Step.COMPUTE_MS, None),
    "token_ms": (Step.COMPUTE_MS, Step.TOKENS),
    "pair_ms": (Step.COMPUTE_MS, Step.PAIRS),
}


def sweep(case: Case) -> dict[str, Any]:
    """Scores of constants on the coarse grid, by alpha."""
    return sweep_finer(Finer(case, COARSE))


def sweep_finer(finer: Finer) -> dict[str, Any]:
    drawn, trace = scene(finer.case)
    return {
        f"{alpha:g}": score(
            drawn, simulate(trace, drawn.node_at(alpha), drawn.cost, Static(StaticSettings(alpha=alpha)))
        )
        for alpha in finer.alphas
        if alpha <= drawn.config.alpha_max
    }


def near_best(scores: dict[str, Any]) -> tuple[float, ...]:
    """Splits of the coarse grid that may be best over all seeds, by the scores of one; and the untuned one."""
    most_ms = NEAR_BEST * min(one["mean_ms"] for one in scores.values())
    return tuple(
        alpha
        for alpha, one in ((float(name), one) for name, one in scores.items())
        if one["mean_ms"] <= most_ms or alpha == UNTUNED_ALPHA
    )


def beside_best(scores: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Splits of the fine grid next to the two that are best over these seeds."""
    best = sorted(_in_all(scores), key=lambda alpha: _mean(scores, alpha, "mean_ms"))[:2]
    around = {round(float(alpha) + side, 2) for alpha in best for side in (-FINE_STEP, FINE_STEP)}
    return tuple(sorted(alpha for alpha in around - set(COARSE) if LEAST <= alpha <= MOST))


def judge(trial: Trial) -> dict[str, Any]:
    drawn, trace = scene(trial.case)
    config = drawn.node_at(trial.start)
    name, _, wrong = trial.policy.partition(WRONG)
    policy = started_policy(name, service_cost(drawn.cost, config, trace)).policy
    if wrong:
        assert isinstance(policy, Limited) and isinstance(policy.policy, Helm)
        teach_wrong(policy.policy, wrong, drawn, trace)
    shown = Shown(policy, trial.case.curves(), tick_s=LOOK_EVERY)
    result = simulate(trace, config, drawn.cost, shown)
    alphas = [window.stats.alpha for window in result.windows]
    path = [round(alpha, 3) for alpha in alphas[:: max(1, len(alphas) // 20)]]
    details = {"alphas": path, "decision_us": shown.decision_us, "prediction_error": shown.prediction_error(OPENING_S)}
    return {**score(drawn, result), **details}


def teach_wrong(policy: Helm, wrong: str, drawn: Drawn, trace: Trace) -> None:
    """Let a controller learn from half a minute of steps in which one term is a multiple of the true one."""
    term, _, factor = wrong.partition(" x ")
    stage, work = TERMS[term]
    node = Node(drawn.config, drawn.cost, prepare_requests(trace, drawn.config), make_outcomes(trace.num_requests))
    node.send(np.arange(trace.num_requests), trace.time_s)
    node.run_until(TAUGHT_S)
    steps, true = node.take_steps(), Estimator()
    true.update(steps)
    if true.costs is not None:  # else too few steps to have learned anything
        amount = 1.0 if work is None else steps[:, work]
        steps[:, stage] += (float(factor) - 1) * getattr(true.costs, term) * amount
        policy.model.estimator.update(steps)


def score(drawn: Drawn, result: SimResult) -> dict[str, float]:
    counted = result.arrived_s >= drawn.scored_from_s
    details: dict[str, float] = {}
    if drawn.bursts_s:
        is_first = is_in_burst(result.arrived_s, *drawn.bursts_s[0])
        details = {f"first_burst_{name}": value for name, value in _figures(result, is_first).items()}
        counted &= ~is_first
    return {**details, **_figures(result, counted)}


def _figures(result: SimResult, chosen: NDArray[np.bool_]) -> dict[str, float]:
    found = summarise(result.outcomes, chosen, result.slo_ms)
    return {
        "num": found.num_requests,
        "mean_ms": found.mean_ms,
        "p99_ms": found.p99_ms,
        "within_slo": found.slo_satisfaction,
    }


def compare(scores: Sequence[dict[str, Any]], constants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One scenario over its seeds: the policy's figures over those of the best constant."""
    best = min(_in_all(constants), key=lambda alpha: _mean(constants, alpha, "mean_ms"))
    mean_ms, p99_ms, within = (
        _mean([{"": one} for one in scores], "", name) for name in ("mean_ms", "p99_ms", "within_slo")
    )
    details = {
        "best_constant": float(best),
        "mean_ms": mean_ms,
        "mean_over_best": mean_ms / _mean(constants, best, "mean_ms") - 1,
        "p99_over_best": p99_ms / _mean(constants, best, "p99_ms") - 1,
        "within_slo_less_best": within - _mean(constants, best, "within_slo"),
        "untuned_over_best": _mean(constants, f"{UNTUNED_ALPHA:g}", "mean_ms") / _mean(constants, best, "mean_ms") - 1,
        "alphas": scores[0]["alphas"],
        "decision_p99_us": max(one["decision_us"][1] for one in scores),
        "prediction_error": scores[0]["prediction_error"],
    }
    if "first_burst_p99_ms" in scores[0]:
        first_ms = np.mean([one["first_burst_p99_ms"] for one in scores])
        untuned_ms = _mean(constants, f"{UNTUNED_ALPHA:g}", "first_burst_p99_ms")
        details["first_burst_p99_over_untuned"] = float(first_ms / untuned_ms - 1)
    return details


def _in_all(scores: Sequence[dict[str, Any]]) -> list[str]:
    return [alpha for alpha in scores[0] if all(alpha in one for one in scores)]


def _mean(scores: Sequence[dict[str, Any]], alpha: str, name: str) -> float:
    """Over seeds, by the number of requests."""
    return float(np.average([one[alpha][name] for one in scores], weights=[one[alpha]["num"] for one in scores]))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    mean = np.array([row["mean_over_best"] for row in rows])
    p99 = np.array([row["p99_over_best"] for row in rows])
    return {
        "scenarios": len(rows),
        "mean_within_5": float(np.mean(mean <= 0.05)),
        "p99_within_5": float(np.mean(p99 <= 0.05)),
        "p99_within_10": float(np.mean(p99 <= 0.10)),
        "worst_mean": float(mean.max()),
        "worst_p99": float(p99.max()),
        "average_mean": float(mean.mean()),
        "average_p99": float(p99.mean()),
        "least_within_slo_less_best": min(row["within_slo_less_best"] for row in rows),
        "decision_p99_us": max(row["decision_p99_us"] for row in rows),
        "prediction_error": float(np.median([row["prediction_error"] or 0.0 for row in rows])),
    }


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    names = ("scenario", "best constant", "mean", "P99", "within SLO", "untuned 0.5", "first burst", "alpha")
    table = Table(*names, title=title)
    for name, row in rows.items():
        first = row.get("first_burst_p99_over_untuned")
        path = " ".join(f"{alpha:.2f}" for alpha in row["alphas"][::4])
        table.add_row(
            name,
            f"{row['best_constant']:g}",
            f"{row['mean_over_best']:+.1%}",
            f"{row['p99_over_best']:+.1%}",
            f"{100 * row['within_slo_less_best']:+.2f}",
            f"{row['untuned_over_best']:+.1%}",
            "" if first is None else f"{first:+.0%}",
            path,
        )
    console = Console(width=140)
    console.print(table)
    for name, value in summary(list(rows.values())).items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


def by_kind(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Average over the scenarios of each kind, with a 95% interval."""
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted({row["kind"] for row in rows.values()}):
        own = [row for row in rows.values() if row["kind"] == kind]
        found[kind] = {"scenarios": len(own)}
        for name in ("mean_over_best", "p99_over_best"):
            found[kind][name] = interval([row[name] for row in own])
    return found


def against(rows: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How much longer the mean latency of `rows` is than ours, by kind; above 0: ours is shorter."""
    longer = {name: row["mean_ms"] / ours[name]["mean_ms"] - 1 for name, row in rows.items()}
    kinds = sorted({row["kind"] for row in rows.values()})
    return {kind: interval([longer[name] for name, row in rows.items() if row["kind"] == kind]) for kind in kinds}


def interval(values: Sequence[float]) -> dict[str, float]:
    """Average and its 95% interval (bootstrap over scenarios)."""
    seen = np.array(values)
    drawn = seen[np.random.default_rng(0).integers(seen.size, size=(2_000, seen.size))].mean(axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {"average": float(seen.mean()), "low": float(low), "high": float(high)}


def cases_of(args: Namespace) -> dict[str, list[Case]]:
    """By scenario and load, one per seed."""
    if args.which == "frozen":
        numbers = list(range(len(FROZEN)))
    else:
        numbers = list(range(0, args.numbers, args.every))
        numbers = [number for number in numbers if not args.kinds or KINDS[number % len(KINDS)][0] in args.kinds]
    return {
        f"{number} {load}": [Case(args.which, number, seed, load, args.scored_from) for seed in range(args.seeds)]
        for number in numbers
        for load in args.loads or [None]
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--range", dest="which", choices=(*RANGES, "frozen"), default="validation")
    parser.add_argument("--numbers", type=int, default=36, help="scenarios, from the first on; all of the frozen ones")
    parser.add_argument("--every", type=int, default=1, help="only every so many of them")
    parser.add_argument("--kinds", nargs="+", help="only these kinds of drawn scenarios")
    parser.add_argument("--loads", type=float, nargs="+", help="shares of the capacity, in place of those drawn")
    parser.add_argument("--scored-from", type=float, default=OPENING_S, help="second from which requests count")
    parser.add_argument("--wrong-costs", action="store_true", help="halve and double each cost at the start")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=["helm"], help="as experiments name them")
    parser.add_argument("--starts", type=float, nargs="+", default=[UNTUNED_ALPHA], help="alpha at the start")
    parser.add_argument("--processes", type=int, default=2)


def run_constants(
    cases: dict[str, list[Case]], store: Store, processes: int
) -> dict[str, list[dict[str, dict[str, float]]]]:
    """Scores by alpha, of each seed, by scenario."""
    finish([own[0] for own in cases.values()], sweep, store, processes, "constants")
    scores = {number: [store.found[own[0].name]] for number, own in cases.items()}
    others = {number: [Finer(case, near_best(scores[number][0])) for case in own[1:]] for number, own in cases.items()}
    finish([one for own in others.values() for one in own], sweep_finer, store, processes, "constants, other seeds")
    for number, own in others.items():
        scores[number] += [store.found[one.name] for one in own]
    finer = {number: [Finer(case, beside_best(scores[number])) for case in own] for number, own in cases.items()}
    finish([one for own in finer.values() for one in own], sweep_finer, store, processes, "finer constants")
    return {
        number: [score | store.found[one.name] for score, one in zip(scores[number], own, strict=True)]
        for number, own in finer.items()
    }


def main(flags: Namespace) -> None:
    if flags.wrong_costs:
        wrong = [f"{term} x {factor}" for term in TERMS for factor in ("0.5", "2")]
        flags.policies = [f"{policy}{WRONG}{one}" for policy in flags.policies for one in wrong]
    cases = cases_of(flags)
    store = Store(BUILD / "controller-trials.jsonl", "2")
    constants = run_constants(cases, store, flags.processes)
    entered = {
        f"{policy} from {start:g}": {
            number: [Trial(case, policy, start) for case in own] for number, own in cases.items()
        }
        for policy in flags.policies
        for start in flags.starts
    }
    everyone = [trial for trials in entered.values() for own in trials.values() for trial in own]
    finish(everyone, judge, store, flags.processes, "policies")
    found: dict[str, Any] = {}
    for title, trials in entered.items():
        rows: dict[str, dict[str, Any]] = {}
        for number, own in trials.items():
            drawn = scene(own[0].case)[0]
            name = drawn.name if own[0].case.load is None else f"{drawn.name} at {drawn.load:g}"
            rows[name] = {"kind": drawn.kind, **compare([store.found[one.name] for one in own], constants[number])}
        show(title, rows)
        found[title] = {
            "summary": summary(list(rows.values())),
            "kinds": by_kind(rows),
            "mean_over_first_policy": against(rows, next(iter(found.values()))["scenarios"] if found else rows),
            "scenarios": rows,
        }
    if flags.out is not None:
        write_measurement(flags.out, {"range": flags.which, "seeds": flags.seeds, "policies": found})
