"""`helmrec load`: send the requests of a trace to a model or a server and measure the latency."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from helmrec.cli.console import check_writable, err, exit_on_error, out, pairs_table, print_error
from helmrec.config import EngineConfig
from helmrec.errors import ConfigError
from helmrec.policies import POLICY_NAMES, check_policy, make_policy, needs_curves

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from helmrec.control.rebalancer import Decision, Rebalancer
    from helmrec.engine.engine import Engine
    from helmrec.load import LoadSnapshot
    from helmrec.traffic.trace import Trace

_SLOW_DRIVER_MS = 5.0
_MODEL_OPTIONS = {  # parameters that say how a model in this process is served
    "pool": "--pool-bytes",
    "alpha": "--alpha",
    "device": "--device",
    "policy": "--policy",
    "decisions": "--decisions",
    "slo_ms": "--slo-ms",
}


def load(  # noqa: PLR0913, PLR0917 - one parameter per flag
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help="A model folder, or a server's http:// address.")],
    trace_path: Annotated[Path, typer.Option("--trace", help="A trace file, from `helmrec trace`.")],
    rate: Annotated[float | None, typer.Option(help="Poisson requests per second; default: the trace's times.")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Stop after so many requests.", show_default="all of the trace", min=1)
    ] = None,
    pool: Annotated[str, typer.Option("--pool-bytes", "--pool", help="Memory that both caches share.")] = "auto",
    alpha: Annotated[float, typer.Option(help="Embedding share of the pool.")] = 0.4,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if there is a card.")] = "auto",
    deadline_ms: Annotated[
        float | None,
        typer.Option("--deadline-ms", "--deadline", help="Milliseconds a request may wait.", show_default="unlimited"),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Policy that moves the boundary: static:ALPHA, {', '.join(POLICY_NAMES)}.", show_default="none"
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(help="Write the decisions of helm, for `helmrec explain`.", show_default="not written"),
    ] = None,
    slo_ms: Annotated[
        float, typer.Option("--slo-ms", "--slo", help="Latency limit of a request in milliseconds.")
    ] = 80,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.", min=0)] = 0,
    results: Annotated[
        Path | None, typer.Option("--out", help="Also write the result as JSON.", show_default="not written")
    ] = None,
) -> None:
    """Send the requests of a trace to a model at their times, and report latency from the time each was due.

    A server has its own pool and policy: with a URL, the options for them are refused. Status 1 if a request failed.
    """
    from helmrec.load import arrival_times
    from helmrec.traffic.trace_file import read_trace

    with exit_on_error():
        check_writable("--out", results)
        check_writable("--decisions", decisions)
        is_server = model.startswith(("http://", "https://"))
        if is_server:
            _refuse_model_options(context)
        _check_policy(policy, decisions)
        trace = read_trace(trace_path)
        times_s = arrival_times(trace.time_s, rate, seed)[:requests]
        if is_server:
            _conclude(_load_server(model, deadline_ms, trace, times_s), results)
            return
        settings: dict[str, Any] = {"pool_bytes": pool, "alpha": alpha, "device": device, "deadline_ms": deadline_ms}
        settings["miss_curves"] = policy is not None and needs_curves(policy)
        with _started(Path(model), EngineConfig(**settings), trace) as engine:
            rebalancer = None if policy is None else _rebalancer(engine, policy, slo_ms, decisions)
            end = _load_engine(engine, rebalancer, trace, times_s)
        _conclude(end, results)


def _refuse_model_options(context: typer.Context) -> None:
    """Raise ConfigError if an option is given that a server decides itself."""
    for name, flag in _MODEL_OPTIONS.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{flag} needs a model folder: a server has its own pool and policy")


def _check_policy(policy: str | None, decisions: Path | None) -> None:
    """Raise ConfigError if there is no such policy, or if it makes no decisions that can be written."""
    if policy is not None:
        check_policy(policy)
    if decisions is not None and (policy is None or not needs_curves(policy)):
        raise ConfigError(
            f"--decisions needs --policy {' or '.join(POLICY_NAMES)}: "
            f"policy {policy or 'none'} makes no decisions that can be explained"
        )


def _started(folder: Path, config: EngineConfig, trace: Trace) -> Engine:
    from helmrec.engine.engine import Engine
    from helmrec.traffic.requests import rank_requests

    err.print("loading the model; the first run compiles, for about a minute", highlight=False)
    with err.status("loading the model"):
        engine = Engine.from_model(folder, config)
        engine.rank([next(rank_requests(trace, engine.model_config))])  # compiles all loops
    return engine


def _load_engine(
    engine: Engine, rebalancer: Rebalancer | None, trace: Trace, times_s: NDArray[np.float64]
) -> LoadSnapshot:
    from helmrec.load import EngineLoad
    from helmrec.traffic.requests import rank_requests

    requests = rank_requests(trace, engine.model_config)
    _print_start(times_s)
    with Live(console=err, transient=True, auto_refresh=False) as live:
        return EngineLoad(engine, rebalancer).run(
            requests, times_s, lambda seen: live.update(_table(seen), refresh=True)
        )


def _load_server(url: str, deadline_ms: float | None, trace: Trace, times_s: NDArray[np.float64]) -> LoadSnapshot:
    from helmrec.serve.load import HttpLoad
    from helmrec.traffic.requests import rank_requests

    load = HttpLoad(url, deadline_ms)
    model = load.model()
    _print_start(times_s)
    with Live(console=err, transient=True, auto_refresh=False) as live:
        return load.run(
            rank_requests(trace, model), model, times_s, lambda seen: live.update(_table(seen), refresh=True)
        )


def _print_start(times_s: NDArray[np.float64]) -> None:
    last_s = float(times_s[-1]) if times_s.size else 0.0
    err.print(f"{times_s.size:,} requests over {last_s:,.{0 if last_s >= 10 else 1}f} s", highlight=False)


def _conclude(end: LoadSnapshot, results: Path | None) -> None:
    out.print(_table(end))
    if end.lag_p99_ms > _SLOW_DRIVER_MS:
        err.print(
            f"the driver was up to {end.lag_p99_ms:.0f} ms late (p99): lower the rate, or use these figures with care"
        )
    if results is not None:
        results.write_text(_as_json(end) + "\n")
    if end.failures:
        cause, num = max(end.failures.items(), key=lambda each: each[1])
        print_error(f"{end.failed} of {end.offered} requests failed; {num} of them with: {cause}")
        raise typer.Exit(1)


def _as_json(end: LoadSnapshot) -> str:
    """The result as JSON, where a figure of no requests is null."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(end), indent=2).decode()


