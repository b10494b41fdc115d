"""`helmrec import`: convert published models to model folders."""

from pathlib import Path
from typing import Annotated, Any

import typer

from helmrec.cli.console import bytes_bar, exit_on_error, out
from helmrec.model.dlrmv3 import ImportOptions, import_dlrmv3

import_app = typer.Typer(help="Import published models.", no_args_is_help=True)


@import_app.callback()
def _import() -> None:
    """Import published models."""


@import_app.command("dlrmv3")
def dlrmv3(  # noqa: PLR0913, PLR0917 - one parameter per flag
    checkpoint: Annotated[Path, typer.Argument(metavar="PATH", help="non_sparse.ckpt, or its folder.")],
    tables: Annotated[Path, typer.Option(help="The folder of sharded tables, with its .metadata.")],
    folder: Annotated[Path, typer.Option("--out", help="Model folder to create; must be new or empty.")],
    heads: Annotated[int, typer.Option(help="Attention heads; a checkpoint does not contain them.")] = 4,
    window: Annotated[int, typer.Option(help="Most events of a history that the model uses.")] = ImportOptions().window,
    candidates: Annotated[int, typer.Option(help="Most candidates of a request.")] = ImportOptions().max_candidates,
    dtype: Annotated[
        str | None, typer.Option(help="Of dense weights and K/V: float32 or bfloat16; the checkpoint's own by default.")
    ] = None,
) -> None:
    """Import Meta's DLRMv3, without running pickled code of its files."""
    with exit_on_error(), bytes_bar() as bar:
        asked: dict[str, Any] = {"num_heads": heads, "window": window, "max_candidates": candidates, "dtype": dtype}
        task = bar.add_task("writing and hashing", total=None)
        config = import_dlrmv3(checkpoint, tables, folder, ImportOptions(**asked), lambda done: bar.advance(task, done))
    out.print(f"{folder}: {config.num_layers} layers, {config.num_rows:,} rows in {len(config.tables)} tables")
    out.print("its K/V depend on the query: they are reused within a request only", highlight=False)
