"""`helmrec rank`: rank the candidates of requests in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from helmrec.cli.console import check_writable, err, exit_on_error, print_error, progress
from helmrec.config import EngineConfig
from helmrec.errors import ConfigError, RequestError
from helmrec.types import RankRequest, RankResult

if TYPE_CHECKING:
    from helmrec.engine.engine import Engine


def rank(  # noqa: PLR0913, PLR0917 - one parameter per flag
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    requests: Annotated[Path, typer.Option(help="Requests, one JSON object a line; fields as in RankRequest.")],
    results: Annotated[Path | None, typer.Option("--out", help="Result file; default: standard output.")] = None,
    pool: Annotated[str, typer.Option("--pool-bytes", "--pool", help="Memory that both caches share.")] = "auto",
    alpha: Annotated[float, typer.Option(help="Embedding share of the pool.")] = 0.4,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if there is a card.")] = "auto",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print device, pool and why they were chosen.")
    ] = False,
) -> None:
    """Rank the requests of a file, in order. A bad line gets an error in its place; the others are ranked.

    Status 2 if a line is bad.
    """
    from helmrec.engine.engine import Engine

    with exit_on_error():
        if not requests.is_file():
            raise ConfigError(f"--requests: no such file, got {str(requests)!r}")
        check_writable("--out", results)
        settings: dict[str, Any] = {"pool_bytes": pool, "alpha": alpha, "device": device}
        with progress() as bar:
            task = bar.add_task("loading", total=None)
            engine = Engine.from_model(
                model,
                EngineConfig(**settings),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if verbose:
            err.print(str(engine.report()), highlight=False, soft_wrap=True)
        with requests.open("rb") as lines, nullcontext(sys.stdout) if results is None else results.open("w") as sink:
            bad = _rank_lines(engine, lines, sink)
    if bad:
        others = f"; {len(bad) - 1} more bad lines have an error in their place" if len(bad) > 1 else ""
        print_error(f"{requests}, line {bad[0].number}: {bad[0].error}{others}")
        raise typer.Exit(2)


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    request: RankRequest | None
    error: str | None = None


def _rank_lines(engine: Engine, lines: Iterable[bytes], sink: TextIO) -> list[_Line]:
    """Write an answer for each line, and return the bad ones."""
    bad = list[_Line]()
    numbered = enumerate(lines, start=1)
    while chunk := [
        _parse(engine, number, line) for number, line in islice(numbered, engine.config.max_batch_requests)
    ]:
        results = iter(engine.rank([line.request for line in chunk if line.request is not None]))
        for line in chunk:
            if line.request is None:
                bad.append(line)
            answer = {"error": line.error} if line.request is None else _as_json(next(results))
            sink.write(json.dumps({"line": line.number, **answer}) + "\n")
    return bad


def _parse(engine: Engine, number: int, text: bytes) -> _Line:
    from helmrec.traffic.request_lines import request_of

    try:
        request = request_of(json.loads(text))
        engine.validate(request)
    except RequestError as error:
        return _Line(number, None, str(error))
    except (TypeError, ValueError) as error:  # of JSON, or of its encoding
        return _Line(number, None, f"not JSON: {error}")
    return _Line(number, request)


def _as_json(result: RankResult) -> dict[str, Any]:
    return {**asdict(result), "scores": result.scores.tolist()}
