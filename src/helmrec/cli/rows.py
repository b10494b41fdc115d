"""`helmrec rows`: new embedding rows from training, as a stream of deltas."""

import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from helmrec.cli.console import bytes_bar, exit_on_error, out, pairs_table, progress
from helmrec.deltas.delta import Delta
from helmrec.deltas.producer import DeltaProducer, skip_to
from helmrec.deltas.source import DeltaSink, in_order, open_source
from helmrec.errors import RequestError

_POLL_S = 0.2
_PUSH_ROWS = 65_536  # of one delta
Place = Annotated[
    str,
    typer.Argument(
        metavar="PLACE", help="A folder of deltas, or a Redis: redis://HOST:6379/0.", envvar="HELMREC_ROW_DELTAS"
    ),
]

rows_app = typer.Typer(help="New embedding rows from training, as a stream of deltas.", no_args_is_help=True)


@contextmanager
def _opened(place: str) -> Iterator[DeltaSink]:
    source = open_source(place)
    try:
        yield source
    finally:
        source.close()


@rows_app.command("push")
def push(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rows: .safetensors or .npz with ids and values, or .csv.")
    ],
    place: Place,
    table: Annotated[str, typer.Option(help="The table that the rows belong to.")] = "item",
    step: Annotated[int, typer.Option(help="The training step they were made at.", min=0)] = 0,
    add: Annotated[bool, typer.Option("--add", help="The values are differences, added to the rows.")] = False,
) -> None:
    """Append the rows of a file to a stream of deltas.

    A .csv has a line per row, without a header: the id, then its values. Many rows become several deltas.
    """
    with exit_on_error():
        ids, values = _read_rows(file)
        with DeltaProducer(place) as producer, progress() as bar:
            task = bar.add_task(f"pushing {file.name}", total=len(ids))
            for start in range(0, max(1, len(ids)), _PUSH_ROWS):
                some = slice(start, start + _PUSH_ROWS)
                producer.push(table, ids[some], values[some], step=step, add=add)
                bar.update(task, advance=_PUSH_ROWS)
            out.print(f"{len(ids):,} rows of {table!r} pushed, up to delta {producer.newest}", highlight=False)


@rows_app.command("push-model")
def push_model(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder that every server can read.")],
    place: Place,
    step: Annotated[int, typer.Option(help="The training step it was made at.", min=0)] = 0,
) -> None:
    """Append a whole new model to a stream of deltas: dense weights and rows.

    Servers swap it in without a pause where it stands in the stream; later deltas change its rows. Keep the folder: a
    server that starts later loads it, too.
    """
    with exit_on_error(), DeltaProducer(place) as producer:
        out.print(f"{model} pushed as delta {producer.push_model(model, step=step)}", highlight=False, soft_wrap=True)


@rows_app.command("tail")
def tail(
    place: Place,
    after: Annotated[int, typer.Option(help="Show the deltas behind this one.", min=0)] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until interrupted.")] = False,
) -> None:
    """Show the deltas of a stream, a line for each; end with an error at one that is missing or corrupt."""
    with exit_on_error(), _opened(place) as source:
        while True:
            for delta in in_order(source.read(after), after):
                out.print(_line(delta), highlight=False, markup=False, soft_wrap=True)
                after = delta.sequence
            if not follow:
                return
            time.sleep(_POLL_S)


@rows_app.command("snapshot")
def snapshot(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder, or an earlier snapshot.")],
    place: Place,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where snapshots lie: --row-snapshots of serve.")],
    to: Annotated[int | None, typer.Option(help="The last delta to include.", min=1, show_default="the newest")] = None,
    keep: Annotated[
        int | None,
        typer.Option(help="Remove all but so many newest snapshots, afterwards.", min=2, show_default="all stay"),
    ] = None,
    trim: Annotated[
        bool, typer.Option("--trim", help="Remove deltas that all kept snapshots include; needs --keep.")
    ] = False,
) -> None:
    """Write a model folder that includes the deltas up to a position, and records it.

    A server with --row-snapshots FOLDER starts from the newest one and applies only the deltas behind it. Run this
    from a timer, with fewer deltas between two runs than the producer keeps; or let a server do it
    (row_snapshot_every_s).
    """
    from helmrec.deltas.schedule import SnapshotPlan, make_snapshot
    from helmrec.deltas.snapshot import snapshot_name
    from helmrec.model.folder import read_manifest
    from helmrec.model.weights import total_table_bytes

    if trim and keep is None:
        raise typer.BadParameter("--trim needs --keep")
    with exit_on_error(), bytes_bar() as bar:
        reading = bar.add_task("deltas", total=None)
        writing = bar.add_task("tables", total=2 * total_table_bytes(read_manifest(model).model))
        position = make_snapshot(
            SnapshotPlan(model=model, deltas=place, folder=folder, keep=keep, trims=trim, to=to),
            lambda done, total: bar.update(reading, completed=done, total=total),
            lambda done: bar.update(writing, advance=done),
        )
    if position is None:
        out.print(
            f"nothing to write: no delta is newer than the snapshots in {folder}", highlight=False, soft_wrap=True
        )
    else:
        name = folder / snapshot_name(position.sequence)
        out.print(f"{name}: the rows at delta {position.sequence}", highlight=False, soft_wrap=True)


