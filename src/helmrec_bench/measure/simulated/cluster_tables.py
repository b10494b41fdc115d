"""Tables of docs/cluster.md from the runs of `helmrec bench run cluster`."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from helmrec_bench.report.files import markdown_table

ROUTERS = (
    *("emb-kv-aware", "kv-aware", "emb-aware", "dynamo-style"),
    *("session-hash", "least-loaded", "power-of-two", "random"),
)
Runs = dict[str, Any]


def of_part(runs: Runs, wanted: str) -> Iterator[tuple[list[str], Any]]:
    """Runs of a part of the measurement, each with the rest of its name."""
    for name, run in runs.items():
        part, *place = name.split("/")
        if part == wanted:
            yield place, run


def routers(runs: Runs) -> None:
    cells: dict[tuple[str, str], dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for (preset, kind, router, seed), run in of_part(runs, "routers"):
        cells[preset, kind][router][int(seed)] = run
    won = 0
    for (preset, kind), by_router in cells.items():
        seeds = sorted(set.intersection(*(set(of) for of in by_router.values())))
        print(f"\n**{preset}, {kind}** ({len(seeds)} paired seeds)\n")
        lines = []
        p99 = {r: np.array([by_router[r][s]["p99_ms"] for s in seeds]) for r in ROUTERS if r in by_router}
        for router, tail in p99.items():
            values = {k: np.mean([by_router[router][s][k] for s in seeds]) for k in by_router[router][seeds[0]]}
            error = tail.std(ddof=1) / np.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
            shares = [f"{values[name]:.1%}" for name in ("slo_satisfaction", "kv_hit", "emb_hit")]
            lines.append([router, f"{values['p99_ms']:.1f} ± {error:.1f}", f"{values['mean_ms']:.2f}", *shares])
        print(markdown_table(["router", "p99 ms", "mean ms", "in SLO", "KV hit", "EMB hit"], lines))
        baseline = min((r for r in p99 if r != "emb-kv-aware"), key=lambda r: p99[r].mean())
        change = p99["emb-kv-aware"] / p99[baseline] - 1
        won += bool(change.mean() < 0)
        by_seed = ", ".join(f"{each:+.1%}" for each in change)
        print(f"\nBest baseline by P99: {baseline}; ours {change.mean():+.1%} (by seed {by_seed}).")
    print(f"\nBest in {won} of {len(cells)} cells.")


def stale(runs: Runs) -> None:
    by_age: dict[str, dict[str, Any]] = defaultdict(dict)
    for (age, seed), run in of_part(runs, "stale"):
        by_age[age][seed] = run
    for age, by_seed in by_age.items():
        seeds = sorted(by_seed.keys() & by_age["fresh"].keys())
        cost = [by_seed[s]["p99_ms"] / by_age["fresh"][s]["p99_ms"] - 1 for s in seeds]
        print(f"stale: {age}: P99 {np.mean([by_seed[s]['p99_ms'] for s in seeds]):.2f} ms, {np.mean(cost):+.1%} {cost}")


def joint(runs: Runs) -> None:
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for (policy, router, seed), run in of_part(runs, "joint"):
        found[policy, router][seed] = run["p99_ms"]
    for (policy, router), by_seed in sorted(found.items(), key=lambda item: np.mean(list(item[1].values()))):
        print(f"joint: {policy:14s} {router:14s} {np.mean(list(by_seed.values())):8.2f} ms over {len(by_seed)} seeds")


def show_tables(runs: Runs) -> None:
    for part in (routers, stale, joint):
        part(runs)
