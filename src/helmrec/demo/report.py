"""The report of the demonstration: one self-contained HTML page with tables and SVG plots."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from helmrec.demo.plan import PARTS, DemoPlan
from helmrec.demo.side import Side
from helmrec.demo.simulated import Simulated
from helmrec.demo.trial import SplitTrial

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 180, 48, 24
_DASHES = ("", "6 4")  # so that lines differ without colour
_COLOURS = ("#b45309", "#1d4ed8")
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#1c1917}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #d6d3d1;text-align:right}
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}figcaption{color:#57534e;font-size:.9rem}
figure{margin:1.5rem 0}"""


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
        ("processor time of the server", [f"{side.cpu_ms:.1f} ms a request" for side in sides]),
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
    tried = "; ".join(f"{trial.alpha:g}: {trial.cpu_ms:.1f} ms" for trial in results.trials)
    parts = [
        f"<p>{html.escape(results.verdict)}</p>",
        _table(("", *(side.name for side in sides)), summary_rows(sides)),
        _figure("P99 of each second, milliseconds", [_line(side, "p99_ms") for side in sides], plan),
        _figure("alpha: the embedding share of the pool", [_line(side, "alpha") for side in sides], plan),
        _figure("share of history tokens reused", [_line(side, "token_reuse_rate") for side in sides], plan),
        _figure("share of rows found in the pool", [_line(side, "row_hit_rate") for side in sides], plan),
        f"<p>Constant splits tried on a sample first (processor time of a request): {html.escape(tried)}.</p>",
    ]
    if results.simulated:
        head = ("on a simulated H200, costs calibrated", "mean", "p99", "within 80 ms")
        body = [(each.name, [f"{each.mean_ms:.1f} ms", f"{each.p99_ms:.1f} ms", f"{each.in_slo:.1%}"])
                for each in results.simulated]  # fmt: skip
        parts.append(_table(head, body))
    page = f"<h1>One pool, two caches</h1>{''.join(parts)}"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>HelmRec demo</title>'
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


def _figure(title: str, lines: Sequence[Line], plan: DemoPlan) -> str:
    top = max((value for line in lines for _, value in line.points), default=1.0) * 1.05 or 1.0
    drawn = "".join(_path(line, plan.side_s, top, which) for which, line in enumerate(lines))
    marks = "".join(_mark(plan.side_s * i / len(PARTS), plan.side_s, part) for i, part in enumerate(PARTS))
    ticks = "".join(
        f'<text x="{_LEFT - 6}" y="{_y(top * share, top) + 4:.0f}" text-anchor="end">{top * share:.3g}</text>'
        for share in (0, 0.5, 1)
    )
    legend = ", ".join(
        f"{line.label} {'dashed' if _DASHES[which % 2] else 'solid'}" for which, line in enumerate(lines)
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}" '
        f'font-size="11" fill="#57534e">{marks}{ticks}{drawn}</svg>'
        f"<figcaption>{html.escape(title)} ({html.escape(legend)})</figcaption></figure>"
    )


def _path(line: Line, end_s: float, top: float, which: int) -> str:
    points = " ".join(f"{_x(second, end_s):.1f},{_y(value, top):.1f}" for second, value in line.points)
    style = f'fill="none" stroke="{_COLOURS[which % 2]}" stroke-width="2" stroke-dasharray="{_DASHES[which % 2]}"'
    return f'<polyline points="{points}" {style}/>'


def _mark(second: float, end_s: float, part: str) -> str:
    x = _x(second, end_s)
    line = f'<line x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{_HEIGHT - _BOTTOM}" stroke="#d6d3d1"/>'
    return f'{line}<text x="{x + 4:.0f}" y="{_HEIGHT - 8}">{part}</text>'


def _x(second: float, end_s: float) -> float:
    return _LEFT + min(1.0, second / end_s) * (_WIDTH - _LEFT - 8)


def _y(value: float, top: float) -> float:
    return 8 + (1 - value / top) * (_HEIGHT - _BOTTOM - 16)
