"""`helmrec trace`: create, import and describe traces."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from helmrec.cli.console import check_writable, exit_on_error, out, pairs_table
from helmrec.errors import ConfigError
from helmrec.traffic.families import FAMILIES, PRESETS, family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.imported import ImportConfig, trace_of_log
from helmrec.traffic.importers import READERS, read_log
from helmrec.traffic.trace import Trace
from helmrec.traffic.trace_file import read_trace, write_trace
from helmrec.traffic.workload import Workload, load_workload
from helmrec_bench.traces.describe import PUBLISHED, Description, describe

trace_app = typer.Typer(help="Create, import and describe traces of traffic.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", help="File to write.")]
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file.")]


@trace_app.command("make")
def make(  # noqa: PLR0913, PLR0917 - one parameter per flag
    path: Out,
    config: Annotated[
        Path | None, typer.Option(help="A workload as TOML; instead of a family.", show_default="none")
    ] = None,
    family_name: Annotated[str, typer.Option("--family", help=f"One of {', '.join(FAMILIES)}.")] = "steady",
    preset_name: Annotated[str, typer.Option("--preset", help=f"One of {', '.join(PRESETS)}.")] = "dlrmv3",
    axis: Annotated[
        str, typer.Option(help="What the families trend and burst change: hot-share, history, skew, rate, all.")
    ] = "all",
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 100,
    duration_s: Annotated[float, typer.Option("--duration", help="Seconds.")] = 600,
    history: Annotated[
        float | None, typer.Option(help="Median history, instead of the preset's.", show_default="the preset's")
    ] = None,
    burst_s: Annotated[float, typer.Option("--burst", help="Seconds a burst lasts.")] = 20,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.", min=0)] = 0,
) -> None:
    """Create a synthetic trace from a family and a preset, or from a workload file."""
    with exit_on_error():
        check_writable("--out", path)
        if config is not None:
            workload = load_workload(config)
        else:
            changes = {"axis": axis, "rate": rate, "duration_s": duration_s, "burst_s": burst_s}
            workload = _family(family_name, preset_name, history, changes)
        _write(generate(workload, seed), path)


def _write(trace: Trace, path: Path) -> None:
    write_trace(trace, path)
    out.print(f"{path}: {trace.num_requests:,} requests of {trace.num_users:,} users", highlight=False)


def _family(name: str, preset_name: str, history: float | None, changes: dict[str, object]) -> Workload:
    shape = preset(preset_name)
    if history is not None:
        if history <= 0:
            raise ConfigError(f"history must be more than 0, got {history}")
        shape = shape.stretched(history)
    return family(name, type(shape)(**shape.model_dump() | changes))


@trace_app.command("import")
def import_(  # noqa: PLR0913, PLR0917 - one parameter per flag
    log_path: Annotated[Path, typer.Argument(metavar="LOG", help="The published file, plain or .gz.")],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(READERS)}.")],
    path: Out,
    history_share: Annotated[float, typer.Option(help="Share of the events that are history only.")] = 0.2,
    visit_gap_s: Annotated[
        float, typer.Option("--visit-gap", help="Seconds between events of one visit, at most.")
    ] = 0,
    duration_s: Annotated[
        float | None,
        typer.Option("--duration", help="Compress into this many seconds.", show_default="the log's own times"),
    ] = None,
    candidates: Annotated[int, typer.Option(help="Candidates per request.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the candidates.", min=0)] = 0,
) -> None:
    """Convert a published interaction log to a trace."""
    with exit_on_error():
        check_writable("--out", path)
        config = ImportConfig(
            source=f"{kind}: {log_path.name}",
            history_share=history_share,
            visit_gap_s=visit_gap_s,
            duration_s=duration_s,
            num_candidates=candidates,
            seed=seed,
        )
        _write(trace_of_log(read_log(kind, log_path), config), path)


@trace_app.command("describe")
def describe_(path: TraceFile) -> None:
    """Print reuse, skew and return times next to published values."""
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
