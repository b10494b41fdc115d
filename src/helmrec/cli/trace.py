"""`helmrec trace`: create traces of traffic, or import them from logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from helmrec.cli.console import bytes_bar, check_writable, err, exit_on_error, out, progress
from helmrec.errors import ConfigError
from helmrec.traffic.families import FAMILIES, PRESETS, family, preset
from helmrec.traffic.importers import READERS, read_log
from helmrec.traffic.own_log import LogColumns, LogReport, ReadLog, read_csv_log, read_parquet_log
from helmrec.traffic.workload import Workload, load_workload

if TYPE_CHECKING:
    from helmrec.traffic.imported import ImportConfig
    from helmrec.traffic.trace import Trace


class ImportGroup(TyperGroup):
    """Runs `published` where no command is named: `import LOG --kind K` was the only form once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["published", *args]
        return super().parse_args(ctx, args)


trace_app = typer.Typer(help="Create, import and describe traces of traffic.", no_args_is_help=True)
import_app = typer.Typer(
    cls=ImportGroup,
    no_args_is_help=True,
    help="Convert a log to a trace: one of your own (csv, parquet), or a published data set. "
    "Each visit of a user becomes a request; the events before it are its history.",
)
trace_app.add_typer(import_app, name="import")

OutFile = Annotated[
    Path, typer.Option("--out", help="File to write: Parquet, or safetensors (no extra needed) if it ends so.")
]
HistoryShare = Annotated[float, typer.Option(help="Share of the events that are history only.")]
VisitGap = Annotated[float, typer.Option("--visit-gap", help="Seconds between events of one visit, at most.")]
Duration = Annotated[
    float | None,
    typer.Option("--duration", help="Compress into this many seconds.", show_default="the log's own times"),
]
Candidates = Annotated[int, typer.Option(help="Candidates per request.")]
CandidateSeed = Annotated[int, typer.Option(help="Seed of the candidates.", min=0)]

UserColumn = Annotated[str, typer.Option(help="Column with the user's id, a number or a string.")]
ItemColumn = Annotated[str, typer.Option(help="Column with the item's id, a number or a string.")]
ActionColumn = Annotated[str, typer.Option(help="Column with the action; '' if there is none.")]
TimeColumn = Annotated[str, typer.Option(help="Column with the time.")]
TimeUnit = Annotated[
    str, typer.Option(help="Unit of the times since 1970: s, ms, us, ns; or iso, such as 2026-03-01T09:30:00Z.")
]
Actions = Annotated[
    str | None,
    typer.Option(
        help="Actions in order of their numbers, such as view,cart,buy; others are dropped.",
        show_default="all; numbers from 0 to 255 stay, names are numbered in alphabetical order",
    ),
]


