"""Plots of docs/measurements/controller.json: alpha against the oracle's path, error over time, P99, bytes by cause.

python -m scripts.controller_plots            # draws docs/images/controller-{paths,p99,bytes}.png
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from helmrec.bench.contest import WINDOW_S

FILE, FOLDER = Path("docs/measurements/controller.json"), Path("docs/images")


def paths(scenarios: dict[str, Any]) -> None:
    """Where alpha was, where the oracle had it, and how far apart they were."""
    names = [name for name in scenarios if name.startswith("main")]
    figure, axes = plt.subplots(2, len(names), figsize=(3.2 * len(names), 5), squeeze=False, sharey="row")
    for column, name in enumerate(names):
        found = scenarios[name]
        seconds = (np.arange(len(found["oracle_path"])) + 0.5) * WINDOW_S
        low, high = np.array(found["band"]).T
        above, below = axes[0][column], axes[1][column]
        above.fill_between(seconds, low, high, alpha=0.2, label="regret below 1%")
        above.plot(seconds, found["oracle_path"], "k--", label="oracle, moves paid")
        for policy in ("helm", "base only"):
            above.plot(seconds, found["policies"][policy]["alphas"], label=policy)
            below.plot(seconds, found["policies"][policy]["error_over_time"], label=policy)
        above.set(title=name, ylim=(0, 1))
        below.set(xlabel="s", ylim=(0, 0.35))
    axes[0][0].set_ylabel("alpha")
    axes[1][0].set_ylabel("|alpha - oracle's|")
    axes[0][0].legend(fontsize=7)
    save(figure, "controller-paths.png")


def p99(scenarios: dict[str, Any]) -> None:
    """Against the best constant in hindsight, with the interval over paired seeds."""
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(scenarios) + 1.2))
    shown = (("helm", "o", 0.0), ("oracle, moves paid", "x", 0.18))
    for policy, mark, down in shown:
        changes = [one["policies"][policy]["p99_change"] for one in scenarios.values()]
        means = np.array([change["mean"] for change in changes]) * 100
        ends = np.array([(c["mean"] - c["low"], c["high"] - c["mean"]) for c in changes]).T * 100
        axis.errorbar(means, np.arange(len(means)) + down, xerr=ends, fmt=mark, label=policy, capsize=2)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.axvline(5, color="C3", linestyle=":", linewidth=0.8)
    axis.set(yticks=range(len(scenarios)), yticklabels=list(scenarios), xlabel="P99 against the best constant, %")
    axis.set_xlim(-20, 20)
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    save(figure, "controller-p99.png")


def moved(scenarios: dict[str, Any]) -> None:
    """Gigabytes by cause, the controller's beside the best constant's."""
    figure, axis = plt.subplots(figsize=(10, 4))
    causes = sorted({c for one in scenarios.values() for c in one["policies"]["helm"]["gb_by_cause"]})
    for side, policy in enumerate(("best constant in hindsight", "helm")):
        below = np.zeros(len(scenarios))
        for number, cause in enumerate(causes):
            height = np.array([one["policies"][policy]["gb_by_cause"].get(cause, 0.0) for one in scenarios.values()])
            label = cause if side == 0 else None
            axis.bar(
                np.arange(len(scenarios)) + 0.4 * side, height, 0.36, bottom=below, color=f"C{number}", label=label
            )
            below += height
    axis.set(ylabel="GB in the run: best constant left, helm right")
    axis.set_xticks(np.arange(len(scenarios)) + 0.2, list(scenarios), rotation=60, ha="right", fontsize=7)
    axis.legend(fontsize=7)
    save(figure, "controller-bytes.png")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / name, dpi=110)
    print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    known = json.loads(FILE.read_text())["scenarios"]
    paths(known)
    p99(known)
    moved(known)
