"""Draws docs/measurements/gpu-adaptive-h200.json: alpha over time, mean and P99 of constants and controller.

python -m scripts.gpu_adaptive_plot
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

FILE, PLOT = Path("docs/measurements/gpu-adaptive-h200.json"), Path("docs/images/adaptive-h200.png")
ALPHAS = tuple(round(0.1 * i, 1) for i in range(1, 10))


def plot(path: Path) -> None:
    cells = json.loads(path.read_text())["set_ups"]
    figure, axes = plt.subplots(3, len(cells), figsize=(5.5 * len(cells), 9), squeeze=False)
    for column, (rows, cell) in enumerate(cells.items()):
        above, start_s = axes[0][column], 0.0
        for stretch in cell["stretches"]:
            above.text(start_s + 0.1, 0.94, stretch["name"], fontsize=8)
            above.axvline(start_s, color="grey", linewidth=0.5)
            start_s += stretch["share_of_run"] * cell["duration_s"]
        times, alphas = zip(*cell["policies"]["adaptive"]["alpha_over_time"], strict=True)
        above.plot(times, alphas, label="adaptive")
        above.axhline(
            cell["best_constant_by_capacity"], linestyle="--", color="grey", label="best constant by capacity"
        )
        above.set(ylim=(0, 1), xlabel="s", ylabel="alpha", title=f"{rows} row{'s' * (rows != '1')} a token")
        above.legend(fontsize=7, loc="lower left")
        constants = [(a, cell["policies"].get(f"static {a:g}")) for a in ALPHAS]
        for axis, key, name in ((axes[1][column], "mean_ms", "mean"), (axes[2][column], "p99_ms", "P99")):
            known = [(a, one[key]) for a, one in constants if one is not None and one[key] is not None]
            axis.plot(*zip(*known, strict=True), "o-", label="constants")
            if (ours_ms := cell["policies"]["adaptive"][key]) is not None:
                axis.axhline(ours_ms, color="C1", label="adaptive, from 0.5")
            axis.set(xlabel="alpha", ylabel=f"{name} of the whole run, ms", ylim=(0, None))
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    print(f"wrote {PLOT}")


if __name__ == "__main__":
    plot(FILE)
