"""`helmrec bench`: list experiments, run one or all, and write the report."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from helmrec.cli.console import err, exit_on_error, out
from helmrec_bench.experiments.registry import EXPERIMENTS, experiment
from helmrec_bench.experiments.report import write_report
from helmrec_bench.experiments.results import Result, claims_markdown, read_results, run_experiment, together
from helmrec_bench.lab.lab import Lab, Place
from helmrec_bench.lab.tiers import TIERS, Tier

bench_app = typer.Typer(help="Every figure and table of the evaluation, one command each.", no_args_is_help=True)

Smoke = Annotated[bool, typer.Option("--smoke", help="Seconds: shows that everything runs, judges nothing.")]
Quick = Annotated[bool, typer.Option("--quick", help="Minutes, one seed; the default.")]
Full = Annotated[bool, typer.Option("--full", help="Hours, five seeds.")]
_HERE = Place()
Scenarios = Annotated[
    Path,
    typer.Option(
        help="Folder of scenarios; copy the installed ones, change a line there and run again.",
        show_default="those of helmrec_bench",
    ),
]
Build = Annotated[Path, typer.Option("--out", help="Folder for results and finished pieces.")]
Seeds = Annotated[int | None, typer.Option(help="Another number of seeds than the tier's.", min=1)]
Processes = Annotated[int | None, typer.Option(help="At once; by default as many as there are cores.", min=1)]
Measurements = Annotated[Path, typer.Option(help="Folder of measured figures, shown beside simulated ones.")]
Together = Annotated[
    Path | None,
    typer.Option("--json", help="Write all results into this one file, too, and show the claims as a table for docs."),
]

_COLOURS = {"reproduced": "green", "partly": "yellow", "not": "red", "not judged": "dim"}


def _tier(*, smoke: bool, quick: bool, full: bool) -> Tier:
    chosen = [name for name, is_set in (("smoke", smoke), ("quick", quick), ("full", full)) if is_set] or ["quick"]
    if len(chosen) > 1:
        raise typer.BadParameter(f"one tier at a time, got {' and '.join(chosen)}")
    return TIERS[chosen[0]]


@bench_app.command("list")
def list_() -> None:
    """Show every experiment and what it answers."""
    table = Table("name", "from", "what", box=None)
    for one in EXPERIMENTS.values():
        table.add_row(one.name, one.source, one.title)
    out.print(table)


@bench_app.command()
def run(  # noqa: PLR0913, PLR0917 - one parameter per flag
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="As `helmrec bench list` shows them.")],
    smoke: Smoke = False,
    quick: Quick = False,
    full: Full = False,
    scenarios: Scenarios = _HERE.scenarios,
    build: Build = _HERE.build,
    seeds: Seeds = None,
    processes: Processes = None,
) -> None:
    """Run one or more experiments; what was stopped goes on where it was."""
    with exit_on_error():
        chosen, tier = [experiment(name) for name in names], _tier(smoke=smoke, quick=quick, full=full)
        tier = tier if seeds is None else replace(tier, num_seeds=seeds)
        place = Place(scenarios=scenarios, build=build)
        for one in chosen:
            _tell(run_experiment(one, Lab(tier, place, processes or os.cpu_count() or 1)))


@bench_app.command("all")
def all_(  # noqa: PLR0913, PLR0917 - one parameter per flag
    smoke: Smoke = False,
    quick: Quick = False,
    full: Full = False,
    scenarios: Scenarios = _HERE.scenarios,
    build: Build = _HERE.build,
    seeds: Seeds = None,
    processes: Processes = None,
) -> None:
    """Run every experiment, then write the report."""
    run(list(EXPERIMENTS), smoke, quick, full, scenarios, build, seeds, processes)
    report(smoke, quick, full, build)


@bench_app.command()
def report(
    smoke: Smoke = False,
    quick: Quick = False,
    full: Full = False,
    build: Build = _HERE.build,
    measurements: Measurements = _HERE.measurements,
    together_in: Together = None,
) -> None:
    """Write one HTML file of all results of a tier: plots, tables, the paper's figure beside ours, verdicts."""
    with exit_on_error():
        tier = _tier(smoke=smoke, quick=quick, full=full)
        path = write_report(Place(measurements=measurements, build=build), tier.name)
        if together_in is not None:
            measurement = together(read_results(build, tier.name))
            together_in.write_text(json.dumps(measurement, indent=1) + "\n")
            out.print(claims_markdown(measurement), markup=False, highlight=False, soft_wrap=True)
    out.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _tell(result: Result) -> None:
    err.print(f"[bold]{result['experiment']}[/bold] in {result['times']['wall_s']:.1f} s", highlight=False)
    for verdict in result["verdicts"]:
        colour = _COLOURS[verdict["finding"]]
        err.print(
            f"  [{colour}]{verdict['finding']}[/{colour}] {verdict['claim']}: {verdict['ours']} "
            f"(paper: {verdict['paper']})",
            highlight=False,
            soft_wrap=True,
        )