@rows_app.command("status")
def status(
    url: Annotated[str, typer.Option(help="A server that follows row deltas.")] = "http://127.0.0.1:8000",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.", min=0.1)] = 10,
) -> None:
    """Show how far a server has followed its stream; status 1 if a fault has stopped it."""
    from helmrec.serve.client import Client

    with exit_on_error(), Client(url, timeout_s) as client:
        found = client.row_stream()
        if found is None:
            raise RequestError("url", url, "this server follows no row deltas (--row-deltas)")
    rows = (
        ("source", found.source),
        ("position / newest", f"{found.position:,} / {found.newest:,}"),
        ("lag", f"{found.lag_deltas:,} deltas, {found.lag_s:.1f} s"),
        ("applied", f"{found.deltas:,} deltas, {found.rows:,} rows"),
        ("duplicates / skipped", f"{found.duplicates:,} / {found.skipped:,}"),
        ("stopped by", found.stop or "nothing"),
    )
    out.print(pairs_table(url, rows))
    if found.stop is not None:
        raise typer.Exit(1)


@rows_app.command("skip")
def skip(
    place: Place,
    to: Annotated[int, typer.Option(help="The last delta to skip.", min=1)],
    after: Annotated[int, typer.Option(help="Skip the deltas behind this one: the position of the servers.", min=0)],
    also_readable: Annotated[
        bool, typer.Option("--also-readable", help="Skip deltas that can be read, too: they do not fit the model.")
    ] = False,
) -> None:
    """Skip deltas that are missing or corrupt, for good and for every server.

    Their rows keep the values they had. The skip is written to the stream, so that all servers agree.
    """
    with exit_on_error(), _opened(place) as source:
        skipped = skip_to(source, after, to, also_readable=also_readable)
    shown = ", ".join(map(str, skipped[:20])) + (", ..." if len(skipped) > 20 else "")
    out.print(f"{len(skipped)} deltas skipped{': ' if skipped else ''}{shown}", highlight=False)


def _line(delta: Delta) -> str:
    if delta.is_skip:
        return f"{delta.sequence}: skipped"
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(delta.made_s))
    kinds = {True: "differences", False: "rows"}
    what = ", ".join(f"{part.ids.size} {kinds[part.is_difference]} of {part.table}" for part in delta.parts)
    if delta.model is not None:
        what = f"model {delta.model.folder}"
    return f"{delta.sequence}: step {delta.step}, {made}, {what}"


def _read_rows(file: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids and values of a file; RequestError says what is wrong with it."""
    if not file.is_file():
        raise RequestError("file", str(file), "there is no such file")
    try:
        if file.suffix == ".csv":
            return _read_csv(file)
        if file.suffix not in (".safetensors", ".npz"):
            raise RequestError("file", file.name, "a name that ends in .safetensors, .npz or .csv is needed")
        found = load_file(file) if file.suffix == ".safetensors" else dict(np.load(file, allow_pickle=False))
    except (SafetensorError, ValueError, EOFError, OSError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError("file", str(file), f"it cannot be read ({error})") from None
    if found.keys() != {"ids", "values"}:
        raise RequestError("file", sorted(found), "arrays named ids and values are needed")
    return found["ids"], found["values"]


def _read_csv(file: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    ids, values = [], []
    with file.open(newline="", encoding="utf-8") as lines:
        for number, line in enumerate(csv.reader(lines), 1):
            try:
                ids.append(int(line[0]))
                values.append([float(value) for value in line[1:]])
            except (ValueError, IndexError):
                raise RequestError(
                    f"{file}, line {number}", ",".join(line)[:80], "an id and numbers are needed"
                ) from None
            if len(values[-1]) != len(values[0]):
                raise RequestError(
                    f"{file}, line {number}", len(values[-1]), f"{len(values[0])} values are needed, as in line 1"
                )
    return np.array(ids, np.int64), np.array(values, np.float32)
