"""The trade-off between the two caches on a real card: throughput and latency over the boundary's place.

For 1, 6 and 24 feature rows a token, nine alphas, three shares of hot users, with and without the host tier for KV,
with steps that overlap and steps that do not. Every cell starts with empty caches.

Precisions are set side by side with steps that overlap; calls with the same `--out` fill one file and go on where the
call before stopped, if the commit is the same.

    helmrec bench run trade-off            # on a card; writes docs/measurements/gpu-tradeoff-h200.json
    helmrec bench run trade-off --plot     # draws docs/images/trade-off-h200.png from that file
    helmrec bench run trade-off --plot --precisions model fp8-all    # docs/images/trade-off-precision-h200.png
    helmrec bench run trade-off --precisions model fp8-all --rows 24 6 --alphas 0.1 0.3 0.5 0.7 0.9 --tier off
    helmrec bench run trade-off --quick --precisions model fp8-all --rows 6 --alphas 0.3    # anywhere: does it work
"""

import itertools
import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, LOW_PRECISIONS
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.measured_parts import MeasuredParts, Row
from helmrec_bench.measure.cards.traffic import (
    PreparedTraffic,
    card_crowd,
    free_memory,
    serve,
    serving_config,
    serving_engine,
)
from helmrec_bench.measure.requests import Crowd
from helmrec_bench.report.files import markdown_table, picture

PLOT, PRECISION_PLOT = (Path(f"docs/images/trade-off-{name}h200.png") for name in ("", "precision-"))
ALPHAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
HOT_SHARES = (0.35, 0.6, 0.85)
ROWS_PER_TOKEN = (1, 6, 24)
TABLE_BYTES = 40 << 30
POOL_BYTES = 6 << 30
NUM_HOT = 56  # 3.7 GB of KV, and about as many bytes of rows take most accesses
NAMES = ("rows_per_token", "hot_share", "host_tier", "alpha", "overlap")  # of a cell
SAVE_BYTES = 16 << 20  # a step, the default
PRECISIONS = {"model": FULL_PRECISION, **LOW_PRECISIONS}


@dataclass(frozen=True)
class MapPlan:
    """Sizes of a run."""

    device: str
    table_bytes: int
    pool_bytes: int
    host_kv_bytes: int
    crowd: Crowd
    warm_up: int  # requests
    measured: int  # requests

    def shape(self, rows_per_token: int) -> ModelConfig:
        config = serving_config(rows_per_token, self.table_bytes)
        return config if self.device == "cuda" else config.model_copy(update={"num_layers": 1})


FULL = MapPlan("cuda", TABLE_BYTES, POOL_BYTES, 8 << 30, card_crowd(NUM_HOT), 40 * 8, 16 * 8)
QUICK = MapPlan("cpu", 64 << 20, 1 << 28, 1 << 28, card_crowd(3, 2_001), 2, 2)


@dataclass(frozen=True)
class Cells:
    """The cells to measure with one engine."""

    rows_per_token: int
    shares: Sequence[float]
    tiers: Sequence[bool]
    alphas: Sequence[float] = ALPHAS
    precision: str = "model"
    overlaps: Sequence[bool] = (True, False)


def run_cell(
    probe: EngineProbe, requests: list[Prepared], alpha: float, plan: MapPlan, *, has_tier: bool
) -> list[dict[str, Any]]:
    """Warm up, then measure the requests left, those of the first half with steps that overlap, the others in turn."""
    probe.clear(alpha)
    probe.clear_prefixes(has_tier=has_tier)
    probe.set_limit("save_bytes_per_step", 1 << 30)  # so that the tier holds what it would after a longer life
    serve(probe, requests[: plan.warm_up])
    probe.set_limit("save_bytes_per_step", SAVE_BYTES)
    measured = []
    for i, first in enumerate(range(plan.warm_up, len(requests), plan.measured)):
        overlaps = i == 0
        probe.set_overlap(is_on=overlaps)
        part = requests[first : first + plan.measured]
        measured.append({"overlap": overlaps, **serve(probe, part).describe()})
    probe.set_overlap(is_on=True)
    return measured


