"""What each part adds: the system less one of them, the allocator's settings, moves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.experiments.strategies import FAMILIES, OURS
from helmrec_bench.judging.judge import paired_change
from helmrec_bench.lab.contests import Field
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.runs import Outcome, Run, Settings
from helmrec_bench.report.blocks import Block, Chart, Table, bars, change_text, lines
from helmrec_bench.report.claims import Rule, Verdict, judged

_MIB, _GB = 1 << 20, 10**9
HOST_BYTES = 64 * _GB  # of the host_tier
_LOAD = 1.15  # of the frozen arrivals: parts show where load is near its limit
EXPANDER: Settings = (("host_kv_bytes", HOST_BYTES),)
_MOVES = ((0.5, 0.6), (0.5, 0.9), (0.6, 0.5), (0.9, 0.5))
_AFTER = 10  # looks after a move that are held against the twin


def _outcomes(lab: Lab, runs: Mapping[str, Sequence[Run]], what: str) -> dict[str, list[Outcome]]:
    found = lab.run([run for ones in runs.values() for run in ones], what)
    return {name: [found[run] for run in ones] for name, ones in runs.items()}


def _beside(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Any]:
    """Figures over seeds, and the change against a reference on the same seeds."""
    p99 = paired_change([one.score.p99_ms for one in outcomes], [one.score.p99_ms for one in reference])
    mean = paired_change([one.score.mean_ms for one in outcomes], [one.score.mean_ms for one in reference])
    return {
        "mean_ms": float(np.mean([one.score.mean_ms for one in outcomes])),
        "p99_ms": float(np.mean([one.score.p99_ms for one in outcomes])),
        "slo_satisfaction": float(np.mean([one.score.slo_satisfaction for one in outcomes])),
        "num_refused": sum(one.score.num_refused for one in outcomes),
        "p99_change": asdict(p99),
        "mean_change": asdict(mean),
    }


@dataclass(frozen=True)
class Ablation:
    """Variants of a node on bursts near its limit; the first is what is shipped, each other one lacks a part of it."""

    first_column: str
    claim: str
    partly: float  # share of the parts without which P99 must rise for "partly"
    variants: Mapping[str, tuple[str, Settings]]  # by name: policy and engine

    @property
    def shipped(self) -> str:
        return next(iter(self.variants))

    def measure(self, lab: Lab) -> Figures:
        runs = {
            name: Field(FAMILIES["Burst"], load=_LOAD, engine=_sized(lab, engine)).runs(lab, policy)
            for name, (policy, engine) in self.variants.items()
        }
        found = _outcomes(lab, runs, self.first_column)
        variants = {name: _beside(outcomes, found[self.shipped]) for name, outcomes in found.items()}
        return {"scenario": FAMILIES["Burst"], "load": _LOAD, "variants": variants}

    def judge(self, figures: Figures) -> Sequence[Verdict]:
        changes = {name: one["p99_change"]["mean"] for name, one in figures["variants"].items()}
        del changes[self.shipped]
        details = ", ".join(f"{name} {change:+.1%}" for name, change in changes.items())
        return (
            judged(
                self.claim,
                "each ablation is worse",
                sum(change > 0.01 for change in changes.values()) / len(changes),
                Rule(1.0, self.partly),
                f"share of ablations whose P99 is more than 1% higher: {details}",
            ),
        )

    def show(self, figures: Figures, measured: Measured) -> Sequence[Block]:
        variants, ours = figures["variants"], frozenset({self.shipped})

        def draw(figure: Any) -> None:
            values = [one["p99_ms"] for one in variants.values()]
            bars(figure.subplots(), list(variants), values, ours, xlabel="P99 (ms), logarithmic", xscale="log")

        rows = [
            [
                name,
                f"{one['mean_ms']:.2f}",
                f"{one['p99_ms']:.1f}",
                change_text(one["p99_change"]),
                f"{one['slo_satisfaction']:.2%}",
            ]
            for name, one in variants.items()
        ]
        header = (self.first_column, "mean ms", "P99 ms", "P99 change", "in SLO")
        chart = Chart(draw, f"{figures['scenario']} at {figures['load']:g} x its arrivals.")
        return chart, Table(header, rows, marked=ours)


def _sized(lab: Lab, engine: Settings) -> Settings:
    """The host tier shrinks with the node."""
    return tuple((name, int(value * lab.tier.size) if name == "host_kv_bytes" else value) for name, value in engine)


def _allocator(move_mib: int = 64, refill_mib: int = 16, **other: object) -> tuple[str, Settings]:
    sizes = (("move_bytes_per_step", move_mib * _MIB), ("refill_bytes_per_step", refill_mib * _MIB))
    return OURS, (*sizes, *other.items())


SYSTEM = Ablation(
    "part taken away",
    "Every part of the system lowers P99",
    0.5,
    {
        "everything": (OURS, EXPANDER),
        "without controller (stays at 0.5)": ("static:0.5", EXPANDER),
        "without KV admission": (OURS, (*EXPANDER, ("kv_admission", "always"))),
        "without row admission": (OURS, (*EXPANDER, ("row_admission", "always"))),
        "without host_tier": (OURS, ()),
        "without refill": (OURS, (*EXPANDER, ("refill_bytes_per_step", 0))),
        "without overlap": (OURS, (*EXPANDER, ("overlap", False))),
    },
)
ALLOCATOR = Ablation(
    "allocator",
    "Bounded moves, budgeted refill and overlap each lower P99",
    0.2,
    {
        "64 MiB a step, refill 16 MiB": _allocator(),
        "moves of 16 MiB a step": _allocator(move_mib=16),
        "moves at once": _allocator(move_mib=8_000),
        "no refill": _allocator(refill_mib=0),
        "refill unbounded": _allocator(refill_mib=4_000),
        "no overlap": _allocator(overlap=False),
    },
)


def measure_moves(lab: Lab) -> Figures:
    """One move half way through steady traffic; the twin was born where the move ends."""
    setup = lab.setup(FAMILIES["Steady"], 0)
    course = setup.course()
    start_s, tick_s = course.scenario.warm_up_s, course.scenario.tick_s
    num = int((course.trace.duration_s - start_s) / tick_s)
    at = num // 2
    at_s = start_s + at * tick_s
    runs = {f"{a:g} to {b:g}": Field(FAMILIES["Steady"]).runs(lab, f"jump:{a:g}>{b:g}@{at_s:g}") for a, b in _MOVES}
    runs |= {f"twin at {b:g}": Field(FAMILIES["Steady"]).runs(lab, f"static:{b:g}") for _, b in _MOVES}
    found = _outcomes(lab, runs, "cost of a move")
    return {
        "scenario": FAMILIES["Steady"],
        "tick_s": tick_s,
        "moves": {
            f"{a:g} to {b:g}": _aftermath(found[f"{a:g} to {b:g}"], found[f"twin at {b:g}"], at) for a, b in _MOVES
        },
    }


def _aftermath(moved: Sequence[Outcome], twin: Sequence[Outcome], at: int) -> dict[str, Any]:
    def seen(outcomes: Sequence[Outcome], name: str) -> Any:
        return np.array([one.ticks[name][at - 2 : at + _AFTER] for one in outcomes])

    p99, twins = seen(moved, "p99_ms"), seen(twin, "p99_ms")
    misses, usual = seen(moved, "missed_rows"), seen(twin, "missed_rows")
    return {
        "p99_change": float(p99[:, 2:].max(axis=1).mean() / twins[:, 2:].max(axis=1).mean() - 1),
        "mean_change": float(seen(moved, "mean_ms")[:, 2:].mean() / seen(twin, "mean_ms")[:, 2:].mean() - 1),
        "missed_rows_change": float(misses[:, 2:].mean() / usual[:, 2:].mean() - 1),
        "p99_ms": p99.mean(axis=0).tolist(),
        "twin_p99_ms": twins.mean(axis=0).tolist(),
        "alpha": seen(moved, "alpha").mean(axis=0).tolist(),
    }


def judge_moves(figures: Figures) -> Sequence[Verdict]:
    small = {name: one for name, one in figures["moves"].items() if name in {"0.5 to 0.6", "0.6 to 0.5"}}
    details = ", ".join(f"{name} {one['p99_change']:+.1%}" for name, one in figures["moves"].items())
    return (
        judged(
            "A move of the size a controller makes does not disturb serving",
            "under 5% slowdown",
            max(one["p99_change"] for one in small.values()),
            Rule(0.05, 0.15, is_more_better=False),
            f"worst second's P99 in the ten looks after it, against a twin that was always there: {details}",
        ),
    )


def show_moves(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        for axes, (name, one) in zip(figure.subplots(1, 4, sharey=True), figures["moves"].items(), strict=True):
            times = (np.arange(len(one["p99_ms"])) - 2) * figures["tick_s"]
            lines(axes, {"moves": (times, one["p99_ms"]), "twin": (times, one["twin_p99_ms"])}, title=name, xlabel="s")
        figure.axes[0].set_ylabel("P99 (ms)")

    rows = [
        [name, *(f"{one[key]:+.1%}" for key in ("p99_change", "mean_change", "missed_rows_change"))]
        for name, one in figures["moves"].items()
    ]
    blocks: list[Block] = [
        Chart(draw, "P99 of each second around the move, against a twin born at the new split.", size=(9.6, 2.8)),
        Table(("move", "worst P99", "mean latency", "missed rows"), rows, "Changes against the twin."),
    ]
    if "gpu-moves-h200.json" in measured:
        blocks.append(_measured_moves(measured["gpu-moves-h200.json"]["moves"]))
    return blocks


def _measured_moves(ones: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for pair in sorted({(one["from"], one["to"]) for one in ones}):
        p99 = {
            moves: float(
                np.mean([o["step_p99_ms"] for o in ones if (o["from"], o["to"]) == pair and o["moves"] == moves])
            )
            for moves in (True, False)
        }
        rows.append(
            [
                f"{pair[0]:g} to {pair[1]:g}",
                f"{p99[True]:.1f}",
                f"{p99[False]:.1f}",
                f"{p99[True] / p99[False] - 1:+.1%}",
            ]
        )
    header = ("move", "P99 of steps after it, ms", "twin, ms", "change")
    return Table(header, rows, "The same on the card (gpu-moves-h200.json).", "measured on an H200")


EXPERIMENTS = (
    Experiment(
        "system-ablation",
        "System ablation",
        "Figure 13",
        "P99 without the controller, the router or parts of the memory manager.",
        "Everything a node has, less one part at a time, on bursts near the limit. The router has its own experiment.",
        SYSTEM.measure,
        SYSTEM.judge,
        SYSTEM.show,
    ),
    Experiment(
        "allocator-ablation",
        "Allocator ablation",
        "Figure 14",
        "P99 with moves all at once, without overlap and without throttled refill.",
        "The allocator's settings, one at a time, under the same controller.",
        ALLOCATOR.measure,
        ALLOCATOR.judge,
        ALLOCATOR.show,
    ),
    Experiment(
        "move-cost",
        "What a move costs in the seconds after it",
        "section on the memory manager; reviewers",
        "alpha is applied in steps and copies overlap compute, for less than 5% slowdown.",
        "One move under steady traffic, against a twin that was always at the new split.",
        measure_moves,
        judge_moves,
        show_moves,
    ),
)
