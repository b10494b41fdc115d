"""What each hand-set number of the controller is worth: half of it and twice as much, on validation scenarios.

    helmrec bench run controller-sensitivity --processes 16 --out docs/measurements/controller-sensitivity.json

Every third scenario of the validation range, one seed. Figures are mean latency and P99 over those of the shipped
number on the same requests.
"""

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from helmrec.control import helm, latency, layers, moves, policy, rebalancer
from helmrec.costs import learned
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import Store, finish
from helmrec_bench.measure.controller.cases import BUILD, Case, Trial
from helmrec_bench.measure.controller.trials import judge

MODULES = (learned, helm, latency, layers, moves, policy, rebalancer)
NUMBERS = (  # module constants that decide where alpha goes, with their units; others are rounding or room
    ("_HALF_LIFE_STEPS", "steps"),
    ("_FEWEST_STEPS", "steps"),
    ("_RIDGE", "share of the moments"),
    ("RECENT_S", "s"),
    ("_NUM_PLAYED", "requests"),
    ("JUDGED_S", "s"),
    ("CHOICE_HALF_LIFE_S", "s"),
    ("EQUAL_SHARE", "share of the latency"),
    ("_SPENT_SHARE", "share of what staying has cost"),
    ("SETTLED", "share of the pool"),
    ("_MOST_BIAS", "factor"),
    ("_BURSTS_S", "s"),
    ("_BURST_FACTOR", "factor of the calm work, less 1"),
    ("_BURST_DEVIATIONS", "deviations"),
    ("_BURST_WEIGHT", "share"),
    ("LOOK_EVERY", "share of a tick"),
    ("_EARLY_DEVIATIONS", "deviations"),
    ("_RATE_WEIGHT", "share"),
)
ABOVE_ONE = ("_BURST_FACTOR", "_MOST_BIAS")  # what is halved and doubled is the part above 1


class Variation(NamedTuple):
    trial: Trial
    number: str
    factor: float

    @property
    def name(self) -> str:
        return f"{self.number} x {self.factor:g}, {self.trial.name}"


def changed(number: str, factor: float) -> float | int:
    value = next(getattr(module, number) for module in MODULES if hasattr(module, number))
    if number in ABOVE_ONE:
        return 1 + (value - 1) * factor
    return type(value)(value * factor)


def judge_changed(variation: Variation) -> dict[str, Any]:
    number, factor = variation.number, variation.factor
    with ExitStack() as stack:
        for module in MODULES:
            if hasattr(module, number):
                stack.enter_context(mock.patch.object(module, number, changed(number, factor)))
        latency._streams.cache_clear()
        found = judge(variation.trial)
    latency._streams.cache_clear()
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--numbers", type=int, default=36, help="validation scenarios; every third of them is run")
    parser.add_argument("--processes", type=int, default=2)


def main(flags: Namespace) -> None:
    trials = [Trial(Case("validation", number, 0), "helm", 0.5) for number in range(0, flags.numbers, 3)]
    store = Store(BUILD / "controller-trials.jsonl", "2")
    finish(trials, judge, store, flags.processes, "as shipped")
    variations = [
        Variation(trial, number, factor) for number, _ in NUMBERS for factor in (0.5, 2.0) for trial in trials
    ]
    finish(variations, judge_changed, store, flags.processes, "changed")
    found: dict[str, dict[str, Any]] = {}
    table = Table("number", "unit", "half: mean, P99", "worst", "double: mean, P99", "worst")
    for number, unit in NUMBERS:
        found[number] = {"unit": unit, "shipped": changed(number, 1.0)}
        for label, factor in (("half", 0.5), ("double", 2.0)):
            own = [one for one in variations if one.number == number and one.factor == factor]
            pairs = [(store.found[one.name], store.found[one.trial.name]) for one in own]
            mean, p99 = (
                np.array([new[key] / shipped[key] - 1 for new, shipped in pairs]) for key in ("mean_ms", "p99_ms")
            )
            found[number][label] = {
                "value": changed(number, factor),
                "mean": float(mean.mean()),
                "worst_mean": float(mean.max()),
                "p99": float(p99.mean()),
                "worst_p99": float(p99.max()),
            }
        shown = [found[number][label] for label in ("half", "double")]
        cells = [(f"{one['mean']:+.1%}, {one['p99']:+.1%}", f"{one['worst_mean']:+.1%}") for one in shown]
        table.add_row(number, unit, *cells[0], *cells[1])
    Console(width=140).print(table)
    if flags.out is not None:
        write_measurement(flags.out, {"scenarios": len(trials), "numbers": found})
