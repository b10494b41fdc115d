"""What all commands share: where they write, and how they end when a caller made a mistake."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from helmrec.errors import HelmRecError
from helmrec.redaction import redact

out, err = Console(), Console(stderr=True)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Errors a caller can cause end the command with one line, not a traceback."""
    try:
        yield
    except HelmRecError as error:
        err.print(f"[red]error:[/red] {redact(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
