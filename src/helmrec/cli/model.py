"""`helmrec model`: create and inspect model folders."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from helmrec.cli.console import bytes_bar, exit_on_error, out, pairs_table
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import PROFILES, profile
from helmrec.model.weights import init_model, load_model, total_table_bytes

model_app = typer.Typer(help="Create and inspect model folders.", no_args_is_help=True)


@model_app.command("init")
def init(
    folder: Annotated[Path, typer.Option("--out", help="Folder to create; must be new or empty.")],
    name: Annotated[str, typer.Option("--profile", help=f"Shape: {', '.join(PROFILES)}.")] = "demo",
    rows: Annotated[int | None, typer.Option(help="Rows of the item table; other tables scale with it.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = 0,
) -> None:
    """Create a model with random weights, for tests and measurements."""
    with exit_on_error(), bytes_bar() as bar:
        config = profile(name, rows)
        task = bar.add_task("writing and hashing", total=2 * total_table_bytes(config))
        init_model(folder, config, seed, lambda done: bar.advance(task, done))
    out.print(f"{folder}: profile {name}, {config.num_rows:,} rows in {len(config.tables)} tables", highlight=False)


@model_app.command("info")
def info(
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    verify: Annotated[bool, typer.Option(help="Checksum tables over 256 MiB too.")] = False,
) -> None:
    """Show a model's shape and check its files."""
    with exit_on_error(), bytes_bar() as bar:
        task = bar.add_task("checking files", total=None)
        model = load_model(folder, verify=verify, progress=lambda done: bar.advance(task, done))
    dense = sum(tensor.numel() for tensor in model.dense.values())
    out.print(_model_table(folder, model.config, dense, model.version))


def _model_table(folder: Path, config: ModelConfig, dense: int, version: int) -> Table:
    item_bytes = 4 if config.dtype == "float32" else 2
    kv_bytes = config.num_layers * config.num_heads * (config.qk_dim + config.v_dim) * item_bytes
    rows = (
        ("version", f"{version:016x}"),
        ("layers x heads x (qk, v)", f"{config.num_layers} x {config.num_heads} x ({config.qk_dim}, {config.v_dim})"),
        ("width, form, dtype", f"{config.dim}, {config.form}, {config.dtype}"),
        ("window / candidates", f"{config.window:,} events / {config.max_candidates:,}"),
        ("dense parameters", f"{dense:,}"),
        ("KV per token", f"{kv_bytes:,} bytes"),
        ("tables", ", ".join(f"{t.name} ({t.num_rows:,})" for t in config.tables)),
        ("table bytes", f"{total_table_bytes(config):,} ({config.row_dtype}, {config.row_dim} wide)"),
    )
    return pairs_table(f"{config.name} in {folder}", rows)