def measure(wanted: Cells, plan: MapPlan, deadline_s: float) -> list[dict[str, Any]]:
    """Measure cells, those with steps that overlap first, until the deadline."""
    started_s, precision = time.perf_counter(), PRECISIONS[wanted.precision]._asdict()
    sizes = {"pool_bytes": plan.pool_bytes, "host_kv_bytes": plan.host_kv_bytes, "alpha": 0.5}
    engine = serving_engine(plan.shape(wanted.rows_per_token), device=plan.device, **sizes, **precision)
    ready_s = time.perf_counter() - started_s
    print(f"K={wanted.rows_per_token}, {wanted.precision}: ready after {ready_s:.1f} s\n{engine.report()}", flush=True)
    probe, num = EngineProbe(engine), plan.warm_up + len(wanted.overlaps) * plan.measured
    traffic = {share: PreparedTraffic(probe, plan.crowd).take(num, share) for share in wanted.shares}
    cells = []
    for share, has_tier, alpha in itertools.product(wanted.shares, wanted.tiers, wanted.alphas):
        if time.perf_counter() > deadline_s:
            print("out of time: the cells left are not measured", flush=True)
            break
        name = {"rows_per_token": wanted.rows_per_token, "hot_share": share, "host_tier": has_tier, "alpha": alpha}
        measured = run_cell(probe, traffic[share], alpha, plan, has_tier=has_tier)
        cells += [{**name, **each} for each in measured]
        print(*cells[-len(measured) :], sep="\n", flush=True)
    engine.close()
    del engine, probe, traffic
    free_memory()
    return cells


def compare_precisions(flags: Namespace, plan: MapPlan, tiers: Sequence[bool], deadline_s: float) -> None:
    """Measure the map in each precision, engine after engine: all precisions of one number of rows, then the next."""
    names = [f"{precision}, {rows} rows" for precision in PRECISIONS for rows in ROWS_PER_TOKEN]
    parts = MeasuredParts(flags.out, ("set_up", *names))
    parts.put("set_up", set_up(plan))
    for rows, precision in itertools.product(flags.rows, flags.precisions):
        name = f"{precision}, {rows} rows"
        wanted = Cells(rows, flags.hot, tiers, flags.alphas, precision, overlaps=(True,))
        done = {(c["hot_share"], c["host_tier"], c["alpha"]) for c in parts.rows_of_this_commit(name)}
        if done >= set(itertools.product(flags.hot, tiers, flags.alphas)):
            continue
        if time.perf_counter() > deadline_s:
            print(f"out of time: {name} is left to the next call", flush=True)
            break
        parts.put(name, measure(wanted, plan, deadline_s))
    print_map({name: parts[name] for name in names if name in parts})


def print_map(parts: dict[str, list[Row]]) -> None:
    """Print requests/s over alpha; the best of each line is bold."""
    alphas = sorted({cell["alpha"] for cells in parts.values() for cell in cells})
    lines = []
    for name, cells in parts.items():
        for share, tier in dict.fromkeys((cell["hot_share"], cell["host_tier"]) for cell in cells):
            of_line = (cell for cell in cells if (cell["hot_share"], cell["host_tier"]) == (share, tier))
            rates = {cell["alpha"]: cell["requests_per_s"] for cell in of_line}
            best = max(rates.values())
            shown = [f"**{rates[a]:.0f}**" if rates.get(a) == best else f"{rates.get(a, 0):.0f}" for a in alphas]
            lines.append([name, f"{share:.0%} hot", "with" if tier else "without", *shown])
    print(markdown_table(["requests/s", "traffic", "host tier", *map(str, alphas)], lines))


def set_up(plan: MapPlan) -> dict[str, int]:
    return {
        "pool_bytes": plan.pool_bytes,
        "table_bytes": plan.table_bytes,
        "hot_users": plan.crowd.num_hot,
        "requests": plan.measured,
    }


