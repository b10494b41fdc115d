"""What all commands share: output streams, progress bars, tables and error messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from helmrec.errors import HelmRecError
from helmrec.redaction import redact

out, err = Console(), Console(stderr=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with a one-line message, without a traceback, on errors that a caller can cause."""
    try:
        yield
    except HelmRecError as error:
        err.print(f"[red]error:[/red] {redact(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def bytes_bar() -> Progress:
    """A progress bar that counts bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)


def pairs_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of labels and values."""
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table