def _rebalancer(engine: Engine, policy: str, slo_ms: float, decisions: Path | None) -> Rebalancer:
    from helmrec.control.rebalancer import Rebalancer

    decider = make_policy(policy)
    if decisions is None:
        return Rebalancer(engine, decider, slo_ms)
    decisions.write_text("")
    starts_s = list[float]()  # start times of the windows

    def note(decision: Decision) -> None:
        starts_s.append(decision.window.traffic.start_s)
        if (explanation := decision.explanation) is not None:
            with decisions.open("a") as lines:
                lines.write(replace(explanation, time_s=explanation.time_s - starts_s[0]).as_json() + "\n")

    return Rebalancer(engine, decider, slo_ms, on_decision=note)


def _table(seen: LoadSnapshot) -> Table:
    refused = ", ".join(f"{num} {cause}" for cause, num in seen.refused.items()) or "none"
    rows = (
        ("offered / answered", f"{seen.offered:,} / {seen.answered:,} ({seen.answered / seen.elapsed_s:,.1f}/s)"),
        ("refused, failed", f"{refused}; {seen.failed}"),
        ("refused after p99", _in_ms(seen.refused_p99_ms)),
        (
            "latency p50 / p99",
            f"{_in_ms(seen.p50_ms)} / {_in_ms(seen.p99_ms)} (recent p99 {_in_ms(seen.recent_p99_ms)})",
        ),
        ("driver late p99", _in_ms(seen.lag_p99_ms)),
        ("tokens reused", f"{seen.pool.token_reuse_rate:.1%}"),
        ("rows hit", f"{seen.pool.row_hit_rate:.1%}"),
        ("alpha, target", f"{seen.pool.alpha:.3f}, {seen.pool.alpha_target:.3f}"),
    )
    return pairs_table(f"{seen.elapsed_s:.1f} s", rows)


def _in_ms(value: float) -> str:
    """A time, or `-` for that of no requests."""
    return "-" if math.isnan(value) else f"{value:.1f} ms"
