"""`helmrec simulate`: compare policies on a scenario."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Column, Table

from helmrec.cli.console import check_writable, err, exit_on_error, out, progress
from helmrec.policies import simulated_policy_names

if TYPE_CHECKING:
    from helmrec.sim.scenario import Scenario
    from helmrec.sim.simulate import SimResult

_FIGURES = ("mean_ms", "p50_ms", "p99_ms", "slo_satisfaction", "token_reuse_rate", "missed_rows_per_request")


def run_simulate(
    path: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A scenario as TOML, or the name of an installed one.")
    ],
    policies: Annotated[
        list[str], typer.Option("--policy", help=f"static:ALPHA, {', '.join(simulated_policy_names())}; may repeat.")
    ],
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0 on.", min=1)] = 1,
    report: Annotated[
        Path | None, typer.Option("--out", help="Write the results as JSON.", show_default="not written")
    ] = None,
) -> None:
    """Simulate a node on a scenario under one or more policies and compare them."""
    from helmrec.sim.scenario import find_scenario, load_scenario

    with exit_on_error():
        check_writable("--out", report)
        scenario = load_scenario(find_scenario(path))
        with progress() as bar:
            task = bar.add_task("simulating", total=None)
            runs = {
                policy: [
                    _run(scenario, policy, seed, lambda done, total: bar.update(task, completed=done, total=total))
                    for seed in range(seeds)
                ]
                for policy in policies
            }
        out.print(_table(scenario, runs))
        for policy in _not_full(scenario, runs):
            err.print(f"{policy}: a cache was still filling up at the end of the warm-up; use a longer warm_up_s")
        if report is not None:
            report.write_text(json.dumps(_as_json(scenario, runs), indent=2) + "\n")


def _run(scenario: Scenario, policy: str, seed: int, on_tick: Callable[[float, float], None]) -> SimResult:
    from helmrec.control.static import Static, StaticSettings
    from helmrec.sim.policies import find_policy
    from helmrec.sim.simulate import Options, simulate

    trace, cost, chosen = scenario.make_trace(seed), scenario.cost(), find_policy(policy)
    config = scenario.node_config(trace)
    options = Options(
        faults=scenario.faults.compiled(),
        has_curves=chosen.needs_curves,
        on_tick=lambda now_s: on_tick(now_s, trace.duration_s),
    )
    decider = chosen.make(cost, config, trace)
    start = StaticSettings(alpha=config.engine.alpha)
    if isinstance(decider, Static):  # a node with a constant split starts at it
        start = decider.settings
    engine = config.engine.model_copy(update={"alpha": start.alpha})
    return simulate(trace, config.model_copy(update={"engine": engine}), cost, decider, scenario.tick_s, options)


def _figures(scenario: Scenario, results: list[SimResult]) -> dict[str, list[float]]:
    summaries = [asdict(result.summary(scenario.warm_up_s)) for result in results]
    return {name: [float(summary[name]) for summary in summaries] for name in (*_FIGURES, "num_refused")}


def _table(scenario: Scenario, runs: dict[str, list[SimResult]]) -> Table:
    """Means over seeds, and the spread of the mean where there is more than one."""
    first = next(iter(runs.values()))
    num_requests = sum(result.arrived_s.size for result in first)
    title = f"{scenario.name}: {num_requests:,} requests, {len(first)} seeds, costs of {first[0].calibration}"
    table = Table(
        Column("policy", no_wrap=True),
        "mean ms",
        "p50",
        "p99",
        "in SLO",
        "reuse",
        "rows missed",
        "last alpha",
        title=title,
    )
    for policy, results in runs.items():
        figures = _figures(scenario, results)
        last = np.mean([result.pool.alpha for result in results])
        cells = (f"{np.mean(figures[name]):.2f}{_spread(figures[name])}" for name in _FIGURES[:3])
        slo, reuse, missed = (float(np.mean(figures[name])) for name in _FIGURES[3:])
        table.add_row(policy, *cells, f"{slo:.2%}", f"{reuse:.1%}", f"{missed:,.0f}", f"{last:.3f}")
    return table


def _not_full(scenario: Scenario, runs: dict[str, list[SimResult]]) -> list[str]:
    """Policies with a run in which a cache had not evicted by the end of the warm-up."""
    return [
        policy
        for policy, results in runs.items()
        if any(run.evicting_from_s is None or run.evicting_from_s > scenario.warm_up_s for run in results)
    ]


def _spread(values: list[float]) -> str:
    return f" ±{np.std(values, ddof=1) / np.sqrt(len(values)):.2f}" if len(values) > 1 else ""


def _as_json(scenario: Scenario, runs: dict[str, list[SimResult]]) -> dict[str, Any]:
    return {
        "scenario": scenario.model_dump(mode="json"),
        "policies": {
            policy: {
                "calibration": results[0].calibration,
                "by_seed": _figures(scenario, results),
                "bytes_by_cause": [result.pool.bytes_by_cause for result in results],
                "window_end_s": [[w.stats.traffic.end_s for w in result.windows] for result in results],
                "alpha_by_window": [[round(w.stats.alpha, 4) for w in result.windows] for result in results],
            }
            for policy, results in runs.items()
        },
    }
