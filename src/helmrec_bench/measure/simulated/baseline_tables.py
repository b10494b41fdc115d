"""The baselines' figures as the Markdown tables of docs/baselines.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from helmrec_bench.report.files import markdown_table

_COLUMNS = (
    "policy", "mean ms", "P99 ms", "P99 against best static", "in SLO", "regret, quasi-static", "regret, oracle", "gap",
    "in band", "decision µs, p50 / p99",
)  # fmt: skip


def as_markdown(tables: Mapping[str, Any], loads: Mapping[str, Any]) -> str:
    parts = [_loads(loads)] if loads else []
    return "\n".join((*parts, *(_table(name, found) for name, found in tables.items())))


def _loads(loads: Mapping[str, Any]) -> str:
    """Policies by scenario; shares of the best constant's largest load, over seeds."""
    names = dict.fromkeys(one for found in loads.values() for one in found["share_of_best_static"])
    heads = [f"{name} ({len(found['best_static'])} seeds)" for name, found in loads.items()]
    lines = []
    for name in names:
        shares = [found["share_of_best_static"].get(name) for found in loads.values()]
        cells = ["-" if share is None else _spread(share, 2) for share in shares]
        lines.append([_shown(name), *cells])
    return f"### Largest load within the SLO\n\n{markdown_table(['policy', *heads], lines)}\n"


def _shown(policy: str) -> str:
    return "static, tuned on another day" if policy == "static" else policy


def _table(name: str, found: Mapping[str, Any]) -> str:
    stars = found["alpha_star"]
    head = f"### {name}\n\nalpha* from {min(stars):g} to {max(stars):g}.\n"
    lines = [_line(policy, row) for policy, row in found["policies"].items()]
    return f"{head}\n{markdown_table(_COLUMNS, lines)}\n"


def _line(policy: str, row: Mapping[str, Any]) -> Sequence[str]:
    change = row["p99_change"]
    return (
        _shown(policy),
        _spread(row["mean_ms"], 1),
        _spread(row["p99_ms"], 0),
        f"{change['mean']:+.0%}" + _ends(change),
        f"{row['slo_satisfaction']['mean']:.1%}",
        f"{row['regret_quasi_static']:+.1%}",
        f"{row['regret_switching']:+.1%}",
        f"{row['gap']:.3f}",
        f"{row['share_inside']:.0%}",
        f"{row['decision_us'][0]:.0f} / {row['decision_us'][1]:.0f}" if row["decision_us"][0] else "-",
    )


def _spread(interval: Mapping[str, float | None], digits: int) -> str:
    """A mean and half its interval; a single seed has none."""
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    return f"{mean:.{digits}f}" + ("" if low is None or high is None else f" ± {(high - low) / 2:.{digits}f}")


def _ends(interval: Mapping[str, float | None]) -> str:
    low, high = interval["low"], interval["high"]
    return "" if low is None or high is None else f" ({low:+.0%} to {high:+.0%})"
