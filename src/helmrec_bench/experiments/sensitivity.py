"""How latency depends on the split, and the split on traffic: HSTU's settings, the ratio, scale and hot share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helmrec.costs.calibrated import BusLoad, ComputeWork, CostTerms, compute_ms, host_ms, rows_ms
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.lab.contests import Field, sweep
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.runs import Outcome
from helmrec_bench.report.blocks import Block, Chart, Table, lines
from helmrec_bench.report.claims import Rule, Verdict, judged

_BATCH, _NEW = 8, 8
_HISTORIES = (1_000, 2_000, 4_000, 8_000, 14_000)
_SETTINGS = {"no cache": (False, False), "EMB only": (True, False), "KV only": (False, True), "both": (True, True)}
RATIO_SCENARIO, SHAPE_SCENARIO = "main-burst-60s", "main-steady"
_SCALES, _HOT_SHARES = (1, 4, 16, 64), (0.1, 0.35, 0.6, 0.85)
_CLUSTER_USERS = 8  # times the scenario's hot users, in all: so many nodes it takes to be as in the scenario
_REGION_EDGE = 0.2  # All-KV below, All-EMB above one minus it


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token weighs."""

    rows_per_token: int
    row_bytes: int
    num_candidates: int


def alone_ms(terms: CostTerms, shape: Shape, history: int, *, emb_hits: bool, kv_hits: bool) -> float:
    """A step of a few requests on an idle device: host, then rows, then compute."""
    new = _NEW if kv_hits else history
    tokens = _BATCH * (new + shape.num_candidates)
    pairs = _BATCH * (new * (history - new / 2) + shape.num_candidates * history)
    rows = float(tokens * shape.rows_per_token)
    missed = 0.0 if emb_hits else rows
    load = BusLoad((rows - missed) * shape.row_bytes, missed * shape.row_bytes, missed)
    bus_ms = rows_ms(terms, load, 0.0, 1.0)
    return host_ms(terms, _BATCH, tokens, rows) + bus_ms + compute_ms(terms, ComputeWork(tokens, pairs, rows))


def measure_settings(lab: Lab) -> Figures:
    scenario = lab.scenario(SHAPE_SCENARIO)
    assert scenario.workload is not None
    config = scenario.node_config(lab.setup(SHAPE_SCENARIO, 0).course().trace)
    shape = Shape(len(config.model.features), config.geometry.row_stride, scenario.workload.num_candidates)
    terms = scenario.cost().terms()
    found = {
        name: [alone_ms(terms, shape, history, emb_hits=emb, kv_hits=kv) for history in _HISTORIES]
        for name, (emb, kv) in _SETTINGS.items()
    }
    return {"histories": list(_HISTORIES), "batch": _BATCH, "rows_per_token": shape.rows_per_token, "ms": found}


def judge_settings(figures: Figures) -> Sequence[Verdict]:
    last = {name: values[-1] for name, values in figures["ms"].items()}
    gain = last["EMB only"] / last["both"]
    alone = min(last["EMB only"], last["KV only"]) / last["both"]
    details = ", ".join(f"{name} {value:.1f} ms" for name, value in last.items())
    return (
        judged(
            "With rows resident, a KV hit makes a long request several times shorter",
            "3.5 x (authors' prototype, batch 8, 14K tokens)",
            gain,
            Rule(3.5, 2.0, unit="ratio"),
            f"EMB only over both, at {figures['histories'][-1]:,} events: {details}",
        ),
        judged(
            "Neither cache alone is enough",
            "both are needed",
            alone,
            Rule(1.5, 1.1, unit="ratio"),
            f"the better of the two alone over both together: {details}",
        ),
    )


