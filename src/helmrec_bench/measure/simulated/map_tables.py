"""The map's figures as the Markdown tables of docs/map.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from helmrec_bench.measure.simulated.map_plots import cell_title
from helmrec_bench.report.files import markdown_table


def cells_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Best splits and what wrong ones cost at three quarters of the load, returning / browsing."""
    header = ["cell", "capacity", "alpha* by capacity", "alpha* by mean, 75% load", "other's alpha: mean", "P99"]
    header += ["capacity", "untuned 0.5: mean", "P99", "capacity"]
    lines = []
    for one in cells:
        regimes = [one["regimes"][name] for name in ("returning", "browsing")]
        cells_ = [cell_title(one["cell"])]
        cells_.append(" / ".join(f"{regime['capacity']:.0f}" for regime in regimes))
        cells_.append(" / ".join(f"{regime['alpha_by_capacity']:g}" for regime in regimes))
        cells_.append(" / ".join(f"{regime['alpha_by_mean'][1]:g}" for regime in regimes))
        for wrong in ("of the other regime", "untuned 0.5"):
            penalties = [regime["penalties"][wrong] for regime in regimes]
            cells_ += [" / ".join(_more(one[key][0]) for one in penalties) for key in ("mean", "p99")]
            cells_.append(" / ".join(f"-{one['capacity']:.0%}" for one in penalties))
        lines.append(cells_)
    return markdown_table(header, lines)


def limits_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """What a split of its own for each regime adds to the largest load."""
    header = ["cell", "shift of alpha*", "best constant", "more load, constant rate", "following"]
    lines = []
    for one in cells:
        constant, following = one["limits"]["constant"], one["limits"]["following"]
        best = f"{constant['static_alpha']:g} / {following['static_alpha']:g}"
        gains = [f"{constant['gain']:+.1%}", f"{following['gain']:+.1%}"]
        lines.append([cell_title(one["cell"]), f"{one['shift_of_alpha']:.2f}", best, *gains])
    return markdown_table(header, lines)


def shifts_table(shifts: Sequence[Mapping[str, Any]]) -> str:
    """Changes against the best constant in hindsight."""
    header = ["cell", "rate", "length", "requests/s", "best constant, mean / P99 ms", "at once: mean", "P99"]
    header += ["oracle with moves paid: mean", "P99", "quasi-static: mean", "P99", "oracle moves by"]
    lines = []
    for one in shifts:
        best = one["best_static"]
        cells_ = [
            cell_title(one["cell"]),
            one["mode"],
            f"{one['length_s']:g} s",
            " / ".join(f"{rate:.0f}" for rate in one["rates"]),
            f"{best['mean_ms']:.1f} / {best['p99_ms']:.0f}",
        ]
        for who in ("tracker", "oracle", "quasi_static"):
            cells_ += [_change(-one[f"{who}_{figure}_gain"]) for figure in ("mean", "p99")]
        lines.append([*cells_, f"{one['oracle_travel']:.2f}"])
    return markdown_table(header, lines)


def _more(share: float) -> str:
    return f"+{share:.0%}" if share < 2 else f"x {1 + share:.0f}" if share < 10 else "collapse"


def _change(share: float) -> str:
    return f"{share:+.0%}" if abs(share) >= 0.005 else "0"


def show_tables(found: Mapping[str, Any]) -> None:
    for table in (cells_table(found["cells"]), limits_table(found["cells"]), shifts_table(found["shifts"])):
        print(table, end="\n\n")
