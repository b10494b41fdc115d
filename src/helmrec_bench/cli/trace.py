"""`helmrec trace describe`: added to the product's group of commands for traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from helmrec.cli.console import exit_on_error, out, pairs_table

if TYPE_CHECKING:
    from helmrec_bench.traces.describe import Description

trace_app = typer.Typer()


@trace_app.callback()
def _group() -> None:
    """Keep `describe` a command of a group, which a single command would not be."""


@trace_app.command("describe")
def describe_(path: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file.")]) -> None:
    """Print reuse, skew and return times next to published values."""
    from helmrec.traffic.trace_file import read_trace
    from helmrec_bench.traces.describe import describe

    with exit_on_error():
        trace = read_trace(path)
        found = describe(trace)
    out.print(_overview(trace.catalogue.source, found))
    out.print(_phases(found))
    out.print(_beside_published(found))


def _overview(source: str, found: Description) -> Table:
    rows = (
        ("requests / users / items", f"{found.num_requests:,} / {found.num_users:,} / {found.num_items:,}"),
        ("duration", f"{found.duration_s:,.0f} s"),
        ("requests by users seen before", f"{found.known_share:.1%}"),
        ("requests by the busiest 5% of users", f"{found.top_users_share:.1%}"),
        ("history, median / p99", f"{found.median_history:,.0f} / {found.p99_history:,.0f} events"),
    )
    return pairs_table(source, rows)


def _phases(found: Description) -> Table:
    table = Table("phase", "requests", "per second", "by known users", "median history", title="phases")
    for phase in found.phases:
        table.add_row(
            phase.name,
            f"{phase.num_requests:,}",
            f"{phase.rate:,.4g}",
            f"{phase.known_share:.1%}",
            f"{phase.median_history:,.0f}",
        )
    return table


def _beside_published(found: Description) -> Table:
    from helmrec_bench.traces.describe import PUBLISHED

    table = Table(title=f"beside published traces (reuse counted on {found.sample_rate:.2%} of the item rows)")
    names = ("no KV kept", "all KV kept", *(published.name for published in PUBLISHED))
    for name in ("", *names):
        table.add_column(name, justify="left" if not name else "right", no_wrap=not name)
    rows: tuple[tuple[str, str, float | None, float | None, str], ...] = (
        ("reads per row read", "{:.1f}", found.full.mean, found.kept.mean, "mean_reuse"),
        ("rows read once", "{:.1%}", found.full.once_rows, found.kept.once_rows, "once_rows"),
        ("reads of those", "{:.1%}", found.full.once_reads, found.kept.once_reads, "once_reads"),
        ("reads of rows read > 64 times", "{:.1%}", found.full.hot_reads, found.kept.hot_reads, "hot_reads"),
        ("slope of item popularity", "{:.2f}", found.item_slope, None, "item_slope"),
        ("events on the top 1% of items", "{:.1%}", found.top_items_share, None, "top_items_share"),
        ("median return time (s)", "{:,.0f}", found.median_return_s, None, "median_return_s"),
        ("75th percentile (s)", "{:,.0f}", found.p75_return_s, None, "p75_return_s"),
    )
    for label, form, full, kept, field in rows:
        values = (full, kept, *(getattr(published, field) for published in PUBLISHED))
        table.add_row(label, *("" if value is None else form.format(value) for value in values))
    return table
