"""`helmrec model`: create, inspect and check model folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from helmrec.cli.console import bytes_bar, err, exit_on_error, out, pairs_table
from helmrec.cli.precision import check_precision_of
from helmrec.model.profiles import PROFILES, profile

if TYPE_CHECKING:
    from helmrec.model.config import ModelConfig

model_app = typer.Typer(help="Create, inspect and check model folders.", no_args_is_help=True)


@model_app.command("init")
def init(
    folder: Annotated[Path, typer.Option("--out", help="Folder to create; must be new or empty.")],
    name: Annotated[str, typer.Option("--profile", help=f"Shape: {', '.join(PROFILES)}.")] = "demo",
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of the item table; other tables scale with it.", show_default="those of the profile"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = 0,
) -> None:
    """Create a model with random weights, for tests and measurements."""
    from helmrec.model.weights import init_model, total_table_bytes

    with exit_on_error(), bytes_bar() as bar:
        config = profile(name, rows)
        task = bar.add_task("writing and hashing", total=2 * total_table_bytes(config))
        init_model(folder, config, seed, lambda done: bar.advance(task, done))
    out.print(f"{folder}: profile {name}, {config.num_rows:,} rows in {len(config.tables)} tables", highlight=False)


@model_app.command("info")
def info(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    verify: Annotated[bool, typer.Option(help="Checksum tables over 256 MiB too.")] = False,
) -> None:
    """Show a model's shape and check its files."""
    from helmrec.model.weights import load_model

    with exit_on_error(), bytes_bar() as bar:
        task = bar.add_task("checking files", total=None)
        model = load_model(folder, verify=verify, progress=lambda done: bar.advance(task, done))
    dense = sum(tensor.numel() for tensor in model.dense.values())
    out.print(_model_table(folder, model.config, dense, model.version))


@model_app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Compare eight bits with the model's dtype instead: fp8 or int8 (K/V), fp8-products, fp8-rows or "
            "int8-rows; together: fp8-layers, int8-caches or fp8-all.",
            show_default="none",
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="Held-out requests for --precision: JSON lines, fields as in RankRequest and perhaps labels, one "
            "number per candidate; or a trace.",
            show_default="random ones",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of --precision: cpu or cuda.")] = "cpu",
) -> None:
    """Compare the scores of an engine on the CPU, caches on, with those of the plain PyTorch module.

    With --precision, compare scores in low and in full precision, and write the verdict to precision.json in the model
    folder, which an engine with kv_dtype="auto" or row_dtype="auto" obeys. Status 1 if low precision is not allowed.
    """
    from helmrec.engine.model_check import check_model
    from helmrec.model.weights import load_model

    if precision is not None:
        with exit_on_error():
            is_allowed = check_precision_of(folder, precision, requests, seed, device)
        raise typer.Exit(0 if is_allowed else 1)
    with exit_on_error():
        model = load_model(folder)
        found = check_model(model, seed)
    out.print("compared: an engine with caches against HstuRanker in float64", highlight=False, soft_wrap=True)
    out.print(f"requests: {found.num_requests}, reused tokens: {found.reused_tokens:,}", highlight=False)
    out.print(
        f"largest difference of scores: {found.largest_difference:.3g}, tolerance: {found.tolerance:.3g}",
        highlight=False,
    )
    if not found.is_equal:
        err.print(f"[red]error:[/red] the scores of {folder} differ", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _model_table(folder: Path, config: ModelConfig, dense: int, version: int) -> Table:
    from helmrec.model.weights import total_table_bytes

    kv_bytes, rounded_bytes = (config.page_geometry(1, kv_dtype).token_bytes for kv_dtype in ("model", "int8"))
    rows = (
        ("version", f"{version:016x}"),
        ("layers x heads x (qk, v)", f"{config.num_layers} x {config.num_heads} x ({config.qk_dim}, {config.v_dim})"),
        ("width, form, dtype", f"{config.dim}, {config.form}, {config.dtype}"),
        ("window / candidates", f"{config.window:,} events / {config.max_candidates:,}"),
        ("dense parameters", f"{dense:,}"),
        ("KV per token", f"{kv_bytes:,} bytes; {rounded_bytes:,} with a kv_dtype of eight bits"),
        ("tables", ", ".join(f"{t.name} ({t.num_rows:,})" for t in config.tables)),
        ("table bytes", f"{total_table_bytes(config):,} ({config.row_dtype}, {config.row_dim} wide)"),
        (
            "a row in memory",
            f"{config.row_stride:,} bytes; {config.record_bytes('int8'):,} with a row_dtype of eight bits",
        ),
    )
    return pairs_table(f"{config.name} in {folder}", rows)
