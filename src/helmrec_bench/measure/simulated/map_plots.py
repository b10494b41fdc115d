"""Pictures of the map: capacity over the split, what a wrong split costs, and what moving it gains."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helmrec_bench.map.load_curve import LoadCurve
from helmrec_bench.report.files import picture

_BLUE, _ORANGE, _GREY, _GREEN = "#2563a8", "#d9702b", "#8a8f98", "#2f8f5b"
_COLOURS = {"returning": _BLUE, "browsing": _ORANGE, "flood": _GREY}


def plot_map(found: Mapping[str, Any], folder: Path) -> None:
    with picture(folder / "map-capacity.png", (13, 8.5)) as figure:
        _capacity(figure, found["cells"])
    with picture(folder / "map-penalty.png", (12, 6)) as figure:
        _penalty(figure, found["cells"])
    with picture(folder / "map-gain.png", (12, 9)) as figure:
        _gain(figure, found["shifts"])


def cell_title(cell: Mapping[str, Any]) -> str:
    bus = "" if cell["bus_speed"] == 1 else f", bus x {cell['bus_speed']:g}"
    rows = "1 row" if cell["rows_per_token"] == 1 else f"{cell['rows_per_token']} rows"
    overlap = "" if cell["overlap"] else ", no overlap"
    return f"{rows} a token, hot x {cell['hot']:g}{bus}{overlap}"


def _capacities(swept: Mapping[str, Any]) -> Any:
    rate = np.array(swept["rate"])
    pairs = zip(swept["mean_ms"], swept["p99_ms"], strict=True)
    return np.array([LoadCurve(rate, np.array(mean), np.array(p99)).capacity() for mean, p99 in pairs])


def _capacity(figure: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    """Largest load within the SLO over the split, a panel for each cell."""
    axes = figure.subplots(3, 4, sharex=True)
    for axis, one in zip(np.ravel(axes), cells, strict=False):
        for regime, swept in one["sweeps"].items():
            alphas, load = np.array(swept["alphas"]), _capacities(swept)
            axis.plot(alphas, load, "o-", color=_COLOURS[regime], label=regime, markersize=3)
            axis.plot(alphas[load.argmax()], load.max(), "*", color=_COLOURS[regime], markersize=13)
        axis.set(title=cell_title(one["cell"]), ylim=(0, None), xlim=(0, 1))
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
    axes[0][3].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("alpha: EMB share of the pool")
    for axis in axes[:, 0]:
        axis.set_ylabel("requests/s with P99 ≤ 80 ms")
    figure.suptitle("Largest load within the SLO at every constant split; the star is the best")


def _penalty(figure: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    """What the other regime's split costs, in mean, P99 and capacity."""
    axes = figure.subplots(1, 3, sharey=True)
    kinds = (("mean at 75% load", "mean", 0), ("P99 at 75% load", "p99", 0), ("capacity lost", "capacity", None))
    names, place = [cell_title(one["cell"]) for one in cells], np.arange(len(cells))
    for axis, (title, key, at) in zip(axes, kinds, strict=True):
        for number, regime in enumerate(("returning", "browsing")):
            lost = [one["regimes"][regime]["penalties"]["of the other regime"][key] for one in cells]
            share = [100 * (value if at is None else value[at]) for value in lost]
            axis.barh(place + 0.2 - 0.4 * number, np.minimum(share, 100), 0.36, color=_COLOURS[regime], label=regime)
        axis.axvspan(20, 30, color=_GREY, alpha=0.25, lw=0, label="the paper's 20 to 30%")
        axis.set(title=title, xlabel="% worse than its own best split", xlim=(0, 100))
        axis.grid(alpha=0.25, axis="x")
    axes[0].set_yticks(place, names)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    figure.suptitle("What it costs to run one regime at the split that is best for the other (cut at 100%)")


def _gain(figure: Any, shifts: Sequence[Mapping[str, Any]]) -> None:
    """P99 and mean against the best constant in hindsight: tracking at once, and both oracles."""
    axes = figure.subplots(1, 2, sharey=True)
    place = np.arange(len(shifts))
    names = [f"{cell_title(one['cell'])}\n{one['length_s']:g} s, {one['mode']} rate" for one in shifts]
    for axis, figure_name in zip(axes, ("mean", "p99"), strict=True):
        for who, colour, mark in (("tracker", _ORANGE, "o"), ("oracle", _BLUE, "D"), ("quasi_static", _GREEN, "|")):
            gains = [np.clip(-100 * one[f"{who}_{figure_name}_gain"], -40, 40) for one in shifts]
            axis.plot(gains, place, mark, color=colour, label=_WHO[who], markersize=10 if mark == "|" else 6)
        axis.axvline(0, color="black", lw=0.8)
        axis.set(title=f"{figure_name}, change against the best constant", xlabel="% (cut at 40)", xlim=(-42, 42))
        axis.grid(alpha=0.25)
    axes[1].axvspan(-38, -24, color=_GREY, alpha=0.25, lw=0, label="the paper's P99")
    axes[0].set_yticks(place, names, fontsize=8)
    axes[0].invert_yaxis()
    axes[0].legend(*axes[1].get_legend_handles_labels(), fontsize=8, loc="upper right")
    figure.suptitle("What moving the split gains at 90% of the best constant's limit")


_WHO = {
    "tracker": "at once to each regime's best",
    "oracle": "oracle that pays for moves (replayed)",
    "quasi_static": "quasi-static: as if moves were free",
}
