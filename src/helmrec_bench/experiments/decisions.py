"""How long a decision takes, as a histogram: the model, all layers and limits included."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.control.policy import Move, Policy, WindowStats
from helmrec.control.static import Static
from helmrec.sim.simulate import Options, simulate
from helmrec_bench.baselines.registry import make_policy
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.experiments.strategies import FAMILIES, OURS
from helmrec_bench.lab.lab import Lab
from helmrec_bench.report.blocks import BLUE, ORANGE, Block, Chart, Table
from helmrec_bench.report.claims import Rule, Verdict, judged

_NUM_CALLS = {"smoke": 2_000, "quick": 100_000, "full": 1_000_000}
_PRESSED = 0.5  # of the scenario: windows enough to go through, again and again
_SHOWN = {"median": "p50_us", "p99": "p99_us", "p99.9": "p999_us"}
_EDGES_US = tuple(np.geomspace(1.0, 1e7, 141).round(3).tolist())  # 20 bins a decade, up to ten seconds


class Keeps:
    """Lets a policy decide and keeps what it was shown."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.windows: list[WindowStats] = []

    def decide(self, stats: WindowStats) -> Move | None:
        self.windows.append(stats)
        return self._policy.decide(stats)

    def reset(self) -> None:
        self._policy.reset()


def measure_decisions(lab: Lab) -> Figures:
    course = lab.setup(FAMILIES["Trend"], 0, pressed=_PRESSED).course()
    keeps = Keeps(Static())
    scenario = course.scenario
    simulate(course.trace, course.node(), scenario.cost(), keeps, scenario.tick_s, Options(has_curves=True))
    windows = [window for window in keeps.windows if window.curves is not None]
    policy = make_policy(OURS, course.service_cost)
    splits = [_follow(policy, window, 0.5) for window in windows]  # compiles, too
    num_calls = _NUM_CALLS[lab.tier.name]
    return {
        "scenario": FAMILIES["Trend"],
        "num_calls": num_calls,
        "num_windows": len(windows),
        "splits": [round(split, 4) for split in splits],
        "times": _timed(policy, windows, num_calls),
    }


def _follow(policy: Policy, window: WindowStats, start: float) -> float:
    """Where the policy would go from `start`."""
    move = policy.decide(replace(window, alpha=start, alpha_target=start))
    return start if move is None else move.alpha


def took_us(policy: Policy, windows: Sequence[WindowStats], num_calls: int) -> NDArray[np.float64]:
    """Microseconds of each call, over the windows in turn."""
    took_ns, clock = np.empty(num_calls, np.int64), time.perf_counter_ns
    for call in range(num_calls):
        window = windows[call % len(windows)]
        started = clock()
        policy.decide(window)
        took_ns[call] = clock() - started
    return took_ns / 1e3


def _timed(policy: Policy, windows: Sequence[WindowStats], num_calls: int) -> dict[str, Any]:
    each = took_us(policy, windows, num_calls)
    return {
        **{f"p{q:g}_us".replace(".", ""): float(np.percentile(each, q)) for q in (50, 99, 99.9)},
        "mean_us": float(each.mean()),
        "edges_us": list(_EDGES_US),
        "histogram": np.histogram(each, _EDGES_US)[0].tolist(),
    }


def judge_decisions(figures: Figures) -> Sequence[Verdict]:
    times = figures["times"]
    shown = ", ".join(f"{name} {times[key]:.1f}" for name, key in _SHOWN.items())
    details = f"{figures['num_calls']:,} calls: {shown} µs"
    return (
        judged(
            "A decision takes microseconds",
            "32 µs per decision",
            times["p50_us"],
            Rule(32.0, 100.0, is_more_better=False, unit="us"),
            f"the median; {details}",
        ),
        judged(
            "Our own bound: 200 µs at the 99th percentile",
            None,
            times["p99_us"],
            Rule(200.0, 1_000.0, is_more_better=False, unit="us"),
            f"{details}; other work on the machine shows here",
        ),
    )


def show_decisions(figures: Figures, measured: Measured) -> Sequence[Block]:
    times = figures["times"]

    def draw(figure: Any) -> None:
        axes, edges = figure.subplots(), np.array(times["edges_us"])
        axes.bar(edges[:-1], times["histogram"], np.diff(edges), align="edge", color=BLUE)
        axes.axvline(32, color=ORANGE, linewidth=1.5, label="paper: 32 µs")
        axes.set(xlabel="µs per decision", ylabel="calls", xscale="log", yscale="log", xlim=(10, 10_000))
        axes.legend(frameon=False)

    return (
        Chart(draw, f"{figures['num_calls']:,} decisions over {figures['num_windows']} windows.", "timed on this CPU"),
        Table(tuple(_SHOWN), [[f"{times[key]:.2f} µs" for key in _SHOWN.values()]], source="timed on this CPU"),
    )


EXPERIMENTS = (
    Experiment(
        "decision-latency",
        "Decision latency",
        "section on overhead; reviewers: histogram",
        "32 µs per decision.",
        "Whole decisions, model, layers and limits included, over the windows of a run, again and again.",
        measure_decisions,
        judge_decisions,
        show_decisions,
    ),
)
