"""`helmrec plan`: how many nodes a load needs, which pool, which split."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from helmrec.cli.console import err, out, told_plainly
from helmrec.errors import ConfigError
from helmrec.model.profiles import PROFILES
from helmrec.sim.cost import default_cost, load_cost
from helmrec.sim.plan import Plan, PlanConfig, make_plan
from helmrec.traffic.families import PRESETS


def plan(  # noqa: PLR0913, PLR0917 - one parameter per flag
    rate: Annotated[float, typer.Option(help="Requests per second, in all.")],
    slo: Annotated[str, typer.Option(help="What 99 of 100 answers may take, such as 80ms.")] = "80ms",
    calibration: Annotated[Path | None, typer.Option(help="Costs of the device; an H200's without.")] = None,
    pools: Annotated[list[str] | None, typer.Option("--pool", help="Memory of a node's pool; may repeat.")] = None,
    profile: Annotated[str, typer.Option(help=f"Model shape: {', '.join(PROFILES)}.")] = "dlrmv3",
    preset: Annotated[str, typer.Option(help=f"Items and candidates: {', '.join(PRESETS)}.")] = "dlrmv3",
    history: Annotated[float, typer.Option(help="Median events of a user.")] = 6_700,
    hot_users: Annotated[int, typer.Option(help="Users who come back, in all.")] = 2_000,
    hot_share: Annotated[float, typer.Option(help="Share of requests they make.")] = 0.7,
    headroom: Annotated[float, typer.Option(help="Share of each node to keep idle.")] = 0.15,
    requests: Annotated[int, typer.Option(help="Requests simulated per run; more is slower and surer.")] = 4_000,
) -> None:
    """Say how many nodes a load needs, with which split, and what P99 to expect: all of it simulated."""
    with told_plainly():
        cost = default_cost() if calibration is None else load_cost(calibration)
        settings: dict[str, Any] = {
            "rate": rate,
            "slo_ms": milliseconds(slo),
            "profile": profile,
            "preset": preset,
            "history": history,
            "hot_users": hot_users,
            "hot_share": hot_share,
            "headroom": headroom,
            "requests_per_run": requests,
        }
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task("simulating", total=None)
            plans = [
                make_plan(
                    PlanConfig(pool_bytes=pool, **settings),
                    cost,
                    lambda what, pool=pool: bar.update(task, description=f"pool {pool}: {what}"),  # type: ignore[misc]
                )
                for pool in pools or ["80GB"]
            ]
        out.print(table_of(plans, rate, milliseconds(slo), cost.name))


def milliseconds(text: str) -> float:
    """80ms, 0.08s or 80."""
    number = text.strip().lower()
    scale = 1.0
    for unit, factor in (("ms", 1.0), ("s", 1_000.0)):
        if number.endswith(unit):
            number, scale = number.removesuffix(unit), factor
            break
    try:
        value = float(number) * scale
    except ValueError:
        raise ConfigError(f"--slo: a time such as 80ms is needed, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"--slo: a time above 0 is needed, got {text!r}")
    return value


def table_of(plans: list[Plan], rate: float, slo_ms: float, calibration: str) -> Table:
    title = f"{rate:,.0f} requests/s, P99 within {slo_ms:g} ms, costs of {calibration}"
    table = Table("pool", "nodes", "memory in all", "alpha", "p99 ms", "in SLO", "KV hit", "EMB hit", title=title)
    for each in plans:
        num = each.num_nodes
        table.add_row(
            f"{each.pool_bytes / 1e9:.0f} GB",
            "too many" if num is None else str(num),
            "-" if num is None else f"{num * each.pool_bytes / 1e9:,.0f} GB",
            f"{each.alpha:.2f}",
            f"{each.p99_ms:.1f}",
            f"{each.slo_satisfaction:.2%}",
            f"{each.kv_hit:.1%}",
            f"{each.emb_hit:.1%}",
        )
    return table
