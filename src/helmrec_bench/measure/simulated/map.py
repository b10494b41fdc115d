"""The map: where the split matters, where it moves, and what moving it can gain.

    helmrec bench run map                      # all cells, about twenty minutes of one core
    helmrec bench run map --processes 2        # the same on two cores
    helmrec bench run map --only-report        # figures and pictures of what has been run

Every finished piece is kept in build/map.jsonl under the calibration it was run with: a run that was stopped goes on
where it was, a new calibration starts anew. Writes docs/measurements/map.json and docs/images/map-*.png.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.costs.calibrated import default_cost
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import Store, digest_of, finish
from helmrec_bench.map.cell_report import (
    best_alpha,
    constant_rate_limit,
    following_rate_limit,
    regime_figures,
)
from helmrec_bench.map.cells import HOT_GB, HOT_USERS, NUM_ROWS, POOL_GB, REGIMES, SLO_MS, Cell, Regime
from helmrec_bench.map.load_curve import ALPHAS, LoadCurve, RegimeSweep, sweep_regime
from helmrec_bench.map.shifts import Shift, run_shift, within_slo
from helmrec_bench.measure.simulated.map_plots import plot_map
from helmrec_bench.measure.simulated.map_tables import show_tables

IMAGES, KEPT = Path("docs/images"), Path("build/map.jsonl")
LOAD = 0.9  # of the best constant's limit, at which shifts are run
CELLS = tuple(
    Cell(rows_per_token=rows, bus_speed=bus, hot=hot, overlap=overlap)
    for rows in (24, 6, 1)
    for bus, hot, overlap in ((1.0, 1.0, True), (0.5, 1.0, True), (1.0, 2.0, True), (1.0, 0.5, True), (1.0, 0.5, False))
    if rows > 1 or hot == 1
)
MAIN = Cell(rows_per_token=24, hot=0.5)
FAVOURABLE = Cell(rows_per_token=24, hot=0.5, overlap=False)
# Every length where the caches compete, fewer elsewhere: shifts take longest.
SHIFTS = (
    (MAIN, "following", 20.0),
    (FAVOURABLE, "following", 20.0),
    (Cell(rows_per_token=1), "following", 20.0),
    (MAIN, "constant", 20.0),
    (Cell(rows_per_token=24), "following", 20.0),
    (Cell(rows_per_token=6), "following", 20.0),
    (MAIN, "following", 60.0),
    (MAIN, "following", 3.0),
    (FAVOURABLE, "following", 60.0),
    (FAVOURABLE, "following", 3.0),
    (FAVOURABLE, "constant", 20.0),
    (Cell(rows_per_token=6), "constant", 20.0),
    (MAIN, "constant", 60.0),
    (MAIN, "constant", 3.0),
    (Cell(rows_per_token=24, bus_speed=0.5), "following", 20.0),
    (Cell(rows_per_token=1), "constant", 20.0),
)
FLOODED = (Cell(rows_per_token=1), MAIN, FAVOURABLE)  # scenarios


class RegimeUnit(NamedTuple):
    cell: Cell
    regime: Regime

    @property
    def name(self) -> str:
        return f"{self.cell.name}, {self.regime}"


class ShiftUnit(NamedTuple):
    cell: Cell
    mode: str
    shift: Shift
    alphas: tuple[float, ...]
    static_alpha: float

    @property
    def name(self) -> str:
        rates = "/".join(f"{rate:.0f}" for rate in self.shift.rates)
        return f"{self.cell.name}, {self.mode} rate, {self.shift.length_s:g} s, of {rates}, seed {self.shift.seed}"


def work(unit: RegimeUnit | ShiftUnit) -> dict[str, Any]:
    if isinstance(unit, RegimeUnit):
        return as_json(sweep_regime(unit.cell, default_cost(), unit.regime))
    shift = within_slo(unit.cell, default_cost(), unit.shift, unit.static_alpha)
    found = run_shift(unit.cell, default_cost(), shift, np.array(unit.alphas))
    return {"rates": shift.rates, **asdict(found)}


def as_json(sweep: RegimeSweep) -> dict[str, Any]:
    return {
        "alphas": sweep.alphas.tolist(),
        "is_full": sweep.is_full.tolist(),
        "kv_hit_rate": sweep.kv_hit_rate.round(4).tolist(),
        "emb_hit_rate": sweep.emb_hit_rate.round(4).tolist(),
        "rate": sweep.curves[0].rate.round(1).tolist(),
        "mean_ms": [curve.mean_ms.round(2).tolist() for curve in sweep.curves],
        "p99_ms": [curve.p99_ms.round(2).tolist() for curve in sweep.curves],
    }


def from_json(kept: dict[str, Any]) -> RegimeSweep:
    rate = np.array(kept["rate"])
    curves = (
        LoadCurve(rate, np.array(mean), np.array(p99))
        for mean, p99 in zip(kept["mean_ms"], kept["p99_ms"], strict=True)
    )
    return RegimeSweep(
        alphas=np.array(kept["alphas"]),
        curves=tuple(curves),
        is_full=np.array(kept["is_full"]),
        kv_hit_rate=np.array(kept["kv_hit_rate"]),
        emb_hit_rate=np.array(kept["emb_hit_rate"]),
    )


def regime_units() -> list[RegimeUnit]:
    pairs = [RegimeUnit(cell, regime) for cell in CELLS for regime in REGIMES]
    return pairs + [RegimeUnit(cell, "flood") for cell in FLOODED]


def has_run(cell: Cell, store: Store) -> bool:
    return all(unit.name in store.found for unit in regime_units() if unit.cell == cell)


def sweeps_of(cell: Cell, store: Store) -> tuple[RegimeSweep, RegimeSweep]:
    first, second = (from_json(store.found[RegimeUnit(cell, regime).name]) for regime in REGIMES)
    return first, second


def shift_units(store: Store) -> list[ShiftUnit]:
    units = []
    for cell, mode, length_s in (one for one in SHIFTS if has_run(one[0], store)):
        sweeps = sweeps_of(cell, store)
        constant, following = constant_rate_limit(sweeps), following_rate_limit(sweeps)
        own = [float(np.where(sweep.is_full, sweep.capacity, 0).max()) for sweep in sweeps]
        rates = [constant.static] * 2 if mode == "constant" else [following.static * capacity for capacity in own]
        alphas = around(best_alpha(sweeps[0]), best_alpha(sweeps[1]), (constant.static_alpha, following.static_alpha))
        shift = Shift(length_s, (round(rates[0], 1), round(rates[1], 1)), LOAD)
        static_alpha = constant.static_alpha if mode == "constant" else following.static_alpha
        units.append(ShiftUnit(cell, mode, shift, alphas, static_alpha))
    return units


def around(first: float, second: float, others: tuple[float, ...]) -> tuple[float, ...]:
    """Splits from one step below the least of these to one above the largest, and the untuned one."""
    places = [ALPHAS.index(alpha) for alpha in (first, second, *others)]
    chosen = ALPHAS[max(0, min(places) - 1) : max(places) + 2]
    return tuple(sorted({*chosen, 0.5}))


def cell_json(cell: Cell, store: Store) -> dict[str, Any]:
    sweeps = sweeps_of(cell, store)
    best = [best_alpha(sweep) for sweep in sweeps]
    limits = {"constant": constant_rate_limit(sweeps), "following": following_rate_limit(sweeps)}
    return {
        "cell": cell.model_dump(),
        "hot_bytes_over_pool": round(HOT_GB * cell.hot / POOL_GB, 2),
        "shift_of_alpha": round(abs(best[1] - best[0]), 3),
        "regimes": {
            regime: asdict(regime_figures(sweep, other))
            for regime, sweep, other in zip(REGIMES, sweeps, best[::-1], strict=True)
        },
        "limits": {mode: {**asdict(limit), "gain": limit.gain} for mode, limit in limits.items()},
        "sweeps": {unit.regime: store.found[unit.name] for unit in regime_units() if unit.cell == cell},
    }


def shift_json(unit: ShiftUnit, store: Store) -> dict[str, Any]:
    """Gains are shares of the best constant's latency; below 0 is worse."""
    found = store.found[unit.name]
    statics = found["statics"].values()
    best = {figure: min(one[figure] for one in statics) for figure in ("mean_ms", "p99_ms")}
    gains = {
        f"{who}_{figure.removesuffix('_ms')}_gain": 1 - found[who][figure] / best[figure]
        for who in ("tracker", "oracle", "quasi_static")
        for figure in best
    }
    return {
        "cell": unit.cell.model_dump(),
        "mode": unit.mode,
        "length_s": unit.shift.length_s,
        "rates_of_regimes_alone": unit.shift.rates,
        "seed": unit.shift.seed,
        "best_static": best,
        **gains,
        **found,
    }


def report(store: Store, out: Path) -> None:
    units = [unit for unit in shift_units(store) if unit.name in store.found]
    found = {
        "calibration": default_cost().name,
        "calibration_digest": digest_of(default_cost()),
        "slo_ms": SLO_MS,
        "hot_users": HOT_USERS,
        "num_rows": NUM_ROWS,
        "load_of_shifts": LOAD,
        "cells": [cell_json(cell, store) for cell in CELLS if has_run(cell, store)],
        "shifts": [shift_json(unit, store) for unit in units],
    }
    write_measurement(out, found)
    plot_map(found, IMAGES)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only-report", action="store_true", help="run nothing")


def main(flags: Namespace) -> None:
    store = Store(KEPT, digest_of(default_cost()))
    if not flags.only_report:
        finish(regime_units(), work, store, flags.processes, "regimes")
        finish(shift_units(store), work, store, flags.processes, "shifts")
    report(store, flags.out)
    show_tables(json.loads(flags.out.read_text()))