@trace_app.command("make")
def make(  # noqa: PLR0913, PLR0917 - one parameter per flag
    path: OutFile,
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
    from helmrec.traffic.generate import generate

    with exit_on_error():
        _check_out(path)
        if config is not None:
            workload = load_workload(config)
        else:
            changes = {"axis": axis, "rate": rate, "duration_s": duration_s, "burst_s": burst_s}
            workload = _family(family_name, preset_name, history, changes)
        _write(generate(workload, seed), path)


def _family(name: str, preset_name: str, history: float | None, changes: dict[str, object]) -> Workload:
    shape = preset(preset_name)
    if history is not None:
        if history <= 0:
            raise ConfigError(f"history must be more than 0, got {history}")
        shape = shape.stretched(history)
    return family(name, type(shape)(**shape.model_dump() | changes))


@import_app.command("csv")
def import_csv(  # noqa: PLR0913, PLR0917 - one parameter per flag
    log_path: Annotated[Path, typer.Argument(metavar="LOG", help="A CSV file with a header, plain or .gz.")],
    path: OutFile,
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    action_column: ActionColumn = "action",
    time_column: TimeColumn = "time",
    time_unit: TimeUnit = "s",
    actions: Actions = None,
    delimiter: Annotated[str, typer.Option(help="Between fields; '\\t' is a tab.")] = ",",
    history_share: HistoryShare = 0.2,
    visit_gap_s: VisitGap = 0,
    duration_s: Duration = None,
    candidates: Candidates = 100,
    seed: CandidateSeed = 0,
) -> None:
    """Convert a CSV log of your own, with columns for user, item, action and time.

    Lines that cannot be used are dropped, and counted by reason. No extra is needed.
    """
    with exit_on_error():
        columns = _columns((user_column, item_column, action_column, time_column), time_unit, actions, delimiter)
        config = _config(f"csv: {log_path.name}", history_share, visit_gap_s, duration_s, (candidates, seed))
        _import_own(read_csv_log, log_path, columns, config, path)


@import_app.command("parquet")
def import_parquet(  # noqa: PLR0913, PLR0917 - one parameter per flag
    log_path: Annotated[Path, typer.Argument(metavar="LOG", help="A Parquet file.")],
    path: OutFile,
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    action_column: ActionColumn = "action",
    time_column: TimeColumn = "time",
    time_unit: TimeUnit = "s",
    actions: Actions = None,
    history_share: HistoryShare = 0.2,
    visit_gap_s: VisitGap = 0,
    duration_s: Duration = None,
    candidates: Candidates = 100,
    seed: CandidateSeed = 0,
) -> None:
    """Convert a Parquet log of your own, with columns for user, item, action and time.

    Lines that cannot be used are dropped, and counted by reason. A column of type timestamp has its unit in the file.
    """
    with exit_on_error():
        columns = _columns((user_column, item_column, action_column, time_column), time_unit, actions)
        config = _config(f"parquet: {log_path.name}", history_share, visit_gap_s, duration_s, (candidates, seed))
        _import_own(read_parquet_log, log_path, columns, config, path)


@import_app.command("published")
def import_published(  # noqa: PLR0913, PLR0917 - one parameter per flag
    log_path: Annotated[Path, typer.Argument(metavar="LOG", help="The published file, plain or .gz.")],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(READERS)}.")],
    path: OutFile,
    history_share: HistoryShare = 0.2,
    visit_gap_s: VisitGap = 0,
    duration_s: Duration = None,
    candidates: Candidates = 100,
    seed: CandidateSeed = 0,
) -> None:
    """Convert the file of a published data set; `trace import LOG --kind KIND` does the same."""
    from helmrec.traffic.imported import trace_of_log

    with exit_on_error():
        _check_out(path)
        config = _config(f"{kind}: {log_path.name}", history_share, visit_gap_s, duration_s, (candidates, seed))
        _write(trace_of_log(read_log(kind, log_path), config), path)


def _check_out(path: Path) -> None:
    from helmrec.traffic.trace_file import check_library

    check_writable("--out", path)
    check_library(path)


def _write(trace: Trace, path: Path) -> None:
    from helmrec.traffic.trace_file import write_trace

    write_trace(trace, path)
    out.print(f"{path}: {trace.num_requests:,} requests of {trace.num_users:,} users", highlight=False)


def _columns(names: tuple[str, str, str, str], unit: str, actions: str | None, delimiter: str = ",") -> LogColumns:
    user, item, action, time = names
    listed = () if actions is None else tuple(name.strip() for name in actions.split(","))
    settings: dict[str, Any] = {"time_unit": unit, "actions": listed, "delimiter": delimiter}
    return LogColumns(user=user, item=item, action=action or None, time=time, **settings)


def _config(
    source: str, history_share: float, visit_gap_s: float, duration_s: float | None, drawn: tuple[int, int]
) -> ImportConfig:
    from helmrec.traffic.imported import ImportConfig

    return ImportConfig(
        source=source,
        history_share=history_share,
        visit_gap_s=visit_gap_s,
        duration_s=duration_s,
        num_candidates=drawn[0],
        seed=drawn[1],
    )


def _import_own(
    read: ReadLog,
    log_path: Path,
    columns: LogColumns,
    config: ImportConfig,
    path: Path,
) -> None:
    from helmrec.traffic.imported import trace_of_log

    _check_out(path)
    with bytes_bar() if read is read_csv_log else progress() as bar:
        task = bar.add_task(f"reading {log_path.name}", total=None)
        log, report = read(log_path, columns, lambda done, total: bar.update(task, completed=done, total=total))
    out.print(_report(log_path, report))
    with err.status("writing the trace"):
        _write(trace_of_log(log, config), path)


def _report(path: Path, report: LogReport) -> Table:
    table = Table("lines", "number", "first line", title=f"{path.name}")
    for label, num in (("read", report.num_read), ("kept", report.num_kept)):
        table.add_row(label, f"{num:,}", "")
    table.add_row("kept, sorted: earlier than a line before it", f"{report.num_out_of_order:,}", "")
    for reason, dropped in report.dropped.items():
        table.add_row(f"dropped: {reason}", f"{dropped.num:,}", f"{dropped.first_line:,}")
    table.add_section()
    table.add_row("users, items", f"{report.num_users:,}, {report.num_items:,}", "")
    for action, number in report.actions.items():
        table.add_row(f"action {action}", f"becomes {number}", "")
    return table
