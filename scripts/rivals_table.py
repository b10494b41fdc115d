"""The rivals' figures as the Markdown tables of docs/rivals.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLUMNS = (
    "policy", "mean ms", "P99 ms", "P99 against best static", "in SLO", "regret, quasi-static", "regret, oracle", "gap",
    "in band", "largest load", "decision µs, p50 / p99",
)  # fmt: skip


def as_markdown(tables: Mapping[str, Any]) -> str:
    return "\n".join(_table(name, found) for name, found in tables.items())


def _table(name: str, found: Mapping[str, Any]) -> str:
    stars = found["alpha_star"]
    head = f"### {name}\n\nalpha* from {min(stars):g} to {max(stars):g}.\n"
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += [_line(policy, row) for policy, row in found["policies"].items()]
    return "\n".join((head, *lines, ""))


def _line(policy: str, row: Mapping[str, Any]) -> str:
    change, load = row["p99_change"], row["largest_load"]
    cells = (
        "static, tuned on another day" if policy == "static" else policy,
        _spread(row["mean_ms"], 1),
        _spread(row["p99_ms"], 0),
        f"{change['mean']:+.0%}" + _ends(change),
        f"{row['slo_satisfaction']['mean']:.1%}",
        f"{row['regret_quasi_static']:+.1%}",
        f"{row['regret_switching']:+.1%}",
        f"{row['gap']:.3f}",
        f"{row['share_inside']:.0%}",
        "-" if load is None else f"{load:.2f}",
        f"{row['decision_us'][0]:.0f} / {row['decision_us'][1]:.0f}" if row["decision_us"][0] else "-",
    )
    return "| " + " | ".join(cells) + " |"


def _spread(interval: Mapping[str, float | None], digits: int) -> str:
    """A mean and half its interval; a single seed has none."""
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    return f"{mean:.{digits}f}" + ("" if low is None or high is None else f" ± {(high - low) / 2:.{digits}f}")


def _ends(interval: Mapping[str, float | None]) -> str:
    low, high = interval["low"], interval["high"]
    return "" if low is None or high is None else f" ({low:+.0%} to {high:+.0%})"


if __name__ == "__main__":
    print(as_markdown(json.loads(Path("docs/measurements/rivals.json").read_text())["variants"]))
