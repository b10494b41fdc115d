"""Pieces of a report: charts as inline SVG, and tables. Knows matplotlib and HTML, no experiment."""

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helmrec_bench.report.files import new_figure

BLUE, ORANGE, GREEN, RED, GREY, VIOLET = "#2563a8", "#d9702b", "#3a8a4d", "#b8373a", "#8a8f98", "#6f4fa3"
PALETTE = (BLUE, ORANGE, GREEN, VIOLET, RED, "#1f8a8a", "#a07a1e", GREY, "#c2548b", "#444b55")


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with a caption; `source` says what its figures come from: simulated, or measured on which device."""

    draw: Callable[[Any], None]  # onto a matplotlib figure
    caption: str
    source: str = "simulated"
    size: tuple[float, float] = (9.6, 3.4)

    def html(self) -> str:
        tag = "measured" if self.source != "simulated" else "simulated"
        return (
            f"<figure>{_svg(self.draw, self.size)}<figcaption>"
            f'<span class="tag {tag}">{html.escape(self.source)}</span> {html.escape(self.caption)}'
            "</figcaption></figure>"
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; the first column names the row. Rows in `marked` stand out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    source: str = "simulated"
    marked: frozenset[str] = frozenset()

    def html(self) -> str:
        tag = "measured" if self.source != "simulated" else "simulated"
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(self._row(row) for row in self.rows)
        caption = f'<span class="tag {tag}">{html.escape(self.source)}</span> {html.escape(self.caption)}'
        return (
            f'<div class="scroll"><table><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _row(self, row: Sequence[str]) -> str:
        kind = ' class="ours"' if row[0] in self.marked else ""
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        return f"<tr{kind}>{cells}</tr>"


Block = Chart | Table


def change_text(change: Mapping[str, float | None]) -> str:
    """An interval of a relative change as a cell; a single seed has no ends."""
    if change["low"] is None:
        return f"{change['mean']:+.1%}"
    return f"{change['mean']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"


def lines(axes: Any, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], **labels: str) -> None:
    """Curves by name, as (x, y)."""
    for color, (name, (x, y)) in zip(_colors(len(series)), series.items(), strict=True):
        axes.plot(x, y, marker="o" if len(x) < 30 else None, markersize=3.5, linewidth=1.6, color=color, label=name)
    axes.set(**labels)
    if len(series) > 1:
        axes.legend(fontsize="small", frameon=False)


def bars(
    axes: Any, names: Sequence[str], values: Sequence[float], ours: frozenset[str] = frozenset(), **labels: Any
) -> None:
    """Horizontal, first on top; `ours` in another colour."""
    places = range(len(names))
    axes.barh(places, values, color=[BLUE if name in ours else "#b9c3cf" for name in names], height=0.7)
    axes.set_yticks(places, names, fontsize="small")
    axes.invert_yaxis()
    axes.set(**labels)


def grouped(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], **labels: Any) -> None:
    """Upright bars: one group a name, one colour a series."""
    width = 0.8 / max(1, len(series))
    for at, (color, (name, values)) in enumerate(zip(_colors(len(series)), series.items(), strict=True)):
        places = [place + (at - (len(series) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(places, values, width * 0.92, color=color, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.set(**labels)


def legend_above(figure: Any, num_columns: int = 7) -> None:
    """One for all axes, which show the same series."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=num_columns, frameon=False, fontsize="small")


def plain(axes: Any) -> None:
    axes.grid(visible=True, color="#e6e9ee", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colors(num: int) -> list[str]:
    return [PALETTE[at % len(PALETTE)] for at in range(num)]


def _svg(draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Text stays text and nothing is dated or random: the same data give the same file."""
    figure = new_figure(size)
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "helmrec",
        "font.size": 9.0,
        "font.family": "sans-serif",
    }
    with mpl.rc_context(style):
        draw(figure)
        for axes in figure.axes:
            if not axes.images:
                plain(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    picture = file.getvalue()
    return picture[picture.index("<svg") :]
