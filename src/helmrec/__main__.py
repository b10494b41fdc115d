"""`python -m helmrec` is the `helmrec` command."""

from helmrec.cli.main import app

app()
