"""`helmrec loadgen`: MLPerf LoadGen's verdict on a model, Server scenario."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from helmrec.cli.console import check_writable, err, exit_on_error, out, pairs_table
from helmrec.config import EngineConfig
from helmrec.errors import TraceError

if TYPE_CHECKING:
    from helmrec_bench.loadgen import LoadGenVerdict

_SPARE = 1.2  # LoadGen draws how many queries fit the time


def loadgen(  # noqa: PLR0913, PLR0917 - one parameter per flag
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    trace_path: Annotated[Path, typer.Option("--trace", help="A trace file, from `helmrec trace`: who asks.")],
    qps: Annotated[float, typer.Option(help="Queries a second, Poisson.")],
    seconds: Annotated[float, typer.Option(help="How long; a submission to MLPerf needs 600.")] = 60,
    latency_ms: Annotated[float, typer.Option("--latency", help="Bound of the 99th percentile.")] = 80,
    pool: Annotated[str, typer.Option("--pool-bytes", "--pool", help="Memory both caches share.")] = "auto",
    alpha: Annotated[float, typer.Option(help="Embedding share of the pool.")] = 0.4,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if there is a card.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the arrivals.", min=0)] = 0,
    logs: Annotated[Path | None, typer.Option(help="Keep LoadGen's own files here.", show_default="not kept")] = None,
    results: Annotated[
        Path | None, typer.Option("--out", help="Write the verdict as JSON, too.", show_default="not written")
    ] = None,
) -> None:
    """Let MLPerf LoadGen (Server scenario) judge a model in this process: VALID or INVALID, and why.

    Status 1 if it is invalid. The n-th query is the n-th request of the trace, made on time and counted in.
    """
    from helmrec.traffic.trace_file import read_trace
    from helmrec_bench.loadgen import LoadGenConfig, judge_trace, loadgen_module

    with exit_on_error():
        loadgen_module()
        check_writable("--out", results)
        config = LoadGenConfig(target_qps=qps, seconds=seconds, latency_ms=latency_ms, seed=seed)
        trace = read_trace(trace_path)
        if trace.num_requests < (needed := int(_SPARE * qps * seconds)):
            raise TraceError(
                f"{trace_path} has {trace.num_requests} requests; {qps:g}/s for {seconds:g} s need {needed}"
            )
        settings: dict[str, Any] = {"pool_bytes": pool, "alpha": alpha, "device": device}
        with err.status("LoadGen at work"):
            verdict, _ = judge_trace(model, EngineConfig(**settings), trace, config, logs)
    out.print(_table(verdict))
    if results is not None:
        results.write_text(json.dumps(asdict(verdict), indent=2) + "\n")
    if not verdict.is_valid:
        raise typer.Exit(1)


def _table(verdict: LoadGenVerdict) -> Table:
    rows = (
        ("problems", "; ".join(verdict.problems) or "none"),
        ("queries a second, asked / completed", f"{verdict.target_qps:,.1f} / {verdict.completed_per_s:,.1f}"),
        ("queries, late, failed", f"{verdict.num_queries:,}, {verdict.num_late:,}, {verdict.num_failed:,}"),
        ("latency mean / max", f"{verdict.mean_ms:.1f} / {verdict.max_ms:.1f} ms"),
        *((f"p{share}", f"{each:.1f} ms") for share, each in verdict.percentiles_ms.items()),
    )
    return pairs_table("VALID" if verdict.is_valid else "INVALID", rows)
