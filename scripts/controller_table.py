"""The tables of docs/controller.md from docs/measurements/controller.json.

python -m scripts.controller_table
"""

import json
from pathlib import Path
from typing import Any

FILE = Path("docs/measurements/controller.json")
SHOWN = ("best constant in hindsight", "oracle, moves paid", "helm", "miss-curve argmin", "untuned 0.5")


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:+.{digits}f}%"


def results(scenarios: dict[str, Any]) -> None:
    """A line per scenario and policy."""
    print(
        "| scenario | policy | mean ms | P99 ms | P99 against best constant (95%) | in SLO | regret | gap | in band |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, found in scenarios.items():
        for policy in SHOWN:
            one = found["policies"][policy]
            change = one["p99_change"]
            is_best = policy.startswith("best")
            against = (
                "" if is_best else f"{percent(change['mean'])} ({percent(change['low'])} to {percent(change['high'])})"
            )
            label = f"best constant ({found['best_constant']:g})" if is_best else policy
            print(
                f"| {name if is_best else ''} | {label} | {one['mean_ms']['mean']:.1f} | {one['p99_ms']['mean']:.1f} "
                f"| {against} | {one['slo_satisfaction']['mean']:.2%} | {percent(one['regret_switching'])} "
                f"| {one['gap_to_oracle_path']:.3f} | {one['share_inside']:.0%} |"
            )


def ablations(scenarios: dict[str, Any]) -> None:
    """Regret and P99 of every variant; scenarios in columns."""
    names = list(scenarios)
    policies = [p for p in scenarios[names[0]]["policies"] if p not in {"untuned 0.5", "best constant in hindsight"}]
    print("| | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for policy in policies:
        rows = [scenarios[name]["policies"][policy] for name in names]
        cells = [f"{percent(one['regret_switching'])} / {percent(one['p99_change']['mean'])}" for one in rows]
        print(f"| {policy} | " + " | ".join(cells) + " |")


def bounds(scenarios: dict[str, Any]) -> None:
    """What is asked of the controller, scenario by scenario."""
    print("| scenario | oracle's P99 gain | had | oracle's mean gain | had | P99 bound (95%) | GB: constant / helm |")
    print("|---|---|---|---|---|---|---|")
    for name, found in scenarios.items():
        rows = found["policies"]
        best, helm, oracle = (rows[p] for p in ("best constant in hindsight", "helm", "oracle, moves paid"))
        mean = oracle["mean_ms"]["mean"] / best["mean_ms"]["mean"] - 1
        moved = [sum(one["gb_by_cause"].values()) for one in (best, helm)]
        print(
            f"| {name} | {percent(oracle['p99_change']['mean'])} | {share(helm['share_of_oracle_p99_gain'])} "
            f"| {percent(mean)} | {share(helm['share_of_oracle_mean_gain'])} | {percent(helm['p99_change']['high'])} "
            f"| {moved[0]:.0f} / {moved[1]:.0f} |"
        )


def share(value: float | None) -> str:
    return "below 1%" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    known = json.loads(FILE.read_text())["scenarios"]
    results(known)
    print()
    bounds(known)
    print()
    ablations(known)
