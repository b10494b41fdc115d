"""`helmrec rank`: rank the candidates of requests in a file."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.progress import Progress

from helmrec.cli.console import err, exit_on_error
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.errors import RequestError
from helmrec.types import RankRequest, RankResult


def rank(  # noqa: PLR0913, PLR0917 - one parameter per flag
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    requests: Annotated[Path, typer.Option(help="Requests, one JSON object a line; fields as in RankRequest.")],
    results: Annotated[Path | None, typer.Option("--out", help="Result file; default: standard output.")] = None,
    pool: Annotated[str, typer.Option(help="Memory that both caches share.")] = "256MiB",
    alpha: Annotated[float, typer.Option(help="Embedding share of the pool.")] = 0.4,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print what the pool holds once it is ready.")
    ] = False,
) -> None:
    """Rank the requests of a file, in order. A bad line gets an error in its place; the others are ranked."""
    with exit_on_error():
        if not requests.is_file():
            raise RequestError("--requests", str(requests), "no such file")
        settings: dict[str, Any] = {"pool_bytes": pool, "alpha": alpha, "device": device}
        with Progress(console=err, transient=True) as bar:
            task = bar.add_task("loading", total=None)
            engine = Engine.from_model(
                folder,
                EngineConfig(**settings),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if verbose:
            err.print(str(engine.report()), highlight=False, soft_wrap=True)
        with requests.open() as lines, nullcontext(sys.stdout) if results is None else results.open("w") as sink:
            num_bad = _rank_lines(engine, lines, sink)
    if num_bad:
        err.print(f"[red]{num_bad} bad lines[/red]; each has an error in its place")
        raise typer.Exit(1)


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