def plot(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    ways = {(True, True): "o-", (True, False): "s-", (False, True): "o--", (False, False): "s--"}
    with picture(PLOT, (12, 10)) as figure:
        axes = figure.subplots(3, 3, sharex=True)
        for (i, rows), (j, share) in itertools.product(enumerate(ROWS_PER_TOKEN), enumerate(HOT_SHARES)):
            own = [cell for cell in cells if (cell["rows_per_token"], cell["hot_share"]) == (rows, share)]
            for (overlap, tier), style in ways.items():
                line = [cell for cell in own if (cell["overlap"], cell["host_tier"]) == (overlap, tier)]
                label = f"{'overlapping' if overlap else 'in turn'}, {'with' if tier else 'without'} host tier"
                alphas, rates = ([cell[name] for cell in line] for name in ("alpha", "requests_per_s"))
                axes[i][j].plot(alphas, rates, style, label=label, markersize=4)
            title = f"{rows} row{'s' * (rows > 1)} a token, {share:.0%} of requests from hot users"
            axes[i][j].set(title=title, ylim=(0, None), xlabel="alpha", ylabel="requests/s")
        axes[0][0].legend(fontsize=7)


def plot_precisions(path: Path) -> None:
    """Requests/s over alpha in each precision that was measured; a ring marks the best alpha of each line."""
    parts = {name: cells for name, cells in json.loads(path.read_text()).items() if name.endswith(" rows")}
    cells = [{**cell, "precision": name.split(",")[0]} for name, of_name in parts.items() for cell in of_name]
    numbers = sorted({cell["rows_per_token"] for cell in cells})
    with picture(PRECISION_PLOT, (12, 3.4 * len(numbers))) as figure:
        axes = figure.subplots(len(numbers), len(HOT_SHARES), sharex=True, sharey="row", squeeze=False)
        for (i, rows), (j, share) in itertools.product(enumerate(numbers), enumerate(HOT_SHARES)):
            own = [cell for cell in cells if (cell["rows_per_token"], cell["hot_share"]) == (rows, share)]
            for precision in dict.fromkeys(cell["precision"] for cell in own):
                line = {cell["alpha"]: cell["requests_per_s"] for cell in own if cell["precision"] == precision}
                label = "the model's bfloat16" if precision == "model" else precision
                [drawn] = axes[i][j].plot(line.keys(), line.values(), "o-", label=label, markersize=4)
                best = max(line, key=line.__getitem__)
                axes[i][j].plot(best, line[best], "o", mfc="none", color=drawn.get_color(), markersize=11)
            axes[i][j].set(title=f"{rows} rows a token, {share:.0%} hot", xlabel="alpha", ylabel="requests/s")
        for row in axes:
            row[0].set_ylim(bottom=0)
        axes[0][0].legend(fontsize=8)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", choices=ROWS_PER_TOKEN, default=[24, 6, 1])
    parser.add_argument("--hot", type=float, nargs="*", choices=HOT_SHARES, default=HOT_SHARES)
    parser.add_argument("--alphas", type=float, nargs="+", choices=ALPHAS, default=ALPHAS)
    parser.add_argument("--tier", choices=("on", "off", "both"), default="both", help="the host tier for KV")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="measure these side by side")
    parser.add_argument("--limit-s", type=float, default=3_600, help="stop after so long with what there is")
    parser.add_argument("--quick", action="store_true", help="a small shape, on any machine")
    parser.add_argument("--plot", action="store_true", help="draw the file there is")


def default_out(flags: Namespace) -> str | None:
    return "gpu-tradeoff-precision-h200.json" if flags.precisions else None


def main(flags: Namespace) -> None:
    if flags.plot:
        return plot_precisions(flags.out) if flags.precisions else plot(flags.out)
    deadline_s, plan = time.perf_counter() + flags.limit_s, QUICK if flags.quick else FULL
    tiers = {"on": [True], "off": [False], "both": [False, True]}[flags.tier]
    if flags.precisions:
        return compare_precisions(flags, plan, tiers, deadline_s)
    wanted = (Cells(rows, flags.hot, tiers, flags.alphas) for rows in flags.rows)
    cells = [cell for each in wanted for cell in measure(each, plan, deadline_s)]
    cells.sort(key=lambda cell: [cell[name] for name in NAMES])
    return write_measurement(flags.out, {"set_up": set_up(plan), "cells": cells})
