"""`helmrec plan`: the number of nodes that a load needs, and their split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from helmrec.cli.console import exit_on_error, out, progress
from helmrec.errors import ConfigError
from helmrec.model.profiles import PROFILES
from helmrec.traffic.families import PRESETS

if TYPE_CHECKING:
    from helmrec.costs.calibrated import CostModel
    from helmrec.sim.plan import Plan


def plan(  # noqa: PLR0913, PLR0917 - one parameter per flag
    rate: Annotated[float, typer.Option(help="Requests per second, in total.")],
    slo: Annotated[str, typer.Option("--slo-ms", "--slo", help="Limit of the P99 latency: 80, 80ms, 0.08s.")] = "80ms",
    calibration: Annotated[Path | None, typer.Option(help="Costs of the device; default: an H200.")] = None,
    pools: Annotated[
        list[str] | None,
        typer.Option("--pool-bytes", "--pool", help="Memory of a node's pool; may repeat.", show_default="80GB"),
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Type of K/V: model, fp8_e4m3 or int8; times do not change.")] = "model",
    row_dtype: Annotated[str, typer.Option(help="Type of rows in the pool, in the same words.")] = "model",
    host_rows: Annotated[
        str | None,
        typer.Option(
            "--host-rows-bytes", help="Host memory for rows of a node; others are on disk.", show_default="all"
        ),
    ] = None,
    disk_reads: Annotated[
        float | None, typer.Option("--disk-reads-per-s", help="Random reads a second of its disk; no default.")
    ] = None,
    profile: Annotated[str, typer.Option(help=f"Model shape: {', '.join(PROFILES)}.")] = "dlrmv3",
    preset: Annotated[str, typer.Option(help=f"Items and candidates: {', '.join(PRESETS)}.")] = "dlrmv3",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take items, candidates, history and returning users from a trace; the flags for them are ignored.",
            show_default="none",
        ),
    ] = None,
    history: Annotated[float, typer.Option(help="Median events of a user.")] = 6_700,
    hot_users: Annotated[int, typer.Option(help="Returning users, in total.")] = 2_000,
    hot_share: Annotated[float, typer.Option(help="Share of requests made by returning users.")] = 0.7,
    headroom: Annotated[float, typer.Option(help="Share of each node's capacity that stays unused.")] = 0.15,
    requests: Annotated[
        int, typer.Option(help="Requests simulated per run; more are slower and more precise.")
    ] = 4_000,
) -> None:
    """Find the number of nodes that a load needs, their split and the expected P99, by simulation."""
    from helmrec.costs.calibrated import default_cost, load_cost
    from helmrec.sim.plan import settings_of_trace
    from helmrec.traffic.trace_file import read_trace

    with exit_on_error():
        cost = default_cost() if calibration is None else load_cost(calibration)
        settings: dict[str, Any] = {
            "rate": rate,
            "slo_ms": milliseconds(slo),
            "kv_dtype": kv_dtype,
            "row_dtype": row_dtype,
            "host_rows_bytes": host_rows,
            "disk_rows_per_s": disk_reads,
            "profile": profile,
            "preset": preset,
            "history": history,
            "hot_users": hot_users,
            "hot_share": hot_share,
            "headroom": headroom,
            "requests_per_run": requests,
        } | ({} if trace is None else settings_of_trace(read_trace(trace)))
        plans = _make_plans(settings, pools or ["80GB"], cost)
        out.print(table_of(plans, rate, milliseconds(slo), cost.name))


def _make_plans(settings: dict[str, Any], pools: list[str], cost: CostModel) -> list[Plan]:
    """Plan for each size of a pool, showing what is simulated."""
    from helmrec.sim.plan import PlanConfig, make_plan

    with progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("simulating", total=None)
        return [
            make_plan(
                PlanConfig(pool_bytes=pool, **settings),
                cost,
                lambda what, pool=pool: bar.update(task, description=f"pool {pool}: {what}"),  # type: ignore[misc]
            )
            for pool in pools
        ]


def milliseconds(text: str) -> float:
    """Parse a time such as 80ms, 0.08s or 80."""
    number, *unit = re.split(r"(ms|s)$", text.strip().lower())
    try:
        value = float(number) * (1_000 if unit[:1] == ["s"] else 1)
    except ValueError:
        raise ConfigError(f"--slo must be a time such as 80ms, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"--slo must be above 0, got {text!r}")
    return value


def _nodes(found: Plan, slo_ms: float) -> str:
    from helmrec.sim.plan import MAX_NODES

    if found.num_nodes is not None:
        return str(found.num_nodes)
    assert found.unloaded_p99_ms is not None
    if found.unloaded_p99_ms > slo_ms:
        return f"unreachable at any size: {found.unloaded_p99_ms:.1f} ms without load"
    return f"more than {MAX_NODES}"


def table_of(plans: list[Plan], rate: float, slo_ms: float, calibration: str) -> Table:
    title = f"{rate:,.0f} requests/s, P99 within {slo_ms:g} ms, costs of {calibration}"
    table = Table("pool", "nodes", "total memory", "alpha", "p99 ms", "in SLO", "KV hit", "EMB hit", title=title)
    for each in plans:
        num = each.num_nodes
        table.add_row(
            f"{each.pool_bytes / 1e9:.0f} GB",
            _nodes(each, slo_ms),
            "-" if num is None else f"{num * each.pool_bytes / 1e9:,.0f} GB",
            f"{each.alpha:.2f}",
            f"{each.p99_ms:.1f}",
            f"{each.slo_satisfaction:.2%}",
            f"{each.kv_hit:.1%}",
            f"{each.emb_hit:.1%}",
        )
    return table
