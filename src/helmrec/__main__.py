"""`python -m helmrec` is the `helmrec` command."""

from helmrec.cli import app

app()
