"""`helmrec histories`: load histories of users into a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helmrec.cli.console import bytes_bar, exit_on_error, out, pairs_table, print_error, progress

if TYPE_CHECKING:
    from helmrec.serve.bulk_load import BulkReport

_MAX_SHOWN = 20  # bad lines

histories_app = typer.Typer(help="Histories of users that a server keeps.", no_args_is_help=True)


@histories_app.callback()
def _group() -> None:
    """Keep `load` a command of a group, which a single command would not be."""


@histories_app.command("load")
def load(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, or Parquet if it ends in .parquet.")],
    url: Annotated[str, typer.Option(help="A server that keeps histories (--history-path).")] = "http://127.0.0.1:8000",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.", min=0.1)] = 60,
) -> None:
    """Load histories from a file into a running server.

    A line is the JSON object that /v1/events takes: user_id, items, actions, timestamps, features. A Parquet file has
    these as columns, with lists. Lines of one user continue each other. A load may be repeated: what the server has
    already is recognised, not appended again. Bad lines are named and skipped; then the status is 2.
    """
    from helmrec.serve.bulk_load import BulkLoad, read_lines
    from helmrec.serve.client import Client

    with exit_on_error(), Client(url, timeout_s) as client:
        loading = BulkLoad(client)
        with progress() if path.suffix == ".parquet" else bytes_bar() as bar:
            task = bar.add_task(f"loading {path.name}", total=None)
            lines = read_lines(path, lambda done, total: bar.update(task, completed=done, total=total))
            try:
                loading.run(lines)
            finally:
                bar.stop()  # before the report is printed
                _print(path, loading.report)
    if loading.report.bad:
        raise typer.Exit(2)


def _print(path: Path, report: BulkReport) -> None:
    rows = (
        ("lines read", f"{report.num_lines:,}"),
        ("lines stored", f"{report.num_stored:,}"),
        ("of them there before", f"{report.num_repeats:,}"),
        ("lines refused", f"{len(report.bad):,}"),
        ("users / events", f"{len(report.users):,} / {report.num_events:,}"),
    )
    out.print(pairs_table(path.name, rows))
    for number, reason in report.bad[:_MAX_SHOWN]:
        print_error(f"{path}, line {number}: {reason}")
    if len(report.bad) > _MAX_SHOWN:
        print_error(f"{len(report.bad) - _MAX_SHOWN:,} more lines were refused")
