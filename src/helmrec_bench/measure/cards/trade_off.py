"""The trade-off between the two caches on a real card: throughput and latency over the boundary's place.

For 1, 6 and 24 feature rows a token, nine alphas, three shares of hot users, with and without the host tier for KV,
with steps that overlap and steps that do not. Every cell starts with empty caches.

    helmrec bench run trade-off            # on a card; writes docs/measurements/gpu-tradeoff-h200.json
    helmrec bench run trade-off --plot     # draws docs/images/trade-off-h200.png from that file
"""

import itertools
import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import PreparedTraffic, card_crowd, serve, serving_config, serving_engine
from helmrec_bench.report.files import picture

PLOT = Path("docs/images/trade-off-h200.png")
ALPHAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
HOT_SHARES = (0.35, 0.6, 0.85)
ROWS_PER_TOKEN = (1, 6, 24)
TABLE_BYTES = 40 << 30
POOL_BYTES = 6 << 30
NUM_HOT = 56  # 3.7 GB of KV, and about as many bytes of rows take most accesses
NAMES = ("rows_per_token", "hot_share", "host_tier", "alpha", "overlap")  # of a cell
SAVE_BYTES = 16 << 20  # a step, the default
WARM_UP, MEASURED = 40 * 8, 16 * 8  # requests


def run_cell(probe: EngineProbe, requests: list[Prepared], alpha: float, *, has_tier: bool) -> list[dict[str, Any]]:
    """Warm up, then measure with steps that overlap and with steps that do not."""
    probe.clear(alpha)
    probe.clear_prefixes(has_tier=has_tier)
    probe.set_limit("save_bytes_per_step", 1 << 30)  # so that the tier holds what it would after a longer life
    serve(probe, requests[:WARM_UP])
    probe.set_limit("save_bytes_per_step", SAVE_BYTES)
    measured = []
    for i, overlap in enumerate((True, False)):
        probe.set_overlap(is_on=overlap)
        part = requests[WARM_UP + i * MEASURED : WARM_UP + (i + 1) * MEASURED]
        measured.append({"overlap": overlap, **serve(probe, part).describe()})
    probe.set_overlap(is_on=True)
    return measured


def measure(
    rows_per_token: int, shares: Sequence[float], tiers: Sequence[bool], deadline_s: float
) -> list[dict[str, Any]]:
    config = serving_config(rows_per_token, TABLE_BYTES)
    started_s = time.perf_counter()
    engine = serving_engine(config, pool_bytes=POOL_BYTES, alpha=0.5, host_kv_bytes="8GiB")
    print(f"K={rows_per_token}: ready after {time.perf_counter() - started_s:.1f} s\n{engine.report()}", flush=True)
    probe, num = EngineProbe(engine), WARM_UP + 2 * MEASURED
    traffic = {share: PreparedTraffic(probe, card_crowd(NUM_HOT)).take(num, share) for share in shares}
    cells = []
    for share, has_tier, alpha in itertools.product(shares, tiers, ALPHAS):
        if time.perf_counter() > deadline_s:
            print("out of time: the cells left are not measured", flush=True)
            break
        name = {"rows_per_token": rows_per_token, "hot_share": share, "host_tier": has_tier, "alpha": alpha}
        measured = run_cell(probe, traffic[share], alpha, has_tier=has_tier)
        cells += [{**name, **each} for each in measured]
        print(*cells[-len(measured) :], sep="\n", flush=True)
    engine.close()
    del engine, probe, traffic
    torch.cuda.empty_cache()
    return cells


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


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", choices=ROWS_PER_TOKEN, default=[24, 6, 1])
    parser.add_argument("--hot", type=float, nargs="*", choices=HOT_SHARES, default=HOT_SHARES)
    parser.add_argument("--tier", choices=("on", "off", "both"), default="both", help="the host tier for KV")
    parser.add_argument("--limit-s", type=float, default=3_600, help="stop after so long with what there is")
    parser.add_argument("--plot", action="store_true", help="draw the file there is")


def main(flags: Namespace) -> None:
    if flags.plot:
        return plot(flags.out)
    deadline_s = time.perf_counter() + flags.limit_s
    tiers = {"on": [True], "off": [False], "both": [False, True]}[flags.tier]
    cells = [cell for rows in flags.rows for cell in measure(rows, flags.hot, tiers, deadline_s)]
    cells.sort(key=lambda cell: [cell[name] for name in NAMES])
    set_up = {"pool_bytes": POOL_BYTES, "table_bytes": TABLE_BYTES, "hot_users": NUM_HOT, "requests": MEASURED}
    return write_measurement(flags.out, {"set_up": set_up, "cells": cells})
