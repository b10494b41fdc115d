"""`helmrec bench`: list experiments, run one or all, and write the report."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from helmrec.cli.console import check_writable, err, exit_on_error, out
from helmrec.errors import ConfigError
from helmrec_bench.lab.place import Place
from helmrec_bench.registry import REGISTERED, Measurement
from helmrec_bench.report.files import new_figure

if TYPE_CHECKING:
    from helmrec_bench.experiments.results import Result

bench_app = typer.Typer(help="Every published figure and table, one command each.", no_args_is_help=True)

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
Seeds = Annotated[
    int | None, typer.Option(help="Another number of seeds than the tier's.", show_default="the tier's", min=1)
]
Processes = Annotated[int | None, typer.Option(help="At once; by default as many as there are cores.", min=1)]
Measurements = Annotated[Path, typer.Option(help="Folder of measured figures, shown beside simulated ones.")]
Together = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write all results into this one file, too, and show the claims as a table for docs.",
        show_default="not written",
    ),
]

_COLOURS = {"reproduced": "green", "partly": "yellow", "not": "red", "not judged": "dim"}


def _tier(*, smoke: bool, quick: bool, full: bool) -> str:
    chosen = [name for name, is_set in (("smoke", smoke), ("quick", quick), ("full", full)) if is_set] or ["quick"]
    if len(chosen) > 1:
        raise typer.BadParameter(f"one tier at a time, got {' and '.join(chosen)}")
    return chosen[0]


@bench_app.command("list")
def list_() -> None:
    """Show every experiment: what it shows, what it needs, how long it takes and what it writes."""
    from helmrec_bench.experiments.registry import EXPERIMENTS

    evaluation = Table(Column("evaluation", no_wrap=True), "what it shows", box=None)
    for one in EXPERIMENTS.values():
        evaluation.add_row(one.name, one.title)
    measurements = Table(Column("measurement", no_wrap=True), "what it shows", box=None)
    for each in REGISTERED.values():
        measurements.add_row(each.name, f"{each.what}\n[dim]{_cost_of(each)}[/dim]")
    out.print(evaluation, "", measurements)
    out.print("\nExperiments of the evaluation are simulated and need no card; `helmrec bench all` runs them all.")


def _cost_of(each: Measurement) -> str:
    """What a measurement needs, how long it takes, and the files it writes."""
    needs = f"needs {each.needs}; " if each.needs != "nothing" else ""
    return f"{needs}{each.takes}; writes {', '.join(each.writes)}"


@bench_app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="`helmrec bench run NAME --help` shows the options of an experiment.",
)
def run(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME [OPTIONS]", help="As `helmrec bench list` shows them.")
    ],
) -> None:
    """Run an experiment with its own options; those of the evaluation may be several at once."""
    with exit_on_error():
        if arguments[0] in REGISTERED:
            REGISTERED[arguments[0]].run(arguments[1:])
            return
        flags = _evaluation_parser().parse_args(arguments)
        place = Place(scenarios=flags.scenarios, build=flags.out)
        _run(flags.names, flags.tier, place, flags.seeds, flags.processes)


def _evaluation_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="helmrec bench run", description="A run that was stopped goes on where it was.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="experiments of the evaluation")
    tiers = parser.add_mutually_exclusive_group()
    for name, text in (("smoke", "seconds, judges nothing"), ("quick", "minutes; the default"), ("full", "hours")):
        tiers.add_argument(f"--{name}", dest="tier", action="store_const", const=name, help=text)
    parser.set_defaults(tier="quick")
    parser.add_argument("--scenarios", type=Path, default=_HERE.scenarios, help="folder of scenarios")
    parser.add_argument("--out", type=Path, default=_HERE.build, help="folder for results and finished pieces")
    parser.add_argument("--seeds", type=_at_least_one, help="another number of seeds than the tier's")
    parser.add_argument("--processes", type=_at_least_one, help="at once; default: as many as there are cores")
    return parser


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _run(names: Sequence[str], tier_name: str, place: Place, seeds: int | None, processes: int | None) -> None:
    """Run the named experiments; all if none is named."""
    from helmrec_bench.experiments.registry import EXPERIMENTS
    from helmrec_bench.experiments.results import run_experiment
    from helmrec_bench.lab.lab import Lab
    from helmrec_bench.lab.tiers import TIERS

    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise ConfigError(f"experiment must be one of {', '.join((*EXPERIMENTS, *REGISTERED))}, got {unknown[0]!r}")
    tier = replace(TIERS[tier_name], num_seeds=seeds or TIERS[tier_name].num_seeds)
    for name in names or EXPERIMENTS:
        _show(run_experiment(EXPERIMENTS[name], Lab(tier, place, processes or os.cpu_count() or 1)))


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
    with exit_on_error():
        new_figure((1, 1))  # raises before anything is run where pictures cannot be drawn
        tier = _tier(smoke=smoke, quick=quick, full=full)
        _run((), tier, Place(scenarios=scenarios, build=build), seeds, processes)
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
    from helmrec_bench.experiments.report import write_report
    from helmrec_bench.experiments.results import claims_markdown, read_results, together

    with exit_on_error():
        check_writable("--json", together_in)
        tier = _tier(smoke=smoke, quick=quick, full=full)
        path = write_report(Place(measurements=measurements, build=build), tier)
        if together_in is not None:
            measurement = together(read_results(build, tier))
            together_in.write_text(json.dumps(measurement, indent=1) + "\n")
            out.print(claims_markdown(measurement), markup=False, highlight=False, soft_wrap=True)
    out.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _show(result: Result) -> None:
    err.print(f"[bold]{result['experiment']}[/bold] in {result['times']['wall_s']:.1f} s", highlight=False)
    for verdict in result["verdicts"]:
        colour = _COLOURS[verdict["finding"]]
        err.print(
            f"  [{colour}]{verdict['finding']}[/{colour}] {verdict['claim']}: {verdict['ours']} "
            f"(paper: {verdict['paper']})",
            highlight=False,
            soft_wrap=True,
        )
