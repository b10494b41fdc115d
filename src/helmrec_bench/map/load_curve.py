"""What a node does as load grows: a run of rising arrivals tells latency at every load, and the largest within an SLO.

Rising slowly, a run passes through all loads in a minute; a run for each load would take ten times as long.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from helmrec.control.static import Static, StaticSettings
from helmrec.costs.calibrated import CostModel
from helmrec.sim.simulate import SimResult, simulate
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec_bench.map.cells import SLO_MS, Cell, Regime

Floats = NDArray[np.float64]

ALPHAS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
_RISE_S, _WINDOW_S = 66.0, 3.0
_FROM = 0.3  # share of the highest rate at which arrivals start to rise
_OVERLOAD, _PROBE_S = 5_000.0, 10.0
_LONGEST_MS = 1e5  # stands for requests that were refused


@dataclass(frozen=True, slots=True, eq=False)
class LoadCurve:
    """Latency over load, rising."""

    rate: Floats  # (windows,) requests per second
    mean_ms: Floats
    p99_ms: Floats

    def capacity(self, slo_ms: float = SLO_MS) -> float:
        """Load up to which the P99 is within the SLO; where it wavers, the middle. At most the highest load seen."""
        is_met = self.p99_ms <= slo_ms
        if is_met.all():
            return float(self.rate[-1])
        if not is_met.any():
            return float(self.rate[0])
        broken, met = int(np.argmin(is_met)), int(np.flatnonzero(is_met)[-1])
        if met > broken:
            return float(self.rate[broken] + self.rate[met]) / 2
        share = np.log(slo_ms / self.p99_ms[met]) / np.log(self.p99_ms[broken] / self.p99_ms[met])
        return float(self.rate[met] + share * (self.rate[broken] - self.rate[met]))

    def mean_at(self, rate: float) -> float:
        return self._at(self.mean_ms, rate)

    def p99_at(self, rate: float) -> float:
        return self._at(self.p99_ms, rate)

    def _at(self, latency_ms: Floats, rate: float) -> float:
        """Between windows, the log of latency smoothed over three: one window has few requests beyond its P99."""
        padded = np.pad(np.log(latency_ms), 1, mode="edge")
        smooth = np.convolve(padded, np.full(3, 1 / 3), mode="valid")
        return float(np.exp(np.interp(rate, self.rate, smooth)))


@dataclass(frozen=True, slots=True, eq=False)
class RegimeSweep:
    """One regime of a cell at every split."""

    alphas: Floats
    curves: tuple[LoadCurve, ...]
    is_full: NDArray[np.bool_]  # (alphas,) both caches evicted before counting began
    kv_hit_rate: Floats  # (alphas,)
    emb_hit_rate: Floats

    @property
    def capacity(self) -> Floats:
        return np.array([curve.capacity() for curve in self.curves])


def run_static(cell: Cell, measured: CostModel, trace: Trace, alpha: float) -> SimResult:
    return simulate(trace, cell.node(alpha), cell.cost(measured), Static(StaticSettings(alpha=alpha)))


def highest_rate(cell: Cell, measured: CostModel, regime: Regime) -> float:
    """Requests per second a node serves that is sent far more; the best of three splits, and a quarter on top."""
    warm_up_s = cell.warm_up_s / 4
    warm_up = cell.phase(regime, warm_up_s - 1, _OVERLOAD)
    trace = generate(cell.workload(warm_up, (cell.phase(regime, _PROBE_S, _OVERLOAD),)), 0)
    served = []
    for alpha in (0.1, 0.4, 0.8):
        result = run_static(cell, measured, trace, alpha)
        answered_s = (result.arrived_s + result.outcomes.latency_ms / 1e3)[~np.isnan(result.outcomes.latency_ms)]
        served.append(np.count_nonzero((answered_s >= warm_up_s) & (answered_s < warm_up_s + _PROBE_S)))
    return 1.25 * max(served) / _PROBE_S


def rising_trace(cell: Cell, regime: Regime, highest: float, seed: int) -> Trace:
    warm_up = cell.phase(regime, cell.warm_up_s - 1, highest * 0.6)
    return generate(cell.workload(warm_up, (cell.phase(regime, _RISE_S, (highest * _FROM, highest)),)), seed)


def load_curve(result: SimResult, start_s: float, highest: float) -> LoadCurve:
    """Of a run whose arrivals rise from `start_s` on."""
    edges = start_s + np.arange(0, _RISE_S + _WINDOW_S / 2, _WINDOW_S)
    latency_ms = np.where(np.isnan(result.outcomes.latency_ms), _LONGEST_MS, result.outcomes.latency_ms)
    parts = [latency_ms[slice(*np.searchsorted(result.arrived_s, ends))] for ends in pairwise(edges)]
    middle = (edges[:-1] + edges[1:]) / 2 - start_s
    return LoadCurve(
        rate=highest * (_FROM + (1 - _FROM) * middle / _RISE_S),
        mean_ms=np.array([part.mean() for part in parts]),
        p99_ms=np.array([np.percentile(part, 99) for part in parts]),
    )


def sweep_regime(cell: Cell, measured: CostModel, regime: Regime, seed: int = 0) -> RegimeSweep:
    highest = highest_rate(cell, measured, regime)
    trace = rising_trace(cell, regime, highest, seed)
    runs = [run_static(cell, measured, trace, alpha) for alpha in ALPHAS]
    return RegimeSweep(
        alphas=np.array(ALPHAS),
        curves=tuple(load_curve(run, cell.warm_up_s, highest) for run in runs),
        is_full=np.array([(run.evicting_from_s or np.inf) <= cell.warm_up_s for run in runs]),
        kv_hit_rate=np.array([run.pool.token_reuse_rate for run in runs]),
        emb_hit_rate=np.array([run.pool.row_hit_rate for run in runs]),
    )