def show_settings(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        series = {name: (figures["histories"], values) for name, values in figures["ms"].items()}
        axes = figure.subplots()
        lines(axes, series, xlabel="history (events)", ylabel="ms for a step of 8")
        axes.set_yscale("log")

    blocks: list[Block] = [
        Chart(
            draw,
            f"A step of {figures['batch']} requests on an idle device, {figures['rows_per_token']} rows a token, by "
            "the terms fitted to an H200's steps.",
        )
    ]
    if "gpu-moves-h200.json" in measured:
        crossover = measured["gpu-moves-h200.json"]["crossover"]
        rows = [
            [f"{one['tokens']:,}", *(f"{one[key]:.2f}" for key in ("resident_ms", "reload_ms", "recompute_ms"))]
            for one in crossover
        ]
        blocks.append(
            Table(
                ("history (tokens)", "KV resident, ms", "reloaded from host, ms", "recomputed, ms"),
                rows,
                "One request alone on the card (gpu-moves-h200.json).",
                "measured on an H200",
            )
        )
    return blocks


def measure_ratio(lab: Lab) -> Figures:
    found = sweep(lab, Field(RATIO_SCENARIO), "latency vs ratio")
    phases = list(next(iter(found.values()))[0].phases)
    return {
        "scenario": RATIO_SCENARIO,
        "alphas": sorted(found),
        "phases": {phase: _by_alpha(found, phase) for phase in phases},
    }


def _by_alpha(found: dict[float, list[Outcome]], phase: str) -> dict[str, list[float]]:
    return {
        figure: [float(np.mean([outcome.phases[phase][figure] for outcome in found[alpha]])) for alpha in sorted(found)]
        for figure in ("mean_ms", "p99_ms")
    }


def judge_ratio(figures: Figures) -> Sequence[Verdict]:
    alphas, phases = figures["alphas"], figures["phases"]
    stars = {phase: alphas[int(np.argmin(one["mean_ms"]))] for phase, one in phases.items()}
    shift = round(max(stars.values()) - min(stars.values()), 6)  # splits are on a grid
    wrong = {
        phase: max(one["mean_ms"][alphas.index(other)] for other in stars.values()) / min(one["mean_ms"]) - 1
        for phase, one in phases.items()
    }
    details = ", ".join(f"{phase}: alpha* {alpha:g}" for phase, alpha in stars.items())
    return (
        judged(
            "The best ratio shifts across regimes",
            "by up to 0.35",
            shift,
            Rule(0.35, 0.1, unit="alpha"),
            f"{details} ({figures['scenario']}, by mean latency)",
        ),
        judged(
            "A wrong ratio leaves 20-30% of latency unrealised",
            "20-30%",
            max(wrong.values()),
            Rule(0.2, 0.05),
            "mean latency at another regime's alpha*: " + ", ".join(f"{p} {w:+.0%}" for p, w in wrong.items()),
        ),
    )


def show_ratio(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        for axes, key in zip(figure.subplots(1, 2), ("mean_ms", "p99_ms"), strict=True):
            series = {phase: (figures["alphas"], one[key]) for phase, one in figures["phases"].items()}
            lines(axes, series, xlabel="alpha (EMB share)", ylabel=f"{key.removesuffix('_ms')} latency (ms)")
            axes.set_yscale("log")

    blocks: list[Block] = [Chart(draw, f"Constant splits on {figures['scenario']}, by phase of the traffic.")]
    if "gpu-tradeoff-h200.json" in measured:
        cells = [c for c in measured["gpu-tradeoff-h200.json"]["cells"] if c["rows_per_token"] == 24 and c["overlap"]]
        blocks.append(_measured_ratio([cell for cell in cells if not cell["host_tier"]]))
    return blocks


def _measured_ratio(cells: list[dict[str, Any]]) -> Chart:
    def draw(figure: Any) -> None:
        series = {}
        for share in sorted({cell["hot_share"] for cell in cells}):
            ones = sorted((cell["alpha"], cell["requests_per_s"]) for cell in cells if cell["hot_share"] == share)
            series[f"{share:.0%} hot requests"] = ([alpha for alpha, _ in ones], [rate for _, rate in ones])
        lines(figure.subplots(), series, xlabel="alpha (EMB share)", ylabel="requests/s")

    caption = "Capacity over the split on the card, 24 rows a token, steps overlapping (gpu-tradeoff-h200.json)."
    return Chart(draw, caption, "measured on an H200")


def measure_scale(lab: Lab) -> Figures:
    scenario = lab.scenario(SHAPE_SCENARIO)
    assert scenario.workload is not None
    users = scenario.workload.phases[0].hot_users * _CLUSTER_USERS
    cells = [
        Field(SHAPE_SCENARIO, load=0.5, traffic=(("hot_share", share), ("hot_users", max(1, users // scale))))
        for scale in _SCALES
        for share in _HOT_SHARES
    ]
    # One seed: the grid is large.
    runs = [{alpha: cell.runs(lab, f"static:{alpha:g}")[0] for alpha in lab.tier.alphas} for cell in cells]
    found = lab.run([run for one in runs for run in one.values()], "scale and hot share")
    means = [{alpha: found[run].score.mean_ms for alpha, run in one.items()} for one in runs]
    stars = [min(one, key=one.__getitem__) for one in means]
    return {
        "scenario": SHAPE_SCENARIO,
        "hot_users": users,
        "scales": list(_SCALES),
        "hot_shares": list(_HOT_SHARES),
        "alpha_star": np.reshape(stars, (len(_SCALES), len(_HOT_SHARES))).tolist(),
    }


def judge_scale(figures: Figures) -> Sequence[Verdict]:
    stars = np.array(figures["alpha_star"])
    counts = {
        "All-KV": int((stars <= _REGION_EDGE).sum()),
        "Split": int(((stars > _REGION_EDGE) & (stars < 1 - _REGION_EDGE)).sum()),
        "All-EMB": int((stars >= 1 - _REGION_EDGE).sum()),
    }
    details = ", ".join(f"{name} {num} of {stars.size} cells" for name, num in counts.items())
    return (
        judged(
            "Cluster scale and hot share divide into All-EMB, Split and All-KV regions",
            "three regions",
            float(sum(num > 0 for num in counts.values())),
            Rule(3, 2, unit="count"),
            f"{details}; All-KV: alpha* at most {_REGION_EDGE:g}, All-EMB: at least {1 - _REGION_EDGE:g}",
        ),
    )


def show_scale(figures: Figures, measured: Measured) -> Sequence[Block]:
    def draw(figure: Any) -> None:
        stars, axes = np.array(figures["alpha_star"]).T, figure.subplots()
        image = axes.imshow(stars, origin="lower", aspect="auto", cmap="RdYlBu_r", vmin=0, vmax=1)
        axes.set_xticks(range(stars.shape[1]), [str(scale) for scale in figures["scales"]])
        axes.set_yticks(range(stars.shape[0]), [f"{share:.0%}" for share in figures["hot_shares"]])
        axes.set(xlabel="nodes", ylabel="share of requests by hot users")
        for (row, column), star in np.ndenumerate(stars):
            axes.text(column, row, f"{star:g}", ha="center", va="center", fontsize=9)
        figure.colorbar(image, label="alpha*")

    caption = (
        f"Split of least mean latency on one node of a cluster that shares {figures['hot_users']:,} hot users by "
        "user id; each node reads all items. One seed."
    )
    return (Chart(draw, caption),)


EXPERIMENTS = (
    Experiment(
        "hstu-settings",
        "HSTU latency under different settings",
        "Figure 1",
        "Latency of HSTU inference without caches, with one of them, and with both, over sequence length.",
        "A step of eight requests on an idle device, by the cost terms fitted to an H200.",
        measure_settings,
        judge_settings,
        show_settings,
    ),
    Experiment(
        "latency-vs-ratio",
        "Latency over the EMB-KV ratio",
        "Figure 4",
        "The best ratio depends on the regime and shifts by up to 0.35; a wrong one costs 20-30%.",
        "Every constant split through both regimes of one scenario.",
        measure_ratio,
        judge_ratio,
        show_ratio,
    ),
    Experiment(
        "scale-and-hot-share",
        "Best ratio over cluster scale and hot share",
        "Figure 16",
        "Regions in which all memory should go to EMB, to KV, or be split.",
        "One node of a cluster with users shared by hash: the more nodes, the fewer hot users on each; half loaded.",
        measure_scale,
        judge_scale,
        show_scale,
    ),
)
