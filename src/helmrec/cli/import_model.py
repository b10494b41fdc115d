"""`helmrec import`: models that others have published, as model folders of ours."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from helmrec.cli.console import err, out, told_plainly
from helmrec.model.dlrmv3 import ImportOptions, import_dlrmv3

import_app = typer.Typer(help="Import published models.", no_args_is_help=True)


@import_app.callback()
def _import() -> None:
    """Import published models."""


@import_app.command("dlrmv3")
def dlrmv3(  # noqa: PLR0913, PLR0917 - one parameter per flag
    checkpoint: Annotated[Path, typer.Argument(metavar="PATH", help="non_sparse.ckpt, or the folder it lies in.")],
    tables: Annotated[Path, typer.Option(help="The folder of sharded tables, with its .metadata.")],
    folder: Annotated[Path, typer.Option("--out", help="Model folder to make; must be new or empty.")],
    heads: Annotated[int, typer.Option(help="Attention heads, which a checkpoint does not tell.")] = 4,
    window: Annotated[int, typer.Option(help="Most events the model looks at.")] = ImportOptions().window,
    candidates: Annotated[int, typer.Option(help="Most candidates of a request.")] = ImportOptions().max_candidates,
    dtype: Annotated[
        str | None, typer.Option(help="Of dense weights and K/V: float32 or bfloat16; the checkpoint's own by default.")
    ] = None,
) -> None:
    """Import Meta's DLRMv3. Nothing pickled in its files is run."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with told_plainly(), Progress(*columns, console=err, transient=True) as bar:
        asked: dict[str, Any] = {"num_heads": heads, "window": window, "max_candidates": candidates, "dtype": dtype}
        task = bar.add_task("writing and hashing", total=None)
        config = import_dlrmv3(checkpoint, tables, folder, ImportOptions(**asked), lambda done: bar.advance(task, done))
    out.print(f"{folder}: {config.num_layers} layers, {config.num_rows:,} rows in {len(config.tables)} tables")
    out.print("its K/V depend on the query: served with reuse inside a request only", highlight=False)
