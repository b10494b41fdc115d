"""`helmrec calibrate`: measure this device and write cost terms for the simulator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize, TypeAdapter
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from helmrec import __version__
from helmrec.calibrate.timed import Measured, read_measured, write_measured
from helmrec.cli.console import check_writable, err, exit_on_error, out
from helmrec.errors import ConfigError
from helmrec.model.profiles import PROFILES

if TYPE_CHECKING:
    from helmrec.calibrate.fit import Fitted
    from helmrec.calibrate.measure import MeasurePlan
    from helmrec.costs.calibrated import CostModel

_SIZES = {"cuda": ("16GiB", "4GiB", "6GiB"), "cpu": ("64MiB", "64MiB", "96MiB")}  # tables, pool, host tier


def calibrate(  # noqa: PLR0913, PLR0917 - one parameter per flag
    out_path: Annotated[Path, typer.Option("--out", help="The calibration, as JSON.")],
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            help=f"Shape: {', '.join(PROFILES)}. Two of them separate the cost of rows.",
            show_default="dlrmv3",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU, if there is one.")] = None,
    name: Annotated[str | None, typer.Option(help="Name in reports; default: the file's name.")] = None,
    tables: Annotated[str | None, typer.Option(help="Bytes of all tables; default 16GiB on a GPU, 64MiB else.")] = None,
    pool: Annotated[
        str | None, typer.Option("--pool-bytes", "--pool", help="Bytes of the pool; default 4GiB on a GPU, 64MiB else.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half the cases, fewer repeats.")] = False,
    keep: Annotated[
        Path | None, typer.Option("--steps", help="Write all measurements as JSON.", show_default="not written")
    ] = None,
    refit: Annotated[
        list[Path] | None,
        typer.Option(help="Fit the measurements of such files instead of measuring; may repeat.", show_default="none"),
    ] = None,
) -> None:
    """Time steps of a real engine on this device and fit the simulator's cost terms to them."""
    with exit_on_error():
        check_writable("--out", out_path)
        check_writable("--steps", keep)
        if refit:
            measured = [each for path in refit for each in read_measured(path)]
        else:
            plan = _plan(device, tables, pool, is_quick=quick)
            measured = _measure_all(profiles or ["dlrmv3"], plan, keep)
        cost, fitted = calibration(name or out_path.stem, measured)
        part = out_path.with_name(f"{out_path.name}.part")  # an interrupted run leaves the old file
        part.write_text(cost.model_dump_json(indent=2) + "\n")
        part.replace(out_path)
    _print(cost, fitted)


def _plan(device: str | None, tables: str | None, pool: str | None, *, is_quick: bool) -> MeasurePlan:
    import torch

    from helmrec.calibrate.measure import MeasurePlan

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in _SIZES:
        raise ConfigError(f"device must be cpu or cuda, got {device!r}")
    default = _SIZES[device]
    table_bytes, pool_bytes = _bytes("tables", tables or default[0]), _bytes("pool_bytes", pool or default[1])
    return MeasurePlan(device, table_bytes, pool_bytes, _bytes("", default[2]), is_quick, provenance())


def _bytes(flag: str, text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        raise ConfigError(f"{flag} must be a size like 4GiB, got {text!r}") from None


def _measure_all(profiles: list[str], plan: MeasurePlan, keep: Path | None) -> list[Measured]:
    from helmrec.calibrate.measure import measure

    measured: list[Measured] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("preparing", total=None)

        def show(what: str, done: int, total: int) -> None:
            if not err.is_terminal and bar.tasks[0].description != what:  # a log file gets lines instead of a bar
                err.print(f"{bar.tasks[0].elapsed or 0.0:6.1f} s  {what}", highlight=False, soft_wrap=True)
            bar.update(task, description=what, completed=done, total=total)

        for profile in profiles:
            measured.append(measure(profile, plan, show))
            if keep is not None:
                write_measured(keep, measured)
    return measured


def calibration(name: str, measured: list[Measured]) -> tuple[CostModel, Fitted]:
    """A calibration from all measurements on one device."""
    from helmrec.calibrate.fit import fit
    from helmrec.costs.calibrated import CostModel

    devices = {one.device for one in measured}
    if len(devices) != 1:
        raise ConfigError(f"steps of one device are needed, got {', '.join(sorted(devices)) or 'none'}")
    fitted = fit(measured)
    terms = {term: float(f"{value:.5g}") for term, value in fitted.terms._asdict().items()}
    shape = " and ".join(one.profile for one in measured)
    cost = CostModel(
        name=name,
        device=measured[0].device,
        shape=shape,
        **terms | {"sorted_from_rows": int(terms["sorted_from_rows"])},
        sources=_sources(measured, fitted),
        made=measured[-1].made,
        fit=fitted.ratios,
    )
    return cost, fitted


def _sources(measured: list[Measured], fitted: Fitted) -> dict[str, str]:
    from helmrec.costs.calibrated import CostTerms

    by_fit = f"fitted to {fitted.num_steps} steps of {' and '.join(one.profile for one in measured)}"
    special = {
        "hit_gb_per_s": "timed: resident rows read in random order",
        "intake_ms": "timed: median of all submitted requests",
        "background_ms": "timed: median of all steps run one at a time",
        "sorted_from_rows": "a setting of the engine; 0: one speed for all misses",
        "reload_floor_ms": "included in reload_gb_per_s",
        "host_floor_ms": "fitted to the launches of steps run one at a time",
        "host_request_ms": "fitted to the launches of steps run one at a time",
        "host_token_us": "fitted to the launches of steps run one at a time",
        "host_row_ns": "fitted to the launches of steps run one at a time",
    }
    if len({one.rows_per_token for one in measured}) == 1:
        special["compute_row_ns"] = (
            "included in compute_token_us: cannot be separated with one number of rows per token"
        )
        special["host_row_ns"] = "included in host_token_us"
    beside = "three quarters of the speed without compute, as in docs/measurements/gpu-rows-h200.json"
    if not measured[0].overlaps:
        beside = special["beside_slowdown"] = "steps do not overlap on this device"
    special |= {"beside_gb_per_s": beside, "sorted_beside_gb_per_s": beside}
    return {term: special.get(term, by_fit) for term in CostTerms._fields}


def provenance() -> dict[str, str]:
    """Command, commit, date and versions of a measurement. HELMREC_COMMIT names the commit outside a git tree."""
    import torch

    return {
        "command": " ".join(["helmrec", *sys.argv[1:]]),
        "commit": os.environ.get("HELMREC_COMMIT") or _described(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "helmrec": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _described() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _print(cost: CostModel, fitted: Fitted) -> None:
    title = f"{cost.name}: {cost.device}, {cost.shape}, {fitted.num_steps:,} steps"
    terms = Table("term", "value", title=title)
    for name, value in cost.terms()._asdict().items():
        terms.add_row(name, f"{value:g}")
    works = Table("work", "predicted / measured")
    for name, ratio in cost.fit.items():
        works.add_row(name, f"{ratio:.3f}")
    out.print(terms, works)
