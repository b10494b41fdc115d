"""What all commands share: output streams, progress bars, tables and error messages."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from helmrec.errors import ConfigError, HelmRecError
from helmrec.redaction import redact

out, err = Console(), Console(stderr=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with a one-line message, without a traceback, on errors that a caller can cause."""
    try:
        yield
    except HelmRecError as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        if error.filename is None:  # not about a file that the user named
            raise
        print_error(f"{error.filename}: {error.strerror}")
        raise typer.Exit(2) from None


def print_error(message: str) -> None:
    """Print one line to standard error. Passwords in it are hidden, brackets are kept."""
    err.print(f"[red]error:[/red] {escape(redact(message))}", highlight=False, soft_wrap=True)


def check_writable(flag: str, path: Path | None) -> None:
    """Raise ConfigError if a file cannot be written. Called before the work whose result goes there."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} must be a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {str(path.parent)!r} to write {path.name!r} to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: no permission to write {str(path)!r}")


def make_folder(flag: str, path: Path) -> None:
    """Make a folder, unless it is there; ConfigError if files cannot be written to it. Called before the work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: the folder cannot be made ({error.strerror}), got {str(path)!r}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{flag}: no permission to write to {str(path)!r}")


def progress(*columns: ProgressColumn) -> Progress:
    """A progress bar on a terminal; nothing elsewhere."""
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def bytes_bar() -> Progress:
    """A progress bar that counts bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return progress(*columns)


def pairs_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of labels and values."""
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table
