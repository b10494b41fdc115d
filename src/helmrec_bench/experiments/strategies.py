"""Control strategies beside each other: the gap to alpha*, its course over time, each layer's part, falsification."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.judging.judge import paired_change
from helmrec_bench.lab.contests import Contest, Field, contest
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.policies import LAYERS
from helmrec_bench.report.blocks import Block, Chart, Table, change_text, lines
from helmrec_bench.report.claims import Rule, Verdict, judged

FAMILIES = {"Steady": "main-steady", "Trend": "main-trend", "Burst": "main-burst-20s"}
OURS, FROZEN = "helm", "frozen helm:0.5"
_WITHOUT = {
    "residual layer": "helm without residual",
    "burst recovery layer": "helm without bursts",
}
_OTHERS = ("kv-only", "emb-only", "hill", "pid", "marginal", "argmin")
_PAPER_GAPS = {
    "static 0.1": (0.292, 0.341, 0.331),
    "static 0.3": (0.092, 0.141, 0.131),
    "static 0.5": (0.108, 0.061, 0.072),
}
_PAPER_GAPS |= {"static 0.7": (0.308, 0.259, 0.269), OURS: (0.024, 0.029, 0.029)}


def measure_strategies(lab: Lab) -> Figures:
    found = {
        family: contest(lab, Field(name), (*_OTHERS, OURS), f"strategies, {family}")
        for family, name in FAMILIES.items()
    }
    return {"families": {family: one.figures() for family, one in found.items()}}


def judge_strategies(figures: Figures) -> Sequence[Verdict]:
    families = figures["families"]
    gaps = {family: one["policies"][OURS]["gap"] for family, one in families.items()}
    constants = {family: _least_constant(one) for family, one in families.items()}
    regrets = {family: one["policies"][OURS]["regret_switching"] for family, one in families.items()}
    details = ", ".join(f"{family} {gap:.3f} (best constant {constants[family]:.3f})" for family, gap in gaps.items())
    return (
        judged(
            "Mean |alpha - alpha*| of the full controller",
            "0.024-0.029 on Steady, Trend and Burst",
            max(gaps.values()),
            Rule(0.029, 0.06, is_more_better=False, unit="alpha"),
            f"the largest of {details}",
        ),
        judged(
            "The controller is nearer to alpha* than the best constant, on every family",
            "0.024-0.029 against 0.06-0.09",
            max(gaps[family] - constants[family] for family in families),
            Rule(0.0, 0.02, is_more_better=False, unit="alpha"),
            f"largest difference of gaps; {details}",
        ),
        judged(
            "Latency regret against an oracle that pays its moves",
            None,
            max(regrets.values()),
            Rule(0.02, 0.05, is_more_better=False),
            "share of mean latency: " + ", ".join(f"{family} {regret:+.1%}" for family, regret in regrets.items()),
        ),
    )


def _least_constant(family: Figures) -> float:
    return min(one["gap"] for name, one in family["policies"].items() if name.startswith("static "))


def show_strategies(figures: Figures, measured: Measured) -> Sequence[Block]:
    families = figures["families"]
    rows = []
    for policy in next(iter(families.values()))["policies"]:
        cells = [policy]
        for at, one in enumerate(families.values()):
            row, paper = one["policies"][policy], _PAPER_GAPS.get(policy)
            cells += [
                f"{row['gap']:.3f}",
                "-" if paper is None else f"{paper[at]:.3f}",
                f"{row['regret_switching']:+.1%}",
            ]
        rows.append(cells)
    header = ["policy"] + [f"{family}: {what}" for family in families for what in ("gap", "paper", "regret")]
    blocks: list[Block] = [
        Table(header, rows, "Gap: mean |alpha - alpha*|. Regret: mean latency against the oracle that pays its moves.",
              marked=frozenset({OURS}))
    ]  # fmt: skip
    if "baselines.json" in measured:
        blocks.append(_baselines(measured["baselines.json"]))
    return blocks


def _baselines(kept: dict[str, Any]) -> Table:
    """Baselines that must be trained or solved for, from the longer run that tuned them."""
    variants = kept["variants"]
    wanted = ("bayesian optimisation", "milp", "xgboost", "lstm", "HelmRec")
    rows = []
    for policy in wanted:
        cells = [policy]
        for one in variants.values():
            row = one["policies"].get(policy)
            cells += ["-", "-"] if row is None else [f"{row['gap']:.3f}", f"{row['regret_switching']:+.1%}"]
        rows.append(cells)
    header = ["policy"] + [f"{name}: {what}" for name in variants for what in ("gap", "regret")]
    caption = f"Tuned and trained baselines, from baselines.json (commit {kept['commit']}), not run again here."
    return Table(header, rows, caption)


def measure_errors(lab: Lab) -> Figures:
    policies = (OURS, *LAYERS, "argmin")
    found = {
        family: contest(lab, Field(FAMILIES[family]), policies, f"errors, {family}") for family in ("Trend", "Burst")
    }
    return {"window_s": lab.tier.window_s, "families": {family: _errors(one) for family, one in found.items()}}


def _errors(found: Contest) -> dict[str, Any]:
    star = found.seen.exact.alpha
    errors = {
        policy: np.mean([np.abs(np.array(one.score.alphas) - star) for one in outcomes], axis=0).round(4).tolist()
        for policy, outcomes in found.found.items()
    }
    return {"alpha_star": star.tolist(), "errors": errors, **found.figures()}


def judge_errors(figures: Figures) -> Sequence[Verdict]:
    verdicts = []
    for layer, without in _WITHOUT.items():
        gains = {
            family: one["policies"][without]["mean_ms"]["mean"] / one["policies"][OURS]["mean_ms"]["mean"] - 1
            for family, one in figures["families"].items()
        }
        verdicts.append(
            judged(
                f"The {layer} lowers mean latency",
                None,
                max(gains.values()),
                Rule(0.01, 0.0001),
                "mean latency without it over with it: " + ", ".join(f"{f} {g:+.2%}" for f, g in gains.items()),
            )
        )
    return verdicts


def show_errors(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        for axes, (family, one) in zip(figure.subplots(1, 2), figures["families"].items(), strict=True):
            times = (np.arange(len(one["alpha_star"])) + 0.5) * figures["window_s"]
            series = {name: (times, one["errors"][name]) for name in (OURS, "helm base", "argmin")}
            lines(axes, series, xlabel="seconds after the warm-up", ylabel="|alpha - alpha*|", title=family)

    rows = []
    for policy in (OURS, *LAYERS, "argmin"):
        cells = [policy]
        for one in figures["families"].values():
            row = one["policies"][policy]
            cells += [f"{row['gap']:.3f}", f"{row['regret_switching']:+.1%}", f"{row['p99_change']['mean']:+.1%}"]
        rows.append(cells)
    header = ["layers"] + [
        f"{f}: {what}" for f in figures["families"] for what in ("gap", "regret", "P99 vs best static")
    ]
    return (
        Chart(draw, "Distance to alpha*, window by window, mean over seeds."),
        Table(header, rows, "The base alone, and each layer switched off in turn.", marked=frozenset({OURS})),
    )


def measure_falsification(lab: Lab) -> Figures:
    policies = (OURS, FROZEN, "static:0.5")
    found = {
        family: contest(lab, Field(FAMILIES[family]), policies, f"falsification, {family}")
        for family in ("Trend", "Burst")
    }
    return {"families": {family: _gains(one) for family, one in found.items()}}


def _gains(found: Contest) -> dict[str, Any]:
    untuned = [one.score for one in found.found["static:0.5"]]
    gains = {}
    for policy in (OURS, FROZEN):
        ours = [one.score for one in found.found[policy]]
        mean = paired_change([one.mean_ms for one in ours], [one.mean_ms for one in untuned])
        p99 = paired_change([one.p99_ms for one in ours], [one.p99_ms for one in untuned])
        gains[policy] = {
            "mean": {"mean": -mean.mean, "low": -mean.high, "high": -mean.low},
            "p99": {"mean": -p99.mean, "low": -p99.high, "high": -p99.low},
        }
    return {"gains": gains}


def judge_falsification(figures: Figures) -> Sequence[Verdict]:
    families = figures["families"]
    left = max(abs(one["gains"][FROZEN][figure]["mean"]) for one in families.values() for figure in ("mean", "p99"))
    gain = min(one["gains"][OURS]["p99"]["mean"] for one in families.values())
    details = ", ".join(
        f"{family} {one['gains'][OURS]['p99']['mean']:+.1%} moving, {one['gains'][FROZEN]['p99']['mean']:+.1%} frozen"
        for family, one in families.items()
    )
    return (
        judged(
            "Frozen at its starting ratio the controller gains nothing",
            None,
            left,
            Rule(1e-9, 0.005, is_more_better=False),
            f"P99 against the untuned split: {details}",
        ),
        judged(
            "Moving, it gains over the split it starts from",
            None,
            gain,
            Rule(0.24, 0.01),
            f"the smaller P99 gain over the untuned 0.5: {details}",
        ),
    )


def show_falsification(figures: Figures, measured: Measured) -> Sequence[Block]:
    rows = [
        [policy, family, *(change_text(one["gains"][policy][figure]) for figure in ("mean", "p99"))]
        for family, one in figures["families"].items()
        for policy in (OURS, FROZEN)
    ]
    caption = (
        "The same controller looks and decides; frozen, nothing of it is done. Gains over a node that stays at 0.5."
    )
    return (Table(("policy", "family", "gain in mean latency", "gain in P99"), rows, caption),)


EXPERIMENTS = (
    Experiment(
        "control-strategies",
        "Control strategies",
        "Table III",
        "Mean |alpha - alpha*| of static ratios, prediction only, PPO only and the full controller.",
        "Every constant, simple baselines and ours on three frozen scenarios, with an oracle that pays its moves.",
        measure_strategies,
        judge_strategies,
        show_strategies,
    ),
    Experiment(
        "error-over-time",
        "Error over time, and what each layer adds",
        "reviewers: error over time, ablation of layers",
        "How far from alpha* the controller is while traffic changes, and which layer brings it there.",
        "The controller, its base alone, and the controller without one layer at a time, beside miss-curve argmin.",
        measure_errors,
        judge_errors,
        show_errors,
    ),
    Experiment(
        "falsification",
        "Falsification: freeze the controller",
        "our test",
        "If the gain comes from moving the boundary, a controller that may not move must gain nothing.",
        "Ours, the same frozen at its starting split, and a node that has no controller.",
        measure_falsification,
        judge_falsification,
        show_falsification,
    ),
)
