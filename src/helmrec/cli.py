"""The `helmrec` command."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from helmrec.calibrate.command import calibrate
from helmrec.config import EngineConfig
from helmrec.console import err, out, told_plainly
from helmrec.demo.plan import QUICK, DemoPlan
from helmrec.demo.run import run_demo
from helmrec.engine.engine import Engine
from helmrec.engine.warm_up import compile_ahead
from helmrec.errors import RequestError
from helmrec.experiments.command import bench_app
from helmrec.explain_cli import explain
from helmrec.import_cli import import_app
from helmrec.load_cli import load
from helmrec.loadgen_cli import loadgen
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import PROFILES, profile
from helmrec.model.weights import init_model, load_model, read_manifest, total_table_bytes
from helmrec.plan_cli import plan
from helmrec.serve_cli import serve
from helmrec.simulate_cli import run_simulate
from helmrec.trace_cli import trace_app
from helmrec.train_cli import train
from helmrec.types import RankRequest, RankResult

app = typer.Typer(
    help="Serve generative recommenders from one memory pool that embedding rows and KV prefixes share.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Make and inspect model folders.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(trace_app, name="trace")
app.add_typer(import_app, name="import")
app.add_typer(bench_app, name="bench")
app.command()(calibrate)
app.command()(load)
app.command()(loadgen)
app.command()(serve)
app.command("simulate")(run_simulate)
app.command()(explain)
app.command()(plan)
app.command()(train)


def _bytes_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)


@model_app.command("init")
def init(
    folder: Annotated[Path, typer.Option("--out", help="Folder to make; must be new or empty.")],
    name: Annotated[str, typer.Option("--profile", help=f"Shape: {', '.join(PROFILES)}.")] = "demo",
    rows: Annotated[int | None, typer.Option(help="Rows of the item table; other tables follow it.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = 0,
) -> None:
    """Make a model with random weights: for trying things out and for measuring."""
    with told_plainly(), _bytes_bar() as bar:
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
    with told_plainly(), _bytes_bar() as bar:
        task = bar.add_task("checking files", total=None)
        model = load_model(folder, verify=verify, progress=lambda done: bar.advance(task, done))
    dense = sum(tensor.numel() for tensor in model.dense.values())
    out.print(_model_table(folder, model.config, dense, model.version))


def _model_table(folder: Path, config: ModelConfig, dense: int, version: int) -> Table:
    table = Table(title=f"{config.name} in {folder}", show_header=False)
    item_bytes = 4 if config.dtype == "float32" else 2
    kv_bytes = config.num_layers * config.num_heads * (config.qk_dim + config.v_dim) * item_bytes
    for label, value in (
        ("version", f"{version:016x}"),
        ("layers x heads x (qk, v)", f"{config.num_layers} x {config.num_heads} x ({config.qk_dim}, {config.v_dim})"),
        ("width, form, dtype", f"{config.dim}, {config.form}, {config.dtype}"),
        ("window / candidates", f"{config.window:,} events / {config.max_candidates:,}"),
        ("dense parameters", f"{dense:,}"),
        ("KV per token", f"{kv_bytes:,} bytes"),
        ("tables", ", ".join(f"{t.name} ({t.num_rows:,})" for t in config.tables)),
        ("table bytes", f"{total_table_bytes(config):,} ({config.row_dtype}, {config.row_dim} wide)"),
    ):
        table.add_row(label, value)
    return table


@app.command()
def rank(  # noqa: PLR0913, PLR0917 - one parameter per flag
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    requests: Annotated[Path, typer.Option(help="Requests, one JSON object a line; fields as in RankRequest.")],
    results: Annotated[Path | None, typer.Option("--out", help="Where results go; standard output by default.")] = None,
    pool: Annotated[str, typer.Option(help="Memory both caches share.")] = "256MiB",
    alpha: Annotated[float, typer.Option(help="Embedding share of the pool.")] = 0.4,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what the pool holds once it is ready.")] = False,
) -> None:
    """Rank the requests of a file, in order; a bad line gets an error in its place and the rest go on."""
    with told_plainly():
        if not requests.is_file():
            raise RequestError("--requests", str(requests), "no such file")
        settings: dict[str, Any] = {"pool_bytes": pool, "alpha": alpha, "device": device}
        with Progress(console=err, transient=True) as bar:
            task = bar.add_task("getting ready", total=None)
            engine = Engine.from_model(
                folder,
                EngineConfig(**settings),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if verbose:
            err.print(str(engine.report()), highlight=False, soft_wrap=True)
        with requests.open() as lines, _writer(results) as sink:
            num_bad = _rank_lines(engine, lines, sink)
    if num_bad:
        err.print(f"[red]{num_bad} bad lines[/red]; each has an error in its place")
        raise typer.Exit(1)


@contextmanager
def _writer(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
    else:
        with path.open("w") as file:
            yield file


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    request: RankRequest | None
    error: str | None = None


def _rank_lines(engine: Engine, lines: TextIO, sink: TextIO) -> int:
    num_bad = 0
    numbered = enumerate(lines, start=1)
    while chunk := [
        _parse(engine, number, line) for number, line in islice(numbered, engine.config.max_batch_requests)
    ]:
        results = iter(engine.rank([line.request for line in chunk if line.request is not None]))
        for line in chunk:
            num_bad += line.request is None
            answer = {"error": line.error} if line.request is None else _as_json(next(results))
            sink.write(json.dumps({"line": line.number, **answer}) + "\n")
    return num_bad


def _parse(engine: Engine, number: int, text: str) -> _Line:
    known = {field.name for field in fields(RankRequest)}
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise RequestError("line", text.strip()[:40], "a JSON object is needed")
        if unknown := values.keys() - known:
            raise RequestError("line", sorted(unknown)[0], f"fields are {', '.join(sorted(known))}")
        request = RankRequest(**values)
        engine.validate(request)
    except (json.JSONDecodeError, TypeError, RequestError) as error:
        return _Line(number, None, str(error))
    return _Line(number, request)


def _as_json(result: RankResult) -> dict[str, Any]:
    return {**asdict(result), "scores": result.scores.tolist()}


@app.command("compile")
def compile_loops(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="A model folder; else the demo's form.")
    ] = None,
) -> None:
    """Compile the host's loops now, so that servers start quickly: for container images, and after an upgrade.

    Compiled code goes where NUMBA_CACHE_DIR says, or beside the package if that is writable. Kernels of a card are
    compiled on that card at the first start, and kept where TRITON_CACHE_DIR says.
    """
    with told_plainly():
        form = profile("demo") if model is None else read_manifest(model).model
        with err.status("compiling"):
            started_s = time.perf_counter()
            num_kinds = compile_ahead(form)
        out.print(f"loops of {num_kinds} kinds of engines in {time.perf_counter() - started_s:.1f} s", highlight=False)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="Of traffic, half for each side.", min=6)] = 60,
    seed: Annotated[int, typer.Option(help="Same seed, same traffic.", min=0)] = 0,
    report: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path("helmrec-demo.html"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, a tiny model, no simulation.")] = False,
) -> None:
    """Serve a small model over HTTP while traffic changes: the best constant split, then ours, side by side."""
    with told_plainly():
        chosen = {"seed": seed} if quick else {"seed": seed, "seconds": seconds}
        plan = DemoPlan(**(QUICK if quick else DemoPlan()).model_dump() | chosen)
        run_demo(out, plan, report)
