"""The report of the demonstration: one self-contained HTML page with tables and SVG plots."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from helmrec.demo.plan import PARTS, DemoPlan
from helmrec.demo.side import Side
from helmrec.demo.simulated import Simulated, shown_ways
from helmrec.demo.trial import SplitTrial

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 190, 48, 24, 18
_DASHES = {"solid": "", "dashed": "6 4", "dotted": "2 3"}  # so that lines differ without colour
_COLOURS = ("--ours", "--best", "--soft")  # of the policy, the best constant split, the untuned one
_FIGURES = {  # fields of a sample
    "alpha": "alpha: the share of the pool that holds rows",
    "p99_ms": "P99 of each second, milliseconds",
    "token_reuse_rate": "share of history tokens reused",
    "row_hit_rate": "share of rows found in the pool",
}
_STYLE = """:root{--ink:#1c1917;--page:#fff;--soft:#57534e;--line:#d6d3d1;--ours:#1d4ed8;--best:#b45309}
@media(prefers-color-scheme:dark){:root{--ink:#e7e5e4;--page:#1c1917;--soft:#a8a29e;--line:#44403c;--ours:#7ea6ff;
--best:#f0a03c}}
body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:var(--ink);
background:var(--page)}
table{border-collapse:collapse;margin:1rem 0;width:100%}td,th{padding:.3rem .8rem;text-align:right}
td,th{border-bottom:1px solid var(--line)}td:first-child,th:first-child{text-align:left;padding-left:0}
td:last-child,th:last-child{padding-right:0}svg{width:100%;height:auto;display:block}svg text{fill:var(--soft)}
figcaption{font-size:.9rem}figcaption small{color:var(--soft);font-size:.85rem}figure{margin:1.5rem 0}
@media(max-width:500px){table{font-size:.8rem}td,th{padding:.3rem .25rem}svg text{font-size:18px}}"""


class DemoResults(NamedTuple):
    """The results of the demonstration."""

    plan: DemoPlan
    trials: list[SplitTrial]
    sides: list[Side]
    verdict: str
    simulated: list[Simulated]


class Line(NamedTuple):
    """A line of a plot."""

    label: str
    points: list[tuple[float, float]]


def summary_rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """Return the rows of the comparison table: a label, and its value for each side."""
    rows: list[tuple[str, list[str]]] = [
        ("requests, answered", [f"{side.end.offered:,}, {side.end.answered:,}" for side in sides]),
        ("mean latency", [f"{side.mean_ms:.1f} ms" for side in sides]),
        ("p50 / p99", [f"{side.end.p50_ms:.1f} / {side.end.p99_ms:.1f} ms" for side in sides]),
        ("processor time a request", [f"{side.cpu_ms:.1f} ms" for side in sides]),
        ("within the SLO", [f"{side.in_slo:.1%}" for side in sides]),
    ]
    for part in PARTS:
        figures = [side.parts[part] for side in sides]
        rows.append((f"{part}: mean / p99", [f"{each.mean_ms:.1f} / {each.p99_ms:.1f} ms" for each in figures]))
    alphas = [[sample.alpha for sample in side.samples] or [side.stats.pool.alpha] for side in sides]
    return [
        *rows,
        ("history tokens reused", [f"{side.stats.pool.token_reuse_rate:.1%}" for side in sides]),
        ("rows found in the pool", [f"{side.stats.pool.row_hit_rate:.1%}" for side in sides]),
        ("alpha, from - to", [f"{min(each):.2f} - {max(each):.2f}" for each in alphas]),
        ("scored again, wrong", [f"{side.stats.audits}, {side.stats.audit_mismatches}" for side in sides]),
    ]


def write_report(path: Path, results: DemoResults) -> None:
    """Write the page."""
    plan, sides = results.plan, results.sides
    marks = {part: plan.side_s * i / len(PARTS) for i, part in enumerate(PARTS)}
    tried = "; ".join(f"{trial.alpha:g}: {trial.cpu_ms:.1f} ms" for trial in results.trials)
    parts = [
        *(f"<p>{html.escape(line)}</p>" for line in results.verdict.splitlines()),
        _table(("", *(side.name for side in sides)), summary_rows(sides)),
        *(
            _figure(title, [_line(side, field) for side in sides], marks, plan.side_s)
            for field, title in _FIGURES.items()
        ),
        f"<p>Constant splits tried on a sample first (processor time of a request): {html.escape(tried)}.</p>",
    ]
    if results.simulated:
        head = ("on a simulated H200, costs calibrated", "mean", "p99", "within 80 ms")
        body = [(each.name, [f"{each.mean_ms:.1f} ms", f"{each.p99_ms:.1f} ms", f"{each.in_slo:.1%}"])
                for each in results.simulated]  # fmt: skip
        parts.append(_table(head, body))
        lines = [(each.name, each.path) for each in results.simulated if each in shown_ways(results.simulated)]
        parts += [
            _figure(
                f"simulated H200: {title}", [Line(name, [(one[0], one[at]) for one in path]) for name, path in lines]
            )
            for at, title in ((1, "alpha"), (2, "P99 of each second, milliseconds"))
        ]
    page = f"<h1>One pool, two caches</h1>{''.join(parts)}"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>HelmRec demo</title>'
        f"<style>{_STYLE}</style><body>{page}</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in (name, *cells))}</tr>" for name, cells in rows]
    return f"<table>{''.join(lines)}</table>"


def _line(side: Side, field: str) -> Line:
    start_s = side.samples[0].time_s if side.samples else 0.0
    seen = [(sample.time_s - start_s, getattr(sample, field)) for sample in side.samples]
    return Line(side.name, [(second, value) for second, value in seen if value is not None])


def _figure(title: str, lines: Sequence[Line], marks: Mapping[str, float] | None = None, least_s: float = 1.0) -> str:
    """`marks`: labels by the second at which what they name begins. The axis has at least `least_s` seconds."""
    top = _round_up(max((value for line in lines for _, value in line.points), default=1.0))
    end_s = max([least_s, *(second for line in lines for second, _ in line.points)])
    drawn = "".join(_path(line, end_s, top, len(lines) - 1 - which) for which, line in enumerate(lines))
    marked = "".join(
        _mark(second, end_s, label) for label, second in (marks or {"0 s": 0, f"{end_s:.0f} s": end_s}).items()
    )
    ticks = "".join(
        f'<text x="{_LEFT - 6}" y="{_y(top * share, top) + 4:.0f}" text-anchor="end">{top * share:.3g}</text>'
        for share in (0, 0.5, 1)
    )
    dashes = list(_DASHES)
    legend = ", ".join(f"{line.label} {dashes[len(lines) - 1 - which]}" for which, line in enumerate(lines))
    return (
        f"<figure><figcaption>{html.escape(title)} <small>({html.escape(legend)})</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}" '
        f'font-size="11">{marked}{ticks}{drawn}</svg></figure>'
    )


def _round_up(value: float) -> float:
    """Return the end of an axis: the next round number, so that its half is round too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if power * step >= value * 0.999)


def _path(line: Line, end_s: float, top: float, which: int) -> str:
    points = " ".join(f"{_x(second, end_s):.1f},{_y(value, top):.1f}" for second, value in line.points)
    dash = list(_DASHES.values())[which]
    style = f'style="stroke:var({_COLOURS[which]})" stroke-width="2" stroke-dasharray="{dash}"'
    return f'<polyline points="{points}" fill="none" {style}/>'


def _mark(second: float, end_s: float, label: str) -> str:
    x = _x(second, end_s)
    line = f'<line x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{_HEIGHT - _BOTTOM}" style="stroke:var(--line)"/>'
    anchor, at = ("end", x - 4) if second >= end_s else ("start", x + 4)
    return f'{line}<text x="{at:.0f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{label}</text>'


def _x(second: float, end_s: float) -> float:
    return _LEFT + min(1.0, second / end_s) * (_WIDTH - _LEFT - 8)


def _y(value: float, top: float) -> float:
    return _TOP + (1 - value / top) * (_HEIGHT - _BOTTOM - 8 - _TOP)
