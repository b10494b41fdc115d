"""Traffic over hours: how hot share and length fluctuate, where the best ratio goes, and whether ours follows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from helmrec.traffic.trace import index_histories
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.experiments.strategies import OURS
from helmrec_bench.judging.contest_report import hindsight
from helmrec_bench.lab.contests import Field, contest, scores, sweep
from helmrec_bench.lab.lab import Lab
from helmrec_bench.report.blocks import BLUE, GREY, ORANGE, Block, Chart, Table, lines
from helmrec_bench.report.claims import Rule, Verdict, judged

SCENARIO = "evaluation/four-hours"


def _field(lab: Lab) -> Field:
    return Field(SCENARIO, pressed=lab.tier.pressed)


def measure_fluctuation(lab: Lab) -> Figures:
    field = _field(lab)
    course = field.setups(lab)[0].course()
    trace, start_s = course.trace, course.scenario.warm_up_s
    edges = np.arange(start_s, trace.duration_s + lab.tier.window_s / 2, lab.tier.window_s)
    histories = index_histories(trace)
    place = np.digitize(trace.time_s, edges) - 1
    is_in = (place >= 0) & (place < edges.size - 1)
    num = np.maximum(1, np.bincount(place[is_in], minlength=edges.size - 1))
    swept = sweep(lab, field, "fluctuation")
    seen = hindsight({alpha: scores(outcomes) for alpha, outcomes in swept.items()})
    return {
        "scenario": SCENARIO,
        "pressed": lab.tier.pressed * lab.tier.time,
        "hours": _hours(edges[:-1] - start_s, lab),
        "rate": (num / lab.tier.window_s).tolist(),
        "known_share": (np.bincount(place[is_in], histories.visit[is_in] > 0, edges.size - 1) / num).tolist(),
        "history": (np.bincount(place[is_in], histories.length[is_in], edges.size - 1) / num).tolist(),
        "alpha_star": seen.exact.alpha.tolist(),
    }


def _hours(times_s: Any, lab: Lab) -> list[float]:
    """Hours of the scenario's day, not of the shorter time that it is simulated in."""
    return (np.asarray(times_s) / (3_600 * lab.tier.pressed * lab.tier.time)).round(4).tolist()


def judge_fluctuation(figures: Figures) -> Sequence[Verdict]:
    stars = figures["alpha_star"]
    share, history = figures["known_share"], figures["history"]
    return (
        judged(
            "Fluctuating traffic moves the best ratio",
            "by up to 0.35",
            round(max(stars) - min(stars), 6),
            Rule(0.35, 0.1, unit="alpha"),
            f"alpha* from {min(stars):g} to {max(stars):g} while known users make {min(share):.0%} to {max(share):.0%} "
            f"of the requests and histories are {min(history):,.0f} to {max(history):,.0f} events in the mean",
        ),
    )


def show_fluctuation(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        share, length, star = figure.subplots(3, 1, sharex=True)
        for axes, key, label, color in (
            (share, "known_share", "known users", BLUE),
            (length, "history", "events", ORANGE),
            (star, "alpha_star", "alpha*", GREY),
        ):
            hours = figures["hours"][: len(figures[key])]
            axes.step(hours, figures[key][: len(hours)], where="post", color=color, linewidth=1.5)
            axes.set_ylabel(label)
        star.set(xlabel="hours", ylim=(0, 1))

    caption = "Share of requests by users seen before, mean history, and the best split of each window"
    return (
        Chart(
            draw,
            f"{caption}: {figures['scenario']}, pressed into {figures['pressed']:.2%} of its time.",
            size=(7.2, 4.2),
        ),
    )


def measure_follow(lab: Lab) -> Figures:
    found = contest(lab, _field(lab), (OURS,), "four hours").figures()
    num = len(found["alpha_star"])
    return {
        "scenario": SCENARIO,
        "pressed": lab.tier.pressed * lab.tier.time,
        "hours": _hours((np.arange(num) + 0.5) * lab.tier.window_s, lab),
        **found,
    }


def judge_follow(figures: Figures) -> Sequence[Verdict]:
    ours = figures["policies"][OURS]
    return (
        judged(
            "alpha follows alpha* over four hours",
            "mean |alpha - alpha*| 0.024-0.029",
            ours["gap"],
            Rule(0.029, 0.06, is_more_better=False, unit="alpha"),
            f"in {ours['share_inside']:.0%} of the windows within the band of 1% regret; the first windows, in which "
            "it comes from 0.5, count",
        ),
        judged(
            "Mean latency while following",
            None,
            ours["regret_switching"],
            Rule(0.02, 0.05, is_more_better=False),
            f"regret against the oracle that pays its moves; the best constant ({figures['best_alpha']:g}): "
            f"{figures['policies']['best static']['regret_switching']:+.1%}",
        ),
    )


def show_follow(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        hours, (low, high) = figures["hours"], figures["band"]
        axes.fill_between(hours, low, high, step="mid", color="#d7e3f1", label="within 1% of the best")
        series = {"alpha*": (hours, figures["alpha_star"]), OURS: (hours, figures["policies"][OURS]["alphas"])}
        lines(axes, series, xlabel="hours", ylabel="alpha")
        axes.set_ylim(0, 1)

    rows = [
        [
            name,
            f"{one['mean_ms']['mean']:.2f}",
            f"{one['p99_ms']['mean']:.1f}",
            f"{one['gap']:.3f}",
            f"{one['regret_switching']:+.1%}",
        ]
        for name, one in figures["policies"].items()
    ]
    return (
        Chart(draw, f"{figures['scenario']}, pressed into {figures['pressed']:.2%} of its time."),
        Table(("policy", "mean ms", "P99 ms", "gap", "regret"), rows, marked=frozenset({OURS})),
    )


EXPERIMENTS = (
    Experiment(
        "fluctuation",
        "Workload fluctuation",
        "Figure 5; reviewers: how traces shift the ratio",
        "Hot share and sequence length swing over hours.",
        "Two slow swings of rate and hot share; every constant split tells which was best when.",
        measure_fluctuation,
        judge_fluctuation,
        show_fluctuation,
    ),
    Experiment(
        "alpha-over-time",
        "alpha and alpha* over four hours",
        "Figure 15",
        "The controller's alpha stays close to the best ratio as traffic drifts.",
        "The same four hours under the controller, from an untuned start.",
        measure_follow,
        judge_follow,
        show_follow,
    ),
)
